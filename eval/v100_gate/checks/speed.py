"""Throughput, latency, step time and acceptance, not inferior to the control."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate import stats
from v100_gate.checks.base import CONTROL, ORACLE, Result, check, join
from v100_gate.evidence import FIGURES, ArmEvidence, Evidence

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


def _gap(wave: str, figure: str, *arms: ArmEvidence) -> str | None:
    """Why a figure of a wave cannot be compared: a valid repeat lacks it; None when none does.

    Leaving such a repeat out would compare the repeats that happened to be measured.
    """
    for arm in arms:
        lacking = arm.unmeasured(wave, figure)
        if lacking:
            return (
                f"{lacking} of {len(arm.records(wave))} valid repeats of {arm.name} have no "
                f"{FIGURES[figure]}"
            )
    return None


def _non_inferior(
    evidence: Evidence,
    policy: CheckPolicy,
    figure: str,
    *,
    higher_is_better: bool,
    relative: bool = True,
    unit: str = "",
) -> Result:
    if evidence.control is None:
        return Result("not-run", "there is no control arm")
    margin = policy.margin if relative else None
    if not relative and policy.margin_points is not None:
        margin = policy.margin_points / 100.0
    if margin is None:
        return Result("not-run", "the profile sets no margin for this check")
    rows = []
    for spec in evidence.profile.waves:
        if gap := _gap(spec.name, figure, evidence.control, evidence.candidate):
            rows.append({"what": spec.name, "status": "not-run", "reason": gap})
            continue
        control = evidence.control.groups(spec.name, figure)
        candidate = evidence.candidate.groups(spec.name, figure)
        decision = stats.non_inferior(
            control, candidate, margin, higher_is_better=higher_is_better, relative=relative
        )
        if decision is None:
            rows.append({"what": spec.name, "status": "not-run", "reason": f"no {FIGURES[figure]}"})
            continue
        base, new = stats.summary(control), stats.summary(candidate)
        change = f"{decision.change:+.2%}" if relative else f"{decision.change * 100:+.2f} points"
        bounds = (
            f"[{decision.low:+.2%}, {decision.high:+.2%}]"
            if relative
            else f"[{decision.low * 100:+.2f}, {decision.high * 100:+.2f}]"
        )
        rows.append(
            {
                "what": spec.name,
                "status": decision.verdict,
                "reason": f"{change} {bounds}, margin {margin:.1%}, control's own noise "
                f"{decision.yardstick:.2%}: {decision.reason}",
                "control": base.median,
                "candidate": new.median,
                "change": decision.change,
                "low": decision.low,
                "high": decision.high,
                "yardstick": decision.yardstick,
                "margin": margin,
                "unit": unit,
            }
        )
    changes = ", ".join(
        f"{row['what']} {row['change']:+.1%}"
        if relative
        else f"{row['what']} {row['change'] * 100:+.2f}"
        for row in rows
        if "change" in row
    )
    return join(rows, f"{FIGURES[figure]}: {changes} (margin {margin:.1%})")


@check("decode-throughput", CONTROL)
def decode_throughput(evidence: Evidence, policy: CheckPolicy) -> Result:
    """All-live decode throughput is not inferior to the control's."""
    return _non_inferior(
        evidence, policy, "decode_tokens_per_s", higher_is_better=True, unit="tok/s"
    )


@check("ttft", CONTROL)
def ttft(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Time to first token is not inferior."""
    return _non_inferior(evidence, policy, "ttft_s", higher_is_better=False, unit="s")


@check("tpot", CONTROL)
def tpot(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Time per output token is not inferior."""
    return _non_inferior(evidence, policy, "tpot_s", higher_is_better=False, unit="s")


@check("step-time", CONTROL)
def step_time(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Time per decode round is not inferior: compute, apart from acceptance."""
    return _non_inferior(evidence, policy, "step_s", higher_is_better=False, unit="s")


@check("acceptance", CONTROL)
def acceptance(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Draft acceptance is not inferior, in percentage points."""
    return _non_inferior(evidence, policy, "acceptance", higher_is_better=True, relative=False)


@check("speculation-pays", ORACLE)
def speculation_pays(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The candidate at its depth is not slower than the controls of smaller depth."""
    margin = policy.margin if policy.margin is not None else 0.0
    rows = []
    for name in evidence.profile.schedule.controls:
        arm = evidence.arms.get(name)
        for spec in evidence.profile.waves:
            what = f"{spec.name} against {name}"
            if arm is None or not arm.starts:
                rows.append({"what": what, "status": "not-run", "reason": "not measured"})
                continue
            if gap := _gap(spec.name, "decode_tokens_per_s", arm, evidence.candidate):
                rows.append({"what": what, "status": "not-run", "reason": gap})
                continue
            decision = stats.non_inferior(
                arm.groups(spec.name, "decode_tokens_per_s"),
                evidence.candidate.groups(spec.name, "decode_tokens_per_s"),
                margin,
                higher_is_better=True,
                relative=True,
            )
            if decision is None:
                rows.append({"what": what, "status": "not-run", "reason": "no throughput"})
                continue
            rows.append(
                {
                    "what": what,
                    "status": decision.verdict,
                    "reason": f"{decision.change:+.1%}: {decision.reason}",
                    "change": decision.change,
                    "low": decision.low,
                    "high": decision.high,
                }
            )
    changes = ", ".join(f"{r['what']} {r['change']:+.0%}" for r in rows if "change" in r)
    return join(rows, changes)
