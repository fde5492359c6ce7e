"""Cycle model of a V100, driven by the emulator's trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from . import timing
from .timing import report

__all__ = ["measure", "report"]


def measure(module, name: str, grid, block, args, smem: int = 0, *, range: bool = False, launch: dict | None = None, **over):
    """Emulate a launch and time it.

    range: time it with the low and the high parameter set too (``low``, ``high`` in us of the
    result).  launch: keywords for Module.launch.  over: core and mem (MHz), l2 ("cold" or
    "keep": what the launch before left), warm (buffers that are in L2 at the start), or any
    parameter of the model.
    """
    with tempfile.TemporaryDirectory(prefix="sm70sim-") as folder:
        trace = Path(folder) / "trace"
        emulated = module.launch(name, grid, block, args, smem, trace=trace, **(launch or {}))
        t = timing.run(module, name, np.atleast_1d(block), smem, trace, **over)
        t.emulated = emulated
        if range:
            t.low, t.high = (
                timing.run(module, name, np.atleast_1d(block), smem, trace, **{**x, **over}).us
                for x in (timing.LOW, timing.HIGH)
            )
        return t
