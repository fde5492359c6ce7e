"""Fetching wheels: what an operator meets when a hash, the network or the disk is wrong."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from v100_build import wheels
from v100_build.errors import BuildError


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wheels.Pin:
    """A cache with one good wheel in it, and its pin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = wheels.wheel_cache() / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "x = 1\n")
        archive.writestr("tiny/big.so", "binary")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pin = wheels.Pin("tiny", "1", path.name, digest, "a test")
    monkeypatch.setattr(wheels, "pins", lambda: {"tiny": pin})
    return pin


def test_good_wheel_is_taken_from_the_cache(tiny: wheels.Pin) -> None:
    said: list[str] = []
    assert wheels.fetch("tiny", said.append).name == tiny.file
    assert said == []  # nothing was downloaded


def test_corrupted_wheel_is_refused_and_kept(tiny: wheels.Pin) -> None:
    path = wheels.wheel_cache() / tiny.file
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(BuildError) as caught:
        wheels.fetch("tiny")
    assert str(path) in str(caught.value)
    assert tiny.sha256 in str(caught.value)
    assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
    assert "delete" in caught.value.remedy
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("place", ["a file", "no such device"])
def test_a_cache_that_cannot_be_made_names_the_variable(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place == "a file" else "/proc/x")
    with pytest.raises(BuildError, match="cannot be made") as caught:
        wheels.wheel_cache()
    assert "XDG_CACHE_HOME" in caught.value.remedy


def test_unpacks_only_what_is_asked_for(tiny: wheels.Pin) -> None:
    folder = wheels.unpacked("tiny", lambda m: not m.endswith(".so"), "python")
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["__init__.py"]


def test_no_network_says_what_to_do(tiny: wheels.Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheels.wheel_cache() / tiny.file).unlink()
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/", "RETRIES": "0", "TIMEOUT": "2"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "CONFIG_FILE"):
        monkeypatch.setenv(f"PIP_{name}", "/dev/null" if name == "CONFIG_FILE" else "")
    with pytest.raises(BuildError) as caught:
        wheels.fetch("tiny")
    assert "tiny==1" in caught.value.what
    assert "network" in caught.value.remedy and tiny.file in caught.value.remedy
    assert list(wheels.wheel_cache().glob("*.whl")) == []


def test_full_disk_is_refused_before_anything_is_written(
    tiny: wheels.Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))
    with pytest.raises(BuildError, match="GiB free"):
        wheels.unpacked("tiny")
    assert not list((wheels.cache_dir() / "unpacked").glob("tiny*"))
