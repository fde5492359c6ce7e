"""Prefill attention: any number of query tokens a request, causal over its past, paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import library

if TYPE_CHECKING:
    import torch


def prefill_attention(
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
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of prompt chunks, and of any shorter rows beside them.

    Query token i of n sees positions <= seq_len - n + i. A request with no query tokens, length 0,
    more than ``max_query_len`` query tokens or a length above ``max_seq_len`` reads and writes
    nothing. The launch is found from the lengths on the device: no plan, no host synchronisation,
    no allocation.

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
        max_query_len: most query tokens of a request, 1..max_seq_len.
        max_seq_len: the context contract in tokens, at most 2^20.
        softmax_scale: factor of the scores, usually D**-0.5; finite and above 0.
        k_scale: descale of K: a key is its cache value times this; finite and above 0.
        v_scale: descale of V, likewise.
        kv_dtype: "fp16", "fp8_e4m3" or "fp8_e5m2".
        out: float16 like q: written for the query tokens of live requests, untouched elsewhere.
        workspace: not needed; any tensor of the ops' common signature.

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
    checks.check_batch(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, max_query_len, max_seq_len
    )
    torch.ops._vllm_fa2_C.sm70_prefill_attention(
        out, q, k_bytes, v_bytes, block_table, seq_lens, query_start_loc, workspace, max_query_len,
        max_seq_len, softmax_scale, k_scale, v_scale, kv_dtype,
    )  # fmt: skip
    return out
