"""The same tokens: exactly for single requests, within the noise for batches, and the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from v100_gate import metrics
from v100_gate.checks.base import CONTROL, ORACLE, Result, check, join
from v100_gate.evidence import ArmEvidence, Evidence
from v100_gate.traces import RequestTrace, WaveRecord

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


def _by_request(records: list[WaveRecord]) -> dict[int, list[RequestTrace]]:
    """Traces of every request index over all records."""
    found: dict[int, list[RequestTrace]] = {}
    for record in records:
        for trace in record.requests:
            found.setdefault(trace.index, []).append(trace)
    return found


def _distance(a: list[WaveRecord], b: list[WaveRecord]) -> float | None:
    """Mean token distance over all pairs of records of one wave, 0..1."""
    values = [
        metrics.token_distance(left.token_ids, right.token_ids)
        for one in a
        for other in b
        if one is not other
        for left, right in zip(one.requests, other.requests, strict=True)
    ]
    return sum(values) / len(values) if values else None


def _beside_control(
    evidence: Evidence, control: ArmEvidence, single: bool
) -> Iterator[tuple[str, list[WaveRecord], list[WaveRecord]]]:
    """Name and both arms' records of each wave of single requests, or of several at once."""
    for spec in evidence.profile.waves:
        if (spec.concurrency == 1) == single:
            yield spec.name, evidence.candidate.records(spec.name), control.records(spec.name)


@check("c1-exact", CONTROL)
def c1_exact(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Single requests: token IDs and acceptance counters are identical in both arms."""
    if evidence.control is None:
        return Result("not-run", "there is no control arm")
    rows = []
    for wave, ours, theirs in _beside_control(evidence, evidence.control, single=True):
        row = {"what": wave, "status": "pass", "reason": ""}
        rows.append(row)
        if not ours or not theirs:
            row |= {"status": "not-run", "reason": "no valid wave in one of the arms"}
            continue
        drift = _distance(theirs, theirs)
        for one in ours:
            for other in theirs:
                at = metrics.first_difference(
                    one.requests[0].token_ids, other.requests[0].token_ids
                )
                counts = [
                    (r.counters.drafts, r.counters.draft_tokens, r.counters.accepted_tokens)
                    for r in (one, other)
                ]
                if at is not None:
                    row |= {
                        "status": "inconclusive" if drift else "fail",
                        "reason": f"token {at} differs"
                        + (" (the control differs from itself too)" if drift else ""),
                    }
                elif evidence.candidate.drafting == evidence.control.drafting:
                    if None in counts[0] or None in counts[1]:
                        if evidence.candidate.drafting and row["status"] == "pass":
                            row |= {"status": "not-run", "reason": "no acceptance counters"}
                    elif counts[0] != counts[1] and row["status"] == "pass":
                        row |= {
                            "status": "fail",
                            "reason": f"same tokens, but drafts, drafted, accepted are {counts[0]} "
                            f"against {counts[1]}",
                        }
    return join(rows, "tokens and acceptance of single requests are identical")


@check("batch-tokens", CONTROL)
def batch_tokens(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Batched requests are no further from the control than the control from itself."""
    if evidence.control is None:
        return Result("not-run", "there is no control arm")
    rows = []
    for wave, ours, theirs in _beside_control(evidence, evidence.control, single=False):
        own, distance = _distance(theirs, theirs), _distance(ours, theirs)
        row = {"what": wave, "status": "pass", "reason": "", "own": own, "distance": distance}
        rows.append(row)
        if own is None or distance is None:
            row |= {"status": "not-run", "reason": "the control needs two valid repeats"}
        elif distance > own + (policy.margin or 0.0):
            row |= {
                "status": "fail",
                "reason": f"{distance:.1%} of tokens lie after a first difference; between "
                f"repeats of the control {own:.1%}",
            }
    spread = ", ".join(
        f"{r['what']} {r['distance']:.1%} (own {r['own']:.1%})"
        for r in rows
        if r["own"] is not None and r["distance"] is not None
    )
    return join(rows, f"distance to the control: {spread}")


@check("greedy-oracle", ORACLE)
def greedy_oracle(evidence: Evidence, policy: CheckPolicy) -> Result:
    """At temperature 0 the candidate's tokens equal those of the arm without speculation.

    Speculation must not change a greedy result, in single requests and in batches. The oracle is
    the control arm `no-spec`.
    """
    oracle = evidence.arms.get("no-spec")
    if evidence.profile.sampling.temperature != 0.0:
        return Result("not-run", "the profile samples; greedy tokens are defined at temperature 0")
    if oracle is None or not oracle.starts:
        return Result("not-run", "there is no no-spec arm")
    rows = []
    for spec in evidence.profile.waves:
        truth = _by_request(oracle.records(spec.name))
        found = _by_request(evidence.candidate.records(spec.name))
        row = {"what": spec.name, "status": "pass", "reason": ""}
        rows.append(row)
        if not truth or not found:
            row |= {"status": "not-run", "reason": "no valid wave in one of the arms"}
            continue
        steady = all(
            trace.token_ids == traces[0].token_ids for traces in truth.values() for trace in traces
        )
        wrong = [
            (index, metrics.first_difference(trace.token_ids, truth[index][0].token_ids))
            for index, traces in found.items()
            for trace in traces
            if trace.token_ids != truth[index][0].token_ids
        ]
        row["compared"] = sum(len(traces) for traces in found.values())
        if wrong:
            row |= {
                "status": "fail" if steady else "inconclusive",
                "reason": f"{len(wrong)} of {row['compared']} generations differ; request "
                f"{wrong[0][0]} from token {wrong[0][1]} on"
                + ("" if steady else " (the oracle differs from itself too)"),
            }
    compared = sum(row.get("compared", 0) for row in rows)
    return join(rows, f"{compared} generations equal those without speculation, token for token")
