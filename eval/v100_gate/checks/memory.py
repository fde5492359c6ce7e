"""KV budget, graph pool, idle memory, clocks and power."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate import gpu
from v100_gate.checks.base import CONTROL, Result, check, join, pair
from v100_gate.evidence import Evidence, median

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy, MemoryCheck


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
    return join([row], text)


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
    return join([row], row["reason"])


@check("idle-memory", CONTROL)
def idle_memory(evidence: Evidence, policy: CheckPolicy) -> Result:
    """GPU memory after load and after the run is the control's within the margin, per GPU, or a
    person attributed the difference."""
    margin = policy.margin_gib if policy.margin_gib is not None else 0.0
    rows, explained = [], None
    for moment in ("loaded", "after"):
        sides: dict[str, dict[str, float]] = {}
        unread = 0
        for arm in pair(evidence):
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
    return join(rows, f"within {margin:.2f} GiB of the control on every GPU{or_attributed}")


CLOCKS_MARGIN = 0.05
"""Largest relative difference of the median clocks of two arms, where the profile sets none."""


@check("gpu-state")
def gpu_state(evidence: Evidence, policy: CheckPolicy) -> Result:
    """Nothing was throttled during a counted wave; both arms had the same power caps, and median
    clocks within the margin."""
    rows = []
    arms: dict[str, list[dict[str, str]]] = {}
    for arm in pair(evidence):
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
    return join(rows, "no throttling; same power caps and clocks in both arms")


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
