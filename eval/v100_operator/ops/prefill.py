"""sm70_prefill_attention: its cases, and how to call it."""

from __future__ import annotations

from itertools import product

import torch
from sm70_attention.prefill import prefill_attention

from ..case import Batch, Case
from . import SOURCES, BenchShape, Op

_DTYPES = ("fp16", "fp8_e4m3", "fp8_e5m2")
_PAGES = (16, 144, 1024, 1648, 3296)
_LAYOUTS = ("separate", "interleaved", "odd")
_GEOMETRIES = ((64, 8, 2), (64, 1, 3), (128, 4, 2), (128, 16, 1), (256, 6, 1), (256, 8, 2))

# Ragged batches: chunks with and without a past, tile ends (rows, 32 positions) and page ends,
# single tokens among chunks, padding.
_BATCHES = (
    ((33, 200, 0, 64, 1, 129), (33, 100, 0, 64, 1, 17)),
    ((1649, 3297, 0, 500), (300, 1, 0, 500)),
    ((31, 32, 2100, 0, 0), (31, 16, 257, 0, 0)),
)


def _case(name: str, lens: tuple[int, ...], queries: tuple[int, ...], **over: object) -> Case:
    base = {"head_dim": 256, "group": 6, "kv_heads": 1, "kv_dtype": "fp8_e4m3", "page_size": 1648}
    return Case(name, seq_lens=lens, query_lens=queries, **{**base, **over})


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


def _daily() -> list[Case]:
    """Chunks of daily size, long pasts, and the ends of the ranges."""
    return [
        _case("8192 of 8192", (8192,), (8192,)),
        _case("6592 on 6592 page 1648", (13184,), (6592,), table="reversed"),
        _case("512 on 100000", (100512,), (512,), page_size=3296),
        _case("64 of 262144", (262144,), (64,), page_size=1536),
        _case("fp16 300 on 60000", (60300,), (300,), kv_dtype="fp16", page_size=832),
        _case("fp16 d128 1000 on 30000", (31000,), (1000,), kv_dtype="fp16", head_dim=128, group=8,
              page_size=16),
        _case("e5m2 300 on 30000", (30300,), (300,), kv_dtype="fp8_e5m2", page_size=1024),
        _case("mixed with decode and verify", (5000, 900, 40000, 2048, 17),
              (1, 8, 16, 1500, 17)),
        _case("40 requests", tuple(50 + 37 * i for i in range(40)), tuple(1 + 3 * i for i in
              range(40)), page_size=144),
        _case("two KV heads interleaved", (9000, 300), (700, 300), kv_heads=2,
              layout="interleaved"),
        _case("all bytes e4m3", (3000, 100), (500, 100), values="bytes", k_scale=0.004),
        _case("all bytes e5m2", (3000, 100), (500, 100), values="bytes", kv_dtype="fp8_e5m2",
              k_scale=0.0001, v_scale=0.01),
        _case("all padded", (0, 0, 0), (0, 0, 0)),
        _case("contract above all lengths", (2000, 300), (800, 200), max_seq_len=262144),
    ]  # fmt: skip


def _call(batch: Batch, workspace: torch.Tensor) -> None:
    case = batch.case
    prefill_attention(
        *batch.tensors,
        **batch.options,
        max_query_len=case.max_query_len,
        kv_dtype=case.kv_dtype,
    )


# A sample runs a shape 128 times: the chunk on the longest context is a quarter of a daily one.
_BENCH = [
    BenchShape("8192 of 8192", _case("bench", (8192,), (8192,))),
    BenchShape("8192 of 32768", _case("bench", (32768,), (8192,))),
    BenchShape("2048 of 131072", _case("bench", (131072,), (2048,))),
    BenchShape("d128 fp16 8192 of 8192",
               _case("bench", (8192,), (8192,), head_dim=128, group=8, kv_dtype="fp16",
                     page_size=1024)),
]  # fmt: skip

OP = Op(
    name="prefill",
    sources=SOURCES["prefill"],
    cases=(*_matrix(), *_daily()),
    bench=_BENCH,
    call=_call,
    workspace_bytes=lambda case: 0,
)
