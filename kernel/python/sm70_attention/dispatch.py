"""Which SM70 kernel serves which rows: every route decision is made here, and nowhere else.

Pure functions over plain values: no torch, no vLLM, no environment.  A caller states what it has
(:class:`Geometry`), what the loaded library reports (:class:`Library`), which routes the operator
disabled, and the query lengths of a batch; the answer is a route with its reason.

There are three routes.

======== ==================================== =====================================================
route    op                                   rows
======== ==================================== =====================================================
paged    ``sm70_paged_attention``             query length 1..16: decode, verification, short tails
long     ``sm70_long_attention``              8-token verification over an E4M3 cache, D 256, GQA 6
prefill  ``sm70_prefill_attention``           longer query lengths: prompt chunks over a past
======== ==================================== =====================================================

The long route is taken by default wherever it is admitted.  One variable per route disables it
(:data:`DISABLE_VARIABLES`); rows of a disabled route go to the route named in :data:`FALLBACK`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """A kernel family; the value is its name in logs, counters and evidence."""

    PAGED = "paged"
    LONG = "long"
    PREFILL = "prefill"


DISABLE_VARIABLES: Mapping[Route, str] = {
    Route.PAGED: "VLLM_SM70_PAGED_ATTENTION",
    Route.LONG: "VLLM_SM70_LONG_ATTENTION",
    Route.PREFILL: "VLLM_SM70_PREFILL_ATTENTION",
}
"""Set to 0 to disable a route.  Unset, and any other value, leaves it on."""

FALLBACK: Mapping[Route, Route] = {
    Route.LONG: Route.PAGED,
    Route.PAGED: Route.PREFILL,
}
"""Where the rows of a disabled route go.  Prefill has no fallback: disabling it is refused."""

ABI = 1
"""The extension's ABI that these rules were written for (kernel/csrc/abi.h)."""

HEAD_DIMS = (64, 128, 256)
KV_DTYPES = ("fp16", "fp8_e4m3", "fp8_e5m2")
MAX_GROUP = 16
"""Query heads that share one KV head, at most."""
PAGE_MULTIPLE = 16
MAX_CONTEXT = 1 << 20
"""Longest context contract of any kernel, in tokens."""
PAGED_MAX_QUERY = 16
"""Longest query that the paged kernel takes; longer ones are prefill."""

LONG_HEAD_DIM = 256
LONG_GROUP = 6
LONG_KV_DTYPE = "fp8_e4m3"
LONG_QUERY = 8
"""Query tokens of each live request of a batch: one token and seven drafts."""
LONG_SINGLE_QUERY = range(2, LONG_QUERY + 1)
"""Query lengths that the long kernel takes when the batch is a single request."""
LONG_MAX_CONTEXT = 262_144
LONG_MAX_BATCH = 16
"""Requests of one long launch, padded ones included: what workspaces and graphs are made for."""

CONTEXT_BOUNDS = (LONG_MAX_CONTEXT,)
"""Contexts, in tokens, for which graphs of the long route are captured; each is cut to the served
limit.  One suffices: the kernel splits a request by that request's own length, so a graph captured
for 262,144 tokens does no more work at 8,192 than one captured for 8,192 would.  The bound sizes
the workspace and nothing else, and each further bound would cost a second set of graphs."""


