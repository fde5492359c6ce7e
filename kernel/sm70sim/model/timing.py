"""Times a traced launch with the cycle model (machine/)."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import build
from ..cubin import Instr, Kernel
from ..errors import SimError
from ..translate import Info
from . import parameters
from .parameters import PIPES

# In the order of enum Why in machine/sm.h.
STALLS = (
    "fixed latency",
    "long scoreboard",
    "short scoreboard",
    "pipe busy",
    "memory queue",
    "barrier",
    "branch",
    "instruction cache",
    "fence",
)
_RECORDS = ("none", "shared", "global", "local", "bar")
_INSTR = np.dtype(
    [
        (name, "u1")
        for name in [
            "pipe",
            "stall",
            "wbar",
            "rbar",
            "wait",
            "nbytes",
            "record",
            "guarded",
            "latency",
            "interval",
            "bank_conflict",
            "arrives_only",
            "bypasses_l1",
        ]
    ]
)
_U64 = ctypes.c_uint64


class _Memory(ctypes.Structure):
    _fields_ = [(n, _U64) for n in ("l2_sectors", "l2_hits", "l2_written", "read", "written")]


class _Job(ctypes.Structure):
    """``struct Job`` of machine/machine.cpp."""

    _fields_ = [
        ("trace", ctypes.c_char_p),
        ("instrs", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("values", ctypes.POINTER(ctypes.c_double)),
        *((n, ctypes.c_uint32) for n in ("n_instrs", "n_values", "n_warm")),
        *((n, ctypes.c_uint32) for n in ("registers", "shared_bytes", "threads")),
        ("warm", ctypes.c_void_p),
        ("l2", ctypes.c_void_p),
        *((n, _U64) for n in ("cycles", "instrs_issued", "ctas_per_sm", "waves_shared")),
        *((n, _U64) for n in ("l1_sectors", "l1_hits", "subcore_cycles", "issue_cycles")),
        ("memory_pipe_busy", _U64),
        ("memory", _Memory),
        ("pipe_issued", _U64 * len(PIPES)),
        ("pipe_busy", _U64 * len(PIPES)),
        ("stalls", _U64 * len(STALLS)),
        ("waited", ctypes.c_void_p),
        ("executed", ctypes.c_void_p),
        ("err", ctypes.c_char * 256),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    lib = build.plain_library(Path(__file__).with_name("machine"))
    lib.sm70sim_l2_new.argtypes, lib.sm70sim_l2_new.restype = [ctypes.c_void_p], ctypes.c_void_p
    lib.sm70sim_l2_free.argtypes, lib.sm70sim_l2_free.restype = [ctypes.c_void_p], None
    return lib


class L2State:
    """What is in L2 from one launch to the next; empty at first."""

    def __init__(self, _from: L2State | None = None):
        self._handle = _library().sm70sim_l2_new(_from._handle if _from else None)

    def copy(self) -> L2State:
        """An independent copy."""
        return L2State(self)

    def __del__(self):
        if handle := getattr(self, "_handle", None):
            _library().sm70sim_l2_free(handle)


_kept: L2State | None = None


def l2_state(l2: str | L2State) -> L2State:
    """The state for l2="cold" (fresh), "keep" (of the last launch that kept it) or itself."""
    global _kept
    if isinstance(l2, L2State):
        return l2
    if l2 not in ("cold", "keep"):
        raise SimError(f'l2 is "cold", "keep" or an L2State, not {l2!r}')
    if l2 == "cold":
        return L2State()
    _kept = _kept or L2State()
    return _kept


def _bank_conflict(ins: Instr, before: Instr | None) -> bool:
    """Three source registers in one of the two banks, none held by .reuse."""

    def name(text: str) -> str:
        return text.strip("-|~!").split(".")[0]

    sources = set()
    for slot, text in enumerate(ins.args[1:], 1):
        register = name(text)
        if not (register.startswith("R") and register[1:].isdigit()):
            continue
        held = before and slot < len(before.args) and ".reuse" in before.args[slot]
        if not (held and name(before.args[slot]) == register):
            sources.add(int(register[1:]))
    return len(sources) >= 3 and len({s & 1 for s in sources}) == 1


def _instructions(kernel: Kernel, info: list[Info], numbers: dict[str, float]) -> np.ndarray:
    """The table of struct InstrT."""
    out = np.zeros(len(kernel.instrs), _INSTR)
    before = None
    for row, ins, facts in zip(out, kernel.instrs, info, strict=True):
        pipe = parameters.pipe_of().get(ins.op)
        if pipe is None:
            raise SimError(
                f"{kernel.name} at 0x{ins.pc:x}: the cycle model knows no pipe of {ins.opcode}; "
                f"add it to {parameters.PATH.name}"
            )
        if ins.pred == "!PT":
            pipe = "NONE"
        interval = numbers[f"pipes.{pipe}.interval"]
        if ins.op == "HMMA" and ins.mods.count("F16") == 2:
            interval = numbers["pipes.TENSOR.interval_f16"]
        row["pipe"], row["interval"] = PIPES.index(pipe), interval
        row["latency"] = numbers[f"pipes.{pipe}.latency"]
        row["stall"], row["wait"] = ins.stall, ins.wait
        row["wbar"], row["rbar"] = ins.wbar, ins.rbar
        row["guarded"], row["nbytes"] = facts.guarded, facts.nbytes
        row["record"] = _RECORDS.index(facts.record)
        row["arrives_only"] = ins.op == "BAR" and ins.mods[:1] == ["ARV"]
        row["bypasses_l1"] = ins.op == "LDG" and "STRONG" in ins.mods
        if pipe in ("ALU", "FMA", "FP16"):
            row["bank_conflict"] = _bank_conflict(ins, before)
        before = ins
    return out


@dataclass
class Timing:
    """Modelled time of one launch.

    Bytes are of the whole launch; utilisations are shares of all cycles of all SMs; stalls are
    idle sub-core cycles by what held the warp that could go on first; waited and executed are
    per instruction.  low, high: us with the low and high parameters (measure(range=True)).
    """

    kernel: Kernel
    cycles: int
    core: float
    insts: int
    ctas_per_sm: int
    dram_read: int
    dram_write: int
    l2_bytes: int
    l1_hit: float
    l2_hit: float
    issue_util: float
    memory_pipe_util: float
    smem_util: float
    pipe_util: dict[str, float]
    issued: dict[str, int]
    stall: dict[str, int]
    peak_gbs: float
    waited: np.ndarray
    executed: np.ndarray
    seconds: float
    low: float | None = None
    high: float | None = None
    emulated: object = field(default=None, repr=False)

    @property
    def us(self) -> float:
        """Microseconds."""
        return self.cycles / self.core

    @property
    def dram_gbs(self) -> float:
        """DRAM bytes read and written per second, in GB/s."""
        return (self.dram_read + self.dram_write) / self.us / 1e3 if self.cycles else 0.0

    @property
    def l2_gbs(self) -> float:
        """L2 bytes per second, in GB/s."""
        return self.l2_bytes / self.us / 1e3 if self.cycles else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of its peak at which each resource works, most first."""
        out = {"DRAM": self.dram_gbs / self.peak_gbs, "issue": self.issue_util}
        out["memory pipe"] = self.memory_pipe_util
        out.update({k: v for k, v in self.pipe_util.items() if k in PIPES[:6]})
        return dict(sorted(out.items(), key=lambda kv: -kv[1]))

    @property
    def bound(self) -> str:
        """The resource nearest to its peak, or "latency" if none is above 60 %."""
        name, share = next(iter(self.utilisation.items()))
        return name if share >= 0.6 else "latency"


