"""Causal paged attention in FP64, from its definition: shares nothing with the kernels."""

from __future__ import annotations

import torch

from .case import KV_TYPES, Batch

CHUNK = 32768
"""Tokens that are gathered and converted at a time."""


def _gather(batch: Batch, cache: torch.Tensor, request: int, head: int, first: int, end: int):
    """[end - first, D] FP64 values of a request, the descale not yet applied."""
    case = batch.case
    position = torch.arange(first, end, device=cache.device)
    page = batch.block_table[request, position // case.page_size].long()
    raw = cache[page, position % case.page_size, head]
    return (raw if case.kv_dtype == "fp16" else raw.view(KV_TYPES[case.kv_dtype])).double()


def attention(batch: Batch, request: int, head: int) -> torch.Tensor:
    """The output [query tokens, group, D] of one request and KV head, FP64."""
    case = batch.case
    length, queries = case.seq_lens[request], case.query_lens[request]
    heads = slice(head * case.group, (head + 1) * case.group)
    q = batch.q[batch.rows_of(request), heads].double().reshape(-1, case.head_dim)
    scores = torch.empty(q.shape[0], length, dtype=torch.float64, device=q.device)
    for first in range(0, length, CHUNK):
        end = min(first + CHUNK, length)
        keys = _gather(batch, batch.k_cache, request, head, first, end) * case.k_scale
        scores[:, first:end] = q @ keys.T
    scores *= batch.softmax_scale
    position = torch.arange(length, device=q.device)
    token = torch.arange(queries, device=q.device).repeat_interleave(case.group)
    scores.masked_fill_(position[None] > (length - queries + token)[:, None], float("-inf"))
    weights = scores.softmax(-1)
    out = torch.zeros_like(q)
    for first in range(0, length, CHUNK):
        end = min(first + CHUNK, length)
        values = _gather(batch, batch.v_cache, request, head, first, end) * case.v_scale
        out += weights[:, first:end] @ values
    return out.reshape(queries, case.group, case.head_dim)
