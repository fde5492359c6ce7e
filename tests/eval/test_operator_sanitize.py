"""`v100_operator sanitize`: clean only where compute-sanitizer looked and found nothing.

A shell script stands for compute-sanitizer, which needs a GPU to run under.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from v100_operator import sanitize

OP = SimpleNamespace(name="long")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """stand_in(shell): puts such a compute-sanitizer, and nothing else, on PATH."""

    def put(shell: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "compute-sanitizer"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{shell}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return tmp_path / "asked"

    return put


def run(tmp_path: Path, tool: str = "memcheck") -> dict:
    return sanitize.run_case(OP, "all padded", tool, tmp_path / "lib.so", tmp_path)


def test_a_clean_run(stand_in, tmp_path: Path) -> None:
    asked = stand_in('echo "========= ERROR SUMMARY: 0 errors"')
    row = run(tmp_path)
    assert row["clean"] and row["summary"] == "0 errors"
    words = asked.read_text()
    assert words.startswith("--tool memcheck --error-exitcode 9 ")
    assert "-m v100_operator check --op long" in words and "--only all padded" in words


@pytest.mark.parametrize(
    "shell",
    [
        'echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error)"; exit 9',
        'echo "Target application terminated before first instrumented API call"; exit 0',
        "exit 1",
    ],
    ids=["a hazard", "it never looked", "the check failed"],
)
def test_what_is_not_clean_keeps_its_output(stand_in, tmp_path: Path, shell: str) -> None:
    stand_in(shell)
    row = run(tmp_path, "racecheck")
    assert not row["clean"] and "output" in row


def test_a_kernel_that_waits_for_ever_is_ended_with_the_tool(
    stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program under the tool holds the pipe too: were it left, this would not return."""
    stand_in("/bin/sleep 3600 & wait")
    monkeypatch.setattr(sanitize, "LIMIT_S", 0.2)
    row = run(tmp_path)
    assert not row["clean"] and row["summary"] is None
    assert row["output"].endswith("ended after 0.2 s")


def test_without_the_tool_it_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="comes with the CUDA toolkit"):
        sanitize.program()


HAZARD = 'echo "========= RACECHECK SUMMARY: 32 hazards displayed (32 errors)"; exit 9'
CLEAN = 'echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)"'


@pytest.fixture
def nvcc(tmp_path: Path):
    """nvcc(): puts one beside the stand-in that makes an empty program."""

    def put(shell: str = 'while [ "$1" != -o ]; do shift; done; : > "$2"') -> None:
        program = tmp_path / "bin/nvcc"
        program.write_text(f"#!/bin/sh\n{shell}\n")
        program.chmod(0o755)

    return put


@pytest.mark.parametrize(
    "handed, raced, expected",
    [(CLEAN, HAZARD, [True, True]), (HAZARD, HAZARD, [False, True]), (CLEAN, CLEAN, [True, False])],
    ids=["sees what there is", "sees hazards where none is", "misses those there are"],
)
def test_controls_say_whether_the_tool_can_judge(
    stand_in, nvcc, tmp_path: Path, handed: str, raced: str, expected: list[bool]
) -> None:
    stand_in(f'case "$*" in *handed) {handed};; *raced) {raced};; esac')
    nvcc()
    rows = sanitize.run_controls("racecheck", tmp_path)
    assert [row["case"] for row in rows] == ["control: handed", "control: raced"]
    assert [row["as_expected"] for row in rows] == expected


def test_a_tool_that_did_not_look_at_a_control_is_not_as_expected(
    stand_in, nvcc, tmp_path: Path
) -> None:
    stand_in("exit 1")
    nvcc()
    assert not any(row["as_expected"] for row in sanitize.run_controls("racecheck", tmp_path))


def test_controls_need_a_compiler_that_works(stand_in, nvcc, tmp_path: Path) -> None:
    stand_in(CLEAN)
    with pytest.raises(SystemExit, match="nvcc is not on PATH"):
        sanitize.run_controls("racecheck", tmp_path)
    nvcc("echo no such architecture >&2; exit 1")
    with pytest.raises(SystemExit, match="no such architecture"):
        sanitize.run_controls("racecheck", tmp_path)


def test_the_ops_whose_warps_hand_over_are_those_that_arrive() -> None:
    """Of the sources of each op's kernel, which mention bar.arrive."""
    kernel = Path(sanitize.__file__).resolve().parents[2] / "kernel/src"
    sources = {"long": ["long_value.cuh"], "prefill": ["prefill/value.cuh"], "paged": ["paged.cu"]}
    arrives = {
        op for op, files in sources.items()
        if any("barrier_arrive" in (kernel / name).read_text() for name in files)
    }  # fmt: skip
    assert arrives == set(sanitize.HANDS_OVER)


def test_its_cases_exist_by_name() -> None:
    """Read from the sources: the op modules need PyTorch."""
    for op, names in sanitize.CASES.items():
        text = (Path(sanitize.__file__).parent / "ops" / f"{op}.py").read_text()
        assert all(f'"{name}"' in text for name in names), op
