"""Bundles: the same inputs give the same name everywhere, and any other input another one."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from v100_serving.bundle import BundleError, bundle

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from fake_release import fake_release, fake_wheelhouse  # noqa: E402

RENDERED = {"instance.conf": "[Service]\n", "api.conf": "", "api.cfg": "", "gate.json": "{}"}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return fake_release(tmp_path, fake_wheelhouse(tmp_path / "wheelhouse"), "1.0.0")


def make(release: Path, out: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "release": release,
        "profile_path": REPOSITORY / "tests" / "deploy" / "profiles" / "fake-tp4.yaml",
        "gpus": [0, 1, 2, 3],
        "port": 18000,
        "systemd": REPOSITORY / "systemd",
        "rendered": RENDERED,
        "out": out,
    }
    return bundle(**(arguments | changes))


def test_same_inputs_give_the_same_bytes(release: Path, tmp_path: Path) -> None:
    one, two = make(release, tmp_path / "a"), make(release, tmp_path / "b")
    assert one["id"] == two["id"]
    assert Path(one["archive"]).read_bytes() == Path(two["archive"]).read_bytes()


def test_every_input_changes_the_name(release: Path, tmp_path: Path) -> None:
    names = {
        make(release, tmp_path / "a")["id"],
        make(release, tmp_path / "a", port=18001)["id"],
        make(release, tmp_path / "a", gpus=[4, 5, 6, 7])["id"],
        make(release, tmp_path / "a", rendered=RENDERED | {"api.cfg": "x"})["id"],
    }
    (release / "serve-cuda.txt").write_text("another lock\n")
    manifest = json.loads((release / "manifest.json").read_text())
    manifest["release"] = "1.0.1"
    (release / "manifest.json").write_text(json.dumps(manifest))
    names.add(make(release, tmp_path / "a")["id"])
    assert len(names) == 5


def test_caches_are_shared_by_instances_of_the_same_release_and_profile(
    release: Path, tmp_path: Path
) -> None:
    one = make(release, tmp_path / "a")["launch"]["cache_key"]
    assert make(release, tmp_path / "a", port=18001)["launch"]["cache_key"] == one


def test_index_holds_the_hash_of_every_file(release: Path, tmp_path: Path) -> None:
    facts = make(release, tmp_path / "a")
    with tarfile.open(facts["archive"]) as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
        modes = {m.name: m.mode for m in tar.getmembers()}
    index = json.loads(files.pop("files.json"))
    assert index == {n: hashlib.sha256(d).hexdigest() for n, d in files.items()}
    assert {"launch.json", "profile.yaml", "units/vllm-v100@.service", "bin/v100-run"} <= set(index)
    assert modes["bin/v100-run"] == 0o755
    assert not any("test-key" in d.decode(errors="ignore") for d in files.values())


def test_folder_that_is_no_release_is_named(tmp_path: Path, release: Path) -> None:
    with pytest.raises(BundleError, match=r"holds no manifest\.json"):
        make(tmp_path, tmp_path / "a")
    (release / "vllm-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(BundleError, match=r"lacks files of its manifest: vllm-1\.0\.0"):
        make(release, tmp_path / "a")
