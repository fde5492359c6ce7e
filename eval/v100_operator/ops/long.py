"""sm70_long_attention: its cases, how to call it, and the ordinary kernel as its control."""

from __future__ import annotations

from itertools import product

import torch
from sm70_attention.long import long_attention, long_workspace_bytes
from sm70_attention.paged import paged_attention, paged_workspace_bytes

from ..case import Batch, Case
from . import SOURCES, BenchShape, Op
from .long_bank import replay_older_graphs

_PAGES = (1024, 1536, 1648, 3296)
_LAYOUTS = ("separate", "interleaved", "odd")
_BATCHES = (1, 2, 4, 8, 16)
_CONTEXTS = (3297, 8192, 32768, 131072, 262144)


def _case(name: str, lens: tuple[int, ...], queries: tuple[int, ...] | None = None, **over) -> Case:
    base = {"head_dim": 256, "group": 6, "kv_heads": 1, "kv_dtype": "fp8_e4m3", "page_size": 1648}
    queries = queries or tuple(8 if n else 0 for n in lens)
    return Case(name, seq_lens=lens, query_lens=queries, **{**base, **over})


def _matrix() -> list[Case]:
    """Every batch with every context: lengths from the context down; pages, layouts, tables in
    turn."""
    cases = []
    for at, (batch, context) in enumerate(product(_BATCHES, _CONTEXTS)):
        lens = tuple(max(8, context - 977 * i * (i % 3)) for i in range(batch))
        page, layout = _PAGES[at % len(_PAGES)], _LAYOUTS[at % len(_LAYOUTS)]
        table = ("permuted", "reversed")[at % 2]
        name = f"{context} x {batch} page {page} {layout} {table}"
        cases.append(_case(name, lens, page_size=page, layout=layout, table=table))
    return cases


def _every_page() -> list[Case]:
    """Each page size with each layout, over page, tile and leaf ends."""
    lens = (3296, 8, 1648, 6593, 0, 1649, 64, 65)
    return [
        _case(f"page {page} {layout}", lens, page_size=page, layout=layout)
        for page, layout in product((16, 144, *_PAGES), _LAYOUTS)
    ]


def _ragged() -> list[Case]:
    """Mixtures, padding, short queries, several KV heads, the ends of the ranges."""
    geometric = tuple(int(1024 * 128 ** (i / 15)) for i in range(16))
    return [
        _case("16 from 1K to 131K", geometric),
        _case("262144 with fifteen of 4096", (262144,) + (4096,) * 15, page_size=3296),
        _case("fifteen of 4096 with 262144", (4096,) * 15 + (262144,), page_size=3296),
        _case("0 and others", (0, 32768, 0, 9, 0, 131072, 64, 0)),
        _case("one zero row", (20000, 0, 20000), page_size=3296),
        _case("all padded", (0, 0, 0)),
        *(_case(f"one request, {q} query tokens", (40000 + q,), (q,)) for q in range(1, 9)),
        _case("mixed query lengths", (5000, 130, 70000, 8), (3, 8, 1, 8)),
        _case("shorter than a tile", (8, 9, 15, 16, 17, 63, 64, 65), page_size=16),
        _case("two KV heads", (70000, 3297, 8), kv_heads=2, layout="interleaved"),
        _case("four KV heads", (33000, 100), kv_heads=4, layout="odd", page_size=3296),
        _case("around twice the leaves", (133120, 133121, 133056), page_size=1024),
        _case("all bytes", (50000, 100), values="bytes", k_scale=0.004),
        _case("contract above all lengths", (2000, 300), max_seq_len=262144),
    ]


def _call(batch: Batch, workspace: torch.Tensor) -> None:
    long_attention(*batch.tensors, **batch.options, workspace=workspace)


def _ordinary(batch: Batch, workspace: torch.Tensor) -> None:
    case = batch.case
    paged_attention(
        *batch.tensors,
        **batch.options,
        max_query_len=case.max_query_len,
        kv_dtype=case.kv_dtype,
        workspace=workspace,
    )


def _workspace_bytes(case: Case) -> int:
    """Enough for the op and for its control."""
    requests = len(case.seq_lens)
    return max(
        long_workspace_bytes(requests, case.kv_heads, case.contract),
        paged_workspace_bytes(
            requests, case.group * case.kv_heads, case.kv_heads, case.head_dim, case.max_query_len,
            case.contract,
        ),
    )  # fmt: skip


_BENCH = [
    BenchShape(
        f"{tokens // 1024}K x {requests} p{page}",
        _case("bench", (tokens,) * requests, page_size=page),
    )
    for page, tokens, requests in product((1648, 3296), (8192, 32768, 131072, 262144), _BATCHES)
]

OP = Op(
    name="long",
    sources=SOURCES["long"],
    cases=[*_ragged(), *_every_page(), *_matrix()],
    bench=_BENCH,
    call=_call,
    workspace_bytes=_workspace_bytes,
    control=("paged", _ordinary),
    control_error=2e-3,
    sequences=(("older graphs while the bank grows", replay_older_graphs),),
)
