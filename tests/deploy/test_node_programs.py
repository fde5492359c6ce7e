"""The node programs (systemd/bin) as modules: what can be told without a booted host."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

BIN = Path(__file__).parents[2] / "systemd" / "bin"
sys.dont_write_bytecode = True


def program(name: str) -> ModuleType:
    """A program of systemd/bin as a module."""
    loader = SourceFileLoader(name.replace("-", "_"), str(BIN / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(BIN.iterdir()), ids=lambda path: path.name)
def test_program_is_executable_and_needs_only_the_standard_library(path: Path) -> None:
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/python3\n")
    imports = "import ast,sys; t=ast.parse(open(sys.argv[1]).read()); print(*sorted({"
    imports += "(n.names[0].name if isinstance(n, ast.Import) else n.module).split('.')[0] "
    imports += "for n in ast.walk(t) if isinstance(n, (ast.Import, ast.ImportFrom))}))"
    done = subprocess.run([sys.executable, "-c", imports, path], capture_output=True, text=True)
    foreign = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert foreign <= ({"vllm"} if path.name == "v100-serve" else set())


XID_LOG = """\
1000.1 node kernel: NVRM: Xid (PCI:0000:3b:00): 62, pid=1, name=old
2000.5 node kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=2, name=python, MMU fault
2001.5 node kernel: usb 1-1: new device
2002.5 node kernel: NVRM: Xid (PCI:0000:86:00): 79, GPU has fallen off the bus
"""


def test_xid_of_another_card_or_of_a_program_is_none_of_ours() -> None:
    faults = program("v100-xid").faults
    assert faults(XID_LOG, 1500, {"00000000:3B:00.0"}) == []


def test_xid_of_our_card_is_found() -> None:
    faults = program("v100-xid").faults
    assert "79, GPU has fallen" in faults(XID_LOG, 1500, {"00000000:86:00.0"})[0]
    assert "62, pid=1" in faults(XID_LOG, 500, {"00000000:3B:00.0"})[0]


def test_unknown_cards_count_as_ours() -> None:
    """A driver that does not answer after a fault must not hide the fault."""
    assert len(program("v100-xid").faults(XID_LOG, 1500, set())) == 1


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, Path]:
    """A cache with two compiled files, and a release folder."""
    folder, release = tmp_path / "cache", tmp_path / "release"
    (folder / "triton" / "ab").mkdir(parents=True)
    release.mkdir()
    (folder / "triton" / "ab" / "kernel.cubin").write_bytes(b"cubin")
    (folder / "build.so").write_bytes(b"elf")
    return folder, release


def test_recording_twice_changes_nothing(cache: tuple[Path, Path]) -> None:
    record = program("v100-caches").record
    assert record(*cache)
    assert not record(*cache)
    assert set(json.loads((cache[1] / "compiled.json").read_text())["files"]) == {
        "build.so",
        "triton/ab/kernel.cubin",
    }


def test_compiled_artefacts_travel_and_a_changed_one_does_not(
    cache: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = program("v100-caches")
    me = type("Owner", (), {"pw_uid": os.getuid(), "pw_gid": os.getgid()})
    monkeypatch.setattr(caches.pwd, "getpwnam", lambda _name: me)
    archive, other = tmp_path / "compiled.tar", tmp_path / "other"
    caches.record(*cache)
    caches.pack(*cache, archive)
    assert caches.unpack(other, cache[1], archive)
    assert (other / "triton" / "ab" / "kernel.cubin").read_bytes() == b"cubin"
    assert not caches.unpack(other, cache[1], archive)
    (cache[0] / "build.so").write_bytes(b"changed")
    with pytest.raises(SystemExit, match="is not as recorded"):
        caches.pack(*cache, archive)


def test_archive_that_would_leave_the_cache_is_refused(
    cache: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = program("v100-caches")
    me = type("Owner", (), {"pw_uid": os.getuid(), "pw_gid": os.getgid()})
    monkeypatch.setattr(caches.pwd, "getpwnam", lambda _name: me)
    index = tmp_path / "compiled.json"
    index.write_text(json.dumps({"files": {"../escaped": "0" * 64}}))
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.add(index, "compiled.json")
    with pytest.raises(SystemExit, match="would leave the cache"):
        caches.unpack(tmp_path / "other" / "deep", cache[1], tmp_path / "evil.tar")


def artifact(folder: Path) -> Path:
    """An artifact with one file."""
    folder.mkdir()
    (folder / "vllm-1-py3-none-any.whl").write_bytes(b"wheel")
    digest = program("v100-release").sha256(folder / "vllm-1-py3-none-any.whl")
    manifest = {"files": {"vllm-1-py3-none-any.whl": {"sha256": digest, "bytes": 5}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_corrupt_or_exchanged_artifact_is_refused(tmp_path: Path) -> None:
    release, folder = program("v100-release"), artifact(tmp_path / "a")
    digest = release.sha256(folder / "manifest.json")
    assert release.verify(folder, digest)["files"]
    with pytest.raises(SystemExit, match="has another hash"):
        release.verify(folder, "0" * 64)
    (folder / "vllm-1-py3-none-any.whl").write_bytes(b"wheeL")
    with pytest.raises(SystemExit, match="is corrupt"):
        release.verify(folder, digest)
    (folder / "vllm-1-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="is missing"):
        release.verify(folder, digest)


def test_flavour_is_read_from_the_wheels_version() -> None:
    flavour_of = program("v100-release").flavour_of
    assert flavour_of("vllm-0.19.1+v100.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl") == "cpu"
    assert flavour_of("vllm-0.19.1+v100.1-cp38-abi3-manylinux_2_31_x86_64.whl") == "cuda"


def test_links_move_forward_and_a_failed_release_is_forgotten(tmp_path: Path) -> None:
    release = program("v100-release")

    def links() -> list[str]:
        names = ("current", "previous", "before")
        return [os.readlink(tmp_path / n) if (tmp_path / n).is_symlink() else "" for n in names]

    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    release.link("one", tmp_path / "current")
    release.remember(tmp_path, back=False)
    release.link("two", tmp_path / "current")
    assert links() == ["two", "one", ""]
    release.remember(tmp_path, back=False)
    release.link("three", tmp_path / "current")
    assert links() == ["three", "two", "one"]
    release.remember(tmp_path, back=True)  # three failed
    release.link("two", tmp_path / "current")
    assert links() == ["two", "one", ""]


def test_preflight_names_the_missing_tool_and_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    faults = list(program("v100-preflight").check_tools({"tools": ["ninja", "c++"]}, False))
    assert [wrong for wrong, _ in faults] == [
        f"ninja is not on PATH={tmp_path}",
        f"c++ is not on PATH={tmp_path}",
    ]
    assert all(mend for _, mend in faults)


def test_driver_versions_compare_as_numbers() -> None:
    version = program("v100-preflight").version
    assert version("570.9") < version("570.26") < version("570.124.06")


def test_ray_commands_join_the_head() -> None:
    environment = {
        "V100_RAY_VENV": "/opt/vllm-v100/venvs/1.0-abc-cuda",
        "RAY_ADDRESS": "192.0.2.11:6379",
        "VLLM_HOST_IP": "192.0.2.12",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    command = program("v100-ray").command
    assert {"--head", "--port=6379", "--num-gpus=4"} <= set(command("head", environment))
    worker = command("worker", environment)
    assert worker[0] == "/opt/vllm-v100/venvs/1.0-abc-cuda/bin/ray"
    assert "--address=192.0.2.11:6379" in worker
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        command("worker", environment | {"RAY_ADDRESS": "192.0.2.11"})


def test_check_that_cannot_look_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight = program("v100-preflight")
    (tmp_path / "launch.json").write_text("{}")

    def broken(_launch: dict, _staged: bool) -> list:
        raise PermissionError("no")

    monkeypatch.setattr(preflight, "RELEASE", tmp_path)
    monkeypatch.setattr(preflight, "CHECKS", {"broken": broken})
    monkeypatch.setattr(sys, "argv", ["v100-preflight", "--staged"])
    assert preflight.main() == 78
    assert "the check itself failed: PermissionError" in capsys.readouterr().err
