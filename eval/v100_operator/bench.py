"""Times an op by graph replay over independent KV working sets, as the layers of a model have.

A sample is eight replays of a graph with one call for each of 16 working sets; samples of the op
and of its control alternate. What is reported is the median; all samples are kept. The outputs are
compared too: of the working sets, which hold the same values, to the bit; of the op and its control
within the op's limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .case import SENTINEL, Batch, make_batch
from .ops import BenchShape, Op

WORKING_SETS = 16
PAIRS = 5
REPLAYS = 8


@dataclass
class Timing:
    """Milliseconds for all working sets (one model step of 16 layers): raw samples."""

    name: str
    kv_bytes: int
    op_ms: list[float]
    control: str | None
    control_ms: list[float]
    output_difference: float | None
    failures: list[str]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.op_ms)

    @property
    def control_median_ms(self) -> float | None:
        return statistics.median(self.control_ms) if self.control_ms else None

    @property
    def gigabytes_per_second(self) -> float:
        """Cache bytes over the median time."""
        return self.kv_bytes * WORKING_SETS / self.median_ms / 1e6


def _capture(call: Callable[[Batch, torch.Tensor], object], sets: list[Batch], workspace):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(sets[0], workspace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in sets:
            call(batch, workspace)
    return graph


def _sample(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def _working_sets(shape: BenchShape) -> list[Batch]:
    """One random batch and copies of it in memory of their own: content does not change time."""
    first = make_batch(shape.case, 1)
    sets = [first]
    for _ in range(WORKING_SETS - 1):
        k, v = first.k_cache.clone(), first.v_cache.clone()
        sets.append(
            Batch(
                first.case,
                first.q.clone(),
                k,
                v,
                first.block_table.clone(),
                first.seq_lens,
                first.query_start_loc,
                first.out.clone(),
            )
        )
    return sets


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| over the largest |b| of what either wrote, in FP64; NaN where one holds it.

    What both left at SENTINEL is no output, and would be the largest |b|.
    """
    written = (a != SENTINEL) | (b != SENTINEL)
    a, b = a[written].double(), b[written].double()
    return ((a - b).abs().max() / b.abs().max()).item()


def _outputs(graph: torch.cuda.CUDAGraph, sets: list[Batch], failures: list[str]) -> torch.Tensor:
    """Output of one replay; every working set holds the same values and must give the same."""
    for batch in sets:
        batch.out.fill_(SENTINEL)
    graph.replay()
    first = sets[0].out.clone()
    if any(not torch.equal(batch.out.view(torch.int16), first.view(torch.int16)) for batch in sets):
        failures.append("equal working sets gave other bits")
    return first


def time_shape(op: Op, shape: BenchShape) -> Timing:
    """Alternating samples of the op and its control."""
    sets = _working_sets(shape)
    size = max(op.workspace_bytes(shape.case), 16)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    graphs = [_capture(op.call, sets, workspace)]
    if op.control:
        graphs.append(_capture(op.control[1], sets, workspace))
    failures: list[str] = []
    outputs = [_outputs(graph, sets, failures) for graph in graphs]
    difference = None
    if op.control_error is not None:
        difference = largest_difference(outputs[0], outputs[1])
        if not difference <= op.control_error:  # written so that a NaN fails
            failures.append(f"output differs from the control's by {difference:.2e}")
    torch.cuda.synchronize()
    samples: list[list[float]] = [[], []]
    for _ in range(PAIRS):
        for at, graph in enumerate(graphs):
            samples[at].append(_sample(graph))
    return Timing(
        shape.name,
        shape.case.kv_bytes,
        samples[0],
        op.control[0] if op.control else None,
        samples[1],
        difference,
        failures,
    )
