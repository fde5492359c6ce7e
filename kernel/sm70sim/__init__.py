"""Runs and times sm_70 machine code with no V100.

    dev = sm70sim.Device(1 << 30)                     # simulated global memory
    mod = sm70sim.Module("kernel.cubin", dev)         # or the bytes of a cubin
    x, y = dev.put(array), dev.zeros(shape, np.float16)
    r = mod.launch("kernel", (gx, gy), (bx,), [x, y, np.int32(n)], smem=65536)
    y.np                                              # the result; r.by_op(), r.hot()
    t = sm70sim.measure(mod, "kernel", grid, block, args, smem, range=True)
    print(sm70sim.report(t, 25)); t.us, t.cycles, t.low, t.high

See docs/sm70sim.md and docs/v100-model.md.
"""

from .cubin import Cubin
from .device import DevArray, Device
from .errors import SimError, UnknownInstruction
from .model import L2State, Timing, measure, report
from .module import LaunchResult, Module

__all__ = [
    "Cubin",
    "DevArray",
    "Device",
    "L2State",
    "LaunchResult",
    "Module",
    "SimError",
    "Timing",
    "UnknownInstruction",
    "measure",
    "report",
]
