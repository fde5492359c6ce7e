"""The long kernel (src/long.cu): split, then the join that the launcher takes."""

from __future__ import annotations

import numpy as np

from ..errors import SimError
from ..module import Module
from . import Launch, Shape, Work
from ._attention import host_functions, make_batch, shipped_cubin

NAME = "long"

_HOST = r"""
extern "C" int args_bytes() { return sizeof(LongArgs); }
extern "C" int slots(int len) { return long_slots(len); }
extern "C" int slot_bytes() { return kLongSlotBytes; }
extern "C" int ctas() { return kLongCtas; }
extern "C" int threads() { return kLongThreads; }
extern "C" int shared_bytes() { return kLongSharedBytes; }
extern "C" int few_most() { return kLongJoinFewMost; }
extern "C" int few_ctas() { return kLongFragments; }
extern "C" int few_threads() { return kLongJoinFewThreads; }
extern "C" int many_ctas() { return kLongJoinManyCtas; }
extern "C" int many_threads() { return kLongJoinManyThreads; }
"""
_POINTERS = ("q", "k", "v", "table", "lens", "starts", "out", "partial", "stats", "leaves")
_STRIDES = ("q_token", "q_head", "out_token", "out_head", "k_page", "v_page", "table_row")
_ARGS = np.dtype(  # LongArgs of src/long_args.h
    [(n, "<u8") for n in _POINTERS]
    + [(n, "<i8") for n in _STRIDES]
    + [(n, "<i4") for n in ("k_token", "k_head", "v_token", "v_head", "pages", "groups_per_page")]
    + [("magic", "<u4"), ("requests", "<i4"), ("max_len", "<i4"), ("slots", "<i4")]
    + [("qk_scale", "<f4"), ("out_scale", "<f4")],
    align=True,
)


def prepare(shape: Shape) -> Work:
    """A batch of this shape; the context contract is its longest request."""
    host = host_functions("long_args.h", _HOST)
    if host.args_bytes() != _ARGS.itemsize:
        raise SimError("LongArgs of src/long_args.h has changed: change cases/long.py")
    requests, longest = len(shape.lengths), max(shape.lengths)
    slots = host.slots(longest)
    results = requests * shape.kv_heads * slots
    batch = make_batch(shape, results * (host.slot_bytes() + 4) + (1 << 16))
    dev, rows = batch.dev, shape.query * shape.q_heads
    args = np.zeros((), _ARGS)
    values = batch.strides() | {
        "partial": dev.empty((results, rows * shape.head_dim), np.float16).addr,
        "stats": dev.empty((results, rows, 2), np.float32).addr,
        "leaves": dev.empty(results, np.int32).addr,
        "requests": requests,
        "max_len": longest,
        "slots": slots,
    }
    for name, value in values.items():
        args[name] = value
    few = requests * shape.kv_heads <= host.few_most()
    join, ctas, threads = (
        ("long_join_few", host.few_ctas(), host.few_threads())
        if few
        else ("long_join_many", host.many_ctas(), host.many_threads())
    )
    packed = [args.tobytes()]
    launches = [
        Launch(
            "long_split",
            (host.ctas(), 1, shape.kv_heads),
            (host.threads(),),
            packed,
            host.shared_bytes(),
        ),
        Launch(join, (ctas, requests, shape.kv_heads), (threads,), packed),
    ]
    return Work(Module(shipped_cubin("long_k16"), dev), launches, batch.check)
