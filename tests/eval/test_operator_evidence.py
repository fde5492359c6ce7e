"""Operator evidence: stale, failed and missing evidence is found, with what changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from v100_operator import evidence, ops
from v100_operator.cli import main


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A kernel folder with one op and the shared sources."""
    root = tmp_path / "kernel"
    for name in ("src/common/mma.cuh", "src/paged.cu", "src/long.cu", "csrc/paged.cpp"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"// {name}\n")
    (root / "kernels.toml").write_text('[[cubin]]\nname = "paged_d256_e4m3"\n')
    return root


def write(folder: Path, kernel: Path, **over: object) -> Path:
    """An evidence file of op "paged" as `check` would write it."""
    folder.mkdir(exist_ok=True)
    content = {
        "schema": evidence.SCHEMA, "kind": "check", "op": "paged", "passed": True,
        "sources": evidence.source_hashes("paged", kernel),
    }  # fmt: skip
    path = folder / "paged.json"
    path.write_text(json.dumps(content | over))
    return path


def test_fresh_evidence_is_good(tmp_path: Path, kernel: Path) -> None:
    write(tmp_path / "evidence", kernel)
    findings = evidence.verify(tmp_path / "evidence", kernel)
    assert [(f.op, f.problem) for f in findings] == [("paged", None)]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("src/paged.cu", "changed: src/paged.cu"),
        ("src/common/mma.cuh", "changed: src/common/mma.cuh"),
        ("src/common/added.cuh", "new: src/common/added.cuh"),
    ],
)
def test_a_changed_source_makes_it_stale(
    tmp_path: Path, kernel: Path, name: str, problem: str
) -> None:
    write(tmp_path / "evidence", kernel)
    with (kernel / name).open("a") as file:
        file.write("// edited\n")
    (finding,) = evidence.verify(tmp_path / "evidence", kernel)
    assert problem in str(finding.problem)


def test_another_op_s_source_does_not(tmp_path: Path, kernel: Path) -> None:
    write(tmp_path / "evidence", kernel)
    (kernel / "src/long.cu").write_text("// rewritten\n")
    (finding,) = evidence.verify(tmp_path / "evidence", kernel)
    assert finding.problem is None


def test_failed_and_missing_evidence_is_found(tmp_path: Path, kernel: Path) -> None:
    folder = tmp_path / "evidence"
    write(folder, kernel, passed=False)
    (finding,) = evidence.verify(folder, kernel)
    assert finding.problem == "it records a failure"
    (folder / "paged.json").unlink()
    (finding,) = evidence.verify(folder, kernel)
    assert (finding.op, finding.problem) == ("paged", "there is no evidence for this op")


def test_a_bench_is_no_check_and_foreign_files_are_left_alone(tmp_path: Path, kernel: Path) -> None:
    folder = tmp_path / "evidence"
    write(folder, kernel, kind="bench")
    (folder / "other.json").write_text('{"schema": "another/1"}')
    findings = evidence.verify(folder, kernel)
    assert [(f.kind, f.problem) for f in findings] == [
        ("bench", None),
        ("check", "there is no evidence for this op"),
    ]


def test_verify_prints_and_exits_red(
    tmp_path: Path, kernel: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["verify", str(tmp_path / "evidence"), "--kernel", str(kernel)]
    write(tmp_path / "evidence", kernel)
    assert main(command) == 0
    (kernel / "src/paged.cu").write_text("// edited\n")
    assert main(command) == 1
    assert "stale  paged" in capsys.readouterr().out


def test_every_op_names_sources_that_exist() -> None:
    for name in evidence.built_ops():
        files = evidence.source_hashes(name)
        assert any(f.endswith(".cu") for f in files), name
        assert any(f.startswith("src/common/") for f in files), name
    with pytest.raises(ValueError, match="expected one of paged, long, prefill"):
        ops.get("decode")


def bench_file(folder: Path, **over: object) -> Path:
    """A bench file whose table is computable by hand: 2 GB in 4 and 10 ms."""
    shape = {
        "shape": "32K x 4", "kv_bytes": 1_000_000_000, "samples_ms": [4.0, 3.0, 9.0],
        "control": "paged", "control_samples_ms": [10.0, 11.0, 9.0], "output_difference": 1e-4,
    }  # fmt: skip
    content = {
        "schema": evidence.SCHEMA, "kind": "bench", "op": "long", "command": "bench --op long",
        "gpu": {"name": "a GPU"}, "library": {"sha256": "a" * 64, "source_sha256": "b" * 64},
        "working_sets": 2, "pairs": 3, "replays": 8, "shapes": [shape],
    }  # fmt: skip
    path = folder / "bench.json"
    path.write_text(json.dumps(content | over))
    return path


def test_report_shows_medians_of_the_raw_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["report", str(bench_file(tmp_path)), "--out", str(tmp_path / "out")]) == 0
    wanted = "| 32K x 4 | 4.000 | 500 | 10.000 | 2.50 | 1.0e-04 |"
    assert wanted in capsys.readouterr().out
    assert wanted in (tmp_path / "out" / "bench.md").read_text()
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "why"), [("{", "is not JSON"), ('{"schema": "other/1"}', "not what"), ("[]", "not")]
)
def test_report_refuses_other_files(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=rf"error: x.json .*{why}"):
        main(["report", str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
