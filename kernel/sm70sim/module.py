"""Loads a cubin and runs its kernels."""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np

from . import build
from .cubin import Cubin, Kernel
from .device import DevArray, Device
from .errors import SimError
from .translate import translate

CONST_BANKS = 18
MAX_THREADS = 1024
REGISTER_FILE = 65536
MAX_SHARED = 98304


class _Params(ctypes.Structure):
    """``struct Params`` of runtime/base.h."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *(
            (n, ctypes.c_uint32)
            for n in ("smem_bytes", "local_bytes", "nregs", "cta_begin", "cta_end", "max_live")
        ),
        ("gmem", ctypes.c_void_p),
        ("gbase", ctypes.c_uint64),
        ("gsize", ctypes.c_uint64),
        ("ginit", ctypes.c_void_p),
        ("cb", ctypes.c_void_p * CONST_BANKS),
        ("cbsize", ctypes.c_uint32 * CONST_BANKS),
        ("quantum", ctypes.c_uint64),
        *((n, ctypes.c_void_p) for n in ("count", "lanes", "sectors")),
        ("trace_path", ctypes.c_char_p),
        ("max_insts", ctypes.c_uint64),
        ("reverse", ctypes.c_uint32),
        ("trace", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("err", ctypes.c_char * 512),
    ]


class LaunchResult:
    """What a launch executed.

    count: executions per instruction (warp instructions).  lanes, sectors: per memory
    instruction of a traced run, lane executions and 32-byte sectors (global) or wavefronts
    (shared).  seconds: host time.
    """

    def __init__(self, kernel: Kernel, count, lanes, sectors, seconds: float):
        self.kernel, self.count, self.lanes, self.sectors = kernel, count, lanes, sectors
        self.seconds = seconds

    @property
    def warp_insts(self) -> int:
        """Executed warp instructions."""
        return int(self.count.sum())

    def by_op(self) -> dict[str, int]:
        """Executed warp instructions by opcode, most first."""
        out: dict[str, int] = {}
        for ins, n in zip(self.kernel.instrs, self.count, strict=True):
            if n:
                out[ins.op] = out.get(ins.op, 0) + int(n)
        return dict(sorted(out.items(), key=lambda kv: -kv[1]))

    def hot(self, n: int = 20) -> list[tuple[int, int, str]]:
        """(executions, address, text) of the most executed instructions."""
        order = np.argsort(-self.count.astype(np.int64))[:n]
        instrs = self.kernel.instrs
        return [(int(self.count[i]), instrs[i].pc, instrs[i].text) for i in order if self.count[i]]

    def mem_table(self) -> list[tuple[int, str, int, int, int]]:
        """(address, text, executions, lanes, sectors or wavefronts) per memory instruction."""
        rows = zip(self.kernel.instrs, self.count, self.lanes, self.sectors, strict=True)
        return [(i.pc, i.text, int(c), int(n), int(s)) for i, c, n, s in rows if c and s]


def _triple(x) -> tuple[int, int, int]:
    return tuple(int(v) for v in [*np.atleast_1d(x), 1, 1, 1][:3])


class Module:
    """A cubin loaded on a Device.

    cubin: path, bytes or Cubin.  hmma_exact: sum tensor products exactly instead of as the
    hardware does.
    """

    def __init__(self, cubin, dev: Device, hmma_exact: bool = False):
        self.cubin = cubin if isinstance(cubin, Cubin) else Cubin(cubin)
        self.dev = dev
        self.hmma_exact = hmma_exact
        self._translated: dict[str, tuple] = {}
        self._globals = 0
        if self.cubin.globals_size:
            self._globals = dev.alloc(self.cubin.globals_size)
            block = dev.view(self._globals, self.cubin.globals_size, np.uint8)
            block[:] = np.frombuffer(self.cubin.globals_init, np.uint8)
            dev._mark(self._globals, self.cubin.globals_size, True)

    def symbol(self, name: str, dtype, count: int) -> np.ndarray:
        """A module-scope variable as an array of ``count`` items."""
        return self.dev.view(self._globals + self.cubin.sym_global[name], count, dtype)

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name, or the only one whose (mangled) name contains it."""
        kernels = self.cubin.kernels
        if name in kernels:
            return kernels[name]
        found = [k for k in kernels if name in k]
        if len(found) != 1:
            raise SimError(f"no kernel {name}: the cubin has {list(kernels)}")
        return kernels[found[0]]

    def translation(self, kernel: Kernel) -> tuple:
        """(library, Translation) of a kernel, compiled on first use."""
        if kernel.name not in self._translated:
            sizes = {b: len(v) for b, v in kernel.const.items()}
            sizes[0] = max(sizes.get(0, 0), kernel.param_base + kernel.param_size)
            translation = translate(kernel, sizes)
            defines = ("-DHMMA_EXACT=1",) if self.hmma_exact else ()
            self._translated[kernel.name] = (
                build.kernel_library(translation.source, defines),
                translation,
            )
        return self._translated[kernel.name]

    def pack_args(self, kernel: Kernel, args) -> bytes:
        """Parameter block: ``args`` is raw bytes, or one item per parameter
        (DevArray, numpy scalar, int, float, bytes of a struct)."""
        if isinstance(args, (bytes, bytearray)):
            return bytes(args)
        if len(args) != len(kernel.params):
            raise SimError(f"{kernel.name} takes {len(kernel.params)} arguments, {len(args)} given")
        buf = bytearray(kernel.param_size)
        for n, ((offset, size), arg) in enumerate(zip(kernel.params, args, strict=True)):
            if isinstance(arg, DevArray):
                raw = int(arg.addr).to_bytes(8, "little")
            elif isinstance(arg, (bytes, bytearray)):
                raw = bytes(arg)
            elif isinstance(arg, float):
                raw = np.float32(arg).tobytes() if size == 4 else np.float64(arg).tobytes()
            elif isinstance(arg, (int, bool)):
                raw = (int(arg) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
            else:
                raw = np.asarray(arg).tobytes()
            if len(raw) != size:
                raise SimError(f"{kernel.name}: argument {n} has {len(raw)} bytes, {size} expected")
            buf[offset : offset + size] = raw
        return bytes(buf)

    def _constants(self, kernel: Kernel, params: _Params, args) -> list[np.ndarray]:
        """Fills the constant banks; the arrays must live as long as the launch."""
        keep = []
        for bank in set(kernel.const) | {0}:
            data = bytearray(self.cubin.const_bank(kernel, bank, self._globals))
            if bank == 0:
                data += b"\0" * max(0, kernel.param_base + kernel.param_size - len(data))
                np.frombuffer(data, np.uint32, count=6)[:] = list(params.block) + list(params.grid)
                data[0x28:0x2C] = int(params.local_bytes).to_bytes(4, "little")  # stack pointer
                packed = self.pack_args(kernel, args)
                data[kernel.param_base : kernel.param_base + len(packed)] = packed
            keep.append(np.frombuffer(bytes(data) + b"\0" * 16, np.uint8).copy())
            params.cb[bank], params.cbsize[bank] = keep[-1].ctypes.data, len(data)
        return keep

    def launch(
        self,
        name: str,
        grid,
        block,
        args,
        smem: int = 0,
        *,
        trace: str | os.PathLike | None = None,
        count_mem: bool = False,
        reverse: bool = False,
        races: bool = False,
        ctas: tuple[int, int] | None = None,
        max_insts: int = 0,
        quantum: int = 20_000,
        max_live: int = 4096,
        stack: int = 1024,
    ) -> LaunchResult:
        """Run a kernel to its end.

        grid, block: numbers or tuples of up to three.  args: see pack_args.  smem: dynamic
        shared memory in bytes.  trace: file for the cycle model.  count_mem: fill lanes and
        sectors of the result.  reverse: run the warps of a block last to first; a kernel whose
        result changes has a race.  races: an access to shared memory that no barrier orders after
        another warp's access to the same byte, one of the two a write, is an error (slow: for
        small shapes).  ctas: only these block numbers [first, end).  max_insts:
        warp instructions after which the launch fails (0: none).  quantum: instructions a warp
        runs before others of its block get their turn.  stack: bytes a thread for calls.
        Raises SimError (out of bounds, misaligned or, if the device tracks it, uninitialised
        access; race; deadlock; trap) naming the instruction.
        """
        kernel = self.kernel(name)
        p = _Params()
        p.grid[:], p.block[:] = _triple(grid), _triple(block)
        threads = int(np.prod(p.block))
        warps = (threads + 31) // 32
        if not 0 < threads <= MAX_THREADS:
            raise SimError(
                f"{kernel.name}: {threads} threads in a block; 1 to {MAX_THREADS} can run"
            )
        if kernel.regs * warps * 32 > REGISTER_FILE:
            raise SimError(
                f"{kernel.name}: {kernel.regs} registers x {threads} threads exceed the "
                "register file"
            )
        p.smem_bytes = kernel.static_smem + smem
        if p.smem_bytes > MAX_SHARED:
            raise SimError(
                f"{kernel.name}: {p.smem_bytes} bytes of shared memory exceed {MAX_SHARED}"
            )
        lib, translation = self.translation(kernel)
        ops = {i.op for i in kernel.instrs}
        deep = "CALL" in ops and ops & {"STL", "LDL"}
        p.local_bytes = (kernel.frame + (stack if deep else 0) + 15) // 16 * 16
        p.nregs = max(kernel.regs, translation.maxreg + 1)
        p.cta_begin, p.cta_end = ctas if ctas else (0, int(np.prod(p.grid)))
        p.max_live, p.quantum, p.max_insts, p.reverse = max_live, quantum, max_insts, int(reverse)
        p.races = int(races)
        p.gmem, p.gbase, p.gsize = self.dev.mem.ctypes.data, self.dev.base, self.dev.size
        p.ginit = self.dev.init.ctypes.data if self.dev.init is not None else None
        keep = self._constants(kernel, p, args)
        count, lanes, sectors = (np.zeros(len(kernel.instrs), np.uint64) for _ in range(3))
        p.count, p.lanes, p.sectors = count.ctypes.data, lanes.ctypes.data, sectors.ctypes.data
        p.trace = int(bool(trace) or count_mem)
        p.trace_path = os.fsencode(trace) if trace else None
        start = time.perf_counter()
        failed = lib.sm70sim_run(ctypes.byref(p))
        seconds = time.perf_counter() - start
        del keep
        if failed:
            raise SimError(f"{kernel.name}: {p.err.decode(errors='replace')}")
        return LaunchResult(kernel, count, lanes, sectors, seconds)
