"""From evidence to a verdict: run the profile's checks, apply waivers, compare the arms."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict

from v100_gate import RESULT_SCHEMA, metrics, stats
from v100_gate.checks import CHECKS
from v100_gate.evidence import FIGURES, ArmEvidence, Evidence
from v100_gate.schema import Waiver


def judge(evidence: Evidence, waivers: dict[str, Waiver]) -> dict:
    """The verdict document.

    A required check that is not `pass` and not waived makes the verdict `fail`. A check that
    passed needs no waiver: one that is there all the same is listed as unused.
    """
    rows = []
    for name, policy in evidence.profile.checks.items():
        result = CHECKS[name](evidence, policy)
        waiver = waivers.get(name)
        status = result.status
        waived = waiver is not None and status != "pass" and status in waiver.statuses
        rows.append(
            {
                "check": name,
                "status": "waived" if waived else status,
                "measured": status,
                "required": policy.required,
                "summary": result.summary,
                "note": policy.note,
                "what": (CHECKS[name].__doc__ or "").split("\n\n")[0].replace("\n    ", " "),
                "waiver": waiver.model_dump(mode="json") if waived else None,
                "rows": result.rows,
            }
        )
    blocking = [r for r in rows if r["required"] and r["status"] not in ("pass", "waived")]
    unused = [name for name in waivers if not any(r["check"] == name and r["waiver"] for r in rows)]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return {
        "schema": RESULT_SCHEMA,
        "profile": evidence.profile.name,
        "run": evidence.root.name,
        "sources": evidence.sources,
        "verdict": "fail" if blocking else "pass",
        "blocking": [row["check"] for row in blocking],
        "waived": [row["check"] for row in rows if row["status"] == "waived"],
        "counts": counts,
        "unused_waivers": unused,
        "judged": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "release": _identity(evidence, "release"),
        "manifest_sha256": _identity(evidence, "manifest_sha256"),
        "library_sha256": _identity(evidence, "library_sha256"),
        "source_sha256": _identity(evidence, "source_sha256"),
        "memory_attribution": [
            item.model_dump(mode="json") for item in evidence.site.memory_attribution
        ],
        "checks": rows,
    }


def _identity(evidence: Evidence, name: str) -> str | None:
    """A field of the candidate's identity."""
    found = (start.identity.get(name) for start in evidence.candidate.starts if start.identity)
    return next(found, None)


def _positions(arm: ArmEvidence, wave: str) -> list[float] | None:
    """Acceptance by position over all valid repeats of a wave, drafts added up."""
    total: list[float] | None = None
    drafts = 0.0
    for record in arm.records(wave):
        counts = record.counters
        if counts.reset or counts.accepted_per_position is None or not counts.drafts:
            return None
        drafts += counts.drafts
        per = counts.accepted_per_position
        total = per if total is None else [a + b for a, b in zip(total, per, strict=True)]
    return [value / drafts for value in total] if total and drafts else None


def compare(evidence: Evidence) -> dict:
    """The comparison document: every figure of every wave in every arm, all raw values."""
    waves = []
    for spec in evidence.profile.waves:
        entry: dict = {
            "wave": spec.name,
            "concurrency": spec.concurrency,
            "input_tokens": spec.lengths,
            "output_tokens": spec.output_tokens,
            "arms": {},
            "against_control": {},
        }
        for name, arm in evidence.arms.items():
            figures = {}
            for figure in FIGURES:
                found = stats.summary(arm.groups(spec.name, figure))
                lacking = arm.unmeasured(spec.name, figure)
                figures[figure] = asdict(found) | {"not_measured": lacking} if found else None
            entry["arms"][name] = {
                "figures": figures,
                "acceptance_by_position": _positions(arm, spec.name),
                "prefix_hits": [r.counters.prefix_hits for r in arm.records(spec.name)],
                "preemptions": [r.counters.preemptions for r in arm.records(spec.name)],
                "kv_usage_peak": [r.kv_usage_peak for r in arm.records(spec.name)],
            }
        if evidence.control is not None:
            for figure in FIGURES:
                relative = figure not in ("acceptance", "prefix_hit_rate")
                base = evidence.control.groups(spec.name, figure)
                new = evidence.candidate.groups(spec.name, figure)
                bounds = stats.interval(base, new, relative)
                one, two = stats.summary(base), stats.summary(new)
                if bounds is None or one is None or two is None:
                    entry["against_control"][figure] = None
                    continue
                change = two.median / one.median - 1 if relative else two.median - one.median
                entry["against_control"][figure] = {
                    "relative": relative,
                    "change": change,
                    "low": bounds[0],
                    "high": bounds[1],
                    "yardstick": stats.yardstick(base, relative),
                }
        waves.append(entry)
    return {
        "schema": RESULT_SCHEMA,
        "profile": evidence.profile.name,
        "sources": evidence.sources,
        "arms": {name: arm.title for name, arm in evidence.arms.items() if arm.starts},
        "waves": waves,
        "rolling": rolling(evidence),
        "memory": memory(evidence),
    }


def rolling(evidence: Evidence) -> list[dict]:
    """Goodput, latency and acceptance by context length for every arrival rate and arm."""
    spec = evidence.profile.rolling
    if spec is None:
        return []
    rows = []
    for rate in spec.rates_per_s:
        for name, arm in evidence.arms.items():
            for record in arm.records(f"rate-{rate:g}", "rolling"):
                traces = record.requests
                by_length: dict[int, list[float]] = {}
                for trace in traces:
                    sizes = metrics.tokens_per_chunk(trace)[1:]
                    if sizes:
                        by_length.setdefault(trace.prompt_tokens, []).append(
                            sum(sizes) / len(sizes)
                        )
                rows.append(
                    {
                        "rate": rate,
                        "arm": name,
                        "start": record.start,
                        "goodput": metrics.goodput(traces, spec.ttft_limit_s, spec.tpot_limit_s),
                        "within_limits": sum(
                            metrics.within_limits(t, spec.ttft_limit_s, spec.tpot_limit_s)
                            for t in traces
                        )
                        / len(traces),
                        "ttft_s": [metrics.ttft(t) for t in traces],
                        "tpot_s": [metrics.tpot(t) for t in traces],
                        "acceptance": metrics.acceptance(record.counters),
                        "tokens_per_chunk_by_length": {
                            str(length): sum(v) / len(v) for length, v in sorted(by_length.items())
                        },
                        "preemptions": record.counters.preemptions,
                        "kv_usage_peak": record.kv_usage_peak,
                    }
                )
    return rows


def memory(evidence: Evidence) -> list[dict]:
    """KV budget, graph pool and model size per arm, start and rank, from the logs."""
    rows = []
    for name, arm in evidence.arms.items():
        for start in arm.starts:
            facts = start.facts
            if facts is None:
                continue
            rows.append(
                {
                    "arm": name,
                    "start": start.number,
                    "kv_tokens": facts["kv_tokens"],
                    "kv_gib": facts["kv_gib_by_rank"],
                    "graph_pool_gib": facts["graph_pool_gib_by_rank"],
                    "model_gib": facts["model_gib_by_rank"],
                    "workspace_gib": facts["workspace_gib_by_rank"],
                    "gpu": {
                        moment: rows
                        for process in start.processes
                        for moment, rows in process.get("gpu", {}).items()
                    },
                }
            )
    return rows
