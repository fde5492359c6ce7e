"""A release: the same bytes from two folders, wheels that are right, and what verify finds."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from v100_build import manifest, release
from v100_build.flavours import FLAVOURS
from v100_build.library import LIBRARY_NAME
from v100_build.paths import REPO

INPUTS = ("patches", "kernel", "requirements")


def _checkout(folder: Path, source: Path = REPO) -> Path:
    """A copy of what a build reads, in another folder."""
    for name in INPUTS:
        shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _build(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(checkout / p) for p in ("patches", "kernel"))
    }
    return subprocess.run(
        [sys.executable, "-m", "v100_build", *arguments],
        env=env, cwd=checkout, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release built in a folder of its own, the one that tests may damage copies of."""
    checkout = _checkout(tmp_path_factory.mktemp("first"))
    run = _build(checkout, "build")
    assert run.returncode == 0, run.stderr
    return checkout / "dist" / release.release_name(False)


@pytest.mark.slow
def test_two_folders_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "elsewhere" / "deeper", built.parents[1])
    run = _build(checkout, "build")
    assert run.returncode == 0, run.stderr
    other = checkout / "dist" / built.name
    assert (other / manifest.MANIFEST).read_bytes() == (built / manifest.MANIFEST).read_bytes()
    assert manifest.verify_files(other) == []


@pytest.mark.parametrize("text", ["{", '{"schema": 99}', "[]"])
def test_a_damaged_manifest_is_no_release_that_is_up_to_date(text: str, tmp_path: Path) -> None:
    """A build then puts a sound one in its place."""
    (tmp_path / manifest.MANIFEST).write_text(text)
    assert not release.up_to_date(tmp_path, {}, {})
    assert not release.up_to_date(tmp_path / "nowhere", {}, {})


def test_second_build_changes_nothing(built: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in built.iterdir()}
    run = _build(built.parents[1], "build")
    assert "up to date" in run.stdout
    assert {p.name: p.stat().st_mtime_ns for p in built.iterdir()} == before


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS)
def test_record_lists_every_member_with_its_hash(built: Path, flavour) -> None:
    with zipfile.ZipFile(built / flavour.wheel_name) as wheel:
        name = f"vllm-{flavour.version}.dist-info/RECORD"
        rows = {r[0]: r[1:] for r in csv.reader(io.StringIO(wheel.read(name).decode()))}
        assert set(rows) == set(wheel.namelist())
        assert rows.pop(name) == ["", ""]
        for member, (digest, size) in rows.items():
            data = wheel.read(member)  # zipfile checks the CRC
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data))), member


def test_cuda_wheel_carries_our_library_and_drops_what_has_no_v100_code(built: Path) -> None:
    flavour = FLAVOURS["cuda"]
    with zipfile.ZipFile(built / flavour.wheel_name) as wheel:
        members = set(wheel.namelist())
        ours = wheel.read(f"vllm/vllm_flash_attn/{LIBRARY_NAME}")
        text = wheel.read(f"vllm-{flavour.version}.dist-info/METADATA").decode()
    assert ours == (built / LIBRARY_NAME).read_bytes()
    assert members.isdisjoint(flavour.dropped)
    assert f"\nName: vllm\nVersion: {flavour.version}\n" in text


def test_cpu_patches_stay_out_of_the_cuda_wheel(built: Path) -> None:
    with zipfile.ZipFile(built / FLAVOURS["cuda"].wheel_name) as wheel:
        cuda = set(wheel.namelist())
    groups = {p["group"] for p in manifest.read(built)["inputs"]["patches"].values()}
    assert "core" in groups
    assert not [name for name in cuda if "cpu_fallback" in name]


def test_verify_names_a_changed_file(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    with (copy / LIBRARY_NAME).open("ab") as f:
        f.write(b"x")
    (copy / "stray.txt").write_text("?")
    run = _build(built.parents[1], "verify", "--files-only", str(copy))
    assert run.returncode == 1
    assert LIBRARY_NAME in run.stderr and "stray.txt" in run.stderr
    assert "2 differences" in run.stderr


def test_verify_names_a_source_edited_after_the_build(built: Path) -> None:
    source = built.parents[1] / "kernel" / "csrc" / "driver.cpp"
    original = source.read_text()
    source.write_text(original + "\n// edited\n")
    try:
        run = _build(built.parents[1], "verify")
    finally:
        source.write_text(original)
    assert run.returncode == 1
    assert "kernel_sources: csrc/driver.cpp" in run.stderr


def test_a_patch_with_another_context_line_stops_the_build(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout")
    patch = next(
        p for p in sorted((checkout / "patches/v0.19.1").glob("*.patch")) if _edit_context(p)
    )
    run = _build(checkout, "build")
    assert run.returncode == 1
    assert patch.name in run.stderr and "hunk" in run.stderr
    assert not (checkout / "dist" / release.release_name(False)).exists()


def _edit_context(patch: Path) -> bool:
    """Changes one context line of a patch; says whether it had one."""
    lines = patch.read_text().split("\n")
    start = next((n for n, line in enumerate(lines) if line.startswith("@@")), None)
    if start is None:
        return False
    for n in range(start + 1, len(lines)):
        if lines[n].startswith(" ") and lines[n].strip():
            lines[n] += "  # not so upstream"
            patch.write_text("\n".join(lines))
            return True
    return False


IMPORT = """
import ctypes, json, sys, torch
torch.ops.load_library(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
library.vllm_sm70_info.restype = ctypes.c_char_p
info = json.loads(library.vllm_sm70_info())
print(json.dumps({"info": info, "ops": [str(getattr(torch.ops._vllm_fa2_C, name).default._schema)
                                        for name in dir(torch.ops._vllm_fa2_C)
                                        if name.startswith("sm70_")]}))
for op in sys.argv[2:]:
    getattr(torch.ops._vllm_fa2_C, op)
try:
    torch.ops._vllm_fa2_C.sm70_preload(0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.serve
def test_extension_imports_and_registers_its_ops_with_no_gpu(
    built: Path, requirements_python: Callable[[], Path]
) -> None:
    run = subprocess.run(
        [requirements_python(), "-c", IMPORT, built / LIBRARY_NAME, "sm70_paged_attention",
         "sm70_long_attention", "sm70_prefill_attention"],
        capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert manifest.read(built)["source_sha256"] in run.stdout
    assert "NVIDIA GPU" in run.stdout or "device" in run.stdout
