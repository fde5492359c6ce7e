"""Whether the committed server evidence stands for this tree; needs no GPU.

    python -m server_proof.verify docs/evidence

A server-PART.json names the patches, kernel sources and wrapper that it ran. Where the tree has
moved on, where a claim of it does not hold, or where a part has no evidence at all,
`server-allowances.yaml` beside it has to say why that is accepted. A file's allowance names the
very content of the file: the next edit needs either a new run or a new reason. An allowance that
nothing needs is an error too. Exit status 0 or 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from v100_build.cubins import source_files

from server_proof.scenarios import PARTS

REPO = Path(__file__).resolve().parents[2]
ALLOWANCES = "server-allowances.yaml"
WRAPPER = "vllm/vllm_flash_attn/sm70_attention/"
GONE = "gone"
MISSING = "missing evidence"


class Allowance(BaseModel):
    """Accepted for the files of `evidence`: `changed` files (path -> SHA-256 now, or "gone"), one
    `claim` that does not hold, or that they are `missing`."""

    model_config = ConfigDict(extra="forbid")
    evidence: list[str]
    changed: dict[str, str] = {}
    claim: str | None = None
    missing: bool = False
    reason: str


class AllowanceFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")
    allowances: list[Allowance]


def recorded(hashes: Mapping[str, Any]) -> dict[str, str]:
    """Path in the repository -> SHA-256 of what an evidence file ran."""
    wrapper = {
        f"kernel/python/sm70_attention/{name.removeprefix(WRAPPER)}": value
        for name, value in hashes["staged_files"].items()
        if name.startswith(WRAPPER) and name.endswith(".py")
    }
    patches = {f"patches/v0.19.1/{name}": value for name, value in hashes["patches"].items()}
    return wrapper | patches | {f"kernel/{n}": v for n, v in hashes["kernel_sources"].items()}


def current(root: Path) -> dict[str, str]:
    """The same of a tree: what would be recorded today."""
    files = [
        *source_files(root / "kernel"),
        *(root / "kernel/python/sm70_attention").glob("*.py"),
        *(root / "patches/v0.19.1").glob("*.patch"),
    ]
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def differences(evidence: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Path -> SHA-256 now (or "gone") of every file that is not what the evidence ran."""
    then, now = recorded(evidence["hashes"]), current(root)
    return {
        path: now.get(path, GONE)
        for path in sorted(then.keys() | now.keys())
        if then.get(path) != now.get(path)
    }


def problems(folder: Path, root: Path = REPO, parts: Collection[str] = tuple(PARTS)) -> list[str]:
    """What nobody accepted, in words; empty when the evidence stands.

    Raises:
        ValueError: the allowances file is not as `AllowanceFile` says, or an evidence file is none.
    """
    path = folder / ALLOWANCES
    try:
        text = yaml.safe_load(path.read_text()) if path.exists() else {"allowances": []}
        allowances = AllowanceFile.model_validate(text).allowances
    except (yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    needed: set[tuple[int, str]] = set()
    found = []
    for name in (f"server-{part}.json" for part in parts):
        if (folder / name).exists():
            continue
        users = [i for i, a in enumerate(allowances) if a.missing and name in a.evidence]
        needed.update((i, MISSING) for i in users)
        if not users:
            found.append(f"{name} is missing: run the part (docs/server-proof.md)")
    for file in sorted(folder.glob("server-*.json")):
        try:
            evidence = json.loads(file.read_text())
            changed = differences(evidence, root)
            failed = [c["claim"] for c in evidence["claims"] if not c["holds"]]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file.name} is no server evidence: {error!r}") from None
        mine = [(i, a) for i, a in enumerate(allowances) if file.name in a.evidence]
        for name, now in changed.items():
            users = [i for i, a in mine if a.changed.get(name) == now]
            needed.update((i, name) for i in users)
            if not users:
                found.append(f"{file.name}: {name} is {now[:16]} now: run the part again")
        for claim in failed:
            users = [i for i, a in mine if a.claim == claim]
            needed.update((i, claim) for i in users)
            if not users:
                found.append(f"{file.name}: does not hold: {claim}")
        if evidence.get("failures"):
            found.append(f"{file.name}: engines failed: {', '.join(evidence['failures'])}")
    for i, allowance in enumerate(allowances):
        whats = [*allowance.changed, *filter(None, [allowance.claim])]
        for what in [*whats, *([MISSING] if allowance.missing else [])]:
            if (i, what) not in needed:
                found.append(f"{ALLOWANCES}: nothing needs the allowance for {what}: remove it")
    return found


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        found = problems(options.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for problem in found:
        print(problem)
    if not found:
        print("server evidence: stands for this tree, or says why not in " + ALLOWANCES)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
