"""The merge gate: what a contributor can run where they are, and the file a pull request carries.

Parts (PARTS, below) are commands with the source files they speak for. `merge` runs what can run
here, says what cannot and why, and writes `docs/evidence/merge-gate.json`: each part's result
and the hash of its sources. `merge_check` (CI) recomputes the hashes: a result whose sources have
changed since is stale, and a required part that failed, is stale or is missing stops the merge.
A part that could not run is never shown as passed; where the committed GPU evidence speaks for the
same kernels, that is a part of its own.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from v100_operator import here

from v100_gate.errors import GateError
from v100_gate.identity import sha256_file

REPO = Path(__file__).resolve().parents[2]
FILE = REPO / "docs" / "evidence" / "merge-gate.json"
SCHEMA = "v100-merge-gate/1"
TAIL_LINES = 12


@dataclass(frozen=True)
class Part:
    """One part of the merge gate.

    `command` runs in the checkout's root with this interpreter in place of "python"; `sources`
    are the tracked folders and files whose content it speaks for; `needs` returns why it cannot
    run here, or None; a part that is not `required` may be `not-run`.
    """

    name: str
    what: str
    command: tuple[str, ...]
    sources: tuple[str, ...]
    required: bool = True
    needs: Callable[[], str | None] = lambda: None


def _compiler() -> str | None:
    return None if shutil.which("g++") else "no C++ compiler here (apt-get install g++)"


PARTS = (
    Part(
        "evidence",
        "the committed GPU evidence belongs to this tree",
        ("make", "-s", "evidence-check"),
        ("kernel", "patches", "eval/v100_operator", "eval/server_proof", "docs/evidence"),
    ),
    Part(
        "reproducible",
        "two builds give the same bytes",
        ("python", "-m", "pytest", "-q", "tests/kernel/test_build_release.py"),
        ("kernel", "patches", "requirements", "tests/kernel/test_build_release.py"),
        needs=_compiler,
    ),
    Part(
        "patches",
        "the series applies exactly to the pinned wheels",
        ("python", "-m", "v100_patches", "verify"),
        ("patches",),
    ),
    Part(
        "emulator",
        "the sm_70 machine code computes what it should",
        ("python", "-m", "pytest", "-q", "-m", "sm70", "tests/kernel", "tests/sm70sim"),
        ("kernel", "tests/kernel", "tests/sm70sim"),
        needs=_compiler,
    ),
    Part(
        "smoke",
        "the patched tree serves and is gated against its control on CPU",
        ("python", "-m", "v100_gate", "demo", "--results", "{scratch}/smoke"),
        ("patches", "kernel", "requirements", "eval/v100_gate", "eval/profiles", "eval/demo"),
        needs=_compiler,
    ),
    Part(
        "operator",
        "kernels against FP64 on this machine's GPU",
        ("python", "-m", "v100_operator", "check-all", "--out", "{scratch}/operator"),
        ("kernel", "eval/v100_operator"),
        required=False,
        needs=here.missing,
    ),
)


def tracked(sources: Sequence[str], root: Path) -> list[Path]:
    """Files of these folders that git tracks or would add, the merge file itself left out.

    Raises: GateError outside a git checkout.
    """
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *sources],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise GateError(f"{root} is not a git checkout: {done.stderr.strip()}")
    names = sorted(set(filter(None, done.stdout.split("\0"))))
    own = FILE.relative_to(REPO).as_posix()
    return [root / name for name in names if name != own and (root / name).is_file()]


def source_hash(sources: Sequence[str], root: Path) -> str:
    """One SHA-256 over the names and contents of a part's sources."""
    digest = hashlib.sha256()
    for path in tracked(sources, root):
        digest.update(f"{path.relative_to(root).as_posix()} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def run_part(part: Part, root: Path, scratch: Path) -> dict:
    """Run one part here; its output goes through to the terminal, its end into the record."""
    before = source_hash(part.sources, root)
    record: dict = {"what": part.what, "required": part.required, "sources_sha256": before}
    missing = part.needs()
    if missing is not None:
        return record | {"status": "not-run", "reason": missing}
    words = [sys.executable if w == "python" else w for w in part.command]
    words = [word.replace("{scratch}", str(scratch)) for word in words]
    began = time.monotonic()
    tail: list[str] = []
    process = subprocess.Popen(
        words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in process.stdout:
            sys.stdout.write("    " + line)
            sys.stdout.flush()
            tail = [*tail[1 - TAIL_LINES :], line.rstrip()]
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    record |= {"seconds": round(time.monotonic() - began, 1), "exit": code}
    if source_hash(part.sources, root) != before:
        return record | {"status": "fail", "reason": "its sources changed while it ran"}
    if code != 0:
        return record | {"status": "fail", "reason": "\n".join(tail)}
    return record | {"status": "pass", "reason": next((t for t in reversed(tail) if t), "")}


def merge(
    only: Sequence[str],
    say: Callable[[str], None],
    scratch: Path,
    root: Path = REPO,
    parts: Sequence[Part] = PARTS,
) -> dict:
    """Run the parts (or only some) and write the file; parts not run now keep their records.

    Raises: GateError for a part that does not exist.
    """
    known = {part.name for part in parts}
    unknown = sorted(set(only) - known)
    if unknown:
        raise GateError(f"no part {unknown[0]!r}; there are {', '.join(sorted(known))}")
    target = root / FILE.relative_to(REPO)
    document = {"schema": SCHEMA, "parts": {}}
    if target.exists():
        document["parts"] = json.loads(target.read_text()).get("parts", {})
    for part in parts:
        if only and part.name not in only:
            continue
        say(f"{part.name}: {part.what}")
        document["parts"][part.name] = run_part(part, root, scratch)
        document["date"] = dt.date.today().isoformat()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return document


def problems(root: Path = REPO, parts: Sequence[Part] = PARTS) -> list[str]:
    """Why the merge file does not stand for this tree; empty when it does.

    The `evidence` folder is among the sources of the evidence part, the merge file itself is not.
    """
    target = root / FILE.relative_to(REPO)
    try:
        document = json.loads(target.read_text())
    except FileNotFoundError:
        return [f"{target.relative_to(root)} is missing: run `make gate` and commit it"]
    except ValueError as error:
        return [f"{target.relative_to(root)} is not JSON: {error}"]
    if document.get("schema") != SCHEMA:
        return [f"{target.relative_to(root)}: schema {document.get('schema')}, not {SCHEMA}"]
    found = []
    for part in parts:
        record = document["parts"].get(part.name)
        if record is None:
            if part.required:
                found.append(f"{part.name}: never run; run `make gate`")
            continue
        if record["status"] == "fail" or (part.required and record["status"] != "pass"):
            last = record["reason"].rstrip().rpartition("\n")[2]
            found.append(f"{part.name}: {record['status']}: {last}")
        elif record["status"] == "pass" and record["sources_sha256"] != source_hash(
            part.sources, root
        ):
            found.append(
                f"{part.name}: stale: {', '.join(part.sources)} changed after it ran; "
                f"run `make gate PARTS={part.name}`"
            )
    return found
