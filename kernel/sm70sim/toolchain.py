"""Where nvdisasm, NVRTC and the CUDA headers are.

``v100_build.toolchain`` decides; the environment variables NVDISASM, NVRTC and CUDA_INC
(a path list) override it one by one.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import SimError


def _project():
    try:
        from v100_build import toolchain
    except ImportError as error:
        raise RuntimeError(
            "v100_build.toolchain is not importable: install the project (make venv) "
            "or set NVDISASM, NVRTC and CUDA_INC"
        ) from error
    return toolchain


def nvdisasm() -> Path:
    """The CUDA 12 disassembler (13 refuses sm_70)."""
    if path := os.environ.get("NVDISASM"):
        return Path(path)
    return Path(_project().nvdisasm())


def nvrtc() -> Path:
    """The NVRTC 12 shared library."""
    if path := os.environ.get("NVRTC"):
        return Path(path)
    return Path(_project().nvrtc())


def cuda_include_dirs() -> list[Path]:
    """Folders with cuda_fp16.h, mma.h and their like."""
    if paths := os.environ.get("CUDA_INC"):
        return [Path(p) for p in paths.split(os.pathsep) if p]
    return [Path(p) for p in _project().cuda_include_dirs()]


def cxx() -> str:
    """The host compiler (GCC 12 or Clang 15, or later)."""
    return os.environ.get("CXX", "g++")


def cache_dir() -> Path:
    """Where compiled translations are kept; entries are named by a hash of their content."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "vllm-v100" / "sm70sim"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimError(
            f"the cache {path} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a folder "
            "that this user may write to"
        ) from None
    return path
