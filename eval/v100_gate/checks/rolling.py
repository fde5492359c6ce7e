"""Goodput, acceptance and preemptions under rolling arrivals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate import metrics, stats
from v100_gate.checks.base import CONTROL, Result, check, join, pair
from v100_gate.evidence import Evidence, median

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


@check("rolling-goodput", CONTROL)
def rolling_goodput(evidence: Evidence, policy: CheckPolicy) -> Result:
    """On the same arrivals, the share of requests within both limits is not inferior."""
    spec = evidence.profile.rolling
    if spec is None or evidence.control is None:
        return Result("not-run", "no control arm, or the profile has no rolling section")
    margin = policy.margin if policy.margin is not None else 0.0
    rows = []
    for rate in spec.rates_per_s:
        wave = f"rate-{rate:g}"
        sides = {}
        for arm in pair(evidence):
            per_start = [
                [
                    float(metrics.within_limits(t, spec.ttft_limit_s, spec.tpot_limit_s))
                    for t in record.requests
                ]
                for record in arm.records(wave, "rolling")
            ]
            sides[arm.name] = per_start
        row = {"what": f"{rate:g}/s", "status": "pass", "reason": ""}
        rows.append(row)
        if not sides["control"] or not sides["candidate"]:
            row |= {"status": "not-run", "reason": "not measured in both arms"}
            continue
        control = [sum(v) / len(v) for v in zip(*sides["control"], strict=True)]
        candidate = [sum(v) / len(v) for v in zip(*sides["candidate"], strict=True)]
        shares = [sum(v) / len(v) for v in sides["control"]]
        noise = max(shares) - min(shares) if len(shares) > 1 else 0.0
        low, high = stats.paired_interval(control, candidate)
        change = sum(candidate) / len(candidate) - sum(control) / len(control)
        row |= {
            "control": sum(control) / len(control),
            "candidate": sum(candidate) / len(candidate),
            "change": change,
            "low": low,
            "high": high,
            "yardstick": noise,
            "reason": f"{change * 100:+.1f} points [{low * 100:+.1f}, {high * 100:+.1f}], "
            f"control's own {noise * 100:.1f}, margin {margin * 100:.1f}",
        }
        if high + noise < -margin:
            row["status"] = "fail"
        elif low - noise < -margin:
            row["status"] = "inconclusive"
    shown = ", ".join(
        f"{r['what']} {r['candidate']:.0%} (control {r['control']:.0%})"
        for r in rows
        if "change" in r
    )
    return join(rows, f"share of requests within the limits: {shown}")


@check("rolling-acceptance", CONTROL)
def rolling_acceptance(evidence: Evidence, policy: CheckPolicy) -> Result:
    """On the same arrivals, acceptance is not lower than the control's by more than the margin."""
    spec = evidence.profile.rolling
    if spec is None or evidence.control is None:
        return Result("not-run", "no control arm, or the profile has no rolling section")
    points = (policy.margin_points or 0.0) / 100
    rows = []
    for rate in spec.rates_per_s:
        values = {
            arm.name: [
                metrics.acceptance(r.counters) for r in arm.records(f"rate-{rate:g}", "rolling")
            ]
            for arm in pair(evidence)
        }
        row = {"what": f"{rate:g}/s", "status": "pass", "reason": ""}
        rows.append(row)
        if any(not v or None in v for v in values.values()):
            row |= {"status": "not-run", "reason": "no acceptance counters in both arms"}
            continue
        control, candidate = median(values["control"]), median(values["candidate"])
        noise = max(values["control"]) - min(values["control"])
        row |= {
            "control": control,
            "candidate": candidate,
            "reason": f"{candidate:.1%}, control {control:.1%} (own {noise:.1%}), "
            f"margin {points:.1%}",
        }
        if candidate < control - points - noise:
            row["status"] = "fail"
    return join(rows, "; ".join(f"{r['what']}: {r['reason']}" for r in rows))


@check("rolling-preemptions", CONTROL)
def rolling_preemptions(evidence: Evidence, policy: CheckPolicy) -> Result:
    """On the same arrivals, the candidate is preempted no more often than the control."""
    spec = evidence.profile.rolling
    if spec is None or evidence.control is None:
        return Result("not-run", "no control arm, or the profile has no rolling section")
    rows = []
    for rate in spec.rates_per_s:
        values = {
            arm.name: [r.counters.preemptions for r in arm.records(f"rate-{rate:g}", "rolling")]
            for arm in pair(evidence)
        }
        row = {"what": f"{rate:g}/s", "status": "pass", "reason": ""}
        rows.append(row)
        if any(not v or None in v for v in values.values()):
            row |= {"status": "not-run", "reason": "no preemption counter in both arms"}
        elif max(values["candidate"]) > max(values["control"]):
            row |= {
                "status": "fail",
                "reason": f"{max(values['candidate']):.0f} preemptions, control "
                f"{max(values['control']):.0f}",
            }
        else:
            row["reason"] = f"{max(values['candidate']):.0f}"
    return join(rows, ", ".join(f"{r['what']}: {r['reason']}" for r in rows))
