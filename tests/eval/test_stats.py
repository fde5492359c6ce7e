"""Decisions of the statistics: what passes, what fails, and what nobody can say."""

from __future__ import annotations

import pytest
from v100_gate import stats

STEADY = [[100.0, 101.0, 99.0], [100.5, 99.5, 100.0]]


def judge(control, candidate, margin=0.05, higher=True, relative=True):
    return stats.non_inferior(
        control, candidate, margin, higher_is_better=higher, relative=relative
    )


def scaled(groups, factor):
    return [[value * factor for value in group] for group in groups]


def test_equal_arms_pass() -> None:
    assert judge(STEADY, STEADY).verdict == "pass"


def test_ten_percent_slower_fails_at_five() -> None:
    decision = judge(STEADY, scaled(STEADY, 0.9))
    assert decision.verdict == "fail"
    assert decision.change == pytest.approx(-0.1)


def test_faster_passes_and_slower_fails_when_less_is_better() -> None:
    assert judge(STEADY, scaled(STEADY, 0.8), higher=False).verdict == "pass"
    assert judge(STEADY, scaled(STEADY, 1.2), higher=False).verdict == "fail"


def test_a_noisy_control_makes_it_inconclusive() -> None:
    noisy = [[80.0, 120.0, 100.0], [95.0, 130.0, 70.0]]
    assert judge(noisy, noisy).verdict == "inconclusive"


def test_starts_that_differ_are_the_yardstick() -> None:
    # Each start is steady, but they lie 10 % apart: a 3 % loss cannot be told from that.
    control = [[100.0, 100.1, 99.9], [110.0, 110.1, 109.9]]
    assert stats.yardstick(control, relative=True) == pytest.approx(0.0952, abs=1e-3)
    assert judge(control, scaled(control, 0.97)).verdict == "inconclusive"


def test_two_values_decide_nothing() -> None:
    decision = judge([[100.0, 100.0]], [[100.0, 100.0]])
    assert decision.verdict == "inconclusive"
    assert "3 are needed" in decision.reason


def test_nothing_measured_is_no_decision() -> None:
    assert judge([[]], STEADY) is None
    assert judge(STEADY, []) is None


def test_points_are_absolute() -> None:
    control = [[0.40, 0.40, 0.40], [0.40, 0.40, 0.40]]
    worse = [[0.37, 0.37, 0.37], [0.37, 0.37, 0.37]]
    assert judge(control, worse, margin=0.02, relative=False).verdict == "fail"
    assert judge(control, worse, margin=0.04, relative=False).verdict == "pass"


def test_the_interval_is_reproducible() -> None:
    noisy = [[80.0, 120.0, 100.0], [95.0, 130.0, 70.0]]
    assert stats.interval(noisy, STEADY, True) == stats.interval(noisy, STEADY, True)


def test_paired_interval_uses_the_same_requests() -> None:
    # Requests differ wildly; the difference per request is constant.
    low, high = stats.paired_interval([0.0, 1.0, 0.0, 1.0], [0.5, 1.5, 0.5, 1.5])
    assert (low, high) == (0.5, 0.5)


def test_nothing_is_relative_to_a_control_of_zero() -> None:
    """A queue time of 0 in both arms is no change that a ratio could express."""
    zero = [[0.0, 0.0], [0.0, 0.0]]
    assert stats.interval(zero, zero, relative=True) is None
    assert stats.interval(zero, zero, relative=False) == (0.0, 0.0)
    assert judge(zero, STEADY) is None
