"""Where things lie: the checkout, the shared cache, the build and release folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from .errors import BuildError

REPO = Path(__file__).resolve().parents[2]
KERNEL = REPO / "kernel"
REQUIREMENTS = REPO / "requirements"
PATCH_SERIES = REPO / "patches" / "v0.19.1"
DIST = REPO / "dist"
BUILD = REPO / "build"


def cache_dir() -> Path:
    """The cache that all checkouts of one user share (``$XDG_CACHE_HOME/vllm-v100``).

    Raises:
        BuildError: it cannot be made, or not be written to.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "vllm-v100"
    remedy = "set XDG_CACHE_HOME to a folder that this user may write to, with 20 GB free"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache {path} cannot be made: {error.strerror}", remedy) from None
    if not os.access(path, os.W_OK):
        raise BuildError(f"the cache {path} cannot be written to", remedy)
    return path


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def tree_hash(root: Path, files: Iterable[Path]) -> str:
    """One SHA-256 over the relative names and the contents of ``files``, in sorted order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
