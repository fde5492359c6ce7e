"""Micro-kernels on the cycle model against published V100 figures.

Rates and latencies are taken between two lengths of the same loop, so that the start of the
launch, the first fetches and the end do not count.  What is compared with a measurement is run
at the clock of that measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..device import Device
from ..module import Module
from . import measure
from .nvrtc import compile_cubin

GUIDE = "CUDA C++ Programming Guide, throughput table, 7.0"
TUNING = "NVIDIA Volta Tuning Guide"
WHITEPAPER = "NVIDIA V100 whitepaper"
JIA = "Jia et al. 2018, arXiv:1804.06826"
FIELD = "1Cat-vLLM, sm70_hmma_pipeline_search.md, V100-SXM2 at 1530 MHz"
SKINNY = "v100-skinny, V100-SXM2-16GB (field notes)"
LATENCY = "te42kyfo/gpu-benches cuda-latency/v100.txt, 1380 MHz"
CACHE = "te42kyfo/gpu-benches gpu-cache/v100.txt, 1380 MHz"
STREAM = "te42kyfo/gpu-benches gpu-stream/v100.txt, 1380 MHz"
MEASURED_MHZ = 1380.0


@dataclass
class Check:
    """One micro-kernel: what it measures, the published figure, how the model gets its own.

    fitted: the figure set a parameter, so the agreement proves nothing.
    """

    name: str
    unit: str
    published: float
    source: str
    model: Callable[[], float]
    fitted: bool = False


@dataclass
class Outcome:
    """A modelled figure beside the published one."""

    check: Check
    modelled: float

    @property
    def deviation(self) -> float:
        """Relative."""
        return self.modelled / self.check.published - 1


def _module(megabytes: int) -> Module:
    source = Path(__file__).with_name("micro.cu").read_text()
    return Module(compile_cubin(source), Device(megabytes << 20))


def _loop(name: str, sms: int, threads: int, args, counts=(10, 30), **over) -> float:
    """Cycles of one iteration of the kernel's outer loop; args(module, n): its arguments."""
    cycles = []
    for n in counts:
        mod = _module(4)
        cycles.append(measure(mod, name, sms, threads, args(mod, n), **over).cycles)
    return (cycles[1] - cycles[0]) / (counts[1] - counts[0])


def _out(mod: Module, n: int) -> list:
    return [mod.dev.zeros(1 << 16, np.uint32), np.int32(n)]


def _in_out(mod: Module, n: int) -> list:
    return [mod.dev.zeros(4096, np.uint32), *_out(mod, n)]


def _scalar(dtype, value=1):
    return lambda mod, n: [*_out(mod, n), dtype(value)]


def hmma_rate(warps: int) -> float:
    """FMA per cycle and SM."""
    return warps * 16 * 1024 / _loop("hmma", 4, warps * 32, _in_out)


def hmma_issue() -> float:
    """Cycles per m8n8k4 of one warp with four independent sums."""
    return _loop("hmma", 1, 32, _in_out) / 16


def hmma_dependent() -> float:
    """Cycles per m8n8k4 that adds to the result of the one before."""
    return _loop("hmma_dependent", 1, 32, _in_out) / 16


def lds_bytes(name: str, nbytes: int, distinct: int = 32) -> float:
    """Bytes per cycle and SM of shared loads of nbytes a lane; distinct lanes count."""
    return 16 * 16 * distinct * nbytes / _loop(name, 2, 512, _out)


def lds_ways(name: str) -> float:
    """Cycles of the shared memory pipe per conflicting 32-bit load."""
    return _loop(name, 2, 512, _out) / (16 * 16)


def lds_latency(name: str = "lds_chase") -> float:
    """Cycles of a dependent 32-bit shared load."""
    return _loop(name, 1, 32, _out) / 32


def rate(name: str, dtype, per: int = 64) -> float:
    """Lane results per cycle and SM with 16 warps."""
    return 16 * per * 32 / _loop(f"{name}_rate", 2, 512, _scalar(dtype), (5, 15))


def latency(name: str, dtype, per: int = 64) -> float:
    """Cycles of a dependent instruction."""
    return _loop(f"{name}_latency", 1, 32, _scalar(dtype), (5, 15)) / per