def run(
    mod,
    name: str,
    block,
    smem: int,
    trace: str | os.PathLike,
    *,
    which: str = "value",
    l2: str | L2State = "cold",
    warm=(),
    **changes: float,
) -> Timing:
    """Time a trace that Module.launch(trace=...) wrote.

    which: parameter set (value, low, high).  l2: see l2_state.  warm: DevArrays whose lines are
    in L2 at the start.  changes: parameters by name, see parameters.values.
    """
    kernel = mod.kernel(name)
    _, translation = mod.translation(kernel)
    numbers = parameters.values(which, **changes)
    table = _instructions(kernel, translation.info, numbers)
    starts = np.array([*translation.starts, len(table) * 16], np.uint32) // 16
    blocks = np.stack([starts[:-1], np.diff(starts)], 1).astype(np.uint32)
    passed = {
        k.replace(".", "_"): v
        for k, v in numbers.items()
        if not k.startswith("pipes.") or k == "pipes.TENSOR.forward"
    }
    job = _Job()
    job.trace = os.fsencode(trace)
    job.instrs, job.blocks, job.n_instrs = table.ctypes.data, blocks.ctypes.data, len(table)
    job.names = (ctypes.c_char_p * len(passed))(*(k.encode() for k in passed))
    job.values = (ctypes.c_double * len(passed))(*passed.values())
    job.n_values = len(passed)
    job.registers, job.shared_bytes = kernel.regs, kernel.static_smem + smem
    job.threads = int(np.prod(block))
    regions = np.array([[w.addr, w.nbytes] for w in warm], np.uint64).reshape(-1)
    job.warm, job.n_warm = regions.ctypes.data, len(warm)
    state = l2_state(l2)
    job.l2 = state._handle
    waited, executed = (np.zeros(len(table), np.uint64) for _ in range(2))
    job.waited, job.executed = waited.ctypes.data, executed.ctypes.data
    start = time.perf_counter()
    if _library().sm70sim_time(ctypes.byref(job)):
        raise SimError(f"{kernel.name}: timing: {job.err.decode(errors='replace')}")
    seconds = time.perf_counter() - start
    sub, sm_cycles = job.subcore_cycles or 1, (job.subcore_cycles or 4) / 4
    memory = job.memory
    channels, mhz = numbers["machine.channels"], numbers["machine.memory_mhz"]
    return Timing(
        kernel=kernel,
        cycles=int(job.cycles),
        core=numbers["machine.core_mhz"],
        insts=int(job.instrs_issued),
        ctas_per_sm=int(job.ctas_per_sm),
        dram_read=memory.read * 32,
        dram_write=memory.written * 32,
        l2_bytes=memory.l2_sectors * 32,
        l1_hit=job.l1_hits / job.l1_sectors if job.l1_sectors else 0.0,
        l2_hit=memory.l2_hits / memory.l2_sectors if memory.l2_sectors else 0.0,
        issue_util=job.issue_cycles / sub,
        memory_pipe_util=job.memory_pipe_busy / sm_cycles,
        smem_util=job.waves_shared / sm_cycles,
        pipe_util={p: n / sub for p, n in zip(PIPES, job.pipe_busy, strict=True) if n},
        issued={p: int(n) for p, n in zip(PIPES, job.pipe_issued, strict=True) if n},
        stall={s: int(n) for s, n in zip(STALLS, job.stalls, strict=True) if n},
        peak_gbs=channels * 32 * mhz * 1e-3,
        waited=waited,
        executed=executed,
        seconds=seconds,
    )


