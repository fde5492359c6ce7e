"""The long kernel with the workspace bank: older graphs stay right while the bank grows.

Graphs of several batch sizes are captured with workspaces of one bank, smallest batch first (the
bank grows, and earlier graphs hold earlier panels) and largest first (all share one panel). Then
they are replayed, out of order, every panel full of NaN before each replay, and each request is
compared to the bit with the same request alone.
"""

from __future__ import annotations

import torch
from sm70_attention.bank import Contract, WorkspaceBank
from sm70_attention.long import long_attention, long_workspace_bytes

from ..case import SENTINEL, Batch, Case, make_batch

CONTEXT = 40_000
BATCHES = (1, 2, 4, 8, 16)


def _case(requests: int) -> Case:
    lens = tuple(CONTEXT - 1977 * i if i % 5 != 3 else 0 for i in range(requests))
    return Case(
        f"{requests} requests", 256, 6, 1, "fp8_e4m3", 1648, lens,
        tuple(8 if n else 0 for n in lens), max_seq_len=CONTEXT,
    )  # fmt: skip


def _capture(batch: Batch, workspace: torch.Tensor) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        long_attention(*batch.tensors, **batch.options, workspace=workspace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        long_attention(*batch.tensors, **batch.options, workspace=workspace)
    return graph


def _compare(batch: Batch, where: str) -> list[str]:
    failures = []
    need = long_workspace_bytes(1, 1, CONTEXT)
    for request, queries in enumerate(batch.case.query_lens):
        if not queries:
            continue
        alone = batch.alone(request)
        workspace = torch.full((need,), 0xFF, dtype=torch.uint8, device=batch.q.device)
        long_attention(*alone.tensors, **alone.options, workspace=workspace)
        got = batch.out[batch.rows_of(request)]
        if not torch.equal(got.view(torch.int16), alone.out.view(torch.int16)):
            failures.append(f"{where}: request {request} has other bits than alone")
    return failures


def replay_older_graphs() -> list[str]:
    """What went wrong, in words; empty when all is right."""
    failures = []
    for name, order in (("growing", BATCHES), ("descending", BATCHES[::-1])):
        bank, contract = WorkspaceBank(), Contract(1, CONTEXT)
        captured, panels = [], []
        for at, requests in enumerate(order):
            batch = make_batch(_case(requests), 700 + at)
            workspace = bank.get(batch.q.device, 0, contract, requests, capturing=True)
            if not any(workspace is panel for panel in panels):
                panels.append(workspace)
            captured.append((batch, _capture(batch, workspace)))
        if (len(panels) == 1) != (name == "descending"):
            failures.append(f"{name}: {len(panels)} panels")
        held = sum(panel.numel() for panel in panels)
        if bank.bytes_held() != held:
            failures.append(f"{name}: the bank holds {bank.bytes_held()} bytes, not {held}")
        for at in (*range(len(captured))[::-1], *range(len(captured))):
            batch, graph = captured[at]
            for panel in panels:
                panel.fill_(0xFF)
            batch.out.fill_(SENTINEL)
            graph.replay()
            failures += _compare(batch, f"{name}, {batch.case.name}")
    return failures
