"""Which release is being measured: hashes of the manifest, the served tree and the log.

A result is worth something only with the bytes it was obtained with. An arm that names a
`manifest` is held to it: the served tree must consist of the files of the release's wheel, and
a library hash in the log must be the manifest's.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

from pydantic import BaseModel

from v100_gate.errors import ProfileError
from v100_gate.schema import Arm
from v100_gate.servicelog import LogFacts


class Identity(BaseModel):
    """What was served in one start, by hashes. `problems` non-empty: not the manifest's release."""

    manifest_sha256: str | None = None
    release: str | None = None
    source_sha256: str | None = None
    library_sha256: str | None = None
    tree: str | None = None
    tree_sha256: str | None = None
    tree_files: int | None = None
    versions: list[str] = []
    """What a service of this release may call itself; empty without a manifest."""
    version: str | None = None
    """What the service called itself (GET /version)."""
    log_library_sha256: list[str] = []
    log_source_sha256: list[str] = []
    verified: list[str] = []
    """What was compared and agreed."""
    problems: list[str] = []


def sha256_file(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tree(tree: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file of a package folder, byte code left out."""
    return {
        path.relative_to(tree).as_posix(): sha256_file(path)
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def combined(hashes: dict[str, str]) -> str:
    """One hash over a tree: SHA-256 of its sorted "path hash" lines."""
    lines = "".join(f"{path} {value}\n" for path, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def wheel_record(wheel: Path, package: str) -> dict[str, str]:
    """Relative path -> SHA-256 (hex) of a package's files, from the wheel's RECORD.

    Byte code is left out, as in `hash_tree`: an interpreter writes it anew.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        if not names:
            raise ProfileError(f"{wheel}: no RECORD inside")
        rows = csv.reader(io.StringIO(archive.read(names[0]).decode()))
        record = {}
        for name, digest, *_ in rows:
            wanted = name.startswith(package + "/") and "__pycache__" not in name
            if wanted and digest.startswith("sha256="):
                raw = base64.urlsafe_b64decode(digest[7:] + "=" * (-len(digest[7:]) % 4))
                record[name.removeprefix(package + "/")] = raw.hex()
    return record


def compare_trees(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Differences between two trees in words, at most ten."""
    problems = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name}: in the release, not in the served tree")
        elif name not in expected:
            problems.append(f"{name}: in the served tree, not in the release")
        elif expected[name] != found[name]:
            problems.append(f"{name}: served {found[name][:12]}, release {expected[name][:12]}")
    if len(problems) > 10:
        problems = [*problems[:10], f"... and {len(problems) - 10} more"]
    return problems


def identify(arm: Arm) -> Identity:
    """Identity of an arm before it is started.

    Raises: ProfileError when the manifest named in the arms file cannot be read.
    """
    identity = Identity()
    found: dict[str, str] | None = None
    if arm.tree is not None:
        if not arm.tree.is_dir():
            raise ProfileError(f"arms: tree {arm.tree} is not a folder")
        found = hash_tree(arm.tree)
        identity.tree = str(arm.tree)
        identity.tree_sha256 = combined(found)
        identity.tree_files = len(found)
    if arm.manifest is None:
        return identity
    try:
        raw = arm.manifest.read_bytes()
        manifest = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ProfileError(f"arms: manifest {arm.manifest}: {error}") from None
    identity.manifest_sha256 = hashlib.sha256(raw).hexdigest()
    identity.release = manifest.get("release")
    identity.source_sha256 = manifest.get("source_sha256")
    identity.library_sha256 = (manifest.get("library") or {}).get("sha256")
    wheels = {
        name: entry
        for name, entry in manifest.get("files", {}).items()
        if name.startswith("vllm") and name.endswith(".whl")
    }
    # A wheel's name states its version; one of a flavour is not the release's own (".cpu").
    identity.versions = [name.split("-")[1] for name in wheels]
    if not wheels and identity.release is not None:
        identity.versions = [identity.release]
    if found is None:
        return identity
    matches: dict[str, list[str]] = {}
    for name, entry in wheels.items():
        wheel = arm.manifest.parent / name
        if not wheel.is_file():
            identity.problems.append(f"{name}: named by the manifest, not beside it")
        elif sha256_file(wheel) != entry["sha256"]:
            identity.problems.append(f"{name}: its hash is not the manifest's")
        else:
            matches[name] = compare_trees(wheel_record(wheel, "vllm"), found)
    # A release holds a wheel per flavour; the served tree is one of them.
    if matches:
        name, differences = min(matches.items(), key=lambda item: len(item[1]))
        if differences:
            identity.problems += [f"served tree is not {name}: {line}" for line in differences]
        else:
            identity.verified.append(f"served tree = {name}")
            identity.versions = [name.split("-")[1]]
    return identity


def from_log(identity: Identity, facts: LogFacts) -> Identity:
    """Add what the service itself reported, and hold it to the manifest."""
    identity.log_library_sha256 = facts.library_sha256
    identity.log_source_sha256 = facts.source_sha256
    for what, reported, expected in (
        ("library", facts.library_sha256, identity.library_sha256),
        ("source", facts.source_sha256, identity.source_sha256),
    ):
        if not reported or expected is None:
            continue
        wrong = [value for value in reported if value != expected]
        if wrong:
            problem = f"the service reports {what} {wrong[0][:12]}, the manifest {expected[:12]}"
            if problem not in identity.problems:
                identity.problems.append(problem)
        elif f"{what} hash in the log" not in identity.verified:
            identity.verified.append(f"{what} hash in the log")
    return identity


def from_version(identity: Identity, answer: str) -> Identity:
    """Add what the service answers to GET /version, and hold it to the manifest.

    A version is a name and no hash: a right one verifies nothing.
    """
    try:
        identity.version = json.loads(answer)["version"]
    except (ValueError, TypeError, KeyError):
        return identity
    if identity.versions and identity.version not in identity.versions:
        identity.problems.append(
            f"the service calls itself {identity.version}, the manifest's release is "
            f"{' or '.join(identity.versions)}"
        )
    return identity


def environment() -> dict:
    """What the gate itself ran on; no host name, no user, no path."""
    info = {
        "python": platform.python_version(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {},
    }
    for name in ("aiohttp", "pydantic", "numpy", "scipy", "matplotlib"):
        module = sys.modules.get(name)
        if module is None:
            continue
        info["packages"][name] = getattr(module, "__version__", "?")
    try:
        info["cpu_model"] = next(
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        info["cpu_model"] = None
    return info


def git_commit(folder: Path) -> str | None:
    """Commit of a checkout, with "+" when files differ from it; None outside a checkout."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if dirty else "")
