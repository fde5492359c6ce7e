"""``manifest.json``: every input and output of a release by SHA-256, and the check of it.

Schema (version 1)::

    {"schema": 1,
     "release": "0.19.1+v100.1",        # the folder's name
     "inputs_sha256": "...",            # one hash over everything below "inputs"
     "inputs": {"wheels": {file: {"sha256", "name", "version", "why"}},
                "locks": {file: sha256}, "patches": {file: {"sha256", "group", "flavours"}},
                "kernel_sources": {path: sha256}, "wrapper": {path: sha256}},
     "toolchain": {"versions": {tool: text}, "nvrtc_flags": [...], "archs": [70, ...]},
     "source_sha256": "...",            # of the kernel sources; the library reports the same
     "kernels": {cubin file: {"sha256", "resources": {entry: {...}}}},
     "library": {"file", "sha256", "info": {...}},
     "files": {file of the release: {"sha256", "bytes"}}}

Nothing in it depends on the machine, the folder or the time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .paths import sha256_file

MANIFEST = "manifest.json"
SCHEMA = 1


def read(release: Path) -> dict:
    """The manifest of a release folder.

    Raises:
        BuildError: there is none, or it is not one of ours.
    """
    path = release / MANIFEST
    if not path.is_file():
        raise BuildError(f"{release} holds no {MANIFEST}", "name a folder that `make build` wrote")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise BuildError(f"{path} is not JSON ({error})", "build the release again") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise BuildError(
            f"{path} has schema {schema!r}; this program reads {SCHEMA}",
            "verify it with the checkout that built it",
        )
    return manifest


def write(release: Path, manifest: dict) -> None:
    """Writes the manifest with sorted keys."""
    (release / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True)
class Difference:
    """One thing that is not as the manifest says."""

    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: the manifest says {self.expected}, found {self.found}"


def verify_files(release: Path, manifest: dict | None = None) -> list[Difference]:
    """Hashes every file of a release again; an empty list means that all is as built.

    Needs nothing but the release folder, so that a node can run it.
    """
    manifest = manifest or read(release)
    differences = []
    for name, entry in sorted(manifest["files"].items()):
        path = release / name
        found = sha256_file(path) if path.is_file() else "no file"
        if found != entry["sha256"]:
            differences.append(Difference(name, entry["sha256"], found))
    for path in sorted(release.iterdir()):
        if path.name not in manifest["files"] and path.name != MANIFEST:
            differences.append(Difference(path.name, "nothing", "a file"))
    return differences


def verify_inputs(manifest: dict, current: dict) -> list[Difference]:
    """Compares the inputs a release was built from with those of this checkout."""
    differences = []
    for kind, built in sorted(manifest["inputs"].items()):
        now = current[kind]
        for name in sorted(built.keys() | now.keys()):
            was, is_now = _sha(built.get(name)), _sha(now.get(name))
            if was != is_now:
                differences.append(Difference(f"{kind}: {name}", was, is_now))
    return differences


def _sha(entry: dict | str | None) -> str:
    if entry is None:
        return "nothing"
    return entry if isinstance(entry, str) else entry["sha256"]
