"""Where the text of a vLLM tree is read from: an unpacked folder, or the wheel itself."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from v100_patches.errors import PatchToolError
from v100_patches.series import FLAVOURS, ROOT, Series

BINARY_SUFFIXES = (".so", ".pyc", ".pyd", ".a", ".o")


def decode(data: bytes) -> str:
    """Text of a file; bytes that are not UTF-8 (a picture, say) survive the way back."""
    return data.decode("utf-8", errors="surrogateescape")


def encode(text: str) -> bytes:
    """The inverse of `decode`."""
    return text.encode("utf-8", errors="surrogateescape")


class Tree(Protocol):
    """Read access to a tree, by path relative to the folder that holds `vllm/`."""

    def read(self, path: str) -> str | None:
        """The file's text with its line ends as they are, or None when there is no such file."""

    def paths(self) -> Iterable[str]:
        """All text files below `vllm/`."""


class Folder:
    """An unpacked wheel."""

    def __init__(self, root: Path) -> None:
        """`root` holds `vllm/`."""
        self.root = root
        if not (root / ROOT).is_dir():
            raise PatchToolError(
                f"{root} has no folder {ROOT}",
                "name the folder that an unpacked vLLM wheel lies in (site-packages, for example)",
            )

    def read(self, path: str) -> str | None:
        """See Tree."""
        file = self.root / path
        return decode(file.read_bytes()) if file.is_file() else None

    def paths(self) -> Iterable[str]:
        """See Tree."""
        for folder, folders, files in os.walk(self.root / ROOT):
            folders[:] = sorted(set(folders) - {"__pycache__"})
            for file in sorted(files):
                if not file.endswith(BINARY_SUFFIXES):
                    yield (Path(folder) / file).relative_to(self.root).as_posix()


class WheelFile:
    """A wheel, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        """`path` is the .whl file."""
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())

    def read(self, path: str) -> str | None:
        """See Tree."""
        return decode(self._zip.read(path)) if path in self._names else None

    def paths(self) -> Iterable[str]:
        """See Tree."""
        for name in sorted(self._names):
            if name.startswith(ROOT) and not name.endswith((*BINARY_SUFFIXES, "/")):
                yield name

    def extract(self, root: Path) -> None:
        """Unpacks the wheel to `root`."""
        self._zip.extractall(root)


class Overlay:
    """A tree with changes on top, in memory."""

    def __init__(self, base: Tree) -> None:
        """`base` is only read."""
        self.base = base
        self.changed: dict[str, str | None] = {}

    def read(self, path: str) -> str | None:
        """See Tree."""
        return self.changed[path] if path in self.changed else self.base.read(path)

    def write(self, path: str, text: str | None) -> None:
        """Sets a file's text; None removes it."""
        self.changed[path] = text

    def paths(self) -> Iterable[str]:
        """See Tree."""
        names = set(self.base.paths()) | set(self.changed)
        return sorted(name for name in names if self.changed.get(name, "") is not None)

    def digest(self) -> str:
        """SHA-256 over path and SHA-256 of every changed file (a removed one counts as absent)."""
        lines = []
        for path, text in sorted(self.changed.items()):
            digest = "absent" if text is None else hashlib.sha256(encode(text)).hexdigest()
            lines.append(f"{digest}  {path}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def flush(self, root: Path) -> None:
        """Writes the changes below `root`; files are replaced, so hard links elsewhere stay."""
        for path, text in self.changed.items():
            file = root / path
            if text is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(file.name + ".v100-patches")
            scratch.write_bytes(encode(text))
            if file.exists():
                scratch.chmod(file.stat().st_mode)
            scratch.replace(file)


def default_wheel_dir() -> Path:
    """The wheel cache that all checkouts share."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-v100" / "wheels"


def open_wheel(series: Series, flavour: str, wheel_dir: Path) -> WheelFile:
    """The pinned wheel of a flavour; raises PatchToolError when it is absent or another one."""
    if flavour not in series.wheels:
        raise PatchToolError(f"unknown flavour '{flavour}'", f"use one of {', '.join(FLAVOURS)}")
    pin = series.wheels[flavour]
    path = wheel_dir / pin.file
    fetch = (
        f"run `make build`, which fetches it, or `pip download --no-deps --dest {wheel_dir} "
        f"{pin.distribution}=={series.version}`"
    )
    if not path.is_file():
        raise PatchToolError(f"the wheel {path} is not there", fetch)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != pin.sha256:
        raise PatchToolError(
            f"{path} has SHA-256 {found}, but base.toml pins {pin.sha256}",
            f"remove the file and {fetch}",
        )
    return WheelFile(path)
