"""The checks: each takes a run's evidence and says pass, fail, inconclusive or not-run.

A check never infers: what was not measured is `not-run`, and `not-run` does not pass. Adding a
check: write a function here, decorate it with its name and what it needs, require it in a profile,
and add a row to the mutation table (tests/eval/test_mutations.py) with a candidate that only it
catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, isfinite, log
from typing import TYPE_CHECKING, Literal

from v100_gate import gpu, metrics, prompts, stats
from v100_gate.evidence import FIGURES, ArmEvidence, Evidence, median
from v100_gate.schema import PAIR
from v100_gate.traces import Look, RequestTrace, WaveRecord

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy, MemoryCheck, Profile

Status = Literal["pass", "fail", "inconclusive", "not-run"]
ORDER: tuple[Status, ...] = ("fail", "inconclusive", "not-run", "pass")


@dataclass
class Result:
    """Outcome of a check: a sentence for people and rows with the numbers behind it."""

    status: Status
    summary: str
    rows: list[dict] = field(default_factory=list)


Check = Callable[[Evidence, "CheckPolicy"], Result]
CHECKS: dict[str, Check] = {}
NEEDS: dict[str, str] = {}
"""What a check cannot do without, for those that need more than a service that answers."""
CONTROL = "a control arm"
ORACLE = "the further controls of the profile"
LOG = "the service's log"


def check(name: str, needs: str | None = None) -> Callable[[Check], Check]:
    """Register a check under its name, with what it needs."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        if needs is not None:
            NEEDS[name] = needs
        return function

    return register


def beyond_a_url(profile: Profile) -> dict[str, str]:
    """Required checks that cannot run on a service that is only a URL -> what they lack."""
    lacking = {
        name: NEEDS[name]
        for name, policy in profile.checks.items()
        if policy.required and name in NEEDS
    }
    routes = profile.checks.get("routes")
    if routes and routes.required and profile.service.tensor_parallel > 1:
        lacking["routes"] = LOG  # the first rank's counter says nothing about the others
    return lacking


def worst(statuses: Iterable[Status]) -> Status:
    """The status that decides a check of several parts; not-run when there is no part."""
    found = set(statuses)
    return next((status for status in ORDER if status in found), "not-run")


def _join(rows: list[dict], good: str) -> Result:
    """A result from rows that have a `status` and a `what`; the worst row speaks."""
    status = worst(row["status"] for row in rows)
    if status == "pass":
        return Result(status, good, rows)
    if not rows:
        return Result("not-run", "nothing was measured", rows)
    bad = [row for row in rows if row["status"] == status]
    text = f"{bad[0]['what']}: {bad[0]['reason']}"
    if len(bad) > 1:
        text += f" (and {len(bad) - 1} more)"
    return Result(status, text, rows)


def _pair(evidence: Evidence) -> list[ArmEvidence]:
    return [arm for arm in (evidence.control, evidence.candidate) if arm is not None]


# ------------------------------------------------------------------------- did it happen at all


