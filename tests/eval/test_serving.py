"""The real thing, once: the patched vLLM serves the tiny hybrid on CPU and is gated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from v100_gate import demo, evidence, services, verdict
from v100_gate.progress import Reporter
from v100_gate.runner import Run
from v100_gate.schema import Profile, read_yaml


@pytest.mark.slow
@pytest.mark.serve
def test_the_patched_tree_serves_what_it_should(tmp_path: Path) -> None:
    """Greedy tokens with drafts equal those without, in single requests and in a batch; drafts
    are accepted, prefixes hit, the served tree is the release's, and nothing is left running."""
    site = demo.prepare(Reporter())
    del site.arms["control"]
    plan = read_yaml(demo.PROFILE, Profile)
    for wave in plan.waves:
        wave.repeats = 1
        wave.output_tokens = 32
    plan.waves = [wave for wave in plan.waves if wave.name in ("C1", "C4")]
    plan.logits = None
    wanted = (
        "complete",
        "identity",
        "service-errors",
        "greedy-oracle",
        "acceptance-counters",
        "prefix-hits",
        "preemptions",
    )
    plan.checks = {name: plan.checks[name] for name in wanted}

    started: list[int] = []
    run = Run(tmp_path / "run", plan, site, Reporter())
    begin = services.ProcessService.start

    async def start(self: services.ProcessService) -> None:
        await begin(self)
        started.append(self.process.pid)

    services.ProcessService.start = start
    try:
        asyncio.run(run.execute())
    finally:
        services.ProcessService.start = begin
    judged = verdict.judge(evidence.load(tmp_path / "run"), {})
    assert {row["check"]: row["status"] for row in judged["checks"]} == dict.fromkeys(
        wanted, "pass"
    )
    assert len(started) == 2
    assert not [pid for session in started for pid in services.session_members(session)]
