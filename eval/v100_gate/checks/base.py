"""What a check is, and how rows become a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from v100_gate.evidence import ArmEvidence, Evidence

if TYPE_CHECKING:
    from v100_gate.schema import CheckPolicy, Profile

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


def join(rows: list[dict], good: str) -> Result:
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


def pair(evidence: Evidence) -> list[ArmEvidence]:
    return [arm for arm in (evidence.control, evidence.candidate) if arm is not None]
