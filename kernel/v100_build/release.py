"""Builds a release folder, or says that it is up to date."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from v100_patches import PatchToolError
from v100_patches.series import load as load_series

from . import cubins, library, manifest, pack, toolchain, wheels
from .errors import BuildError
from .flavours import FLAVOURS
from .locks import file_lock
from .paths import BUILD, DIST, KERNEL, PATCH_SERIES, REPO, REQUIREMENTS, sha256_file

Say = Callable[[str], None]


def release_name(validation: bool) -> str:
    """The folder's name under ``dist/``."""
    return FLAVOURS["cuda"].version + ("-validation" if validation else "")


def archs(validation: bool) -> list[int]:
    """The architectures to compile for."""
    return [cubins.SM70, *(cubins.VALIDATION_ARCHS if validation else ())]


def current_inputs() -> dict:
    """Hashes of everything a release is built from, as the manifest lists them."""

    def hashes(root: Path, files: Iterable[Path]) -> dict[str, str]:
        return {path.relative_to(root).as_posix(): sha256_file(path) for path in sorted(files)}

    series = load_series(PATCH_SERIES)
    return {
        "wheels": {
            p.file: {"sha256": p.sha256, "name": p.name, "version": p.version, "why": p.why}
            for p in wheels.pins().values()
        },
        "locks": hashes(REQUIREMENTS, REQUIREMENTS.glob("*.txt")),
        "patches": {p.name: {"sha256": p.sha256, "group": p.group} for p in series.patches},
        "kernel_sources": hashes(KERNEL, cubins.source_files()),
        "wrapper": hashes(KERNEL / "python", pack.WRAPPER.rglob("*.py")),
        "build_program": hashes(
            REPO, [*(KERNEL / "v100_build").glob("*.py"), *(REPO / "patches").rglob("*.py")]
        ),
    }


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def up_to_date(folder: Path, inputs: dict, recipe: dict) -> bool:
    """Whether ``folder`` is what a build would make now, every file of it hashed."""
    try:
        have = manifest.read(folder)
    except BuildError:  # none, damaged, or of another schema: a build puts a sound one there
        return False
    return have.get("inputs_sha256") == _digest(inputs, recipe) and not manifest.verify_files(
        folder, have
    )


def build(
    validation: bool = False,
    flavours: Iterable[str] = ("cuda", "cpu"),
    say: Say = lambda _: None,
    dist: Path = DIST,
) -> Path:
    """Builds a release and returns its folder; does nothing when it is up to date.

    The folder appears whole or not at all: it is made beside its place and moved there last.

    Args:
        validation: also compile for sm_80 and sm_90, so that the same sources run on such GPUs.
        flavours: which wheels to pack.  A release for nodes holds both.
        say: is told each step.
        dist: the folder that holds releases.

    Raises:
        BuildError, PatchToolError: with what to do.
    """
    folder = dist / release_name(validation)
    dist.mkdir(parents=True, exist_ok=True)
    with file_lock(folder):
        return _build(validation, sorted(flavours, reverse=True), say, folder)


def _build(validation: bool, flavours: list[str], say: Say, folder: Path) -> Path:
    say("hashing the inputs")
    inputs = current_inputs()
    recipe = {
        "versions": toolchain.versions(),
        "nvrtc_flags": list(cubins.FLAGS),
        "archs": archs(validation),
        "flavours": flavours,
    }
    if up_to_date(folder, inputs, recipe):
        say(f"{folder.name} is up to date")
        return folder

    built = cubins.compile_all(recipe["archs"], say)
    # One folder a variant, so that an incremental build links only what changed.
    so = library.link(built, BUILD / ("validation" if validation else "release"), say)

    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        release_json = json.dumps(
            {
                "release": folder.name,
                "source_sha256": cubins.source_hash(),
                "library_sha256": sha256_file(so),
                "inputs_sha256": _digest(inputs, recipe),
            },
            sort_keys=True,
        )
        shutil.copyfile(so, scratch / library.LIBRARY_NAME)
        for name in flavours:
            flavour = FLAVOURS[name]
            say(f"packing {flavour.wheel_name}")
            pack.pack(flavour, so if name == "cuda" else None, release_json, scratch)
            shutil.copyfile(REQUIREMENTS / flavour.lock, scratch / flavour.lock)
        files = {
            path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
            for path in sorted(scratch.iterdir())
        }
        manifest.write(
            scratch,
            {
                "schema": manifest.SCHEMA,
                "release": folder.name,
                "inputs_sha256": _digest(inputs, recipe),
                "inputs": inputs,
                "toolchain": recipe,
                "source_sha256": cubins.source_hash(),
                "kernels": {
                    c.file_name: {
                        "sha256": sha256_file(c.path),
                        "resources": {k: asdict(r) for k, r in sorted(c.resources.items())},
                    }
                    for c in built
                },
                "library": {
                    "file": library.LIBRARY_NAME,
                    "sha256": files[library.LIBRARY_NAME]["sha256"],
                    "info": library.library_info(built),
                },
                "files": files,
            },
        )
        _replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    say(f"built {folder.name}")
    return folder


def _replace(new: Path, place: Path) -> None:
    """Puts ``new`` where ``place`` is; the old folder goes only once the new one is there."""
    old = place.with_name(f".old-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    new.chmod(0o755)
    if place.exists():
        os.replace(place, old)
    os.replace(new, place)
    shutil.rmtree(old, ignore_errors=True)


__all__ = ["BuildError", "PatchToolError", "build", "current_inputs", "release_name"]
