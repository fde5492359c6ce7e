"""Assembles what a node keeps of one release of one instance, as a folder and a tar archive.

The folder is complete: programs, units, drop-ins, proxy configuration, profile, launch plan. Its
name ends with a hash over all of it, so that code and configuration go forward and back together,
and the same inputs give the same name on every machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from v100_serving.launch import launch_plan
from v100_serving.profiles import load_profile

FLAVOURS = {"v100": "cuda", "cpu": "cpu"}
"""Flavour of the vLLM wheel for each accelerator."""

VENV_GROWTH = 3
"""An installed environment takes up to this many times the size of its wheels."""


class BundleError(ValueError):
    """The release folder cannot be bundled; the text says what is missing."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_manifest(release: Path) -> tuple[dict[str, Any], str]:
    path = release / "manifest.json"
    if not path.is_file():
        raise BundleError(
            f"{release} holds no manifest.json: name a folder that `make build` wrote"
        )
    data = path.read_bytes()
    manifest = json.loads(data)
    missing = [name for name in manifest["files"] if not (release / name).is_file()]
    if missing:
        raise BundleError(f"{release} lacks files of its manifest: {', '.join(missing)}")
    return manifest, _sha256(data)


def _release_facts(manifest: dict[str, Any], digest: str, artifact: str) -> dict[str, Any]:
    facts = {
        "schema": 1,
        "release": manifest["release"],
        "artifact": artifact,
        "manifest_sha256": digest,
        "wheels": {n: e["sha256"] for n, e in manifest["files"].items() if n.endswith(".whl")},
    }
    for name in ("inputs_sha256", "source_sha256"):
        if name in manifest:
            facts[name] = manifest[name]
    if "library" in manifest:
        facts["library_sha256"] = manifest["library"]["sha256"]
    return facts


def bundle(
    release: Path,
    profile_path: Path,
    gpus: list[int],
    port: int,
    systemd: Path,
    rendered: dict[str, str],
    out: Path,
    wheelhouse: Path | None = None,
) -> dict[str, Any]:
    """Writes ``out/ID.tar`` and returns what the deployment must know about it.

    Args:
        release: folder with manifest.json, wheels and lock files.
        systemd: the repository's folder of units and node programs.
        rendered: instance.conf, api.conf, api.cfg and gate.json of this instance, by name.
        wheelhouse: wheels of the lock file; counted for the space that the node needs.

    Raises:
        BundleError, ProfileError, ImpossibleProfile, LaunchError.
    """
    manifest, digest = _read_manifest(release)
    profile = load_profile(profile_path)
    launch = launch_plan(profile, gpus, port)
    launch["cache_key"] = _sha256(digest.encode() + profile_path.read_bytes())[:12]
    name = re.sub(r"[^A-Za-z0-9.+-]", "-", manifest["release"])
    artifact = f"{name}-{digest[:12]}"
    files = {
        "profile.yaml": profile_path.read_bytes(),
        "launch.json": json.dumps(launch, indent=1).encode() + b"\n",
        "release.json": json.dumps(_release_facts(manifest, digest, artifact), indent=1).encode()
        + b"\n",
    }
    for folder, below in ((systemd / "bin", "bin/"), (systemd / "units", "units/")):
        for path in sorted(folder.iterdir()):
            if path.is_file():
                files[below + path.name] = path.read_bytes()
    for needed in ("instance.conf", "api.conf", "api.cfg", "gate.json"):
        if needed not in rendered:
            raise BundleError(f"the rendered files lack {needed}")
        files[needed] = rendered[needed].encode()
    index = json.dumps({n: _sha256(d) for n, d in sorted(files.items())}, indent=1).encode() + b"\n"
    identity = f"{name}-{_sha256(index)[:12]}"
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"{identity}.tar"
    _write_tar(archive, files | {"files.json": index})

    artifact_bytes = sum((release / n).stat().st_size for n in manifest["files"])
    flavour = FLAVOURS[profile.hardware.accelerator]
    wheels = sum(p.stat().st_size for p in wheelhouse.glob("*.whl")) if wheelhouse else 0
    return {
        "id": identity,
        "archive": str(archive),
        "files_sha256": _sha256(index),
        "artifact": artifact,
        "artifact_files": sorted([*manifest["files"], "manifest.json"]),
        "artifact_hashes": {n: e["sha256"] for n, e in manifest["files"].items()}
        | {"manifest.json": digest},
        "manifest_sha256": digest,
        "flavour": flavour,
        "venv": f"{artifact}-{flavour}",
        "bytes_needed": artifact_bytes + wheels + VENV_GROWTH * (artifact_bytes + wheels),
        "launch": launch,
    }


def _write_tar(archive: Path, files: dict[str, bytes]) -> None:
    """A tar whose bytes depend on names and contents only."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o755 if name.startswith("bin/") else 0o644
            tar.addfile(info, io.BytesIO(data))
