"""`v100_operator check-all`: says what it needs, and one wrong op makes it red."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from v100_build import release
from v100_operator import evidence, here
from v100_operator.cli import main

# Stands for an interpreter with PyTorch and a GPU, which no test machine has: it notes what it is
# asked to run and finds the op "long" wrong.
INTERPRETER = """#!/bin/sh
[ "$1" = -c ] && exit {has_gpu}
echo "$PYTHONPATH|$*" >> {log}
case "$*" in *"--op long"*) exit 1;; esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with /bin/sh's tools and nothing of NVIDIA's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv(here.VARIABLE, raising=False)
    return folder


def test_without_a_gpu_it_says_so(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: no GPU here"):
        main(["check-all", "--out", str(tmp_path / "out")])


def test_without_pytorch_it_names_the_variable(tools: Path, tmp_path: Path) -> None:
    program(tools / "nvidia-smi", "#!/bin/sh\n")
    assert here.VARIABLE in str(here.missing())
    program(tools / "python3", INTERPRETER.format(has_gpu=1, log=tmp_path / "log"))
    assert here.VARIABLE in str(here.missing())


def test_every_op_is_checked_and_one_wrong_op_is_red(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "log"
    program(tools / "nvidia-smi", "#!/bin/sh\n")
    python = program(tmp_path / "torch" / "python", INTERPRETER.format(has_gpu=0, log=log))
    monkeypatch.setenv(here.VARIABLE, str(python))
    monkeypatch.setattr(release, "build", lambda validation, say: tmp_path / "release")
    assert main(["check-all", "--out", str(tmp_path / "out")]) == 1
    asked = log.read_text().splitlines()
    assert len(asked) == len(evidence.built_ops()) == 3
    for line, op in zip(asked, sorted(evidence.built_ops()), strict=True):
        path, words = line.split("|")
        assert str(evidence.REPO / "eval") in path and "kernel/python" in path
        assert f"check --op {op} --library {tmp_path}/release/_vllm_fa2_C.abi3.so" in words
    assert "1 ops failed" in capsys.readouterr().err
