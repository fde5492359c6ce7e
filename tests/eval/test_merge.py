"""The merge gate's file: what ran, what could not, and when it no longer stands for the tree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from v100_gate.errors import GateError
from v100_gate.merge import PARTS, REPO, Part, merge, problems, tracked

GOOD = Part("good", "always passes", ("python", "-c", "print('fine')"), ("src",))
BAD = Part("bad", "always fails", ("python", "-c", "print('why'); raise SystemExit(3)"), ("src",))
ABSENT = Part("gpu", "needs a GPU", ("false",), ("src",), required=False, needs=lambda: "no GPU")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one source file."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("1\n")
    return tmp_path


def run(root: Path, *parts: Part, only: tuple[str, ...] = ()) -> dict:
    return merge(only, lambda _: None, root / "scratch", root, parts)


def test_what_ran_passes_and_what_could_not_is_said(checkout: Path) -> None:
    document = run(checkout, GOOD, ABSENT)
    assert document["parts"]["good"]["status"] == "pass"
    assert document["parts"]["good"]["reason"] == "fine"
    assert document["parts"]["gpu"]["status"] == "not-run"
    assert document["parts"]["gpu"]["reason"] == "no GPU"
    assert problems(checkout, (GOOD, ABSENT)) == []


def test_a_failure_stops_the_merge_with_its_last_words(checkout: Path) -> None:
    run(checkout, GOOD, BAD)
    (problem,) = problems(checkout, (GOOD, BAD))
    assert problem.startswith("bad: fail") and "why" in problem


def test_a_changed_source_makes_a_result_stale(checkout: Path) -> None:
    run(checkout, GOOD)
    (checkout / "src" / "a.py").write_text("2\n")
    (problem,) = problems(checkout, (GOOD,))
    assert "stale" in problem and "PARTS=good" in problem
    run(checkout, GOOD)
    assert problems(checkout, (GOOD,)) == []


def test_a_new_file_makes_a_result_stale(checkout: Path) -> None:
    run(checkout, GOOD)
    (checkout / "src" / "b.py").write_text("")
    assert "stale" in problems(checkout, (GOOD,))[0]


def test_a_required_part_that_did_not_run_stops_the_merge(checkout: Path) -> None:
    needed = Part("gpu", "needs a GPU", ("false",), ("src",), needs=lambda: "no GPU")
    run(checkout, needed)
    assert problems(checkout, (needed,))[0].startswith("gpu: not-run")
    assert problems(checkout, (needed, GOOD))[1] == "good: never run; run `make gate`"


def test_one_part_can_be_run_again(checkout: Path) -> None:
    run(checkout, GOOD, BAD)
    document = run(checkout, GOOD, BAD, only=("good",))
    assert document["parts"]["bad"]["status"] == "fail"
    with pytest.raises(GateError, match="no part 'speling'"):
        run(checkout, GOOD, only=("speling",))


def test_a_missing_or_foreign_file_is_said(checkout: Path) -> None:
    assert "is missing" in problems(checkout, (GOOD,))[0]
    path = checkout / "docs" / "evidence" / "merge-gate.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert "is not JSON" in problems(checkout, (GOOD,))[0]
    path.write_text(json.dumps({"schema": "other"}))
    assert "schema other" in problems(checkout, (GOOD,))[0]


def test_a_part_whose_sources_change_while_it_runs_fails(checkout: Path) -> None:
    editing = Part("e", "edits", ("python", "-c", "open('src/a.py','w').write('x')"), ("src",))
    assert "changed while it ran" in run(checkout, editing)["parts"]["e"]["reason"]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_speaks_for_files_that_exist_and_for_its_own_program(part: Part) -> None:
    for source in part.sources:
        assert tracked([source], REPO), source
    for word in part.command:  # a weakened judge or test must make its result stale
        program = REPO / "eval" / word if word.startswith("v100_") else REPO / word
        if program.exists() and word != "docs/evidence":
            covered = [REPO / source for source in part.sources]
            assert any(program.is_relative_to(c) or c.is_relative_to(program) for c in covered)
