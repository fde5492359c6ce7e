"""What nvidia-smi and systemctl say: idle memory, clocks, throttle reasons, foreign users.

Everything goes through the ordinary programs, found on PATH. Without nvidia-smi there is no GPU
evidence: functions return None, and the checks that need it are `not-run`.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from pathlib import Path

FIELDS = (
    "index",
    "name",
    "memory.used",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)
BENIGN_THROTTLE = 0x1 | 0x2
"""GPU idle and application clocks setting: not a loss of speed."""


def _smi(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def sample() -> list[dict[str, str]] | None:
    """One row per GPU with the fields of FIELDS as nvidia-smi prints them (MiB, MHz, W, C)."""
    text = _smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    if text is None:
        return None
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]


def as_csv(rows: list[dict[str, str]]) -> str:
    """The rows of `sample` as CSV with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def number(text: str) -> float | None:
    """A value as nvidia-smi prints it; None for "[N/A]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def throttled(row: dict[str, str]) -> bool | None:
    """True when a GPU was held back by heat or power at the time of the sample; None when
    nvidia-smi did not say."""
    try:
        return bool(int(row["clocks_throttle_reasons.active"], 16) & ~BENIGN_THROTTLE)
    except ValueError:
        return None


def users() -> list[dict[str, str]] | None:
    """Processes with memory on a GPU: pid, process_name, used_memory (MiB)."""
    text = _smi(
        "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"
    )
    if text is None:
        return None
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    names = ("pid", "process_name", "used_memory")
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def unit_of(pid: int) -> str | None:
    """The systemd unit a process runs in, from its control group; None when unknown."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    for part in reversed(text.strip().replace("\n", "/").split("/")):
        if part.endswith((".service", ".scope")):
            return part
    return None


def session_of(pid: int) -> int | None:
    """Session ID of a process; the gate starts each service in a session of its own."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def foreign_users(own_sessions: set[int], own_units: set[str]) -> list[str] | None:
    """GPU users that belong to no arm, in words; None when nvidia-smi cannot tell."""
    rows = users()
    if rows is None or not all(row["pid"].isdigit() for row in rows):
        return None
    foreign = []
    for row in rows:
        pid = int(row["pid"])
        unit = unit_of(pid)
        if session_of(pid) in own_sessions or unit in own_units:
            continue
        where = f" of unit {unit}" if unit else ""
        foreign.append(f"{row['process_name']} (pid {pid}{where}, {row['used_memory']} MiB)")
    return foreign


def active_units(units: list[str]) -> list[str] | None:
    """Those of `units` that are active or activating; None when systemctl cannot tell."""
    if not units:
        return []
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "is-active", *units], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    states = done.stdout.split()
    if len(states) != len(units):
        return None
    busy = {"active", "activating", "reloading", "deactivating"}
    return [unit for unit, state in zip(units, states, strict=True) if state in busy]
