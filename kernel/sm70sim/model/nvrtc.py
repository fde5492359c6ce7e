"""Compiles CUDA C++ to sm_70 cubins with NVRTC, for micro-kernels and tests."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os

from .. import toolchain
from ..errors import SimError


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(toolchain.nvrtc()))


def compile_cubin(source: str, options: tuple[str, ...] = ()) -> bytes:
    """The sm_70 cubin of a source text; cached.  Raises SimError with the compiler's log."""
    flags = ["--gpu-architecture=sm_70", "--std=c++17", "-default-device", "-w", *options]
    key = hashlib.sha256("\0".join([source, str(toolchain.nvrtc()), *flags]).encode())
    path = toolchain.cache_dir() / f"nvrtc-{key.hexdigest()[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    flags += [f"-I{p}" for p in toolchain.cuda_include_dirs()]
    lib, program = _nvrtc(), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    failed = lib.nvrtcCompileProgram(program, len(flags), array)

    def fetch(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    if failed:
        raise SimError("NVRTC: " + fetch("ProgramLog").decode(errors="replace")[:4000])
    cubin = fetch("CUBIN")
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(cubin)
    os.replace(partial, path)
    return cubin
