"""Every rank took every route of the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v100_gate.checks.base import Result, check, join
from v100_gate.evidence import Evidence

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy


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
    return join(rows, f"launches in counted waves: {shown}; all {ranks} rank(s) used every route")
