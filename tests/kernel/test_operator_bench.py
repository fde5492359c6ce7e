"""The operator benchmark's comparison of two outputs, in the Python that has PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

EVAL = Path(__file__).resolve().parents[2] / "eval"
PROBE = r"""
import json, torch
from v100_operator.bench import largest_difference
from v100_operator.case import SENTINEL

def halves(*values):
    return torch.tensor(values, dtype=torch.float16)

print(json.dumps([
    largest_difference(halves(0.5, -0.25, SENTINEL), halves(0.5, -0.5, SENTINEL)),
    largest_difference(halves(0.5, SENTINEL), halves(0.5, 0.0)),
    largest_difference(halves(0.5, float("nan")), halves(0.5, 0.25)) <= 1e9,
]))
"""


def test_only_what_was_written_is_compared(requirements_python: Callable[[], Path]) -> None:
    run = subprocess.run(
        [str(requirements_python()), "-c", PROBE],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(EVAL)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    relative, spare_row, nan_passes = json.loads(run.stdout)
    assert relative == 0.5, "the sentinel of a spare row is the largest value"
    assert spare_row > 1000, "a row that one of the two wrote, and nobody owns, is a difference"
    assert not nan_passes
