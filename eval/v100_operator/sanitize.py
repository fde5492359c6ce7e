"""Runs small cases under NVIDIA's compute-sanitizer: bad addresses and hazards on shared memory.

It sees the code of the GPU at hand. The sm_70 code that ships is held to the same in the emulator
(`launch(..., races=True)`, docs/sm70sim.md).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from .ops import Op

TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = {
    "paged": ("contract above all lengths", "all padded"),
    "long": ("shorter than a tile", "contract above all lengths", "all padded"),
    "prefill": ("contract above all lengths", "all padded"),
}
"""Names of small cases by op: a tool slows a kernel down some hundred times."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.+)")


def program() -> str:
    """The path of compute-sanitizer.

    Raises:
        SystemExit: it is not on PATH.
    """
    found = shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit(
            "error: compute-sanitizer is not on PATH: it comes with the CUDA toolkit "
            "(add its bin folder to PATH)"
        )
    return found


def run_case(op: Op, case: str, tool: str, library: Path, scratch: Path) -> dict[str, object]:
    """One case under one tool: exit status, the tool's summary, and its last lines if it failed."""
    command = [
        program(), "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "v100_operator",
        "check", "--op", op.name, "--library", str(library), "--only", case,
        "--out", str(scratch / "check.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    output = (done.stdout + done.stderr).replace(str(library), library.name)
    summary = _SUMMARY.search(output)
    row: dict[str, object] = {
        "tool": tool,
        "case": case,
        "exit": done.returncode,
        "summary": summary[1].strip() if summary else None,
    }
    # Without a summary the tool did not look, whatever the exit status says.
    row["clean"] = done.returncode == 0 and summary is not None
    if not row["clean"]:
        row["output"] = output[-4000:]
    return row
