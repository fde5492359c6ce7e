"""Runs tests of in_vllm/ inside vLLM, on the tree with the series and on the one without.

The files import vLLM, which this project's own environment does not hold; one process per tree
runs them, with pytest lent from here. Their tests called test_fault_... show what the series mends:
they pass with it and fail without it, and all others pass on both.
"""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).resolve().parent
FILES = ("gdn_states", "uniform_decode")
RUN = """
import sys
sys.path.append(sys.argv[1])  # last: pytest and what it needs, and nothing that vLLM has itself
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def outcomes(tree: Path, scratch: Path, run_vllm, *files: str, **options) -> dict[str, str]:
    """'passed', 'skipped' or the text of the failure, by 'file::test[parameters]'."""
    report = scratch / "report.xml"
    paths = [HERE / "in_vllm" / f"{file}.py" for file in files]
    arguments = ["-c", RUN, Path(pytest.__file__).parents[1], "-q", "-c", os.devnull]
    arguments += [f"--rootdir={HERE}", "-p", "no:cacheprovider", "-W", "ignore"]
    arguments += ["-p", "no:asyncio", f"--junitxml={report}", *paths]
    done = run_vllm(tree, *arguments, timeout=900, **options)
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


@pytest.fixture(scope="module")
def stock(stock_tree, tmp_path_factory, run_vllm) -> dict[str, str]:
    return outcomes(stock_tree, tmp_path_factory.mktemp("report"), run_vllm, *FILES)


@pytest.fixture(scope="module")
def patched(patched_tree, tmp_path_factory, run_vllm) -> dict[str, str]:
    return outcomes(patched_tree, tmp_path_factory.mktemp("report"), run_vllm, *FILES)


@pytest.mark.parametrize("file", FILES)
def test_the_series_mends_the_faults(patched, file: str) -> None:
    mine = {name: outcome for name, outcome in patched.items() if name.startswith(f"{file}::")}
    assert mine
    assert {name: text for name, text in mine.items() if text != "passed"} == {}


@pytest.mark.parametrize("file", FILES)
def test_stock_has_the_faults_and_no_other(stock, patched, file: str) -> None:
    mine = {name: outcome for name, outcome in stock.items() if name.startswith(f"{file}::")}
    assert mine.keys() == {name for name in patched if name.startswith(f"{file}::")}
    faults = {name for name in mine if "::test_fault_" in name}
    assert faults
    assert {name for name, text in mine.items() if text != "passed"} == faults
    for name in faults:
        assert "AssertionError" in mine[name], f"{name} fails in another way:\n{mine[name]}"
