"""What an evidence file is bound to, and whether it still is."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from . import ops

SCHEMA = "v100_operator/1"
REPO = Path(__file__).resolve().parents[2]
KERNEL = REPO / "kernel"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_hashes(op: str, kernel: Path = KERNEL) -> dict[str, str]:
    """SHA-256 of each source that the op is made from, by its path below kernel/."""
    files = {p for pattern in ops.sources(op) for p in kernel.glob(pattern) if p.is_file()}
    return {p.relative_to(kernel).as_posix(): file_sha256(p) for p in sorted(files)}


def command_line() -> str:
    """This process's command, with file names in place of paths."""
    words = [w if "/" not in w else Path(w).name for w in sys.argv[1:]]
    return shlex.join(["python", "-m", "v100_operator", *words])


def header(op: str, kind: str, library: Path, info) -> dict[str, object]:
    """What every evidence file begins with: what ran, where, and made from what."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "op": op,
        "command": command_line(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library": {
            "name": library.name,
            "sha256": file_sha256(library),
            "abi": info.abi,
            "archs": list(info.archs),
            "source_sha256": info.source_sha256,
        },
        "sources": source_hashes(op),
    }


def write(path: Path, content: dict[str, object]) -> None:
    """Writes an evidence file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Finding:
    """Of one evidence file: "good", or why not."""

    file: str
    op: str
    kind: str
    problem: str | None


def _problem(content: dict, kernel: Path) -> str | None:
    if content.get("passed") is not True:
        return "it records a failure"
    now = source_hashes(content["op"], kernel)
    recorded = content["sources"]
    changed = [f for f in recorded if f in now and now[f] != recorded[f]]
    gone = [f for f in recorded if f not in now]
    new = [f for f in now if f not in recorded]
    parts = [
        f"{what}: {', '.join(files)}"
        for what, files in (("changed", changed), ("gone", gone), ("new", new))
        if files
    ]
    return "sources since then " + "; ".join(parts) if parts else None


def built_ops(kernel: Path = KERNEL) -> set[str]:
    """Ops that have cubins in kernel/kernels.toml, by the first word of the cubin's name."""
    rows = tomllib.loads((kernel / "kernels.toml").read_text()).get("cubin", [])
    return {row["name"].split("_")[0] for row in rows} & set(ops.NAMES)


def verify(folder: Path, kernel: Path = KERNEL) -> list[Finding]:
    """One finding a file of ours in ``folder``, and one for each built op without a check."""
    findings = []
    checked = set()
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            findings.append(Finding(path.name, "?", "?", f"not JSON: {error}"))
            continue
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            continue
        op, kind = content["op"], content["kind"]
        findings.append(Finding(path.name, op, kind, _problem(content, kernel)))
        if kind == "check":
            checked.add(op)
    for op in sorted(built_ops(kernel) - checked):
        findings.append(Finding("-", op, "check", "there is no evidence for this op"))
    return findings