def chase(kib: int, core: float = MEASURED_MHZ) -> float:
    """Cycles of a dependent load in a random ring of this size, after the first round."""
    lines = (kib << 10) // 128
    cycles = []
    for rounds in (1, 2):
        mod = _module(2 * (kib >> 10) + 4)
        ring = mod.dev.zeros((kib << 10) // 8, np.uint64)
        order = np.random.default_rng(0).permutation(lines)
        ring.np[order * 16] = ring.addr + np.roll(order, -1).astype(np.uint64) * 128
        args = [ring, mod.dev.zeros(8, np.uint64), np.int32(rounds * lines)]
        cycles.append(measure(mod, "chase", 1, 1, args, core=core).cycles)
    return (cycles[1] - cycles[0]) / lines


def block_reads(kib: int) -> float:
    """GB/s of 80 blocks of 256 threads that all read the same buffer again and again."""
    n = kib * 128
    iterations = max(1, (1 << 16) // n)
    us = []
    for rounds in (1, 2):
        mod = _module(16)
        b, a = mod.dev.zeros(n, np.float64), mod.dev.zeros(256, np.float64)
        args = [a, b, np.int32(n), np.int32(rounds * iterations), np.int32(0)]
        us.append(measure(mod, "block_sum", 80, 256, args, warm=[b], core=MEASURED_MHZ).us)
    return 80 * n * 8 * iterations / (us[1] - us[0]) / 1e3


def stream(name: str, core: float) -> float:
    """GB/s of a whole launch of `copy` or `read_only`, 8 blocks of 256 threads per SM."""
    nbytes = 40 << 20
    mod = _module(100)
    a = mod.dev.zeros(nbytes + (1 << 20), np.uint8)
    b = mod.dev.zeros(nbytes if name == "copy" else 4096, np.uint8)
    n = nbytes // 16 // (640 * 1024) * (640 * 1024)
    t = measure(mod, name, 640, 256, [a, b, np.int32(n)], core=core)
    if name == "read_only":
        return n * 16 / t.us / 1e3
    # What the launch leaves dirty in L2 is written later: count the DRAM's own time for it.
    dirty = n * 16 - t.dram_write
    return 2 * n * 16 / (t.us + dirty / (0.9 * t.peak_gbs) / 1e3) / 1e3


def _pair(name: str, title: str, per_cycle: float, cycles: float, dtype, sources, per: int = 64):
    return [
        Check(
            f"{title}, rate", "lanes/clk/SM", per_cycle, sources[0], lambda: rate(name, dtype, per)
        ),
        Check(f"{title}, latency", "cycles", cycles, sources[1], lambda: latency(name, dtype, per)),
    ]


CHECKS: list[Check] = [
    Check("HMMA, 8 warps per SM", "FMA/clk/SM", 512, WHITEPAPER, lambda: hmma_rate(8)),
    Check("HMMA, 1 warp, 4 chains", "cycles per m8n8k4", 8.38, FIELD, hmma_issue),
    Check("HMMA, dependent", "cycles per m8n8k4", 8.66, FIELD, hmma_dependent, fitted=True),
    Check("LDS.128, no conflict", "B/clk/SM", 128, WHITEPAPER, lambda: lds_bytes("lds128", 16)),
    Check("LDS.32, no conflict", "B/clk/SM", 128, WHITEPAPER, lambda: lds_bytes("lds32", 4)),
    Check("LDS.32, 2 ways", "cycles each", 2, JIA, lambda: lds_ways("lds32_conflict2")),
    Check("LDS.32, 4 ways", "cycles each", 4, JIA, lambda: lds_ways("lds32_conflict4")),
    Check("LDS.32, 32 ways", "cycles each", 32, JIA, lambda: lds_ways("lds32_conflict32")),
    Check("LDS, dependent", "cycles", 19, JIA, lds_latency, fitted=True),
    Check("LDS by index", "cycles", 26.4, FIELD, lambda: lds_latency("lds_index")),
    *_pair("ffma", "FFMA", 64, 4, np.float32, (GUIDE, TUNING)),
    *_pair("lop3", "LOP3", 64, 4, np.uint32, (GUIDE, TUNING)),
    *_pair("iadd_xor", "IADD3, LOP3", 64, 4, np.uint32, (GUIDE, TUNING), per=128),
    Check("IMAD, rate", "lanes/clk/SM", 64, GUIDE, lambda: rate("imad", np.uint32)),
    *_pair("hfma2", "HFMA2", 64, 6, np.uint32, (GUIDE, JIA)),
    *_pair("dfma", "DFMA", 32, 8, np.float64, (GUIDE, JIA)),
    Check("MUFU.EX2, rate", "lanes/clk/SM", 16, GUIDE, lambda: rate("ex2", np.float32)),
    Check("SHFL, rate", "lanes/clk/SM", 32, GUIDE, lambda: rate("shfl", np.uint32)),
    Check("L1 hit, dependent", "cycles", 29.9, LATENCY, lambda: chase(8), fitted=True),
    Check("L2 hit, dependent", "cycles", 215.0, LATENCY, lambda: chase(512), fitted=True),
    Check("L2 hit, dependent, 1530 MHz", "cycles", 210.7, FIELD, lambda: chase(512, 1530.0)),
    Check("DRAM, dependent", "cycles", 428.3, LATENCY, lambda: chase(32768), fitted=True),
    Check("L1 reads, 64 KiB", "GB/s", 13873, CACHE, lambda: block_reads(64), fitted=True),
    Check("L2 reads, 512 KiB", "GB/s", 2410, CACHE, lambda: block_reads(512), fitted=True),
    Check("L2 reads, 2 MiB", "GB/s", 2440, CACHE, lambda: block_reads(2048)),
    Check("read, 1530 MHz", "GB/s", 879, SKINNY, lambda: stream("read_only", 1530.0)),
    Check("copy, 1530 MHz", "GB/s", 822, SKINNY, lambda: stream("copy", 1530.0)),
]


def validate(checks: list[Check] | None = None) -> list[Outcome]:
    """Run the checks (all by default)."""
    return [Outcome(c, c.model()) for c in (CHECKS if checks is None else checks)]


def markdown(outcomes: list[Outcome]) -> str:
    """The table of docs/v100-model.md."""
    rows = ["| micro-kernel | unit | modelled | published | deviation | source |", "|---" * 6 + "|"]
    for o in outcomes:
        c = o.check
        note = " (fitted)" if c.fitted else ""
        rows.append(
            f"| {c.name} | {c.unit} | {o.modelled:.4g} | {c.published:.4g} | {o.deviation:+.1%} | "
            f"{c.source}{note} |"
        )
    return "\n".join(rows)
