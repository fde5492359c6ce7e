"""Runs small cases under NVIDIA's compute-sanitizer: bad addresses and hazards on shared memory.

It sees the code of the GPU at hand. The sm_70 code that ships is held to the same in the emulator
(`launch(..., races=True)`, docs/sm70sim.md).

The warps of some kernels hand shared memory to each other with bar.arrive and bar.sync. Whether
racecheck understands that is tried on two controls (sanitizer_control.cu): if it names hazards
where there are none, or misses those there are, what it says of such kernels is kept, and counts
neither for nor against them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
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
HANDS_OVER = ("long", "prefill")
"""Ops whose warps hand shared memory over with bar.arrive."""
CONTROLS = {"handed": True, "raced": False}
"""Control -> whether a tool that understands it finds it clean."""
LIMIT_S = 300.0
"""For one case: a kernel whose barriers do not add up waits for ever."""
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


def _run(tool: str, line: list[str], named: Path) -> dict[str, object]:
    """What a tool says of a program; `named`, a path in its output, is cut to its last part."""
    command = [program(), "--tool", tool, "--error-exitcode", "9", *line]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the program under the tool too
        output = process.communicate()[0] + f"\nended after {LIMIT_S:g} s"
    output = output.replace(str(named), named.name)
    summary = _SUMMARY.search(output)
    row: dict[str, object] = {
        "tool": tool,
        "exit": process.returncode,
        "summary": summary[1].strip() if summary else None,
    }
    # Without a summary the tool did not look, whatever the exit status says.
    row["clean"] = process.returncode == 0 and summary is not None
    if not row["clean"]:
        row["output"] = output[-4000:]
    return row


def run_case(op: Op, case: str, tool: str, library: Path, scratch: Path) -> dict[str, object]:
    """One case under one tool: exit status, the tool's summary, and its last lines if it failed."""
    line = [
        sys.executable, "-m", "v100_operator", "check", "--op", op.name, "--library", str(library),
        "--only", case, "--out", str(scratch / "check.json"),
    ]  # fmt: skip
    return {"case": case} | _run(tool, line, library)


def run_controls(tool: str, scratch: Path) -> list[dict[str, object]]:
    """The controls under one tool; `as_expected` says whether the tool saw what there is.

    Raises:
        SystemExit: nvcc is missing, or does not compile the controls.
    """
    nvcc, binary = shutil.which("nvcc"), scratch / "control"
    if nvcc is None:
        raise SystemExit(
            "error: nvcc is not on PATH, and the controls of the sanitizer have to be compiled: it "
            "comes with the CUDA toolkit (add its bin folder to PATH)"
        )
    source = Path(__file__).with_name("sanitizer_control.cu")
    built = subprocess.run(
        [nvcc, "-arch=native", "-o", str(binary), str(source)], capture_output=True, text=True
    )
    if built.returncode:
        raise SystemExit(f"error: nvcc does not compile {source.name}: {built.stderr[-2000:]}")
    rows = []
    for name, clean in CONTROLS.items():
        row = {"case": f"control: {name}"} | _run(tool, [str(binary), name], binary)
        rows.append(row | {"as_expected": row["summary"] is not None and row["clean"] == clean})
    return rows
