"""The torch stand-ins for Triton kernels, compared with the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def triton() -> Path:
    """The folder of Triton's Python package: the pinned wheel without its CUDA programs."""
    from v100_build.wheels import unpacked

    def wanted(member: str) -> bool:
        return "/backends/nvidia/bin/" not in member

    return unpacked("triton", wanted, "python")


@pytest.mark.slow
def test_stand_ins_do_what_the_kernels_do(patched_tree, triton, outcomes_in_vllm) -> None:
    result = outcomes_in_vllm(
        patched_tree, "cpu_kernels", path=(triton,), env={"TRITON_INTERPRET": "1"}
    )
    assert {name: text for name, text in result.items() if text != "passed"} == {}
    assert len(result) > 20
