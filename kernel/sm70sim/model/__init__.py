"""Cycle model of a V100, driven by the emulator's trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from . import timing
from .timing import L2State, Timing, report

__all__ = ["L2State", "Timing", "measure", "report"]


def measure(
    module,
    name: str,
    grid,
    block,
    args,
    smem: int = 0,
    *,
    range: bool = False,
    launch: dict | None = None,
    l2: str | L2State = "cold",
    **changes,
) -> Timing:
    """Emulate a launch and time it.

    range: time it with the low and the high parameters too (low and high of the result, in us).
    launch: keywords for Module.launch.  l2: "cold", "keep" (what the last launch that kept it
    left), or an L2State that this launch starts from and changes.  changes: warm (buffers that
    are in L2 at the start), core and mem (MHz), or any parameter of v100.toml by name.
    """
    state = timing.l2_state(l2)
    before = state.copy() if range else None
    with tempfile.TemporaryDirectory(prefix="sm70sim-") as folder:
        trace = Path(folder) / "trace"
        emulated = module.launch(name, grid, block, args, smem, trace=trace, **(launch or {}))

        def run(which: str, l2: L2State) -> Timing:
            shape = np.atleast_1d(block)
            return timing.run(module, name, shape, smem, trace, which=which, l2=l2, **changes)

        result = run("value", state)
        result.emulated = emulated
        if range:
            result.low, result.high = (run(w, before.copy()).us for w in ("low", "high"))
        return result