@check("complete")
def complete(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Every planned wave of every planned start has its valid repeats."""
    rows = []
    profile = evidence.profile
    for name, arm in evidence.arms.items():
        pair = name in PAIR
        if not pair and name not in profile.schedule.controls:
            continue
        planned = profile.schedule.starts_per_arm if pair else 1
        for number in range(1, planned + 1):
            start = next((s for s in arm.starts if s.number == number), None)
            wanted = [
                (spec.name, "measured", profile.counts(spec, name)[1]) for spec in profile.waves
            ]
            if pair:
                if profile.retrieval:
                    wanted.append(("retrieval", "quality", 1))
                    if profile.retrieval.needle_lengths:
                        wanted.append(("needle", "quality", 1))
                if profile.logits:
                    wanted.append(("logits", "logits", 1))
                if profile.rolling:
                    wanted += [(f"rate-{r:g}", "rolling", 1) for r in profile.rolling.rates_per_s]
            for wave, kind, count in wanted:
                have = len(start.measured(wave, kind)) if start else 0
                tried = (
                    [r for r in start.waves if r.wave == wave and r.kind == kind] if start else []
                )
                row = {
                    "what": f"{name} start {number}, {wave}",
                    "valid": have,
                    "wanted": count,
                    "status": "pass",
                    "reason": "",
                }
                if have < count:
                    row["status"] = "fail" if tried else "not-run"
                    row["reason"] = f"{have} of {count} valid repeats"
                    invalid = [r for r in tried if r.invalid]
                    if invalid:
                        row["reason"] += f"; {invalid[-1].invalid[0]}"
                rows.append(row)
    return _join(rows, f"all {len(rows)} parts of the schedule have their valid repeats")


@check("fresh-starts", "a service that the gate starts")
def fresh_starts(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Each arm was started afresh as often as the profile asks, one process per start."""
    wanted = evidence.profile.schedule.starts_per_arm
    rows = []
    for arm in _pair(evidence):
        fresh = [s for s in arm.starts if s.processes and s.processes[-1].get("fresh")]
        split = [s.number for s in arm.starts if len(s.processes) > 1]
        status: Status = "pass" if len(fresh) >= wanted else "not-run"
        rows.append(
            {
                "what": f"arm {arm.name}",
                "fresh": len(fresh),
                "wanted": wanted,
                "status": status,
                "reason": f"{len(fresh)} fresh starts, {wanted} are asked for"
                if status != "pass"
                else "",
                "note": f"start {split} was interrupted and continued in a second process"
                if split
                else "",
            }
        )
    note = "; ".join(row["note"] for row in rows if row["note"])
    return _join(
        rows,
        f"{wanted} fresh start{'s' if wanted > 1 else ''} of each arm"
        + (f" ({note})" if note else ""),
    )


@check("identity", "a manifest")
def identity(evidence: Evidence, policy: CheckPolicy) -> Result:
    """What was served is the release of the manifest, by hashes, in every process that gave a
    counted wave."""
    rows = []
    reported: dict[str, set[str]] = {"library": set(), "source": set()}
    for start in evidence.candidate.starts:
        many = len(start.serving) > 1
        for number, process in enumerate(start.serving, 1):
            who = process.get("identity")
            what = f"candidate start {start.number}" + (f", process {number}" if many else "")
            row = {"what": what, "status": "pass", "reason": ""}
            if who is None or not who.get("manifest_sha256"):
                row |= {"status": "not-run", "reason": "the arms file names no manifest"}
            elif who["problems"]:
                row |= {"status": "fail", "reason": who["problems"][0]}
            elif not who["verified"]:
                row |= {
                    "status": "not-run",
                    "reason": "neither a served tree nor a hash in the log could be compared",
                }
            else:
                row["release"] = who["release"]
                row["verified"] = ", ".join(who["verified"])
            for kind, hashes in reported.items():
                hashes.update((who or {}).get(f"log_{kind}_sha256", []))
            rows.append(row)
        if not start.serving:
            what = f"candidate start {start.number}"
            rows.append({"what": what, "status": "not-run", "reason": "no counted wave"})
    for kind, hashes in reported.items():
        if len(hashes) > 1:
            names = " and ".join(sorted(value[:12] for value in hashes))
            reason = f"the candidate's processes report {names}"
            rows.append({"what": kind, "status": "fail", "reason": reason})
    return _join(rows, rows[0].get("verified", "") if rows else "")


def _look_row(what: str, looks: list[Look], why_not: str) -> dict:
    """A row of `hygiene`: everybody who was seen fails it, a look that saw nothing is not-run."""
    others = [other for seen in looks for other in seen.others]
    row = {"what": what, "looks": len(looks), "status": "pass", "reason": ""}
    if others:
        row |= {"status": "fail", "reason": others[0]}
    elif not looks:
        row |= {"status": "not-run", "reason": "nobody looked"}
    elif any(seen.active_units is None for seen in looks):
        row |= {"status": "not-run", "reason": "systemctl could not say which units are active"}
    elif any(seen.foreign is None for seen in looks):
        row |= {"status": "not-run", "reason": why_not}
    return row


@check("hygiene", "a service that the gate starts")
def hygiene(evidence: Evidence, policy: CheckPolicy) -> Result:
    """No other unit and no foreign process used the GPUs before, while and after counted waves
    were taken, in any arm."""
    site = evidence.site.hygiene
    if not site.gpu:
        return Result(
            "not-run", "the arms set hygiene.gpu: false, so nobody looked at who used the GPUs"
        )
    rows = []
    for arm in evidence.arms.values():
        why_not = "nvidia-smi could not say who uses the GPUs"
        if arm.name in evidence.site.arms and evidence.site.arms[arm.name].kind == "url":
            why_not = "the GPU processes of a url arm cannot be told from foreign ones"
        for start in arm.starts:
            what = f"{arm.name} start {start.number}"
            if not start.serving:
                rows.append(_look_row(what, [], why_not))
            for process in start.serving:
                for moment in ("before", "loaded", "after"):
                    seen = process.get("hygiene", {}).get(moment)
                    # An interrupted process has no "after": the look as its last wave ended is it.
                    if seen is None and moment == "after":
                        continue
                    looks = [Look.model_validate(seen)] if seen else []
                    rows.append(_look_row(f"{what}, {moment}", looks, why_not))
            for record in start.waves:
                if not record.invalid:
                    name = f"{what}, during {record.wave} {record.kind} {record.repeat}"
                    rows.append(_look_row(name, record.looks, why_not))
    units = len(site.stopped_units)
    looks = sum(row["looks"] for row in rows)
    return _join(
        rows,
        f"no foreign GPU process and none of {units} named units at {looks} looks before, during "
        "and after the waves",
    )


def _each_process(arm: ArmEvidence) -> list[tuple[str, dict]]:
    """Every process that served an arm, with its place in words; an interrupted start has more
    than one, and a start that was never recorded has none."""
    found = []
    for start in arm.starts:
        what = f"{arm.name} start {start.number}"
        many = len(start.processes) > 1
        for number, process in enumerate(start.processes, 1):
            found.append((f"{what}, process {number}" if many else what, process))
        if not start.processes:
            found.append((what, {}))
    return found


@check("service-errors", LOG)
def service_errors(evidence: Evidence, policy: CheckPolicy) -> Result:
    """No process of the candidate died or wrote an error line, the resumed ones included."""
    rows = []
    for what, process in _each_process(evidence.candidate):
        facts = process.get("facts")
        row = {"what": what, "status": "pass", "reason": ""}
        # Records of earlier versions do not say what kind of failure it was.
        broke = process.get("failure", "ServiceError") == "ServiceError"
        if process.get("end") == "failed" and broke:
            lines = process.get("error", "").splitlines() or ["the service failed"]
            row |= {"status": "fail", "reason": lines[0]}
        elif facts is None:
            row |= {"status": "not-run", "reason": "no log could be read"}
        elif facts["errors"]:
            row |= {"status": "fail", "reason": facts["errors"][0]}
        rows.append(row)
    return _join(rows, "no process died, no error in the service's log")


@check("compile-events", LOG)
def compile_events(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The log shows no compilation during a counted wave.

    It shows vLLM's own compilation and graph capture, extension builds, and Triton's autotuning
    where the service has TRITON_PRINT_AUTOTUNING=1. A Triton kernel that is compiled without
    autotuning leaves no line; the warm-up wave of every cell is there for those.
    """
    rows = []
    for arm in _pair(evidence):
        for spec in evidence.profile.waves:
            records = arm.records(spec.name)
            unread = sum(record.compile_events is None for record in records)
            rows.append(
                {
                    "what": f"{arm.name}, {spec.name}",
                    "status": "pass" if records and not unread else "not-run",
                    "reason": f"no log for {unread} waves" if records else "no valid wave",
                }
            )
    return _join(
        rows,
        "the log shows no compilation during a counted wave (Triton's autotuning is in it only "
        "with TRITON_PRINT_AUTOTUNING=1)",
    )


# ------------------------------------------------------------------------- speed


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
    return _join(rows, f"{FIGURES[figure]}: {changes} (margin {margin:.1%})")


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
    return _join(rows, changes)


# ------------------------------------------------------------------------- same tokens


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


@check("c1-exact", CONTROL)
def c1_exact(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Single requests: token IDs and acceptance counters are identical in both arms."""
    if evidence.control is None:
        return Result("not-run", "there is no control arm")
    rows = []
    for spec in evidence.profile.waves:
        if spec.concurrency != 1:
            continue
        ours, theirs = evidence.candidate.records(spec.name), evidence.control.records(spec.name)
        row = {"what": spec.name, "status": "pass", "reason": ""}
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
    return _join(rows, "tokens and acceptance of single requests are identical")


@check("batch-tokens", CONTROL)
def batch_tokens(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Batched requests are no further from the control than the control from itself."""
    if evidence.control is None:
        return Result("not-run", "there is no control arm")
    rows = []
    for spec in evidence.profile.waves:
        if spec.concurrency == 1:
            continue
        ours, theirs = evidence.candidate.records(spec.name), evidence.control.records(spec.name)
        own, distance = _distance(theirs, theirs), _distance(ours, theirs)
        row = {"what": spec.name, "status": "pass", "reason": "", "own": own, "distance": distance}
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
    return _join(rows, f"distance to the control: {spread}")


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
    return _join(rows, f"{compared} generations equal those without speculation, token for token")


# ------------------------------------------------------------------------- cache and scheduling


@check("prefix-hits")
def prefix_hits(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Prefix-cache hits per wave are at least the control's, and not zero."""
    rows = []
    for spec in evidence.profile.waves:
        sides = {}
        for arm in _pair(evidence):
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
    return _join(rows, f"hit tokens per wave: {hits}")


@check("preemptions")
def preemptions(evidence: Evidence, policy: CheckPolicy) -> Result:
    """No request of a wave was preempted: the waves were live together as planned."""
    rows = []
    for arm in _pair(evidence):
        for spec in evidence.profile.waves:
            values = [record.counters.preemptions for record in arm.records(spec.name)]
            row = {"what": f"{arm.name}, {spec.name}", "status": "pass", "reason": ""}
            if not values or None in values:
                row |= {"status": "not-run", "reason": "no preemption counter"}
            elif sum(values):
                row |= {"status": "fail", "reason": f"{sum(values):.0f} preemptions"}
            rows.append(row)
    return _join(rows, "none")


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
    return _join(rows, shown)


# ------------------------------------------------------------------------- routes and memory


def _launches(counts: dict[str, float], route: str) -> float:
    """Launches of a route ("long"), or of a route in one kind of graph ("long/bounded")."""
    return sum(
        count
        for key, count in counts.items()
        if (key.partition("/")[2] + "/").startswith(route + "/")
    )


@check("routes")
def routes(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Every rank of the candidate launched every route the profile names, and the first rank did
    so during counted waves.

    A rank's evidence is its log: the line of a route's first launch, which every rank writes
    when it happens, or a line of totals (at intervals and when it ends; not needed). The first
    rank's is also the service's counter vllm:attention_route_launches, before and after a wave,
    which alone says what ran in counted waves.
    """
    wanted = evidence.profile.routes
    ranks = evidence.profile.service.tensor_parallel
    if not wanted:
        return Result("not-run", "the profile names no route")
    rows = []
    for start in evidence.candidate.starts:
        what = f"candidate start {start.number}"
        by_rank = (start.facts or {}).get("launches_by_rank", {})
        scraped = [record.counters.routes or {} for record in start.waves if not record.invalid]
        for rank in range(ranks):
            seen = [by_rank.get(str(rank), {}), *(scraped if rank == 0 else [])]
            for route in wanted:
                count = max(_launches(launches, route) for launches in seen)
                row = {"what": f"{what}, rank {rank}, {route}", "status": "pass", "reason": ""}
                if not any(seen):
                    missing = "no log could be read" if start.facts is None else "no route lines"
                    row |= {"status": "not-run", "reason": f"{missing} of this rank"}
                elif not count:
                    row |= {"status": "fail", "reason": "never launched"}
                else:
                    row["launches"] = count
                rows.append(row)
    records = [r for spec in evidence.profile.waves for r in evidence.candidate.records(spec.name)]
    counted = [record.counters.routes for record in records]
    for route in wanted:
        row = {"what": f"counted waves, {route}", "status": "pass", "reason": ""}
        if not counted or None in counted:
            row |= {"status": "not-run", "reason": "no vllm:attention_route_launches counter"}
        else:
            total = sum(_launches(found, route) for found in counted)
            row["launches"] = total
            if not total:
                row |= {"status": "fail", "reason": "never launched while the waves ran"}
        rows.append(row)
    launched = {row["what"].split(", ")[-1]: row.get("launches") for row in rows}
    shown = ", ".join(f"{route} {launched[route]:,.0f}" for route in wanted if launched.get(route))
    return _join(rows, f"launches in counted waves: {shown}; all {ranks} rank(s) used every route")


def _memory(evidence: Evidence, fact: str, what: str) -> tuple[float | None, float | None]:
    """Worst rank of control and candidate for a log fact, over all starts."""
    sides = []
    for arm in (evidence.control, evidence.candidate):
        values = []
        for start in arm.starts if arm else []:
            found = (start.facts or {}).get(fact)
            if isinstance(found, dict):
                values += found.values()
            elif found is not None:
                values.append(found)
        worst_first = min if "kv" in fact else max
        sides.append(worst_first(values) if values else None)
    return sides[0], sides[1]


ROUNDING_GIB = 0.01
"""vLLM logs GiB with two decimals."""


def _attributed(evidence: Evidence, name: MemoryCheck, gib: float) -> str | None:
    """The attributions of a check in words when they cover a difference of `gib`; else None."""
    items = [item for item in evidence.site.memory_attribution if name in item.checks]
    if not items or sum(item.gib for item in items) < gib - ROUNDING_GIB:
        return None
    return "attributed: " + "; ".join(f"{item.what} {item.gib:g} GiB" for item in items)


@check("kv-budget", CONTROL)
def kv_budget(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The candidate has the control's KV budget, or a person attributed the difference."""
    tokens = _memory(evidence, "kv_tokens", "tokens")
    gib = _memory(evidence, "kv_gib_by_rank", "GiB")
    if None in tokens:
        return Result("not-run", "the log does not state the KV cache size in both arms")
    control, candidate = tokens
    lost = 1.0 - candidate / control
    row = {
        "what": "KV tokens",
        "control": control,
        "candidate": candidate,
        "control_gib": gib[0],
        "candidate_gib": gib[1],
        "status": "pass",
        "reason": "",
    }
    text = f"{candidate:,.0f} tokens, control {control:,.0f}"
    if gib[0] is not None and gib[1] is not None:
        text += f" ({gib[1]:.2f} and {gib[0]:.2f} GiB)"
    margin = policy.margin or 0.0
    if lost > margin:
        words = None
        if None not in gib:
            # Tokens can be lost without GiB (a larger page): what the lost tokens would take
            # counts too, but for the page that rounding down costs.
            tokens_lost = control - candidate - evidence.profile.service.page_size
            missing = max(gib[0] - gib[1], tokens_lost / control * gib[0])
            words = _attributed(evidence, "kv-budget", missing)
        if words:
            return Result("pass", f"{text}; the difference is {words}", [row])
        row |= {
            "status": "fail",
            "reason": f"{text}: {lost:.1%} less, margin {margin:.1%}, and nobody attributed it",
        }
    return _join([row], text)


@check("graph-pool", CONTROL)
def graph_pool(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The graph pool grew by no more than the margin, or a person attributed the growth."""
    control, candidate = _memory(evidence, "graph_pool_gib_by_rank", "GiB")
    if control is None or candidate is None:
        return Result("not-run", "the log states no graph pool in both arms")
    margin = policy.margin_gib if policy.margin_gib is not None else 0.0
    grown = candidate - control
    row = {
        "what": "graph pool",
        "control": control,
        "candidate": candidate,
        "status": "pass",
        "reason": f"{candidate:.2f} GiB, control {control:.2f} GiB, margin {margin:.2f} GiB",
    }
    if grown > margin:
        words = _attributed(evidence, "graph-pool", grown)
        row["status"] = "pass" if words else "fail"
        row["reason"] += f"; {words or 'nobody attributed it'}"
    return _join([row], row["reason"])


@check("idle-memory", CONTROL)
def idle_memory(evidence: Evidence, policy: CheckPolicy) -> Result:
    """GPU memory after load and after the run is the control's within the margin, per GPU, or a
    person attributed the difference."""
    margin = policy.margin_gib if policy.margin_gib is not None else 0.0
    rows, explained = [], None
    for moment in ("loaded", "after"):
        sides: dict[str, dict[str, float]] = {}
        unread = 0
        for arm in _pair(evidence):
            for start in arm.starts:
                for process in start.processes:
                    for gpu_row in process.get("gpu", {}).get(moment, []):
                        mib = gpu.number(gpu_row["memory.used"])
                        unread += mib is None
                        side = sides.setdefault(arm.name, {})
                        known = side.get(gpu_row["index"], 0.0)
                        side[gpu_row["index"]] = max(known, (mib or 0.0) / 1024)
        if unread:
            reason = f"nvidia-smi did not say the memory in {unread} rows"
            rows.append({"what": moment, "status": "not-run", "reason": reason})
            continue
        if "candidate" not in sides or "control" not in sides:
            rows.append({"what": moment, "status": "not-run", "reason": "no nvidia-smi snapshots"})
            continue
        for index, used in sides["candidate"].items():
            before = sides["control"].get(index)
            row = {
                "what": f"GPU {index} {moment}",
                "candidate": used,
                "control": before,
                "status": "pass",
                "reason": "",
            }
            if before is None:
                row |= {"status": "not-run", "reason": "the control did not use this GPU"}
            elif used - before > margin:
                words = _attributed(evidence, "idle-memory", used - before)
                explained = explained or words
                row |= {
                    "status": "pass" if words else "fail",
                    "reason": f"{used:.2f} GiB, control {before:.2f} GiB, margin {margin:.2f}; "
                    f"{words or 'nobody attributed it'}",
                }
            rows.append(row)
    or_attributed = f", or {explained}" if explained else ""
    return _join(rows, f"within {margin:.2f} GiB of the control on every GPU{or_attributed}")


CLOCKS_MARGIN = 0.05
"""Largest relative difference of the median clocks of two arms, where the profile sets none."""


@check("gpu-state")
def gpu_state(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Nothing was throttled during a counted wave; both arms had the same power caps, and median
    clocks within the margin."""
    rows = []
    arms: dict[str, list[dict[str, str]]] = {}
    for arm in _pair(evidence):
        seen = [
            row for spec in evidence.profile.waves for r in arm.records(spec.name) for row in r.gpu
        ]
        arms[arm.name] = seen
        row = {"what": arm.name, "status": "pass", "reason": "", "samples": len(seen)}
        states = [gpu.throttled(sample) for sample in seen]
        hot = [sample for sample, state in zip(seen, states, strict=True) if state]
        if hot:
            row |= {
                "status": "fail",
                "reason": f"GPU {hot[0]['index']} was throttled in {len(hot)} of {len(seen)} "
                f"samples ({hot[0]['clocks_throttle_reasons.active']})",
            }
        elif not seen:
            row |= {"status": "not-run", "reason": "no nvidia-smi samples during the waves"}
        elif None in states:
            row |= {
                "status": "not-run",
                "reason": f"nvidia-smi gave no throttle reasons in {states.count(None)} of "
                f"{len(seen)} samples",
            }
        rows.append(row)
    if len(arms) == 2:
        rows += _same_state(arms, policy.margin if policy.margin is not None else CLOCKS_MARGIN)
    return _join(rows, "no throttling; same power caps and clocks in both arms")


def _same_state(arms: dict[str, list[dict[str, str]]], margin: float) -> list[dict]:
    """Rows that compare power caps and clocks of two arms, GPU by GPU."""
    rows = []
    for index in sorted({sample["index"] for seen in arms.values() for sample in seen}):
        for name, field_name, allowed in (
            ("power cap", "power.limit", 0.0),
            ("SM clock", "clocks.sm", margin),
            ("memory clock", "clocks.mem", margin),
        ):
            sides = {
                arm: [gpu.number(sample[field_name]) for sample in seen if sample["index"] == index]
                for arm, seen in arms.items()
            }
            row = {"what": f"GPU {index} {name}", "status": "pass", "reason": ""}
            rows.append(row)
            if any(not values or None in values for values in sides.values()):
                row |= {"status": "not-run", "reason": "nvidia-smi does not say it for both arms"}
                continue
            # A cap is a setting and has one value; a clock moves, and its median is compared.
            if not allowed and any(len(set(values)) > 1 for values in sides.values()):
                row |= {"status": "fail", "reason": "it changed during the gate"}
                continue
            row |= {arm: median(values) for arm, values in sides.items()}
            if abs(row["candidate"] - row["control"]) > allowed * row["control"]:
                row |= {
                    "status": "fail",
                    "reason": f"{row['candidate']:g}, control {row['control']:g}",
                }
    return rows


# ------------------------------------------------------------------------- quality


def _score(evidence: Evidence, wave: str, key: str) -> Result:
    import json

    path = evidence.root / "fixtures" / "retrieval.json"
    if not path.exists():
        return Result("not-run", "no retrieval was measured")
    items = json.loads(path.read_text())[key]
    if not items:
        return Result("not-run", f"the profile has no {wave}")
    rows = []
    for arm in _pair(evidence):
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
    return _join(rows, f"{right} of {len(ours)} right, all with finish reason stop")


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
    return _join(rows, rows[0]["reason"])


# ------------------------------------------------------------------------- rolling arrivals


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
        for arm in _pair(evidence):
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
    return _join(rows, f"share of requests within the limits: {shown}")


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
            for arm in _pair(evidence)
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
    return _join(rows, "; ".join(f"{r['what']}: {r['reason']}" for r in rows))


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
            for arm in _pair(evidence)
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
    return _join(rows, ", ".join(f"{r['what']}: {r['reason']}" for r in rows))
