"""Builds fake releases for the deployment tests: a manifest, a lock file, a fake vLLM wheel.

The layout and manifest are those of `make build`; what the wheel does is chosen by a mode. The
wheelhouse holds a fake ninja, as the release's lock file asks for ninja.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

SOURCES = Path(__file__).parent / "fake_vllm" / "vllm"
MODES = ("ok", "crash", "unhealthy", "nondeterministic")


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A pure-Python wheel with `files` and whatever scripts they declare."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), data)
    return wheel


def scripts(**entries: str) -> bytes:
    """entry_points.txt of console scripts."""
    return ("[console_scripts]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())).encode()


def fake_wheelhouse(folder: Path) -> Path:
    """A wheelhouse with a fake ninja."""
    folder.mkdir(parents=True)
    files = {
        "fake_ninja.py": b"def main():\n    print('1.13.0 (fake)')\n",
        "ninja-1.13.0+fake.dist-info/entry_points.txt": scripts(ninja="fake_ninja:main"),
    }
    write_wheel(folder, "ninja", "1.13.0+fake", files)
    return folder


def fake_release(
    folder: Path, wheelhouse: Path, version: str, mode: str = "ok", ninja: bool = True
) -> Path:
    """A release folder `folder/VERSION` whose fake vLLM behaves as `mode` says."""
    assert mode in MODES
    release = folder / version
    release.mkdir(parents=True)
    behaviour = {"version": version, "mode": mode, "load_s": 0.5}
    files = {f"vllm/{path.name}": path.read_bytes() for path in sorted(SOURCES.glob("*.py"))}
    files["vllm/behaviour.json"] = json.dumps(behaviour).encode()
    files[f"vllm-{version}.dist-info/entry_points.txt"] = scripts(vllm="vllm.cli:main")
    write_wheel(release, "vllm", version, files)
    (wheel,) = wheelhouse.glob("ninja-*.whl")
    lock = f"ninja==1.13.0+fake --hash=sha256:{sha256(wheel.read_bytes())}\n" if ninja else "\n"
    (release / "serve-cuda.txt").write_text(lock)
    entries = {
        path.name: {"sha256": sha256(path.read_bytes()), "bytes": path.stat().st_size}
        for path in sorted(release.iterdir())
    }
    manifest = {"schema": 1, "release": version, "files": entries}
    (release / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return release
