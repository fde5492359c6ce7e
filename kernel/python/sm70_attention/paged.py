"""Ordinary request-major paged attention: 1..16 query tokens a request, any mix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import library
from .dispatch import PAGED_MAX_QUERY

if TYPE_CHECKING:
    import torch

# The split policy of kernel/src/paged_args.h, for the size of the workspace (the op checks it).
MAX_ROWS = 64
SPLIT_UNIT = 128
MIN_UNITS = 2
TARGET_CTAS = 160
TARGET_WIDE_CTAS = 80
NARROW_ROWS = 16


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_splits(max_seq_len: int, max_query_len: int, group: int, kv_heads: int) -> int:
    """Query rows times splits of one request and KV head that the workspace must have room for."""
    by_size = _ceil_div(_ceil_div(max_seq_len, SPLIT_UNIT), MIN_UNITS)
    most = 0
    for queries in range(1, max_query_len + 1):
        rows = queries * group
        ctas = TARGET_CTAS if rows <= NARROW_ROWS else TARGET_WIDE_CTAS
        target = max(1, ctas // (kv_heads * _ceil_div(rows, MAX_ROWS)))
        most = max(most, rows * min(target, by_size))
    return most


def paged_workspace_bytes(
    requests: int, q_heads: int, kv_heads: int, head_dim: int, max_query_len: int, max_seq_len: int
) -> int:
    """Bytes of workspace that :func:`paged_attention` needs; enough for any smaller call too.

    Args:
        requests: requests of the batch, padded ones included.
        q_heads: query heads of the rank.
        kv_heads: KV heads of the rank.
        head_dim: 64, 128 or 256.
        max_query_len: most query tokens of a request, 1..16.
        max_seq_len: the context contract in tokens.
    """
    rows = row_splits(max_seq_len, max_query_len, q_heads // kv_heads, kv_heads)
    return requests * kv_heads * rows * (head_dim * 2 + 8)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_dtype: str = "fp16",
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of a few query tokens a request over its paged cache.

    Query token i of n sees positions <= seq_len - n + i. A request with no query tokens, length 0,
    more than ``max_query_len`` query tokens or a length above ``max_seq_len`` reads and writes
    nothing. A request's result depends on its own data, length and query tokens only: the same
    bits alone, in any batch and at every call. Allocates nothing and does not synchronise, so it
    can be captured in a CUDA graph.

    Args:
        q: float16 [tokens, q_heads, D]; D is 64, 128 or 256; last dimension contiguous, address
            and other strides multiples of 8 bytes.
        k_cache: [pages, page_size, kv_heads, D]; page_size any multiple of 16; float16, or uint8
            or the float8 dtype for the FP8 types; last dimension contiguous, address and other
            strides multiples of 8 bytes. K and V may interleave in one allocation.
        v_cache: like k_cache.
        block_table: int32 [>= requests, columns]: the page of each page_size tokens. Entries past
            a request's length are not read; columns * page_size >= max_seq_len.
        seq_lens: int32 [requests], tokens of each request, its query tokens included.
        query_start_loc: int32 [requests + 1], first query token of each request; padded requests
            repeat the last value.
        max_query_len: most query tokens of a request, 1..16.
        max_seq_len: the context contract in tokens, at most 2^20.
        softmax_scale: factor of the scores, usually D**-0.5; finite and above 0.
        k_scale: descale of K: a key is its cache value times this; finite and above 0.
        v_scale: descale of V, likewise.
        kv_dtype: "fp16", "fp8_e4m3" or "fp8_e5m2". An E4M3 NaN byte inside a request reads as
            +-480; NaN and infinity of the other types propagate. Bytes past the end are not read.
        out: float16 like q: written for the query tokens of live requests, untouched elsewhere.
        workspace: uint8, contiguous, at least :func:`paged_workspace_bytes`; may be shared by all
            calls on a stream.

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
    k_bytes = checks.cache_bytes("k_cache", k_cache, kv_dtype)
    v_bytes = checks.cache_bytes("v_cache", v_cache, kv_dtype)
    g = checks.check_batch(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, max_query_len, max_seq_len
    )
    if max_query_len > PAGED_MAX_QUERY:
        raise ValueError(
            f"max_query_len is {max_query_len}; expected 1 to {PAGED_MAX_QUERY}: "
            "longer queries are prefill (prefill_attention)"
        )
    checks.check_workspace(
        workspace,
        paged_workspace_bytes(
            g.requests, g.q_heads, g.kv_heads, g.head_dim, max_query_len, max_seq_len
        ),
        q,
    )
    torch.ops._vllm_fa2_C.sm70_paged_attention(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, workspace, max_query_len,
        max_seq_len, softmax_scale, k_scale, v_scale, kv_dtype,
    )  # fmt: skip
    return out
