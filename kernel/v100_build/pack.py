"""Packs a stock wheel, the patch series and our extension into one of our wheels.

Members that stay as they are keep the compressed bytes of the stock wheel: 700 MB of libraries are
neither unpacked nor compressed again, and the output depends on nothing but its inputs.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from v100_patches import AppliedPatch, apply_series

from . import wheels
from .errors import BuildError
from .flavours import UPSTREAM_VERSION, Flavour
from .library import LIBRARY_NAME
from .paths import KERNEL, PATCH_SERIES

FA_FOLDER = "vllm/vllm_flash_attn"
WRAPPER = KERNEL / "python" / "sm70_attention"
EPOCH = (2020, 1, 1, 0, 0, 0)  # every member of ours; stock members keep their own time


@dataclass(frozen=True)
class PackedWheel:
    """A wheel that was written, and the patches inside it."""

    path: Path
    flavour: Flavour
    patches: list[AppliedPatch]


def pack(
    flavour: Flavour, library: Path | None, release_json: str, out: Path, stock: Path | None = None
) -> PackedWheel:
    """Writes the wheel of ``flavour`` into the folder ``out``.

    Args:
        flavour: which one.
        library: our extension; None for the CPU flavour, which holds none.
        release_json: what the wrapper is told about the release it belongs to.
        out: folder of the release.
        stock: the stock wheel; fetched by its pin when None.

    Raises:
        BuildError: the stock wheel is not the pinned one, or lacks what we replace.
        v100_patches.PatchToolError: a patch does not apply.
    """
    stock = stock or wheels.fetch(flavour.stock)
    path = out / flavour.wheel_name
    wheels.require_space(out, 2 * stock.stat().st_size)
    scratch = Path(tempfile.mkdtemp(prefix="v100-pack-"))
    try:
        tree = scratch / "tree"
        # Byte code may have been written there by an import; it is not the wheel's.
        shutil.copytree(
            wheels.unpacked_tree(flavour.name) / "vllm",
            tree / "vllm",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        patches = apply_series(tree, flavour.name, PATCH_SERIES)
        ours = _our_members(flavour, library, release_json)
        with zipfile.ZipFile(stock) as source:
            _check_members(source, flavour)
            with zipfile.ZipFile(scratch / "wheel", "w") as target:
                _write(source, target, flavour, tree, ours)
        os.replace(shutil.move(scratch / "wheel", path.with_suffix(".part")), path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return PackedWheel(path, flavour, patches)


def _our_members(flavour: Flavour, library: Path | None, release_json: str) -> dict[str, bytes]:
    """Members that no patch makes: the extension and the wrapper that imports it."""
    members = {
        f"{FA_FOLDER}/sm70_attention/{path.relative_to(WRAPPER).as_posix()}": path.read_bytes()
        for path in sorted(WRAPPER.rglob("*.py"))
    }
    members[f"{FA_FOLDER}/sm70_attention/release.json"] = release_json.encode()
    if library is not None:
        members[f"{FA_FOLDER}/{LIBRARY_NAME}"] = library.read_bytes()
    elif flavour.name == "cuda":
        raise ValueError("the CUDA flavour needs the extension")
    return members


def _check_members(source: zipfile.ZipFile, flavour: Flavour) -> None:
    names = set(source.namelist())
    if missing := [name for name in flavour.dropped if name not in names]:
        raise BuildError(
            f"the stock {flavour.stock} wheel has no {missing}, which we leave out",
            "correct the `dropped` table in v100_build/flavours.py",
        )


def _write(
    source: zipfile.ZipFile,
    target: zipfile.ZipFile,
    flavour: Flavour,
    tree: Path,
    ours: dict[str, bytes],
) -> None:
    """Writes every member: stock ones as they are, changed and new ones compressed anew."""
    stock_info = f"{flavour.stock.replace('-', '_')}-{UPSTREAM_VERSION}.dist-info"
    our_info = f"vllm-{flavour.version}.dist-info"
    known = _record_hashes(source, f"{stock_info}/RECORD")
    record: list[tuple[str, str, str]] = []

    def add(name: str, data: bytes, mode: int = 0o644) -> None:
        info = zipfile.ZipInfo(name, EPOCH)
        info.external_attr = (0o100000 | mode) << 16
        info.create_system = 3
        target.writestr(info, data, zipfile.ZIP_DEFLATED, 6)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append((name, f"sha256={digest}", str(len(data))))

    stock_names = set()
    for info in sorted(source.infolist(), key=lambda info: info.filename):
        name = info.filename
        stock_names.add(name)
        if info.is_dir() or name in flavour.dropped or name in ours:
            continue
        if name.startswith(f"{stock_info}/"):
            renamed = name.replace(stock_info, our_info, 1)
            if not name.endswith("/RECORD"):
                add(renamed, _metadata(name, source.read(info), flavour))
        elif name.endswith(".so"):
            _copy_raw(source, target, info)
            record.append((name, *known[name]))
        else:
            path = tree / name
            if not path.exists():  # a patch removed it
                continue
            data = path.read_bytes()
            if name == "vllm/_version.py":
                data = _version_file(data, flavour)
            if _same(known[name], data):
                _copy_raw(source, target, info)
                record.append((name, *known[name]))
            else:
                add(name, data)
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        name = path.relative_to(tree).as_posix()
        if name not in stock_names:  # a patch added it
            if name in ours:
                raise BuildError(
                    f"a patch writes {name}, which the build writes too",
                    "keep the wrapper in kernel/python and the rest in the patches",
                )
            add(name, path.read_bytes())
    for name, data in sorted(ours.items()):
        add(name, data, 0o755 if name.endswith(".so") else 0o644)

    text = io.StringIO()
    rows = [*sorted(record), (f"{our_info}/RECORD", "", "")]
    csv.writer(text, lineterminator="\n").writerows(rows)
    info = zipfile.ZipInfo(f"{our_info}/RECORD", EPOCH)
    info.external_attr = 0o100644 << 16
    info.create_system = 3
    target.writestr(info, text.getvalue(), zipfile.ZIP_DEFLATED, 6)


def _record_hashes(source: zipfile.ZipFile, name: str) -> dict[str, tuple[str, str]]:
    """(hash, size) of every member by the stock RECORD, which the wheel's own pin vouches for."""
    rows = csv.reader(io.StringIO(source.read(name).decode()))
    return {row[0]: (row[1], row[2]) for row in rows}