def report(t: Timing, top: int = 0) -> str:
    """The timing as text; top: so many instructions that wait most."""
    lines = [
        f"{t.kernel.name}: {t.cycles} cycles = {t.us:.2f} us at {t.core:.0f} MHz, "
        f"{t.insts} warp instructions; bound: {t.bound}",
        f"  DRAM {t.dram_gbs:.0f} GB/s (read {t.dram_read / 1e6:.2f} MB, written "
        f"{t.dram_write / 1e6:.2f} MB), L2 {t.l2_gbs:.0f} GB/s, hits {t.l2_hit:.1%}, L1 hits "
        f"{t.l1_hit:.1%}, {t.ctas_per_sm} blocks per SM",
        "  busy: " + ", ".join(f"{k} {v:.1%}" for k, v in t.utilisation.items() if v > 0.0005),
    ]
    total = sum(t.stall.values()) or 1
    stalls = sorted(t.stall.items(), key=lambda kv: -kv[1])
    lines.append("  idle sub-core cycles: " + ", ".join(f"{k} {v / total:.1%}" for k, v in stalls))
    if t.low is not None:
        lines.append(f"  range over uncertain parameters: {t.low:.2f} .. {t.high:.2f} us")
    if top:
        lines.append("  most waiting (share of warp time, executions):")
        all_waits = int(t.waited.sum()) or 1
        for i in np.argsort(-t.waited.astype(np.int64))[:top]:
            ins = t.kernel.instrs[i]
            share, n = int(t.waited[i]) / all_waits, int(t.executed[i])
            if share:
                lines.append(f"    {share:6.1%} {n:9d}  {ins.pc:05x} {ins.text}")
    return "\n".join(lines)
