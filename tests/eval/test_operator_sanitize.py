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


def test_without_the_tool_it_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="comes with the CUDA toolkit"):
        sanitize.program()


def test_its_cases_exist_by_name() -> None:
    """Read from the sources: the op modules need PyTorch."""
    for op, names in sanitize.CASES.items():
        text = (Path(sanitize.__file__).parent / "ops" / f"{op}.py").read_text()
        assert all(f'"{name}"' in text for name in names), op
