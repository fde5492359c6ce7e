"""Results are bound to a release: the served tree, the log and the manifest must agree."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from support import profile, put_together, start, wave
from v100_gate import identity
from v100_gate.checks import CHECKS
from v100_gate.errors import ProfileError
from v100_gate.schema import CheckPolicy, UrlArm
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


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"version": "0.19.1+v100.1"}', None),
        ('{"version": "0.19.1"}', "the service calls itself 0.19.1, the manifest's release is"),
        ("<html>", None),
    ],
)
def test_the_version_is_held_to_the_manifest(
    release: UrlArm, answer: str, words: str | None
) -> None:
    found = identity.from_version(identity.identify(release), answer)
    assert (words in found.problems[0]) if words else not found.problems
    # A name is no hash.
    release.tree = None
    assert identity.from_version(identity.identify(release), answer).verified == []


def test_a_flavours_wheel_has_a_version_of_its_own(release: UrlArm) -> None:
    """One release, two wheels: the version must be that of the wheel whose tree is served."""
    manifest = json.loads(release.manifest.read_text())
    manifest["files"]["vllm-0.19.1+v100.1.cpu-cp38-abi3-x.whl"] = {"sha256": "0" * 64}
    release.manifest.write_text(json.dumps(manifest))
    release.tree = None
    found = identity.identify(release)
    assert found.versions == ["0.19.1+v100.1", "0.19.1+v100.1.cpu"]
    assert not identity.from_version(found, '{"version": "0.19.1+v100.1.cpu"}').problems


def who(**fields: object) -> dict:
    """The stored identity of a process that is its manifest's."""
    good = identity.Identity(manifest_sha256="a" * 64, verified=["library hash in the log"])
    return good.model_copy(update=fields).model_dump(mode="json")


@pytest.mark.parametrize(
    ("first", "status", "words"),
    [
        ({}, "pass", "library hash in the log"),
        ({"problems": ["the service reports library 9"]}, "fail", "process 1: the service reports"),
        ({"verified": []}, "not-run", "could be compared"),
        ({"log_library_sha256": ["9" * 64]}, "fail", "report 111111111111 and 999999999999"),
    ],
)
def test_every_process_that_gave_a_wave_is_identified(first: dict, status: str, words: str) -> None:
    """A start that was continued has two; the second one does not stand for the first."""
    log = {"log_library_sha256": ["1" * 64]}
    processes = [
        {"service_start_id": "one", "identity": who(**(log | first))},
        {"service_start_id": "two", "identity": who(**log)},
        {"service_start_id": "refused", "identity": who(problems=["gave no wave"])},
    ]
    waves = [wave(service_start_id="one"), wave(service_start_id="two")]
    evidence = put_together(profile(), candidate=[start(*waves, processes=processes)])
    result = CHECKS["identity"](evidence, CheckPolicy())
    assert result.status == status
    assert words in result.summary
