"""Retrieval, needles and log-probabilities."""

from __future__ import annotations

from math import exp, isfinite, log
from typing import TYPE_CHECKING

from v100_gate import prompts
from v100_gate.checks.base import CONTROL, Result, Status, check, join, pair
from v100_gate.evidence import Evidence
from v100_gate.traces import WaveRecord

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


def _score(evidence: Evidence, wave: str, key: str) -> Result:
    import json

    path = evidence.root / "fixtures" / "retrieval.json"
    if not path.exists():
        return Result("not-run", "no retrieval was measured")
    items = json.loads(path.read_text())[key]
    if not items:
        return Result("not-run", f"the profile has no {wave}")
    rows = []
    for arm in pair(evidence):
        for start in arm.starts:
            for record in start.measured(wave, "quality"):
                for item, trace in zip(items, record.requests, strict=True):
                    right = prompts.answered(trace.text, item["answer"])
                    natural = trace.finish_reason == "stop"
                    status: Status = "pass" if right and natural else "fail"
                    reason = ""
                    if not right:
                        reason = f"expected {item['answer']}, got {trace.text[-80:]!r}"
                    elif not natural:
                        reason = f"finish reason {trace.finish_reason!r}, not 'stop'"
                    # A wrong answer of the control is shown, and is not the candidate's fault.
                    if arm.name == "control" and status == "fail":
                        reason, status = f"(control, not counted) {reason}", "pass"
                    rows.append(
                        {
                            "what": f"{arm.name} start {start.number}, question {trace.index}",
                            "tokens": trace.prompt_tokens,
                            "depth": item["depth"],
                            "status": status,
                            "reason": reason,
                        }
                    )
    ours = [row for row in rows if row["what"].startswith("candidate")]
    if not ours:
        return Result("not-run", f"no valid {wave} of the candidate", rows)
    right = sum(row["status"] == "pass" for row in ours)
    return join(rows, f"{right} of {len(ours)} right, all with finish reason stop")


@check("retrieval")
def retrieval(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Long-document retrieval: every answer right, every finish reason `stop`."""
    return _score(evidence, "retrieval", "documents")


@check("needle")
def needle(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Needles at several depths and lengths: every answer right."""
    return _score(evidence, "needle", "needles")


def _positions(record: WaveRecord) -> list[list[dict[str, float]]]:
    """Top log-probabilities per request and step: [{token: log p}]."""
    return [
        [row for block in trace.logprobs for row in block.get("top_logprobs") or []]
        for trace in record.requests
    ]


def logit_distance(a: WaveRecord, b: WaveRecord) -> tuple[float, float, int]:
    """Largest absolute difference of log p and largest KL over positions with equal context.

    A request's steps count up to and including the first one whose chosen token differs: until
    then both arms saw the same context, so both were teacher-forced by the same text. KL is over
    the tokens both arms list, with everything else in one bucket, which bounds the true KL from
    below. Returns (max abs, max KL, positions compared).
    """
    largest, divergence, compared = 0.0, 0.0, 0
    for left, right, ta, tb in zip(
        _positions(a), _positions(b), a.requests, b.requests, strict=True
    ):
        ids_a, ids_b = ta.token_ids, tb.token_ids
        for step, (p, q) in enumerate(zip(left, right, strict=False)):
            common = p.keys() & q.keys()
            if not common:
                return float("inf"), float("inf"), compared
            compared += 1
            largest = max(largest, *(abs(p[token] - q[token]) for token in common))
            kl, rest_p, rest_q = 0.0, 1.0, 1.0
            for token in common:
                kl += exp(p[token]) * (p[token] - q[token])
                rest_p -= exp(p[token])
                rest_q -= exp(q[token])
            if rest_p > 1e-9 and rest_q > 1e-9:
                kl += rest_p * log(rest_p / rest_q)
            divergence = max(divergence, kl)
            if step >= len(ids_a) or step >= len(ids_b) or ids_a[step] != ids_b[step]:
                break
    return largest, divergence, compared


@check("logits", CONTROL)
def logits(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Teacher-forced log-probabilities agree with the control's, up to the profile's limits
    or the control's own start-to-start distance, whichever is larger."""
    spec = evidence.profile.logits
    if evidence.control is None or spec is None:
        return Result("not-run", "no control arm, or the profile has no logits section")
    theirs = evidence.control.records("logits", "logits")
    ours = evidence.candidate.records("logits", "logits")
    if not theirs or not ours:
        return Result("not-run", "not measured in both arms")
    own_abs = own_kl = 0.0
    for first, one in enumerate(theirs):
        for other in theirs[first + 1 :]:
            distance = logit_distance(one, other)
            own_abs, own_kl = max(own_abs, distance[0]), max(own_kl, distance[1])
    rows = []
    for number, record in enumerate(ours, 1):
        # Each component at its worst: the pair with the largest |dlog p| need not have the
        # largest KL, nor the fewest positions.
        apart, diverged, positions = zip(
            *(logit_distance(other, record) for other in theirs), strict=True
        )
        largest, divergence, compared = max(apart), max(diverged), min(positions)
        row = {
            "what": f"candidate start {number}",
            "max_abs": largest if isfinite(largest) else None,
            "kl": divergence if isfinite(divergence) else None,
            "positions": compared,
            "own_max_abs": own_abs if isfinite(own_abs) else None,
            "own_kl": own_kl if isfinite(own_kl) else None,
            "status": "pass",
            "reason": f"max |dlog p| {largest:.2e}, KL {divergence:.2e} over {compared} positions "
            f"(limits {spec.max_abs}, {spec.kl}; control against itself {own_abs:.2e}, "
            f"{own_kl:.2e})",
        }
        if largest > max(spec.max_abs, own_abs) or divergence > max(spec.kl, own_kl):
            row["status"] = "fail"
        elif not isfinite(own_abs) and (largest > spec.max_abs or divergence > spec.kl):
            row["status"] = "inconclusive"
            row["reason"] += ": two starts of the control list no common token"
        elif compared == 0:
            row["status"] = "not-run"
        rows.append(row)
    return join(rows, rows[0]["reason"])