@dataclass(frozen=True)
class Geometry:
    """What an attention layer is, on one rank.

    ``query_dtype`` is "float16" or another torch dtype's name; ``kv_dtype`` one of
    :data:`KV_DTYPES`; ``page_size`` the tokens of a kernel page, None while it is not known.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    query_dtype: str = "float16"
    page_size: int | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class Library:
    """What the loaded extension says of itself (``vllm_sm70_info``).

    ``archs`` are compute capabilities times ten; ``kernels`` the names of its cubins;
    ``long_batch_capacity`` the requests that its long kernel admits.
    """

    abi: int
    archs: frozenset[int]
    kernels: frozenset[str]
    long_batch_capacity: int = 0
    source_sha256: str = ""

    @classmethod
    def from_info(cls, info: Mapping) -> Library:
        """Reads the JSON object of ``vllm_sm70_info``; KeyError names a field that is missing."""
        return cls(
            abi=int(info["abi"]),
            archs=frozenset(int(str(a).removeprefix("sm_")) for a in info["archs"]),
            kernels=frozenset(k if isinstance(k, str) else str(k["name"]) for k in info["kernels"]),
            long_batch_capacity=int(info.get("long_batch_capacity", 0)),
            source_sha256=str(info.get("source_sha256", "")),
        )

    @property
    def long_requests(self) -> int:
        """Requests of one long launch: larger batches take the ordinary route."""
        return min(self.long_batch_capacity, LONG_MAX_BATCH)

    def runs_on(self, capability: int) -> bool:
        """Whether the library holds code for this compute capability (times ten): machine code
        runs on its own major architecture, from its own minor upwards."""
        return any(a // 10 == capability // 10 and a <= capability for a in self.archs)

    def has(self, route: Route, geometry: Geometry) -> bool:
        """Whether a kernel of `route` for this head dimension and cache dtype is compiled in."""
        stem = f"{route.value}_d{geometry.head_dim}_{geometry.kv_dtype.removeprefix('fp8_')}"
        return any(k == stem or k.startswith(stem + "_") for k in self.kernels)


@dataclass(frozen=True)
class Decision:
    """A route and why: ``reason`` is a short stable phrase, fit for a log line and a test."""

    route: Route
    reason: str


def refusal(
    geometry: Geometry,
    library: Library | None,
    capability: int,
    disabled: Collection[Route] = (),
) -> str | None:
    """Why the backend cannot serve this layer at all, with the remedy; None where it can.

    Args:
        geometry: the layer.
        library: what the extension reports, None where it did not load.
        capability: the device's compute capability times ten.
        disabled: the routes that the operator turned off.
    """
    g = geometry
    if g.query_dtype != "float16":
        return (
            f"queries are {g.query_dtype}; SM70 kernels take float16: pass --dtype half "
            "(a model that vLLM refuses in float16, such as Gemma 2 and 3, cannot run here)"
        )
    if g.kv_dtype not in KV_DTYPES:
        return (
            f"a {g.kv_dtype} KV cache has no SM70 kernel: "
            "pass --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"
        )
    if g.head_dim not in HEAD_DIMS:
        return (
            f"head dimension {g.head_dim} has no SM70 kernel (64, 128 and 256 have): "
            "with a float16 cache, --attention-backend TRITON_ATTN runs it, slowly"
        )
    if g.kv_heads < 1 or g.q_heads % g.kv_heads or g.group > MAX_GROUP:
        return (
            f"{g.q_heads} query heads over {g.kv_heads} KV heads: SM70 kernels take whole groups "
            f"of at most {MAX_GROUP}; another tensor-parallel size changes the groups"
        )
    if g.page_size is not None and (g.page_size < 1 or g.page_size % PAGE_MULTIPLE):
        return (
            f"block size {g.page_size} is not a multiple of {PAGE_MULTIPLE}: "
            "leave --block-size out, or give a multiple"
        )
    if library is None:
        return (
            "the extension _vllm_fa2_C with the SM70 kernels did not load: "
            "install the vllm wheel of this release (the stock wheel has no V100 kernels)"
        )
    if library.abi != ABI:
        return (
            f"the extension _vllm_fa2_C has ABI {library.abi} and this vLLM wants {ABI}: "
            "they come from different releases; install the wheel of one release"
        )
    if not library.runs_on(capability):
        have = ", ".join(f"sm_{a}" for a in sorted(library.archs)) or "nothing"
        return (
            f"the extension _vllm_fa2_C holds code for {have} and the device is sm_{capability}: "
            "use a V100, or a validation build for this device"
        )
    if Route.PREFILL in disabled:
        return f"{DISABLE_VARIABLES[Route.PREFILL]}=0 leaves no kernel for prompt chunks: unset it"
    for route in (Route.PREFILL, Route.PAGED):
        if route not in disabled and not library.has(route, g):
            return (
                f"the extension _vllm_fa2_C has no {route.value} kernel for head dimension "
                f"{g.head_dim} with a {g.kv_dtype} cache: install the wheel of this release"
            )
    return None


def long_refusal(
    geometry: Geometry, library: Library, disabled: Collection[Route] = ()
) -> str | None:
    """Why no batch of this layer takes the long route; None where some batches do."""
    if Route.LONG in disabled:
        return f"disabled by {DISABLE_VARIABLES[Route.LONG]}=0"
    if geometry.query_dtype != "float16":
        return "queries are not float16"
    if geometry.kv_dtype != LONG_KV_DTYPE:
        return f"the cache is {geometry.kv_dtype}, not {LONG_KV_DTYPE}"
    if geometry.head_dim != LONG_HEAD_DIM:
        return f"head dimension {geometry.head_dim}, not {LONG_HEAD_DIM}"
    if geometry.kv_heads < 1 or geometry.q_heads != LONG_GROUP * geometry.kv_heads:
        return f"{geometry.q_heads} query heads over {geometry.kv_heads} KV heads, not groups of 6"
    if library.abi != ABI:
        return f"the library has ABI {library.abi}, not {ABI}"
    if library.long_requests < 1:
        return "the library has no long kernel"
    return None


def decide(
    geometry: Geometry,
    query_lens: Sequence[int],
    library: Library,
    disabled: Collection[Route] = (),
    max_context: int = 0,
    bound: int = LONG_MAX_CONTEXT,
) -> Decision:
    """The route of one set of rows: the whole admission matrix.

    Args:
        geometry: the layer, one that :func:`refusal` lets pass.
        query_lens: query tokens of each request; 0 for a padded row.
        library: what the extension reports.
        disabled: the routes that the operator turned off.
        max_context: an upper bound of the requests' lengths, from the CPU.
        bound: the context contract that the long kernel would run under.
    """
    longest = max(query_lens, default=0)
    if longest > PAGED_MAX_QUERY:
        return Decision(Route.PREFILL, f"query length {longest} is over {PAGED_MAX_QUERY}")
    ordinary = (
        Decision(Route.PREFILL, f"{DISABLE_VARIABLES[Route.PAGED]}=0")
        if Route.PAGED in disabled
        else None
    )
    why = long_refusal(geometry, library, disabled)
    if why is None:
        why = _long_batch_refusal(query_lens, library.long_requests, max_context, bound)
    if why is None:
        rows = len(query_lens)
        return Decision(Route.LONG, f"query length {longest}, batch {rows}, E4M3, D 256, GQA 6")
    return ordinary or Decision(Route.PAGED, f"ordinary: {why}")


def _long_batch_refusal(
    query_lens: Sequence[int], capacity: int, max_context: int, bound: int
) -> str | None:
    live = [n for n in query_lens if n]
    if not live:
        return "no live request"
    if len(query_lens) > capacity:
        return f"batch {len(query_lens)} is over the library's {capacity}"
    if len(live) == 1:
        if live[0] not in LONG_SINGLE_QUERY:
            return f"query length {live[0]}, not 2 to {LONG_QUERY}"
    elif any(n != LONG_QUERY for n in live):
        return f"batched query lengths are not all {LONG_QUERY}"
    if max_context > bound:
        return f"a context of {max_context} is over the bound {bound}"
    return None


def context_bounds(
    geometry: Geometry,
    library: Library,
    disabled: Collection[Route],
    served_limit: int,
    batch: int,
    query_len: int,
) -> tuple[int, ...]:
    """Context bounds, ascending, for which a uniform batch gets graphs of its own, beside the
    ordinary one: empty for every batch that the long route does not serve.

    Args:
        served_limit: the longest context that the service admits, in tokens.
        batch: requests of the graph, padding included.
        query_len: query tokens of each.
    """
    if query_len != LONG_QUERY:
        return ()
    bounds = sorted({min(b, served_limit) for b in CONTEXT_BOUNDS})
    return tuple(
        b
        for b in bounds
        if decide(geometry, [query_len] * batch, library, disabled, b, b).route is Route.LONG
    )


@dataclass(frozen=True)
class Launch:
    """One launch: requests [first, first + count) of the batch by one route."""

    route: Route
    first: int
    count: int
    max_query_len: int
    reason: str


def plan(
    geometry: Geometry,
    query_lens: Sequence[int],
    library: Library,
    disabled: Collection[Route] = (),
    max_context: int = 0,
    bound: int = LONG_MAX_CONTEXT,
) -> tuple[Launch, ...]:
    """The launches of an eager batch, in order; together they cover every request once.

    The requests up to the first one over :data:`PAGED_MAX_QUERY` are decode and verify rows; the
    rest is prefill (vLLM orders a batch so; where it does not, short rows behind a long one are
    served by the prefill kernel, which is right for any length).
    """
    split = next((i for i, n in enumerate(query_lens) if n > PAGED_MAX_QUERY), len(query_lens))
    launches = []
    for first, rows in ((0, query_lens[:split]), (split, query_lens[split:])):
        if not any(rows):
            continue
        decision = decide(geometry, rows, library, disabled, max_context, bound)
        launches.append(Launch(decision.route, first, len(rows), max(rows), decision.reason))
    return tuple(launches)


def graph_plan(
    geometry: Geometry,
    batch: int,
    query_len: int,
    library: Library,
    disabled: Collection[Route] = (),
    bound: int | None = None,
) -> tuple[Launch, ...]:
    """The one launch of a uniform batch that a full CUDA graph holds.

    Args:
        batch: requests of the graph, padding included.
        query_len: query tokens of each.
        bound: the graph's context bound; None for the ordinary graph, which must serve any rows
            of this shape at any context and so never holds the long kernel.
    """
    query_lens = [query_len] * batch
    if bound is None:
        disabled = frozenset(disabled) | {Route.LONG}
        decision = decide(geometry, query_lens, library, disabled)
        decision = Decision(decision.route, "ordinary graph")
    else:
        decision = decide(geometry, query_lens, library, disabled, bound, bound)
    return (Launch(decision.route, 0, batch, query_len, decision.reason),)


def disabled_routes(environment: Mapping[str, str]) -> frozenset[Route]:
    """The routes whose variable is 0 in `environment` (pass ``os.environ``)."""
    return frozenset(
        route for route, name in DISABLE_VARIABLES.items() if environment.get(name) == "0"
    )
