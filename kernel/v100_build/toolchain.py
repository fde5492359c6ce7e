"""The one place that knows where the compiler, its headers and the binary tools are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import wheels
from .errors import BuildError


@cache
def nvrtc() -> Path:
    """NVRTC 12.8's shared library (its builtins library lies beside it)."""
    root = wheels.unpacked("nvidia-cuda-nvrtc-cu12")
    return root / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"


@cache
def cuda_include_dirs() -> list[Path]:
    """Folders with cuda.h and cuda_fp16.h."""
    return [wheels.unpacked("nvidia-cuda-runtime-cu12") / "nvidia/cuda_runtime/include"]


@cache
def _binary_tools() -> Path:
    prefix = "triton/backends/nvidia/bin/"
    root = wheels.unpacked("triton", lambda m: m.startswith(prefix), "bin")
    for tool in (root / prefix).iterdir():
        tool.chmod(0o755)
    return root / prefix


def cuobjdump() -> Path:
    """CUDA 12.8's cuobjdump; CUDA 13's refuses sm_70."""
    return _binary_tools() / "cuobjdump"


def nvdisasm() -> Path:
    """CUDA 12.8's nvdisasm; CUDA 13's refuses sm_70."""
    return _binary_tools() / "nvdisasm"


def ptxas() -> Path:
    """CUDA 12.8's ptxas."""
    return _binary_tools() / "ptxas"


@cache
def torch_root() -> Path:
    """Headers and the libraries to link against, of the pinned PyTorch wheel."""
    libs = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so")
    wanted = ("torch/include/torch/", "torch/include/c10/", *libs)
    return wheels.unpacked("torch", lambda m: m.startswith(wanted), "abi") / "torch"


@cache
def cxx() -> str:
    """The host compiler.

    Raises:
        BuildError: there is none.
    """
    found = shutil.which("g++")
    if not found:
        raise BuildError(
            "there is no C++ compiler (g++) on PATH",
            "install one: apt-get install g++ (Debian, Ubuntu)",
        )
    return found


@cache
def cmake() -> tuple[str, str]:
    """CMake and Ninja: the pinned ones of the project's environment."""
    found = []
    for tool in ("cmake", "ninja"):
        beside = Path(sys.executable).with_name(tool)
        path = str(beside) if beside.exists() else shutil.which(tool)
        if not path:
            raise BuildError(f"there is no {tool} on PATH", "run `make venv`, which installs it")
        found.append(path)
    return found[0], found[1]


@cache
def versions() -> dict[str, str]:
    """Versions of everything that compiles, for the manifest."""

    def first_line(*command: str) -> str:
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return next(line for line in out.splitlines() if line.strip())

    def release(tool: Path) -> str:
        out = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"V(\d+\.\d+\.\d+)", out)
        return match.group(1) if match else out.strip()

    return {
        "g++": first_line(cxx(), "--version"),
        "ld": first_line("ld", "--version"),
        "cmake": first_line(cmake()[0], "--version"),
        "ninja": first_line(cmake()[1], "--version"),
        "nvrtc": wheels.pin("nvidia-cuda-nvrtc-cu12").version,
        "cuobjdump": release(cuobjdump()),
        "torch": wheels.pin("torch").version,
    }
