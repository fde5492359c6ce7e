"""Prefix hits, preemptions, and counters that must be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate import metrics
from v100_gate.checks.base import Result, check, join, pair
from v100_gate.evidence import Evidence, median

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


@check("prefix-hits")
def prefix_hits(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Prefix-cache hits per wave are at least the control's, and not zero."""
    rows = []
    for spec in evidence.profile.waves:
        sides = {}
        for arm in pair(evidence):
            values = [r.counters.prefix_hits for r in arm.records(spec.name)]
            known = [value for value in values if value is not None]
            sides[arm.name] = median(known) if known and len(known) == len(values) else None
        row = {"what": spec.name, "status": "pass", "reason": "", **sides}
        ours = sides["candidate"]
        missing = [name for name, value in sides.items() if value is None]
        if missing:
            row |= {"status": "not-run", "reason": f"no prefix-cache counters of {missing[-1]}"}
        elif ours == 0 and evidence.profile.service.prefix_caching:
            row |= {"status": "fail", "reason": "no hit, although the prompts repeat"}
        elif ours < sides.get("control", 0.0):
            row |= {
                "status": "fail",
                "reason": f"{ours:.0f} tokens hit, the control {sides['control']:.0f}",
            }
        rows.append(row)
    hits = ", ".join(
        f"{r['what']} {r['candidate']:.0f}" for r in rows if r["candidate"] is not None
    )
    return join(rows, f"hit tokens per wave: {hits}")


@check("preemptions")
def preemptions(evidence: Evidence, policy: CheckPolicy) -> Result:
    """No request of a wave was preempted: the waves were live together as planned."""
    rows = []
    for arm in pair(evidence):
        for spec in evidence.profile.waves:
            values = [record.counters.preemptions for record in arm.records(spec.name)]
            row = {"what": f"{arm.name}, {spec.name}", "status": "pass", "reason": ""}
            if not values or None in values:
                row |= {"status": "not-run", "reason": "no preemption counter"}
            elif sum(values):
                row |= {"status": "fail", "reason": f"{sum(values):.0f} preemptions"}
            rows.append(row)
    return join(rows, "none")


@check("acceptance-counters")
def acceptance_counters(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The candidate drafted in every wave, and its counters say how much was accepted."""
    rows = []
    for spec in evidence.profile.waves:
        records = evidence.candidate.records(spec.name)
        rates = [metrics.acceptance(record.counters) for record in records]
        row = {"what": spec.name, "status": "pass", "reason": ""}
        if not rates or None in rates:
            row |= {"status": "not-run", "reason": "no acceptance counters, or nothing drafted"}
        elif max(rates) == 0.0:
            row |= {"status": "fail", "reason": "nothing that was drafted was ever accepted"}
        else:
            row["acceptance"] = median(rates)
        rows.append(row)
    shown = ", ".join(f"{r['what']} {r['acceptance']:.1%}" for r in rows if "acceptance" in r)
    return join(rows, shown)
