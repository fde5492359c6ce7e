"""The ordinary paged kernel (src/paged.cu) on the shapes of the long one: split and join."""

from __future__ import annotations

import numpy as np

from ..errors import SimError
from ..module import Module
from . import Launch, Shape, Work
from ._attention import host_functions, make_batch, shipped_cubin

NAME = "paged"

_HOST = r"""
extern "C" int args_bytes() { return sizeof(PagedArgs); }
extern "C" int split_bound(int len, int n, int g, int h) { return paged_split_bound(len, n, g, h); }
extern "C" int row_splits(int len, int n, int g, int h) { return paged_row_splits(len, n, g, h); }
extern "C" int shared_bytes(int d, int b, int t) { return paged_shared_bytes(d, b, t); }
extern "C" int threads() { return kPagedThreads; }
extern "C" int join_threads() { return kPagedJoinThreads; }
extern "C" int max_rows() { return kPagedMaxRows; }
"""
_POINTERS = ("q", "k", "v", "table", "lens", "starts", "out", "partial", "stats")
_STRIDES = ("q_token", "q_head", "out_token", "out_head", "k_page", "v_page", "table_row")
_INTS = ("k_token", "k_head", "v_token", "v_head", "pages", "table_width", "groups_per_page")
_ARGS = np.dtype(  # PagedArgs of src/paged_args.h
    [(n, "<u8") for n in _POINTERS]
    + [(n, "<i8") for n in _STRIDES]
    + [(n, "<i4") for n in _INTS]
    + [("magic", "<u4")]
    + [(n, "<i4") for n in ("kv_heads", "group", "max_len", "max_query", "row_splits")]
    + [("qk_scale", "<f4"), ("out_scale", "<f4")],
    align=True,
)


def prepare(shape: Shape) -> Work:
    """A batch of this shape; the context contract is its longest request."""
    host = host_functions("paged_args.h", _HOST)
    if host.args_bytes() != _ARGS.itemsize:
        raise SimError("PagedArgs of src/paged_args.h has changed: change cases/paged.py")
    requests, longest, group = len(shape.lengths), max(shape.lengths), shape.q_heads
    room = host.row_splits(longest, shape.query, group, shape.kv_heads)
    slots = requests * shape.kv_heads * room
    batch = make_batch(shape, slots * (shape.head_dim * 2 + 8) + (1 << 16))
    dev, rows = batch.dev, group * shape.query
    args = np.zeros((), _ARGS)
    values = batch.strides() | {
        "partial": dev.empty((slots, shape.head_dim), np.float16).addr,
        "stats": dev.empty((slots, 2), np.float32).addr,
        "table_width": batch.table.np.shape[1],
        "kv_heads": shape.kv_heads,
        "group": group,
        "max_len": longest,
        "max_query": shape.query,
        "row_splits": room,
    }
    for name, value in values.items():
        args[name] = value
    tiles = next((t for t in (1, 2, 4, 6) if rows <= t * 8), host.max_rows() // 8)
    chunks = -(-rows // host.max_rows())
    splits = host.split_bound(longest, 1, group, shape.kv_heads)
    packed = [args.tobytes()]
    launches = [
        Launch(
            f"paged_split_t{tiles}",
            (chunks * shape.kv_heads, splits, requests),
            (host.threads(),),
            packed,
            host.shared_bytes(shape.head_dim, shape.kv_bytes, tiles),
        ),
        Launch("paged_join", (rows, shape.kv_heads, requests), (host.join_threads(),), packed),
    ]
    module = Module(shipped_cubin(f"paged_d{shape.head_dim}_e4m3"), dev)
    return Work(module, launches, batch.check)
