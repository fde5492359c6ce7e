"""sm70_paged_attention: its cases, and how to call it."""

from __future__ import annotations

from itertools import product

import torch
from sm70_attention.paged import paged_attention, paged_workspace_bytes

from ..case import Batch, Case
from . import SOURCES, BenchShape, Op

_DTYPES = ("fp16", "fp8_e4m3", "fp8_e5m2")
_PAGES = (16, 144, 1024, 1536, 1648, 3296)
_LAYOUTS = ("separate", "interleaved", "odd")
_GEOMETRIES = ((64, 8, 2), (64, 1, 3), (128, 4, 2), (128, 16, 1), (256, 6, 1), (256, 8, 2))

# Ragged batches that walk over page ends, tile ends (64, 128) and unit ends, with padding.
_BATCHES = (
    ((1, 15, 16, 17, 0, 127), (1, 1, 1, 1, 0, 1)),
    ((128, 129, 0, 1649, 3297, 255), (8, 8, 0, 8, 8, 8)),
    ((9, 64, 257, 5000, 0, 0), (1, 8, 3, 16, 0, 0)),
    ((7, 1000, 143, 2049), (7, 1, 5, 2)),
)


def _matrix() -> list[Case]:
    """Every geometry with every dtype; pages, layouts, tables and batches in turn."""
    cases = []
    for n, ((dim, group, heads), kv) in enumerate(product(_GEOMETRIES, _DTYPES)):
        for turn in range(2):
            at = 2 * n + turn
            lens, queries = _BATCHES[at % len(_BATCHES)]
            page, layout = _PAGES[(at + n) % len(_PAGES)], _LAYOUTS[(at + n // 3) % len(_LAYOUTS)]
            table = ("permuted", "reversed")[(at // 2) % 2]
            name = f"d{dim} g{group} h{heads} {kv} page {page} {layout} {table}"
            cases.append(
                Case(f"{name} #{at}", dim, group, heads, kv, page, lens, queries, layout, table)
            )
    return cases


def _case(name: str, lens: tuple[int, ...], queries: tuple[int, ...], **over: object) -> Case:
    base = {"head_dim": 256, "group": 6, "kv_heads": 1, "kv_dtype": "fp8_e4m3", "page_size": 1648}
    return Case(name, seq_lens=lens, query_lens=queries, **{**base, **over})


def _every_page() -> list[Case]:
    """Each page size with each layout at the main geometry."""
    lens = (3296, 1, 1648, 6593, 0, 1649)
    queries = (8, 1, 8, 1, 0, 4)
    return [
        _case(f"page {page} {layout}", lens, queries, page_size=page, layout=layout)
        for page, layout in product(_PAGES, _LAYOUTS)
    ]


def _long() -> list[Case]:
    """Long and very ragged batches, and the ends of the ranges."""
    return [
        _case("1..262144 q1", (262144, 1, 131072, 32768, 8192, 77), (1,) * 6),
        _case("8..262144 q8", (262144, 8, 100001, 9, 0, 65), (8, 8, 8, 8, 0, 8), page_size=3296),
        _case("262144 alone q1 reversed", (262144,), (1,), table="reversed", page_size=1536),
        _case(
            "100000 two KV heads", (100000, 3), (4, 2), kv_heads=2, layout="interleaved",
            page_size=1024,
        ),
        _case("fp16 65536", (65536, 5), (8, 1), kv_dtype="fp16", page_size=1024),
        _case("fp16 d128 65536", (65536, 200), (1, 1), kv_dtype="fp16", head_dim=128, group=4,
              kv_heads=2, page_size=16),
        _case("e5m2 65536", (65536, 5), (8, 1), kv_dtype="fp8_e5m2", page_size=3296),
        _case("256 rows", (3000, 16, 40), (16, 16, 9), group=16),
        _case("65 rows and 1 row", (3000, 700), (13, 1), group=5, kv_heads=2),
        _case("16 requests q1", tuple(1 + 977 * i for i in range(16)), (1,) * 16),
        _case("64 requests q1", tuple(31 * i for i in range(64)),
              tuple(int(i > 0) for i in range(64)), page_size=144),
        _case("all bytes e4m3", (5000, 100), (8, 1), values="bytes", k_scale=0.004),
        _case("all bytes e5m2", (5000, 100), (8, 1), values="bytes", kv_dtype="fp8_e5m2",
              k_scale=0.0001, v_scale=0.01),
        _case("all padded", (0, 0, 0), (0, 0, 0)),
        _case("contract above all lengths", (2000, 300), (8, 2), max_seq_len=262144),
    ]  # fmt: skip


def _call(batch: Batch, workspace: torch.Tensor) -> None:
    case = batch.case
    paged_attention(
        *batch.tensors,
        **batch.options,
        max_query_len=case.max_query_len,
        kv_dtype=case.kv_dtype,
        workspace=workspace,
    )


def _workspace_bytes(case: Case) -> int:
    return paged_workspace_bytes(
        len(case.seq_lens), case.group * case.kv_heads, case.kv_heads, case.head_dim,
        case.max_query_len, case.contract,
    )  # fmt: skip


def _read(batch: Batch, workspace: torch.Tensor) -> None:
    """Reads the live cache bytes once and does nothing with them: the floor of this GPU."""
    for cache in (batch.k_cache, batch.v_cache):
        cache[:-1].view(torch.int64).sum()


_BENCH = [
    BenchShape(f"q{queries} {tokens // 1024}K x {requests}",
               _case("bench", (tokens,) * requests, (queries,) * requests))
    for queries in (1, 8)
    for tokens in (8192, 32768, 131072)
    for requests in (1, 4, 8)
]  # fmt: skip

OP = Op(
    name="paged",
    sources=SOURCES["paged"],
    cases=(*_matrix(), *_every_page(), *_long()),
    bench=_BENCH,
    call=_call,
    workspace_bytes=_workspace_bytes,
    control=("plain read of the cache", _read),
)
