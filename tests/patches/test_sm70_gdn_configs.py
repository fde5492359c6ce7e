"""The chunked GDN prefill kernels: configurations that do not spill on SM70, and the stock ones
everywhere else.

The lists are those that the kernels' own files make with real Triton, where nothing but the
reported device is made up; the resources are those of the machine code for sm_70.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "in_vllm" / "gdn_configs.py"
OPS = "vllm/model_executor/layers/fla/ops"
# What compiling for one GPU takes of Triton's wheel, besides Python files and metadata.
PARTS = ("triton/_C/libtriton.so", "triton/backends/nvidia/bin/ptxas", "triton/backends/nvidia/lib")


def _wanted(name: str) -> bool:
    code = name.endswith(".py") or ".dist-info/" in name
    return code or (name.startswith(PARTS) and not name.endswith("blackwell"))


@pytest.fixture(scope="module")
def run(vllm_python, tmp_path_factory):
    """Runs the program on the kernels' files of a tree; returns what it prints."""
    from v100_build import toolchain, wheels

    triton = wheels.unpacked("triton", _wanted, part="aot")
    cache = tmp_path_factory.mktemp("triton")

    def run(tree: Path, capability: str, verb: str) -> dict[str, dict[str, dict[str, int]]]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"PYTHONPATH": str(triton), "TRITON_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [vllm_python, PROGRAM, tree / OPS, capability, verb, toolchain.cuobjdump()],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def stock() -> Path:
    from v100_build.wheels import unpacked_tree

    return unpacked_tree("cpu")


@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0"])
def test_other_gpus_keep_the_stock_lists(run, stock, patched_tree, capability):
    assert run(patched_tree, capability, "list") == run(stock, capability, "list")


def test_sm70_has_lists_of_its_own(run, stock, patched_tree):
    """Short ones: each configuration is compiled and timed while the first request waits."""
    ours, theirs = run(patched_tree, "7.0", "list"), run(stock, "7.0", "list")
    assert ours.keys() == theirs.keys()
    for kernel, configs in ours.items():
        assert 1 <= len(configs) <= 3 < len(theirs[kernel]), kernel


@pytest.mark.slow
def test_sm70_configurations_hardly_spill(run, patched_tree):
    """Each kernel has one that needs no stack; none needs more than a few registers' worth."""
    for kernel, configs in run(patched_tree, "7.0", "compile").items():
        stacks = [taken["stack"] for taken in configs.values()]
        assert min(stacks) == 0, (kernel, configs)
        assert max(stacks) <= 256, (kernel, configs)
