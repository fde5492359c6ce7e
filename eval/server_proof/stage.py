"""Collects what turns an installed stock vLLM 0.19.1 into this release, for another machine.

    python -m server_proof.stage --release dist/0.19.1+v100.1-validation --stock WHEEL --out DIR

DIR/vllm gets every file in which the release's CUDA wheel differs from the stock wheel (patched
Python files, the kernels' package, the extension), DIR/hashes.json says what they are. `run.py
--stage DIR` lays them over the installation there. A validation release, because its extension has
code for other GPUs than a V100.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

EXTENSION = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"


class StageError(Exception):
    """The release cannot be staged; the text says what to do."""


def stage(release: Path, stock: Path, out: Path) -> dict[str, Any]:
    """Writes the staged files; returns what hashes.json says.

    Raises:
        StageError: no CUDA wheel in the release, or a wheel without the SM70 extension.
    """
    wheels = [p for p in release.glob("vllm-*.whl") if "cpu" not in p.name]
    if len(wheels) != 1:
        raise StageError(f"{release} holds {len(wheels)} CUDA wheels: make build VALIDATION=1")
    shutil.rmtree(out, ignore_errors=True)
    files: dict[str, str] = {}
    with zipfile.ZipFile(wheels[0]) as ours, zipfile.ZipFile(stock) as theirs:
        known = {i.filename: (i.CRC, i.file_size) for i in theirs.infolist()}
        for info in ours.infolist():
            name = info.filename
            same = known.get(name) == (info.CRC, info.file_size)
            if info.is_dir() or same or not name.startswith("vllm/"):
                continue
            content = ours.read(name)
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            files[name] = hashlib.sha256(content).hexdigest()
        if EXTENSION not in files:
            raise StageError(f"{wheels[0].name} holds no {EXTENSION} of its own: build it again")
        described = json.loads(ours.read("vllm/vllm_flash_attn/sm70_attention/release.json"))
    manifest = json.loads((release / "manifest.json").read_text())
    hashes = {
        "release": described,
        "wheel": {"name": wheels[0].name, "sha256": _sha256(wheels[0])},
        "stock_wheel": {"name": stock.name, "sha256": _sha256(stock)},
        "library_sha256": files[EXTENSION],
        "patches": {n: p["sha256"] for n, p in manifest["inputs"]["patches"].items()},
        "kernel_sources": manifest["inputs"]["kernel_sources"],
        "staged_files": files,
    }
    (out / "hashes.json").write_text(json.dumps(hashes, indent=1))
    return hashes


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", type=Path, required=True)
    parser.add_argument("--stock", type=Path, required=True, help="the stock CUDA wheel")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        hashes = stage(options.release, options.stock, options.out)
    except (StageError, OSError, KeyError) as error:
        print(f"cannot stage: {error}", file=sys.stderr)
        return 1
    size = sum(p.stat().st_size for p in options.out.rglob("*") if p.is_file())
    print(f"{len(hashes['staged_files'])} files, {size / 2**20:.1f} MiB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
