"""The table of what the kernels serve: shapes, cache types, query lengths, one row a route.

The limits are those of :mod:`.dispatch`, which decides; this is how they are shown. The README's
table is this module's output: ``python -m sm70_attention.routes --markdown``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from . import dispatch


@dataclass(frozen=True)
class RouteRow:
    """One route for readers; every field is text for a table cell."""

    route: str
    op: str
    serves: str
    query_lengths: str
    head_dims: str
    groups: str
    kv_dtypes: str
    contexts: str
    disabled_by: str


_HEAD_DIMS = ", ".join(map(str, dispatch.HEAD_DIMS))
_KV_DTYPES = ", ".join(dispatch.KV_DTYPES)
_GROUPS = f"1 to {dispatch.MAX_GROUP}"

ROUTES: tuple[RouteRow, ...] = (
    RouteRow(
        dispatch.Route.PAGED.value,
        "sm70_paged_attention",
        "decode, draft and verify rows, short prompt tails",
        f"1 to {dispatch.PAGED_MAX_QUERY}, any mix",
        _HEAD_DIMS,
        _GROUPS,
        _KV_DTYPES,
        "to 1,048,576",
        f"{dispatch.DISABLE_VARIABLES[dispatch.Route.PAGED]}=0",
    ),
    RouteRow(
        dispatch.Route.LONG.value,
        "sm70_long_attention",
        "verification of seven drafts in long contexts",
        f"{dispatch.LONG_QUERY} (single request: "
        f"{dispatch.LONG_SINGLE_QUERY.start} to {dispatch.LONG_SINGLE_QUERY.stop - 1})",
        str(dispatch.LONG_HEAD_DIM),
        str(dispatch.LONG_GROUP),
        dispatch.LONG_KV_DTYPE,
        f"to {dispatch.LONG_MAX_CONTEXT:,}",
        f"{dispatch.DISABLE_VARIABLES[dispatch.Route.LONG]}=0",
    ),
    RouteRow(
        dispatch.Route.PREFILL.value,
        "sm70_prefill_attention",
        "prompt chunks over a past",
        f"over {dispatch.PAGED_MAX_QUERY}",
        _HEAD_DIMS,
        _GROUPS,
        _KV_DTYPES,
        "to 1,048,576",
        "always on",
    ),
)

_COLUMNS = (
    ("Route", "route"), ("Rows", "serves"), ("Query length", "query_lengths"),
    ("Head dim", "head_dims"), ("Query heads a KV head", "groups"), ("KV cache", "kv_dtypes"),
    ("Context", "contexts"), ("Disabled by", "disabled_by"),
)  # fmt: skip


def markdown(rows: Sequence[RouteRow] = ROUTES) -> str:
    """The table in Markdown, one line a route, with its footnote."""
    lines = [
        "| " + " | ".join(title for title, _ in _COLUMNS) + " |",
        "| " + " | ".join("---" for _ in _COLUMNS) + " |",
    ]
    lines += ["| " + " | ".join(getattr(r, field) for _, field in _COLUMNS) + " |" for r in rows]
    lines.append("")
    lines.append(
        f"Queries are float16. Pages are any multiple of {dispatch.PAGE_MULTIPLE} tokens; FP8 "
        "caches have one descale each for K and V."
    )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: prints the table."""
    parser = argparse.ArgumentParser(description="The shapes and routes of the SM70 kernels.")
    parser.add_argument("--markdown", action="store_true", required=True, help="as Markdown")
    parser.parse_args(arguments)
    print(markdown(), end="")


if __name__ == "__main__":
    main()
