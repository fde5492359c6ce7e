"""Results are bound to a release: the served tree, the log and the manifest must agree."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from v100_gate import identity
from v100_gate.errors import ProfileError
from v100_gate.schema import UrlArm
from v100_gate.servicelog import LogFacts

FILES = {"vllm/__init__.py": b"x = 1\n", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"\x7fELF"}
WHEEL = "vllm-0.19.1+v100.1-cp38-abi3-manylinux_2_31_x86_64.whl"


@pytest.fixture
def release(tmp_path: Path) -> UrlArm:
    """A release with one wheel, and its files as a served tree."""
    rows = []
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
        rows.append("vllm/__pycache__/a.cpython-311.pyc,sha256=AAAA,1")
        archive.writestr("vllm-0.19.1.dist-info/RECORD", "\n".join(rows))
    for name, data in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest = {
        "release": "0.19.1+v100.1",
        "source_sha256": "5" * 64,
        "library": {"sha256": "1" * 64},
        "files": {WHEEL: {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return UrlArm(
        kind="url",
        url="http://x",
        model="m",
        manifest=tmp_path / "manifest.json",
        tree=tmp_path / "site" / "vllm",
    )


def test_the_releases_tree_is_recognised(release: UrlArm) -> None:
    found = identity.identify(release)
    assert found.problems == []
    assert found.verified == [f"served tree = {WHEEL}"]
    assert found.release == "0.19.1+v100.1"


def test_byte_code_does_not_count(release: UrlArm) -> None:
    cache = release.tree / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"1")
    assert identity.identify(release).problems == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: (tree / "__init__.py").write_text("x = 2\n"), "__init__.py: served"),
        (lambda tree: (tree / "__init__.py").unlink(), "in the release, not in the served tree"),
        (lambda tree: (tree / "extra.py").write_text(""), "in the served tree, not in the release"),
    ],
    ids=["changed", "missing", "added"],
)
def test_another_tree_is_named(release: UrlArm, change, words: str) -> None:
    change(release.tree)
    assert words in identity.identify(release).problems[0]


def test_a_wheel_that_is_not_the_manifests_is_named(release: UrlArm) -> None:
    wheel = release.manifest.parent / WHEEL
    wheel.write_bytes(wheel.read_bytes() + b" ")
    assert "its hash is not the manifest's" in identity.identify(release).problems[0]


def test_the_log_is_held_to_the_manifest(release: UrlArm) -> None:
    good = LogFacts(library_sha256=["1" * 64], source_sha256=["5" * 64])
    found = identity.from_log(identity.identify(release), good)
    assert found.problems == []
    assert "library hash in the log" in found.verified
    bad = LogFacts(library_sha256=["1" * 64, "9" * 64])
    found = identity.from_log(identity.identify(release), bad)
    assert "reports library 999999999999" in found.problems[0]


def test_a_manifest_that_is_not_there_is_an_error(release: UrlArm) -> None:
    release.manifest = Path("/nowhere/manifest.json")
    with pytest.raises(ProfileError, match="manifest /nowhere"):
        identity.identify(release)
