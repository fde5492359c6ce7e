"""The model's figures for the benchmark shapes: table, JSON and plot."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..cases import BENCHMARK_SHAPES, Launch, Shape, Work
from . import parameters, timing
from .timing import L2State, Timing

HBM_GBS = 879.0  # best read rate measured on a V100-SXM2 (field notes)
TENSOR_FMA = 512  # per cycle and SM
SETS = ("value", "low", "high")


@dataclass
class Row:
    """One shape of one operation.  Times in us of one layer; layers: of a whole step in ms."""

    op: str
    shape: Shape
    layers: int
    launches: list[tuple[Launch, Timing]]
    low: float | None
    high: float | None
    error: float | None
    seconds: float

    @property
    def us(self) -> float:
        """One layer, launch gaps not included."""
        return sum(t.us for launch, t in self.launches if not launch.once_per_step)

    @property
    def once_us(self) -> float:
        """Launches that run once per step."""
        return sum(t.us for launch, t in self.launches if launch.once_per_step)

    @property
    def hbm_floor(self) -> float:
        """us to read K and V once at 879 GB/s."""
        return self.shape.cache_bytes / HBM_GBS / 1e3

    @property
    def tensor_floor(self) -> float:
        """us of the tensor cores of 80 SMs at 1530 MHz."""
        machine = parameters.values()
        rate = TENSOR_FMA * machine["machine.sms"] * machine["machine.core_mhz"]
        return self.shape.fma / rate

    def json(self) -> dict:
        """Everything, for the JSON file."""
        return {
            "op": self.op,
            "shape": {"name": str(self.shape), **vars(self.shape)},
            "us": self.us,
            "us_low": self.low,
            "us_high": self.high,
            "us_once_per_step": self.once_us,
            "ms_all_layers": (self.us * self.layers + self.once_us) / 1e3,
            "layers": self.layers,
            "hbm_floor_us": self.hbm_floor,
            "tensor_floor_us": self.tensor_floor,
            "ratio_hbm": self.us / self.hbm_floor,
            "ratio_tensor": self.us / self.tensor_floor,
            "error": self.error,
            "host_seconds": self.seconds,
            "launches": [
                {
                    "kernel": launch.kernel,
                    "once_per_step": launch.once_per_step,
                    "cycles": t.cycles,
                    "us": t.us,
                    "warp_instructions": t.insts,
                    "bound": t.bound,
                    "utilisation": t.utilisation,
                    "dram_read_bytes": t.dram_read,
                    "dram_written_bytes": t.dram_write,
                    "dram_gbs": t.dram_gbs,
                    "l2_bytes": t.l2_bytes,
                    "l1_hit": t.l1_hit,
                    "l2_hit": t.l2_hit,
                    "blocks_per_sm": t.ctas_per_sm,
                    "registers": t.kernel.regs,
                    "idle_subcore_cycles": t.stall,
                }
                for launch, t in self.launches
            ],
        }


def measure_shape(adapter: ModuleType, shape: Shape, folder: Path, sets=SETS) -> Row:
    """Emulate the launches of a shape once, check the result, time the traces.

    folder: for the traces.  sets: parameter sets; low and high are None if left out.
    """
    start = time.perf_counter()
    work: Work = adapter.prepare(shape)
    traces = []
    for n, launch in enumerate(work.launches):
        module = work.modules.get(launch.kernel, work.module)
        trace = folder / f"launch-{n}"
        args = (launch.kernel, launch.grid, launch.block, launch.args, launch.smem)
        module.launch(*args, trace=trace)
        traces.append((launch, module, trace))
    error = work.check() if work.check else None
    timings: dict[str, list[Timing]] = {}
    for which in sets:
        l2 = L2State()
        timings[which] = [
            timing.run(m, x.kernel, x.block, x.smem, trace, which=which, l2=l2)
            for x, m, trace in traces
        ]
    for _, _, trace in traces:
        trace.unlink()

    def layer(which: str) -> float | None:
        if which not in timings:
            return None
        pairs = zip(work.launches, timings[which], strict=True)
        return sum(t.us for launch, t in pairs if not launch.once_per_step)

    return Row(
        adapter.NAME,
        shape,
        getattr(adapter, "LAYERS", 16),
        list(zip(work.launches, timings["value"], strict=True)),
        layer("low"),
        layer("high"),
        error,
        time.perf_counter() - start,
    )


HEADER = (
    "| op | shape | layer, us (low .. high) | 16 layers, ms | HBM floor, us | ratio (low .. high) "
    "| tensor floor, us | DRAM GB/s | tensor busy | bound | error |"
)


def markdown_row(row: Row) -> str:
    """A line under HEADER; DRAM, tensor and bound are of the longest launch."""
    longest = max((t for _, t in row.launches), key=lambda t: t.cycles)
    error = "-" if row.error is None else f"{row.error:.1e}"
    floor, span, ratios = row.hbm_floor, "", ""
    if row.low is not None and row.high is not None:
        span = f" ({row.low:.1f} .. {row.high:.1f})"
        ratios = f" ({row.low / floor:.3f} .. {row.high / floor:.3f})"
    return (
        f"| {row.op} | {row.shape} | {row.us:.1f}{span} "
        f"| {(row.us * row.layers + row.once_us) / 1e3:.3f} | {floor:.1f} "
        f"| {row.us / floor:.3f}{ratios} "
        f"| {row.tensor_floor:.1f} | {longest.dram_gbs:.0f} "
        f"| {longest.pipe_util.get('TENSOR', 0):.0%} | {longest.bound} | {error} |"
    )


def write_json(rows: list[Row], path: Path) -> None:
    """All rows with the parameters that they were modelled with."""
    content = {
        "parameters": {k: vars(p) for k, p in parameters.table().items()},
        "hbm_floor_gbs": HBM_GBS,
        "not_included": "launch gaps, about 2 us between dependent launches",
        "rows": [r.json() for r in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(rows: list[Row], path: Path) -> None:
    """Achieved against floor: bars from low to high, marks for the two floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{r.op}\n{r.shape}".replace(", ", ",\n") for r in rows]
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.5 * len(rows), 4.8), layout="constrained")
    places = range(len(rows))
    ratios = [r.us / r.hbm_floor for r in rows]
    below = [max(0.0, (r.us - (r.low or r.us)) / r.hbm_floor) for r in rows]
    above = [max(0.0, ((r.high or r.us) - r.us) / r.hbm_floor) for r in rows]
    axes.bar(places, ratios, 0.6, color="#4c72b0", label="modelled (low .. high)")
    axes.errorbar(places, ratios, [below, above], fmt="none", ecolor="black", capsize=4)
    axes.axhline(1.0, color="#c44e52", label=f"HBM floor ({HBM_GBS:.0f} GB/s)")
    tensor = [r.tensor_floor / r.hbm_floor for r in rows]
    axes.scatter(places, tensor, marker="_", s=900, color="#55a868", label="tensor floor")
    for x, ratio in zip(places, ratios, strict=True):
        axes.text(x, ratio, f" {ratio:.2f}", ha="left", va="bottom")
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel("time of a layer / HBM floor")
    axes.set_title("Modelled V100 time against the floors")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def shapes_of(adapter: ModuleType) -> tuple[Shape, ...]:
    """The shapes of an adapter."""
    return getattr(adapter, "SHAPES", BENCHMARK_SHAPES)