def _same(known: tuple[str, str], data: bytes) -> bool:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return known == (f"sha256={digest}", str(len(data)))


def _copy_raw(source: zipfile.ZipFile, target: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Copies a member's compressed bytes as they are.

    zipfile has no call for this; the header is written by ZipInfo and the bytes follow it.
    """
    reader, writer = source.fp, target.fp
    assert reader is not None and writer is not None
    reader.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", reader.read(4))
    reader.seek(name_length + extra_length, os.SEEK_CUR)
    copy = zipfile.ZipInfo(info.filename, info.date_time)
    copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
    copy.create_system, copy.CRC = info.create_system, info.CRC
    copy.compress_size, copy.file_size = info.compress_size, info.file_size
    copy.header_offset = writer.tell()
    writer.write(copy.FileHeader(zip64=False))
    left = info.compress_size
    while left:
        block = reader.read(min(left, 1 << 22))
        writer.write(block)
        left -= len(block)
    target.filelist.append(copy)
    target.NameToInfo[copy.filename] = copy
    target.start_dir = writer.tell()


def _metadata(name: str, data: bytes, flavour: Flavour) -> bytes:
    """METADATA with our name, version and, for the CPU flavour, the plain PyTorch."""
    if not name.endswith("/METADATA"):
        return data
    head, _, body = data.decode().partition("\n\n")
    head = re.sub(r"(?m)^Name: .*$", "Name: vllm", head, count=1)
    head = re.sub(r"(?m)^Version: .*$", f"Version: {flavour.version}", head, count=1)
    # The stock CPU wheel names a PyTorch build that PyPI does not serve.
    head = re.sub(r"(?m)^(Requires-Dist: torch\w*==[0-9.]+)\+cpu\b", r"\1", head)
    return f"{head}\n\n{body}".encode()


def _version_file(data: bytes, flavour: Flavour) -> bytes:
    """``vllm/_version.py`` that reports the version of the wheel."""
    text = data.decode()
    text = re.sub(rf"'{re.escape(UPSTREAM_VERSION)}'", f"'{flavour.version}'", text)
    numbers = ", ".join(UPSTREAM_VERSION.split("."))
    return re.sub(rf"\({numbers}\)", f"({numbers}, '{flavour.local}')", text).encode()
