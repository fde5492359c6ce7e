"""A case as data, and its tensors.

The oracle and the ops both read these tensors; neither knows how they were made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

KV_TYPES = {
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SENTINEL = 1234.0
"""What output rows that no request owns must still hold after a call."""


@dataclass(frozen=True)
class Case:
    """One batch. seq_lens include the query tokens; 0 and 0 is a padded request.

    layout: "separate" (K and V in halves of one allocation, as vLLM keeps them), "interleaved" (K
    and V of a token side by side), "odd" (addresses and strides that are multiples of 8 bytes and
    of nothing more). table: "permuted" or "reversed" pages. values: "normal", or "bytes" (every
    finite FP8 byte equally likely). max_seq_len: the context contract; 0 takes the longest.
    """

    name: str
    head_dim: int
    group: int
    kv_heads: int
    kv_dtype: str
    page_size: int
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    layout: str = "separate"
    table: str = "permuted"
    values: str = "normal"
    k_scale: float = 0.75
    v_scale: float = 1.5
    max_seq_len: int = 0
    spare_tokens: int = 3

    @property
    def contract(self) -> int:
        """Context contract in tokens."""
        return self.max_seq_len or max(1, *self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return max(1, *self.query_lens)

    @property
    def element_bytes(self) -> int:
        return 2 if self.kv_dtype == "fp16" else 1

    @property
    def kv_bytes(self) -> int:
        """Cache bytes that one call must read."""
        live = sum(n for n, q in zip(self.seq_lens, self.query_lens, strict=True) if q)
        return 2 * live * self.kv_heads * self.head_dim * self.element_bytes

    def single(self, request: int) -> Case:
        """The same request alone, under the same contract."""
        return replace(
            self,
            seq_lens=(self.seq_lens[request],),
            query_lens=(self.query_lens[request],),
            max_seq_len=self.contract,
        )


@dataclass
class Batch:
    """Tensors of a case: q, out float16 [tokens, q_heads, D]; caches [pages, page, kv_heads, D]
    (FP8 as uint8); block_table int32 [requests, columns]; seq_lens, query_start_loc int32."""

    case: Case
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor

    @property
    def softmax_scale(self) -> float:
        return self.case.head_dim**-0.5

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments that every attention function begins with."""
        return (
            self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens,
            self.query_start_loc,
        )  # fmt: skip

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments that every attention function has."""
        return {
            "max_seq_len": self.case.contract,
            "softmax_scale": self.softmax_scale,
            "k_scale": self.case.k_scale,
            "v_scale": self.case.v_scale,
            "out": self.out,
        }

    def rows_of(self, request: int) -> slice:
        """Tokens of a request in q and out."""
        first = sum(self.case.query_lens[:request])
        return slice(first, first + self.case.query_lens[request])

    def alone(self, request: int) -> Batch:
        """One request of this batch by itself: the same cache and query bytes."""
        rows = self.rows_of(request)
        n = self.case.query_lens[request]
        return Batch(
            self.case.single(request),
            self.q[rows],
            self.k_cache,
            self.v_cache,
            self.block_table[request : request + 1],
            self.seq_lens[request : request + 1],
            torch.tensor([0, n], dtype=torch.int32, device=self.q.device),
            torch.full_like(self.q[rows], SENTINEL),
        )


def _cache_views(case: Case, pages: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    row = case.head_dim * case.element_bytes
    heads = case.kv_heads * row
    offset_k = 0
    if case.layout == "separate":
        token, offset_v = heads, pages * case.page_size * heads
        total = 2 * offset_v
    elif case.layout == "interleaved":
        token, offset_v = 2 * heads, heads
        total = pages * case.page_size * token
    elif case.layout == "odd":
        token, offset_k, offset_v = 2 * heads + 8, 8, 8 + heads
        total = pages * case.page_size * token + 64
    else:
        raise ValueError(f"layout is {case.layout!r}; expected separate, interleaved or odd")
    size = case.element_bytes
    dtype = torch.float16 if case.kv_dtype == "fp16" else torch.uint8
    flat = torch.empty(total // size, dtype=dtype, device=device)
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    strides = (case.page_size * token // size, token // size, row // size, 1)
    return (
        torch.as_strided(flat, shape, strides, offset_k // size),
        torch.as_strided(flat, shape, strides, offset_v // size),
    )


def _fill(case: Case, cache: torch.Tensor, generator: torch.Generator) -> None:
    """Random values, a page at a time to bound the memory."""
    for first in range(0, cache.shape[0], 64):
        part = cache[first : first + 64]
        if case.values == "bytes":
            raw = torch.randint(
                0, 256, part.shape, dtype=torch.uint8, device=part.device, generator=generator
            )
            magnitude = raw & 0x7F
            limit = 0x7E if case.kv_dtype == "fp8_e4m3" else 0x7B
            part.copy_(torch.where(magnitude > limit, raw & 0x80, raw))
            continue
        values = torch.randn(part.shape, device=part.device, generator=generator)
        converted = values.to(KV_TYPES[case.kv_dtype])
        part.copy_(converted if case.kv_dtype == "fp16" else converted.view(torch.uint8))


def _poison(case: Case, cache: torch.Tensor, table: torch.Tensor) -> None:
    """NaN everywhere past the end of each request, and in the page that nobody owns."""
    nan = float("nan") if case.kv_dtype == "fp16" else 0x7F
    cache[cache.shape[0] - 1] = nan
    for row, length in zip(table, case.seq_lens, strict=True):
        if length % case.page_size:
            cache[int(row[length // case.page_size]), length % case.page_size :] = nan


def make_batch(case: Case, seed: int, device: str = "cuda") -> Batch:
    """The tensors of a case: everything past a request's end is NaN, -1 or a sentinel."""
    generator = torch.Generator(device=device).manual_seed(seed)
    page_counts = [-(-n // case.page_size) for n in case.seq_lens]
    pages = sum(page_counts) + 1
    order = list(range(pages - 1))
    if case.table == "permuted":
        cpu = torch.Generator().manual_seed(seed)
        order = torch.randperm(max(pages - 1, 1), generator=cpu).tolist()
    elif case.table == "reversed":
        order.reverse()
    columns = max(-(-case.contract // case.page_size), 1)
    table = torch.full((len(case.seq_lens), columns), -1, dtype=torch.int32)
    at = 0
    for request, count in enumerate(page_counts):
        table[request, :count] = torch.tensor(order[at : at + count], dtype=torch.int32)
        at += count
    k_cache, v_cache = _cache_views(case, pages, device)
    for cache in (k_cache, v_cache):
        _fill(case, cache, generator)
        _poison(case, cache, table)
    tokens = sum(case.query_lens)
    shape = (tokens + case.spare_tokens, case.group * case.kv_heads, case.head_dim)
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        case,
        torch.randn(shape, device=device, generator=generator).half(),
        k_cache,
        v_cache,
        table.to(device),
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        starts.to(device),
        torch.full(shape, SENTINEL, dtype=torch.float16, device=device),
    )
