"""Finds, checks and loads the extension ``_vllm_fa2_C.abi3.so``.

A library that does not belong to this wrapper is refused before anything of it is registered or
launched: it must report, through the plain C function ``vllm_sm70_info``, the ABI number of the
rules and the hash of the kernel sources that this wrapper was released with.  One that admits
fewer requests to the long kernel is no reason to refuse: the rules send larger batches the ordinary
way.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .dispatch import ABI

logger = logging.getLogger(__name__)

LIBRARY_NAME = "_vllm_fa2_C.abi3.so"
_PACKAGE = Path(__file__).resolve().parent


class LibraryError(RuntimeError):
    """The extension is missing, foreign or stale; the message says which and what to do."""


@dataclass(frozen=True)
class LibraryInfo:
    """What a library says of itself.

    ``archs`` are compute capabilities times ten; ``kernels`` the names of its cubins.
    """

    path: Path
    abi: int
    source_sha256: str
    archs: tuple[int, ...]
    long_batch_capacity: int
    kernels: frozenset[str]


def default_path() -> Path:
    """The library beside the package that holds this one (where the wheel puts both)."""
    return _PACKAGE.parent / LIBRARY_NAME


@cache
def expected_source_hash() -> str | None:
    """The kernel sources' hash that the library must report.

    An installed wrapper has it in ``release.json``; in a source tree it is computed from the tree,
    as the build does (v100_build.cubins.source_hash). None where neither is there.
    """
    release = _PACKAGE / "release.json"
    if release.is_file():
        return str(json.loads(release.read_text())["source_sha256"])
    kernel = _PACKAGE.parents[1]
    if (kernel / "kernels.toml").is_file() and (kernel / "csrc" / "abi.h").is_file():
        return source_tree_hash(kernel)
    return None


def source_tree_hash(kernel: Path) -> str:
    """SHA-256 over the names and contents of everything in ``kernel`` that the extension is made
    from: device sources, host sources, the table of cubins, the CMake file."""
    device = [p for p in (kernel / "src").rglob("*") if p.suffix in (".cu", ".cuh", ".h")]
    host = [*(kernel / "csrc").glob("*.cpp"), *(kernel / "csrc").glob("*.h")]
    files = [*device, *host, kernel / "kernels.toml", kernel / "CMakeLists.txt"]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(kernel).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def read_info(path: Path) -> LibraryInfo:
    """Asks a library what it is, without registering its ops.

    The library links against PyTorch, so PyTorch must be importable.

    Raises:
        LibraryError: it is not there, does not load, or is not ours.
    """
    path = Path(path)
    if not path.is_file():
        raise LibraryError(
            f"there is no SM70 attention library at {path}: install the vllm wheel of this "
            "release, or pass the path of a built one"
        )
    # Its libraries must be in the process before the extension's; without PyTorch the load says so.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

    try:
        # Registration of ops happens when the file is loaded, whoever loads it. What protects a
        # caller is that the ops are refused below before the first launch.
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path} does not load ({error}): it was built for another PyTorch or platform; "
            "install the vllm wheel of this release"
        ) from None
    try:
        function = handle.vllm_sm70_info
    except AttributeError:
        raise LibraryError(
            f"{path} is not an SM70 attention library (it has no vllm_sm70_info): the stock vllm "
            "wheel has a library of the same name; install the vllm wheel of this release"
        ) from None
    function.restype = ctypes.c_char_p
    try:
        info = json.loads(function())
        return LibraryInfo(
            path=path,
            abi=int(info["abi"]),
            source_sha256=str(info["source_sha256"]),
            archs=tuple(int(a) for a in info["archs"]),
            long_batch_capacity=int(info["long_batch_capacity"]),
            kernels=frozenset(info["kernels"]),
        )
    except (TypeError, ValueError, KeyError) as error:
        raise LibraryError(
            f"{path} does not say what it is ({error!r}): it is of another release; install the "
            "vllm wheel of this release"
        ) from None


def check_info(info: LibraryInfo, source_hash: str | None) -> None:
    """Refuses a library that does not belong to this wrapper.

    Args:
        info: what the library reports.
        source_hash: what it must report; None leaves the sources unchecked.

    Raises:
        LibraryError: another ABI number or source hash; the message has both values.
    """
    remedy = "library and wrapper are of different releases: install one release's vllm wheel"
    if info.abi != ABI:
        raise LibraryError(f"{info.path} has ABI {info.abi}, this wrapper needs {ABI}; {remedy}")
    if source_hash is not None and info.source_sha256 != source_hash:
        raise LibraryError(
            f"{info.path} was built from kernel sources {info.source_sha256[:16]}, this wrapper "
            f"belongs to {source_hash[:16]}; {remedy} (in a source tree: make build)"
        )


_loaded: LibraryInfo | None = None


def loaded() -> LibraryInfo | None:
    """The library in use, None before the first :func:`load`."""
    return _loaded


def load(path: Path | str | None = None) -> LibraryInfo:
    """Checks the library and registers its ops; later calls return what is loaded.

    Logs once which bytes are in use: the gate holds the line to the release's manifest.

    Args:
        path: the file; by default the one beside this package.

    Raises:
        LibraryError: it is missing, foreign or stale, or another one is loaded already.
    """
    global _loaded
    wanted = Path(path).resolve() if path is not None else None
    if _loaded is not None:
        if wanted is not None and wanted != _loaded.path:
            raise LibraryError(
                f"{_loaded.path} is loaded already and ops register once a process: "
                f"start a new process for {wanted}"
            )
        return _loaded
    target = wanted or default_path().resolve()
    info = read_info(target)
    check_info(info, expected_source_hash())
    import torch

    torch.ops.load_library(str(target))
    logger.info(
        "sm70_attention: library sha256=%s source sha256=%s",
        hashlib.sha256(target.read_bytes()).hexdigest(),
        info.source_sha256,
    )
    _loaded = info
    return info
