"""Single checks on evidence that was put together by hand: what they compare, and what they do
with what is missing."""

from __future__ import annotations

from math import log

import pytest
from support import profile, put_together, start, trace, wave
from v100_gate.checks import CHECKS, Result
from v100_gate.evidence import Evidence
from v100_gate.schema import CheckPolicy


def judged(name: str, evidence: Evidence, **policy: object) -> Result:
    """The result of one check."""
    return CHECKS[name](evidence, CheckPolicy(**policy))


# ------------------------------------------------------------------------- logits


def teacher_forced(*steps: dict[str, float]):
    """A `logits` wave of one request with these top log-probabilities, step by step."""
    request = trace(tokens=len(steps), logprobs=[{"top_logprobs": list(steps)}])
    return wave("logits", kind="logits", requests=[request])


SURE = {"a": log(0.99), "b": log(0.009)}
RARE = {"a": log(0.99), "b": log(0.009) + 0.3}
"""An unlikely token moved by 0.3: the larger |dlog p|, hardly any KL."""
EVEN = {"a": log(0.5), "b": log(0.4)}
MOVED = {"a": log(0.5) - 0.2, "b": log(0.4) + 0.2}
"""Likely tokens moved by 0.2: the smaller |dlog p|, the larger KL."""


def test_logits_take_the_worst_of_each_component() -> None:
    plan = profile(
        logits={"input_tokens": 64, "positions": 1, "steps": 2, "max_abs": 1, "kl": 0.01}
    )
    control = [
        start(teacher_forced(SURE, EVEN), number=1),
        start(teacher_forced(RARE), number=2),
    ]
    candidate = [start(teacher_forced(SURE, MOVED))]
    (row,) = judged("logits", put_together(plan, control=control, candidate=candidate)).rows
    assert row["max_abs"] == pytest.approx(0.3)  # against the second start
    # Against the first: 0.5 x 0.2 - 0.4 x 0.2 + 0.1 ln(0.1 / 0.102074).
    assert row["kl"] == pytest.approx(0.017947, rel=1e-3)
    assert row["positions"] == 1
    assert row["status"] == "fail"


def test_a_control_without_a_common_token_excuses_nothing() -> None:
    """Its distance to itself is then unknown, and no limit can be drawn from it."""
    plan = profile(logits={"input_tokens": 64, "positions": 1, "steps": 1, "max_abs": 0.05})
    control = [
        start(teacher_forced({"a": -0.1}), number=1),
        start(teacher_forced({"b": -0.1}), number=2),
    ]
    candidate = [start(teacher_forced({"a": -0.2}))]
    result = judged("logits", put_together(plan, control=control, candidate=candidate))
    assert result.status == "inconclusive"


def test_a_candidate_without_a_common_token_fails() -> None:
    plan = profile(logits={"input_tokens": 64, "positions": 1, "steps": 1, "max_abs": 0.05})
    control = [start(teacher_forced({"a": -0.1})), start(teacher_forced({"a": -0.1}), number=2)]
    candidate = [start(teacher_forced({"b": -0.1}))]
    result = judged("logits", put_together(plan, control=control, candidate=candidate))
    assert result.status == "fail"
    assert result.rows[0]["max_abs"] is None  # JSON has no infinity
