"""Compiles the kernels of ``kernel/kernels.toml`` to cubins with NVRTC, and reads their resources.

A cubin depends on the kernel sources, the defines, the architecture and NVRTC alone, so it is kept
in the shared cache under the hash of those.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import toolchain
from .errors import BuildError
from .locks import file_lock
from .paths import KERNEL, cache_dir, tree_hash

KERNEL_TABLE = KERNEL / "kernels.toml"
SM70 = 70
VALIDATION_ARCHS = (80, 90)
FLAGS = ("--std=c++17", "-default-device", "--ptxas-options=-v")


@dataclass(frozen=True)
class CubinSpec:
    """One row of ``kernel/kernels.toml``."""

    name: str
    source: str
    entries: tuple[str, ...]
    defines: dict[str, str] = field(default_factory=dict, hash=False)
    max_registers: int | None = None

    def options(self, arch: int) -> list[str]:
        """NVRTC's options for this cubin, without include folders."""
        options = [*FLAGS, f"--gpu-architecture=sm_{arch}"]
        options += [f"-D{key}={value}" for key, value in self.defines.items()]
        if self.max_registers:
            options.append(f"--maxrregcount={self.max_registers}")
        return options


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, in registers per thread and bytes."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def clean(self) -> bool:
        """Whether the kernel keeps everything in registers."""
        return not (self.stack or self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class BuiltCubin:
    """A compiled cubin: its spec, architecture, file and resources by entry point."""

    spec: CubinSpec
    arch: int
    path: Path
    resources: dict[str, Resources]

    @property
    def file_name(self) -> str:
        return f"{self.spec.name}.sm_{self.arch}.cubin"


def load_specs(table: Path = KERNEL_TABLE) -> list[CubinSpec]:
    """The cubins that the table lists.

    Raises:
        BuildError: a row with an unknown key, a missing source, or a name used twice.
    """
    rows = tomllib.loads(table.read_text()).get("cubin", [])
    known = {"name", "source", "entries", "defines", "max_registers"}
    specs: list[CubinSpec] = []
    for row in rows:
        label = f"{table.name}: cubin {row.get('name', '(no name)')!r}"
        if unknown := set(row) - known:
            raise BuildError(f"{label} has unknown keys {sorted(unknown)}", f"use {sorted(known)}")
        for key in ("name", "source", "entries"):
            if not row.get(key):
                raise BuildError(f"{label} has no {key}", f"add {key} to the row")
        if not (table.parent / row["source"]).is_file():
            raise BuildError(f"{label}: {row['source']} does not exist", "correct `source`")
        if any(s.name == row["name"] for s in specs):
            raise BuildError(f"{label} is listed twice", "give one of them another name")
        defines = {key: str(value) for key, value in row.get("defines", {}).items()}
        specs.append(
            CubinSpec(
                row["name"], row["source"], tuple(row["entries"]), defines, row.get("max_registers")
            )
        )
    return specs


def source_files(root: Path = KERNEL) -> list[Path]:
    """Every file that the machine code and the extension are made from."""
    files = [*_device_sources(root), *root.glob("csrc/*.cpp"), *root.glob("csrc/*.h")]
    return sorted([*files, root / "kernels.toml", root / "CMakeLists.txt"])


def source_hash(root: Path = KERNEL) -> str:
    """The hash that a library carries and that the wrapper and the evidence compare."""
    return tree_hash(root, source_files(root))


def _device_sources(root: Path) -> list[Path]:
    return [p for p in (root / "src").rglob("*") if p.suffix in (".cu", ".cuh", ".h")]


def included_files(source: Path, root: Path = KERNEL) -> set[Path]:
    """``source`` and every project file that it includes, directly or not.

    The project's own headers are included by quotes, relative to the file or to ``src/``.
    """
    found: set[Path] = set()
    todo = [source]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', path.read_text()):
            for folder in (path.parent, root / "src"):
                if (folder / name).is_file():
                    todo.append((folder / name).resolve())
                    break
    return found


class Nvrtc:
    """NVRTC through its C interface; one program at a time."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(toolchain.nvrtc()))

    def compile(self, source: Path, options: Iterable[str]) -> tuple[bytes, str]:
        """Compiles one file to a cubin; returns the ELF image and the compiler's log.

        Raises:
            BuildError: the source does not compile; the error holds the compiler's log.
        """
        lib, program = self.lib, ctypes.c_void_p()
        text = source.read_bytes()
        # The name is the one thing of the path that the compiler may record.
        lib.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
        encoded = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        failed = lib.nvrtcCompileProgram(program, len(encoded), array)
        log = self._bytes(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
        message = log.rstrip(b"\0").decode(errors="replace")
        if failed:
            lib.nvrtcDestroyProgram(ctypes.byref(program))
            raise BuildError(f"{source.name} does not compile:\n{message}", "correct the source")
        image = self._bytes(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return image, message

    def _bytes(self, program: ctypes.c_void_p, size_call: str, get_call: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.lib, size_call)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.lib, get_call)(program, buffer)
        return buffer.raw


def compile_cubin(spec: CubinSpec, arch: int, root: Path = KERNEL) -> BuiltCubin:
    """Compiles one cubin, or takes it from the cache.

    Raises:
        BuildError: it does not compile, or lacks an entry point that the table names.
    """
    options = spec.options(arch)
    root = root.resolve()
    key = hashlib.sha256(
        json.dumps(
            [
                tree_hash(root, included_files(root / spec.source, root)),
                spec.source, options, spec.entries,
                toolchain.wheels.pin("nvidia-cuda-nvrtc-cu12").sha256,
                toolchain.wheels.pin("nvidia-cuda-runtime-cu12").sha256,
            ]
        ).encode()
    ).hexdigest()  # fmt: skip
    folder = cache_dir() / "cubins"
    folder.mkdir(parents=True, exist_ok=True)
    image, notes = folder / f"{key}.cubin", folder / f"{key}.json"
    with file_lock(image):
        if not notes.exists():
            includes = [root / "src", *toolchain.cuda_include_dirs()]
            elf, log = Nvrtc().compile(
                root / spec.source, [*options, *(f"-I{path}" for path in includes)]
            )
            image.write_bytes(elf)
            found = read_resources(log, image)
            if missing := [entry for entry in spec.entries if entry not in found]:
                raise BuildError(
                    f"{spec.source} has no entry point {missing} for cubin {spec.name}; "
                    f"it has {sorted(found)}",
                    'name it in `entries`, or declare it `extern "C" __global__`',
                )
            notes.write_text(json.dumps({name: asdict(r) for name, r in found.items()}))
    resources = {name: Resources(**row) for name, row in json.loads(notes.read_text()).items()}
    return BuiltCubin(spec, arch, image, resources)


def read_resources(log: str, image: Path) -> dict[str, Resources]:
    """Registers, shared memory, stack and spills of every kernel of a cubin.

    Spills come from ptxas's log; registers, shared memory and stack from the cubin itself.
    """
    spills: dict[str, tuple[int, int]] = {}
    name = ""
    for line in log.splitlines():
        if match := re.search(r"Function properties for (\w+)", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills[name] = (int(match.group(1)), int(match.group(2)))
    out = subprocess.run(
        [toolchain.cuobjdump(), "-res-usage", str(image)], capture_output=True, text=True
    )
    text = out.stdout + out.stderr
    usage: dict[str, Resources] = {}
    for match in re.finditer(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text
    ):
        kernel, registers, stack, shared, local = match.groups()
        stores, loads = spills.get(kernel, (0, 0))
        usage[kernel] = Resources(
            int(registers), int(shared), int(stack) + int(local), stores, loads
        )
    return usage


def _compile(job: tuple[CubinSpec, int, Path]) -> BuiltCubin:
    return compile_cubin(*job)


def compile_all(
    archs: Iterable[int],
    say: Callable[[str], None] = lambda _: None,
    specs: list[CubinSpec] | None = None,
    root: Path = KERNEL,
    workers: int = 2,
) -> list[BuiltCubin]:
    """Compiles every cubin of the table for every architecture.

    Raises:
        BuildError: one does not compile, or an sm_70 kernel spills or uses local memory.
    """
    specs = load_specs(root / "kernels.toml") if specs is None else specs
    jobs = [(spec, arch, root) for spec in specs for arch in archs]
    # The wheels are unpacked before the workers start, so that they need not queue for it.
    toolchain.nvrtc(), toolchain.cuda_include_dirs(), toolchain.cuobjdump()
    built: list[BuiltCubin] = []
    with ProcessPoolExecutor(max_workers=workers) as pool:
        for n, cubin in enumerate(pool.map(_compile, jobs), 1):
            say(f"compiled {cubin.file_name} ({n}/{len(jobs)})")
            built.append(cubin)
    check_clean(built)
    return built


def check_clean(cubins: Iterable[BuiltCubin]) -> None:
    """Fails when an sm_70 kernel spills.

    Other architectures are for validation: there the Volta tensor instruction is emulated and
    takes registers that it does not take on a V100.
    """
    dirty = [
        f"{c.spec.name}/{name}: {r.stack} bytes of stack, {r.spill_stores} bytes of spill stores, "
        f"{r.spill_loads} bytes of spill loads"
        for c in cubins
        if c.arch == SM70
        for name, r in c.resources.items()
        if not r.clean
    ]
    if dirty:
        raise BuildError(
            "kernels that leave the registers on sm_70:\n    " + "\n    ".join(dirty),
            "make the tile smaller or shorten a live range; a spill is never shipped",
        )
