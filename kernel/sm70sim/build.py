"""Compiles translated kernels and the runtime, with a cache keyed by content."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

from . import toolchain
from .errors import SimError

RUNTIME = Path(__file__).parent / "runtime"
_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
)


def arch_flags() -> tuple[str, ...]:
    """SM70SIM_CXXFLAGS, else -march=native: faster code, the same results."""
    return tuple(os.environ.get("SM70SIM_CXXFLAGS", "-march=native").split())


@functools.cache
def _compiler_id(cxx: str, flags: tuple[str, ...]) -> str:
    """Version and, because of -march=native, the target macros of the compiler."""
    run = subprocess.run(
        [cxx, *flags, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True
    )
    if run.returncode:
        raise SimError(f"{cxx} does not work: {run.stderr[:2000]}")
    return hashlib.sha256(run.stdout.encode()).hexdigest()


def cached(name: str, sources: list[bytes], flags: list[str], make) -> Path:
    """The cached file for these sources and flags; make(path) writes it when it is missing."""
    cxx = toolchain.cxx()
    key = hashlib.sha256()
    for part in (*sources, " ".join(flags).encode(), _compiler_id(cxx, arch_flags()).encode()):
        key.update(len(part).to_bytes(8, "little") + part)
    path = toolchain.cache_dir() / f"{name}-{key.hexdigest()[:32]}"
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        make(partial)
        os.replace(partial, path)
    return path


def _compile(args: list[str], what: str) -> None:
    run = subprocess.run([toolchain.cxx(), *args], capture_output=True, text=True)
    if run.returncode:
        raise SimError(f"{toolchain.cxx()} failed on {what}:\n{run.stderr[:4000]}")


def _headers() -> list[bytes]:
    return [p.read_bytes() for p in sorted(RUNTIME.glob("*.h"))]


@functools.cache
def _runtime_object(name: str, flags: tuple[str, ...]) -> Path:
    source = RUNTIME / name
    args = ["-O2", *_COMMON, *flags]

    def make(out: Path) -> None:
        _compile([*args, "-c", str(source), "-o", str(out)], name)

    return cached(f"{source.stem}.o", [*_headers(), source.read_bytes()], args, make)


def kernel_library(source: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of one translated kernel; defines: for the runtime."""
    runtime = sorted(p.name for p in RUNTIME.glob("*.cpp"))
    objects = [_runtime_object(name, (*arch_flags(), *defines)) for name in runtime]
    args = ["-Og", *_COMMON, *arch_flags(), "-I", str(RUNTIME), "-shared", "-Wl,-Bsymbolic"]

    def make(out: Path) -> None:
        cpp = out.with_suffix(".cpp")
        cpp.write_text(source)
        try:
            _compile([*args, str(cpp), *map(str, objects), "-o", str(out)], str(cpp))
        finally:
            cpp.unlink()

    key = [source.encode(), *(o.name.encode() for o in objects), *_headers()]
    return ctypes.CDLL(str(cached("kernel.so", key, args, make)))


def plain_library(folder: Path) -> ctypes.CDLL:
    """A shared library of the C++ sources of a folder (the cycle model)."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".h", ".cpp"))
    sources = [str(p) for p in files if p.suffix == ".cpp"]
    args = ["-O2", *_COMMON, *arch_flags(), "-shared"]

    def make(out: Path) -> None:
        _compile([*args, *sources, "-o", str(out)], folder.name)

    return ctypes.CDLL(
        str(cached(f"{folder.name}.so", [p.read_bytes() for p in files], args, make))
    )


def host_library(text: str, include: Path) -> ctypes.CDLL:
    """A shared library of a C++ text that includes headers of a folder."""
    headers = [p.read_bytes() for p in sorted(include.glob("*.h"))]
    args = ["-O1", *_COMMON, f"-I{include}", "-shared"]

    def make(out: Path) -> None:
        cpp = out.with_suffix(".cpp")
        cpp.write_text(text)
        try:
            _compile([*args, str(cpp), "-o", str(out)], "functions of the host launcher")
        finally:
            cpp.unlink()

    return ctypes.CDLL(str(cached("host.so", [text.encode(), *headers], args[:-2], make)))
