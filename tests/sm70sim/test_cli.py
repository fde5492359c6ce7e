"""The command line: timing a cubin, and errors that say what is wrong."""

from __future__ import annotations

import pytest
from sm70sim.__main__ import main
from sm70sim.model.nvrtc import compile_cubin

SOURCE = r"""
extern "C" __global__ void scale(float *a, int n, float f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] *= f;
}"""


@pytest.fixture
def cubin(tmp_path):
    path = tmp_path / "scale.cubin"
    path.write_bytes(compile_cubin(SOURCE))
    return str(path)


def run(cubin: str, *more: str) -> int:
    args = ["--arg", "buf:4096:f32", "--arg", "i32:1000", "--arg", "f32:2"]
    return main(["time", cubin, "scale", "--grid", "4", "--block", "256", *args, *more])


def test_time_prints_cycles_bytes_and_what_waits(cubin, capsys):
    assert run(cubin, "--set", "l2_latency=160") == 0
    out = capsys.readouterr().out
    for part in ("cycles", "1530 MHz", "DRAM", "idle sub-core cycles", "range", "LDG"):
        assert part in out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--set", "l9_latency=1"), "no parameter l9_latency"),
        (("--arg", "i32:1"), "takes 3 arguments, 4 given"),
        (("--arg", "what:1"), "argument not understood: what:1"),
        (("--arg", "i32:many"), "argument not understood: i32:many"),
        (("--arg", "file:/nowhere"), "No such file or directory: '/nowhere'"),
        (("--set", "l2_latency"), "expected PARAMETER=NUMBER"),
    ],
)
def test_errors_are_one_line(cubin, capsys, more, why):
    assert run(cubin, *more) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and why in err and err.count("\n") == 1


def test_a_cubin_that_is_not_there_and_a_check_that_is_none(capsys):
    assert main(["time", "/nowhere.cubin", "k"]) == 1
    assert "/nowhere.cubin" in capsys.readouterr().err
    assert main(["validate", "--only", "no such check"]) == 1
    assert "no check has 'no such check' in its name" in capsys.readouterr().err


def test_model_refuses_unknown_cases(capsys, tmp_path):
    assert main(["model", "--op", "nothing", "--out", str(tmp_path)]) == 1
    assert "no case nothing: there are long, paged" in capsys.readouterr().err
