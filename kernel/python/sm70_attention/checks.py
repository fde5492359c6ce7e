"""Argument checks that the attention functions share.

Each error names the argument, its shape or value, and what was expected. Nothing here reads a
tensor's content, so nothing synchronises with the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .dispatch import HEAD_DIMS, KV_DTYPES, MAX_CONTEXT, MAX_GROUP, PAGE_MULTIPLE

_CACHE_DTYPES = {
    "fp16": (torch.float16,),
    "fp8_e4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.uint8, torch.float8_e5m2),
}
ALIGNMENT = 8
"""Bytes that every address and stride must be a multiple of."""


def _shape(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} (strides {tuple(t.stride())}, {t.dtype})"


@dataclass(frozen=True)
class Geometry:
    """Sizes that the checks found: tokens and heads of q, requests, group = q heads a KV head."""

    requests: int
    q_heads: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int


def check_rows(name: str, t: torch.Tensor) -> None:
    """q or out: float16 [tokens, q_heads, D], last dimension contiguous, 8-byte steps."""
    if t.dtype != torch.float16 or t.dim() != 3:
        raise ValueError(f"{name} is {_shape(t)}; expected float16 [tokens, q_heads, head_dim]")
    if t.stride(2) != 1:
        raise ValueError(
            f"{name} is {_shape(t)}; expected a contiguous last dimension: "
            f"pass {name}.contiguous() or a view that keeps it"
        )
    if t.data_ptr() % ALIGNMENT or any(s * 2 % ALIGNMENT for s in t.stride()[:2]):
        raise ValueError(f"{name} is {_shape(t)}; expected address and strides in 8-byte steps")


def check_scale(name: str, value: float) -> None:
    """A descale or softmax scale: a finite host number above 0."""
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a tensor; expected a host float (pass {name}.item() once)")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}; expected a finite number above 0")


def cache_bytes(name: str, cache: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """The cache as the ops take it: float16 for "fp16", else the bytes as uint8 (a view)."""
    if kv_dtype not in _CACHE_DTYPES:
        raise ValueError(f"kv_dtype is {kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    if cache.dtype not in _CACHE_DTYPES[kv_dtype] or cache.dim() != 4:
        wanted = " or ".join(str(d) for d in _CACHE_DTYPES[kv_dtype])
        raise ValueError(
            f"{name} is {_shape(cache)}; expected {wanted} [pages, page_size, kv_heads, head_dim] "
            f"for kv_dtype {kv_dtype!r}"
        )
    if cache.stride(3) != 1:
        raise ValueError(f"{name} is {_shape(cache)}; expected a contiguous last dimension")
    size = cache.element_size()
    if cache.data_ptr() % ALIGNMENT or any(s * size % ALIGNMENT for s in cache.stride()[:3]):
        raise ValueError(f"{name} is {_shape(cache)}; expected address and strides in 8-byte steps")
    return cache if kv_dtype == "fp16" else cache.view(torch.uint8)


def check_batch(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> Geometry:
    """Shapes, dtypes and devices of one call; the caches as :func:`cache_bytes` returns them.

    Raises:
        ValueError: an argument does not fit; the message names it, its shape and the expectation.
    """
    check_rows("q", q)
    check_rows("out", out)
    if out.shape != q.shape:
        raise ValueError(f"out is {_shape(out)}; expected the shape of q, {tuple(q.shape)}")
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"v_cache is {_shape(v_cache)}; expected k_cache's {tuple(k_cache.shape)}")
    _, q_heads, head_dim = q.shape
    pages, page_size, kv_heads, cache_dim = k_cache.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q is {_shape(q)}; expected a head dimension of 64, 128 or 256")
    if cache_dim != head_dim:
        raise ValueError(f"k_cache is {_shape(k_cache)}; expected q's head dimension {head_dim}")
    if page_size < 1 or page_size % PAGE_MULTIPLE:
        raise ValueError(
            f"k_cache is {_shape(k_cache)}: pages of {page_size} tokens; "
            f"expected a multiple of {PAGE_MULTIPLE}"
        )
    if pages < 1:
        raise ValueError(f"k_cache is {_shape(k_cache)}; expected at least one page")
    if kv_heads < 1 or q_heads % kv_heads or q_heads // kv_heads > MAX_GROUP:
        raise ValueError(
            f"q is {_shape(q)} over {kv_heads} KV heads; expected a whole number of query heads, "
            f"at most {MAX_GROUP}, for each KV head"
        )
    for name, t, dims in (
        ("block_table", block_table, 2),
        ("seq_lens", seq_lens, 1),
        ("query_start_loc", query_start_loc, 1),
    ):
        if t.dtype != torch.int32 or t.dim() != dims or (t.shape[-1] > 1 and t.stride(-1) != 1):
            kind = "int32 [requests, columns]" if dims == 2 else "int32, one dimension"
            raise ValueError(f"{name} is {_shape(t)}; expected {kind}, last dimension contiguous")
    requests = seq_lens.shape[0]
    if query_start_loc.shape[0] != requests + 1:
        raise ValueError(
            f"query_start_loc is {_shape(query_start_loc)}; expected requests + 1 = "
            f"{requests + 1} entries for seq_lens {tuple(seq_lens.shape)}"
        )
    if block_table.shape[0] < requests:
        raise ValueError(f"block_table is {_shape(block_table)}; expected {requests} rows or more")
    if not 1 <= max_seq_len <= MAX_CONTEXT:
        raise ValueError(f"max_seq_len is {max_seq_len}; expected 1 to {MAX_CONTEXT}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len is {max_query_len}; expected 1 or more")
    if block_table.shape[1] * page_size < max_seq_len:
        raise ValueError(
            f"block_table is {_shape(block_table)}: {block_table.shape[1]} columns of "
            f"{page_size}-token pages hold {block_table.shape[1] * page_size} tokens; "
            f"expected room for max_seq_len {max_seq_len}"
        )
    for name, t in (
        ("out", out), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table),
        ("seq_lens", seq_lens), ("query_start_loc", query_start_loc),
    ):  # fmt: skip
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected q's device, {q.device}")
    return Geometry(requests, q_heads, kv_heads, q_heads // kv_heads, head_dim, page_size)


def check_workspace(workspace: torch.Tensor, needed: int, q: torch.Tensor) -> None:
    """A contiguous uint8 tensor of at least ``needed`` bytes on q's device."""
    have = workspace.numel() * workspace.element_size()
    if not workspace.is_contiguous() or workspace.device != q.device or have < needed:
        raise ValueError(
            f"workspace is {_shape(workspace)} on {workspace.device}; expected {needed} contiguous "
            f"bytes on {q.device}"
        )
