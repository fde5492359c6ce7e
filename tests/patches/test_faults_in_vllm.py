"""Runs tests of in_vllm/ inside vLLM, on the tree with the series and on the one without.

One process per tree runs them. Their tests called test_fault_... show what the series mends:
they pass with it and fail without it, and all others pass on both.
"""

from __future__ import annotations

import pytest

FILES = ("gdn_states", "uniform_decode")


@pytest.fixture(scope="module")
def stock(stock_tree, outcomes_in_vllm) -> dict[str, str]:
    return outcomes_in_vllm(stock_tree, *FILES)


@pytest.fixture(scope="module")
def patched(patched_tree, outcomes_in_vllm) -> dict[str, str]:
    return outcomes_in_vllm(patched_tree, *FILES)


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
