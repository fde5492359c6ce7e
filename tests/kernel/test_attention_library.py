"""The wrapper's library: what is stale or foreign is refused before the first launch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sm70_attention import dispatch, library

KERNEL = Path(__file__).resolve().parents[2] / "kernel"
GOOD = {
    "abi": library.ABI,
    "source_sha256": "a" * 64,
    "archs": [70],
    "long_batch_capacity": dispatch.LONG_MAX_BATCH,
    "kernels": ["paged_d256_e4m3"],
}


def make_library(folder: Path, info: dict | str | None) -> Path:
    """A shared library that reports `info`; without vllm_sm70_info where it is None."""
    text = info if isinstance(info, str) else json.dumps(info)
    body = "int unrelated;"
    if info is not None:
        body = f"const char* vllm_sm70_info(void) {{ return {json.dumps(text)}; }}"
    (folder / "fake.c").write_text(body)
    path = folder / library.LIBRARY_NAME
    subprocess.run(["gcc", "-shared", "-fPIC", str(folder / "fake.c"), "-o", str(path)], check=True)
    return path


def test_reads_what_a_library_says(tmp_path: Path) -> None:
    info = library.read_info(make_library(tmp_path, GOOD))
    assert (info.abi, info.archs, info.kernels) == (1, (70,), frozenset({"paged_d256_e4m3"}))
    library.check_info(info, "a" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"abi": 7}, "has ABI 7, this wrapper needs 1"),
        ({"source_sha256": "b" * 64}, "was built from kernel sources bbbbbbbbbbbbbbbb"),
    ],
    ids=["ABI", "sources"],
)
def test_refuses_another_release(tmp_path: Path, change: dict, message: str) -> None:
    info = library.read_info(make_library(tmp_path, GOOD | change))
    with pytest.raises(library.LibraryError, match=re.escape(message)):
        library.check_info(info, "a" * 64)


@pytest.mark.parametrize(("capacity", "requests"), [(0, 0), (4, 4), (16, 16), (32, 16)])
def test_another_capacity_bounds_the_long_route_and_is_no_refusal(
    tmp_path: Path, capacity: int, requests: int
) -> None:
    info = library.read_info(make_library(tmp_path, GOOD | {"long_batch_capacity": capacity}))
    library.check_info(info, "a" * 64)
    reported = dispatch.Library(info.abi, frozenset(info.archs), info.kernels, capacity)
    geometry = dispatch.Geometry(6, 1, 256, "fp8_e4m3")
    taken = [
        n
        for n in range(1, 40)
        if dispatch.decide(geometry, [8] * n, reported).route is dispatch.Route.LONG
    ]
    assert taken == list(range(1, requests + 1))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "is not an SM70 attention library"),
        ("not JSON", "does not say what it is"),
        ({"abi": 1}, "does not say what it is"),
    ],
    ids=["the stock library", "not JSON", "fields missing"],
)
def test_refuses_a_foreign_library(tmp_path: Path, info: dict | str | None, message: str) -> None:
    with pytest.raises(library.LibraryError, match=message):
        library.read_info(make_library(tmp_path, info))


def test_a_missing_or_broken_file_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(library.LibraryError, match=r"there is no .* install the vllm wheel"):
        library.read_info(tmp_path / "none.so")
    (tmp_path / "broken.so").write_text("not an ELF file")
    with pytest.raises(library.LibraryError, match="does not load"):
        library.read_info(tmp_path / "broken.so")


def test_load_refuses_a_library_of_other_sources(tmp_path: Path) -> None:
    """In a source tree the wrapper compares with the tree itself."""
    with pytest.raises(library.LibraryError, match="was built from kernel sources"):
        library.load(make_library(tmp_path, GOOD))
    assert library.loaded() is None


def test_the_source_hash_is_the_build_s(tmp_path: Path) -> None:
    from v100_build.cubins import source_hash

    assert library.expected_source_hash() == source_hash()
    copy = tmp_path / "kernel"
    shutil.copytree(KERNEL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert library.source_tree_hash(copy) == source_hash()
    with (copy / "src" / "paged.cu").open("a") as file:
        file.write("\n")
    assert library.source_tree_hash(copy) != source_hash()


def test_abi_number_is_the_extension_s() -> None:
    from v100_build.library import abi_constants

    numbers = abi_constants()
    assert numbers["kAbi"] == library.ABI
    assert numbers["kLongBatchCapacity"] == dispatch.LONG_MAX_BATCH


def test_routes_table_is_made_of_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    from sm70_attention import dispatch, routes

    routes.main(["--markdown"])
    table = capsys.readouterr().out
    for route in dispatch.Route:
        assert f"| {route.value} |" in table
    for kv in dispatch.KV_DTYPES:
        assert kv in table
