"""Long attention: eight verified tokens of 1..16 requests over long E4M3 caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import library
from .dispatch import (
    LONG_GROUP,
    LONG_HEAD_DIM,
    LONG_KV_DTYPE,
    LONG_MAX_BATCH,
    LONG_MAX_CONTEXT,
    LONG_QUERY,
)

if TYPE_CHECKING:
    import torch

# The split policy of kernel/src/long_args.h, for the size of the workspace (the op checks it).
TILE_TOKENS = 64
BLOCK_LEAVES = 4
LEAVES = 80
MIN_LEAF_TILES = 3
MAX_LEAF_TILES = 26
SLOT_BYTES = 6 * LONG_QUERY * (LONG_HEAD_DIM * 2 + 8) + 4
Q_ALIGNMENT = 16
"""Bytes that q's address and strides must be a multiple of."""
CACHE_REACH = 8 << 32
"""Bytes that a cache may span."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def leaves(length: int) -> int:
    """Parts that a request of ``length`` tokens is split into, whatever the batch."""
    tiles = _ceil_div(length, TILE_TOKENS)
    most = LEAVES if tiles <= LEAVES * MAX_LEAF_TILES else 2 * LEAVES
    return min(most, _ceil_div(tiles, MIN_LEAF_TILES))


def long_workspace_bytes(requests: int, kv_heads: int, max_seq_len: int) -> int:
    """Bytes of workspace that :func:`long_attention` needs; enough for any smaller batch too.

    Args:
        requests: requests of the batch, padded ones included.
        kv_heads: KV heads of the rank.
        max_seq_len: the context contract in tokens.

    Raises:
        ValueError: a batch or contract that the kernel does not take.
    """
    if not 0 <= requests <= LONG_MAX_BATCH:
        raise ValueError(f"{requests} requests; the long kernel takes up to {LONG_MAX_BATCH}")
    if not 1 <= max_seq_len <= LONG_MAX_CONTEXT:
        raise ValueError(f"max_seq_len is {max_seq_len}; expected 1 to {LONG_MAX_CONTEXT}")
    slots = _ceil_div(leaves(max_seq_len), BLOCK_LEAVES) * BLOCK_LEAVES
    return requests * kv_heads * slots * SLOT_BYTES


def long_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_seq_len: int,
    softmax_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of up to eight query tokens a request over long E4M3 caches.

    Query token i of n sees positions <= seq_len - n + i. A request with no query tokens, more than
    eight, length 0 or a length above ``max_seq_len`` reads and writes nothing. A request's result
    depends on its own data, length and query tokens only: the same bits alone, in any batch and at
    every call. Allocates nothing and does not synchronise, so it can be captured in a CUDA graph;
    lengths, tables and q may change between replays.

    Args:
        q: float16 [tokens, q_heads, 256], six query heads for each KV head; last dimension
            contiguous, address and other strides multiples of 16 bytes.
        k_cache: uint8 or float8_e4m3fn [pages, page_size, kv_heads, 256]; page_size any multiple
            of 16; last dimension contiguous, address and other strides multiples of 8 bytes (of 16
            is faster); spans at most 32 GiB. K and V may interleave in one allocation.
        v_cache: like k_cache.
        block_table: int32 [>= requests, columns]: the page of each page_size tokens. Entries past
            a request's length are not read; columns * page_size >= max_seq_len.
        seq_lens: int32 [requests <= 16], tokens of each request, its query tokens included.
        query_start_loc: int32 [requests + 1], first query token of each request; padded requests
            repeat the last value.
        max_seq_len: the context contract in tokens, at most 262,144.
        softmax_scale: factor of the scores, usually 1/16; finite and above 0.
        k_scale: descale of K: a key is its cache value times this; finite and above 0.
        v_scale: descale of V, likewise.
        out: float16 like q: written for the query tokens of live requests, untouched elsewhere.
        workspace: uint8, contiguous, at least :func:`long_workspace_bytes`; needs no
            initialisation; calls on one stream may share it, calls on two streams may not.

    A NaN byte (0x7f, 0xff) inside a request reads as +-480 times the descale (see
    :func:`nan_bytes`); bytes past a request's end never reach the output, whatever they are.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        LibraryError: the extension is missing, foreign or stale.
    """
    import torch

    from . import checks

    library.load()
    for name, value in (
        ("softmax_scale", softmax_scale), ("k_scale", k_scale), ("v_scale", v_scale)
    ):  # fmt: skip
        checks.check_scale(name, value)
    k_bytes = checks.cache_bytes("k_cache", k_cache, LONG_KV_DTYPE)
    v_bytes = checks.cache_bytes("v_cache", v_cache, LONG_KV_DTYPE)
    g = checks.check_batch(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, LONG_QUERY, max_seq_len
    )
    if g.head_dim != LONG_HEAD_DIM or g.group != LONG_GROUP:
        raise ValueError(
            f"q is {tuple(q.shape)} over {g.kv_heads} KV heads; expected head dimension "
            f"{LONG_HEAD_DIM} and {LONG_GROUP} query heads for each KV head (paged_attention "
            "takes other geometries)"
        )
    if q.data_ptr() % Q_ALIGNMENT or any(s * 2 % Q_ALIGNMENT for s in q.stride()[:2]):
        raise ValueError(
            f"q has strides {tuple(q.stride())}; expected address and strides in "
            f"{Q_ALIGNMENT}-byte steps"
        )
    for name, cache in (("k_cache", k_bytes), ("v_cache", v_bytes)):
        if cache.shape[0] * cache.stride(0) > CACHE_REACH:
            raise ValueError(f"{name} spans {cache.shape[0] * cache.stride(0)} bytes; "
                             f"at most {CACHE_REACH}")  # fmt: skip
    checks.check_workspace(workspace, long_workspace_bytes(g.requests, g.kv_heads, max_seq_len), q)
    torch.ops._vllm_fa2_C.sm70_long_attention(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, workspace, max_seq_len,
        softmax_scale, k_scale, v_scale,
    )  # fmt: skip
    return out


def nan_bytes(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> int:
    """NaN bytes (0x7f, 0xff) of an E4M3 cache inside the requests: a check for debugging.

    The cache writer saturates at +-448, so such a byte is a NaN activation. The long and paged
    kernels read it as +-480, because telling it apart costs three more instructions for every
    four bytes. Synchronises with the GPU.

    Args:
        cache: uint8 or float8_e4m3fn [pages, page_size, kv_heads, D].
        block_table: int32 [>= requests, columns].
        seq_lens: int32 [requests].
    """
    import torch

    found = 0
    page_size = cache.shape[1]
    for row, length in zip(block_table.tolist(), seq_lens.tolist(), strict=False):
        for column in range(_ceil_div(length, page_size)):
            tokens = min(page_size, length - column * page_size)
            page = cache[row[column], :tokens].view(torch.uint8)
            found += int(((page & 0x7F) == 0x7F).sum())
    return found
