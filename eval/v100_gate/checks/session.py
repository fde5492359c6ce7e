"""Did it happen at all: planned parts, fresh starts, identity, hygiene, errors, compilations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate.checks.base import LOG, Result, Status, check, join, pair
from v100_gate.evidence import ArmEvidence, Evidence
from v100_gate.schema import PAIR
from v100_gate.traces import Look

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


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
    return join(rows, f"all {len(rows)} parts of the schedule have their valid repeats")


@check("fresh-starts", "a service that the gate starts")
def fresh_starts(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Each arm was started afresh as often as the profile asks, one process per start."""
    wanted = evidence.profile.schedule.starts_per_arm
    rows = []
    for arm in pair(evidence):
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
    return join(
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
    return join(rows, rows[0].get("verified", "") if rows else "")


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
    return join(
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
    return join(rows, "no process died, no error in the service's log")


@check("compile-events", LOG)
def compile_events(evidence: Evidence, policy: CheckPolicy) -> Result:
    """The log shows no compilation during a counted wave.

    It shows vLLM's own compilation and graph capture, extension builds, and Triton's autotuning
    where the service has TRITON_PRINT_AUTOTUNING=1. A Triton kernel that is compiled without
    autotuning leaves no line; the warm-up wave of every cell is there for those.
    """
    rows = []
    for arm in pair(evidence):
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
    return join(
        rows,
        "the log shows no compilation during a counted wave (Triton's autotuning is in it only "
        "with TRITON_PRINT_AUTOTUNING=1)",
    )
