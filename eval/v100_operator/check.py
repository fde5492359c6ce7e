"""Runs an op's cases and says, for each, what was compared and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from . import oracle
from .case import SENTINEL, Batch, make_batch
from .ops import Op


@dataclass
class CaseResult:
    """Of one case: errors against the oracle (None: nothing live), and the failed comparisons."""

    name: str
    max_error: float | None = None
    l2_error: float | None = None
    failures: list[str] = field(default_factory=list)


def _poisoned(op: Op, batch: Batch) -> torch.Tensor:
    """A workspace full of NaN: a partial result that was not written cannot go unseen."""
    size = max(op.workspace_bytes(batch.case), 16)
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=batch.q.device)


def _run(op: Op, batch: Batch) -> torch.Tensor:
    batch.out.fill_(SENTINEL)
    op.call(batch, _poisoned(op, batch))
    return batch.out.clone()


def _accuracy(op: Op, batch: Batch, out: torch.Tensor, result: CaseResult) -> None:
    case = batch.case
    for request, queries in enumerate(case.query_lens):
        if not queries or not case.seq_lens[request]:
            continue
        for head in range(case.kv_heads):
            want = oracle.attention(batch, request, head)
            heads = slice(head * case.group, (head + 1) * case.group)
            error = out[batch.rows_of(request), heads].double() - want
            largest = (error.abs().max() / want.abs().max()).item()
            l2 = (error.norm() / want.norm()).item()
            where = f"request {request}, KV head {head}"
            # Written so that a NaN fails.
            if not largest <= op.max_error:
                result.failures.append(f"{where}: largest error {largest:.2e} > {op.max_error:g}")
            if not l2 <= op.l2_error:
                result.failures.append(f"{where}: L2 error {l2:.2e} > {op.l2_error:g}")
            result.max_error = max(result.max_error or 0.0, largest)
            result.l2_error = max(result.l2_error or 0.0, l2)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _graph(op: Op, batch: Batch, seed: int, result: CaseResult) -> None:
    """Captures, changes every input in place (lengths and order of requests too), replays."""
    workspace = _poisoned(op, batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op.call(batch, workspace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.call(batch, workspace)
    # Rotate the requests, so that lengths, tables and query starts all change.
    case = batch.case
    generator = torch.Generator(device=batch.q.device).manual_seed(seed)
    batch.q.copy_(torch.randn(batch.q.shape, device=batch.q.device, generator=generator).half())
    for cache in (batch.k_cache, batch.v_cache):
        # One copy of each page's neighbour: other bytes, still NaN only past the ends' pages.
        if case.kv_dtype == "fp16":
            cache.neg_()
        else:
            cache.bitwise_xor_(0x80)
    shift = 1 % len(case.seq_lens)
    queries = case.query_lens[shift:] + case.query_lens[:shift]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch.query_start_loc.copy_(starts)
    batch.seq_lens.copy_(batch.seq_lens.roll(-shift))
    batch.block_table.copy_(batch.block_table.roll(-shift, 0))
    eager = _run(op, batch)
    workspace.fill_(0xFF)
    batch.out.fill_(SENTINEL)
    graph.replay()
    if not _same(eager, batch.out):
        result.failures.append("graph replay after changed inputs differs from eager")
    if torch.isnan(eager).any():
        result.failures.append("NaN after changed inputs")


def check_case(op: Op, case, seed: int) -> CaseResult:
    """All comparisons of one case."""
    result = CaseResult(case.name)
    batch = make_batch(case, seed)
    out = _run(op, batch)
    _accuracy(op, batch, out, result)
    owned = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    for request, length in enumerate(case.seq_lens):
        if length:
            owned[batch.rows_of(request)] = True
    if not bool((out[~owned] == SENTINEL).all()):
        result.failures.append("rows that no request owns were written")
    for _ in range(2):
        if not _same(out, _run(op, batch)):
            result.failures.append("a second run gave other bits")
    if op.batch_invariant:
        for request, queries in enumerate(case.query_lens):
            if queries and case.seq_lens[request]:
                alone = batch.alone(request)
                if not _same(_run(op, alone), out[batch.rows_of(request)]):
                    result.failures.append(f"request {request} alone has other bits than in batch")
    _graph(op, batch, seed + 1, result)
    return result
