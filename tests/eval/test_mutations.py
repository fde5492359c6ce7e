"""The mutation table: deliberately broken candidates, and the checks that catch them.

One control is measured; each candidate is a run of its own, put beside it as `gate compare` does.
A row names every check that has to block, so a check that also blocks by accident is seen too.
Speed checks may answer `fail` or, on a busy machine, `inconclusive`: neither passes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import arms, profile, run
from v100_gate import evidence, verdict
from v100_gate.errors import RefusedError, ServiceError
from v100_gate.evidence import Evidence

ROUND_S = 0.04
"""Long against the jitter of a busy test machine."""
SPEED = {"decode-throughput", "step-time", "tpot"}
TIMED = SPEED | {"ttft", "speculation-pays"}
GOOD: dict = {
    "round_s": ROUND_S,
    "ranks": 2,
    "accepted": [4, 2, 7, 0, 5, 3],
    "routes": ["paged", "long", "prefill"],
}


def plan():
    """The profile of the table: two starts, three repeats, every check of the mutations."""
    wave = {
        "input_tokens": 256,
        "output_tokens": 32,  # seven rounds
        "shared_prefix_tokens": 128,
        "warmups": 0,  # the stand-in has nothing to warm up
        "repeats": 3,
    }
    checks: dict = {
        name: {}
        for name in (
            "complete",
            "fresh-starts",
            "service-errors",
            "compile-events",
            "c1-exact",
            "batch-tokens",
            "prefix-hits",
            "preemptions",
            "acceptance-counters",
            "routes",
            "retrieval",
            "needle",
            "logits",
            "kv-budget",
        )
    }
    checks |= {name: {"margin": 0.05} for name in SPEED}
    checks |= {"acceptance": {"margin_points": 2.0}, "graph-pool": {"margin_gib": 0.1}}
    return profile(
        service={"max_model_len": 8192, "draft_tokens": 7, "page_size": 16, "tensor_parallel": 2},
        schedule={"starts_per_arm": 2},
        waves=[
            {"name": "C1", "concurrency": 1} | wave,
            {"name": "C4", "concurrency": 4} | wave,
        ],
        retrieval={
            "requests": 4,
            "input_tokens": 2000,
            "max_output_tokens": 64,
            "needle_lengths": [1500],
            "needle_depths": [0.2, 0.8],
        },
        logits={"input_tokens": 256, "positions": 2, "steps": 4},
        routes=["paged", "long/bounded"],
        checks=checks,
    )


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """The good server, measured once."""
    folder = tmp_path_factory.mktemp("control")
    return run(folder, plan(), arms(folder, candidate=GOOD))


def judge(folder: Path, control: Evidence, broken: dict) -> dict:
    """Measure a candidate and judge it beside the control."""
    found = run(folder, plan(), arms(folder, candidate=GOOD | broken))
    return verdict.judge(evidence.side_by_side(control, "candidate", found, "candidate"), {})


def accidents(judged: dict, caught_by: set[str]) -> set[str]:
    """Checks that block and are not meant to. A speed check that a busy machine made inconclusive
    is not a catch by accident."""
    status = {row["check"]: row["status"] for row in judged["checks"]}
    return {
        name
        for name in set(judged["blocking"]) - caught_by
        if not (name in TIMED and status[name] == "inconclusive")
    }


MUTATIONS = [
    pytest.param({}, set(), id="unbroken"),
    pytest.param({"retrieval_wrong": 1}, {"retrieval"}, id="answers one retrieval wrongly"),
    pytest.param({"retrieval_ramble": True}, {"retrieval", "needle"}, id="never ends an answer"),
    pytest.param({"round_s": ROUND_S * 1.1}, SPEED, id="10 % slower"),
    pytest.param(
        {"accepted": [3, 1, 6, 0, 4, 2]},
        # Fewer tokens per round: throughput and TPOT fall with it, the round itself does not.
        {"acceptance", "c1-exact", "decode-throughput", "tpot"},
        id="lower acceptance",
    ),
    pytest.param({"routes": ["paged", "prefill"]}, {"routes"}, id="never selects the long route"),
    pytest.param({"kv_tokens": 960_000, "kv_gib": 11.0}, {"kv-budget"}, id="less KV"),
    pytest.param({"graph_pool_gib": 1.13}, {"graph-pool"}, id="larger graph pool"),
    pytest.param({"salt": "other"}, {"c1-exact", "batch-tokens", "logits"}, id="other tokens"),
    pytest.param({"logit_shift": 0.2}, {"logits"}, id="other log-probabilities"),
    pytest.param({"no_prefix_hits": True}, {"prefix-hits"}, id="no prefix hits"),
    pytest.param({"preemptions_per_request": 1}, {"preemptions"}, id="preempts"),
    pytest.param(
        {"log_error": "ERROR [engine] worker recovered from an exception"},
        {"service-errors"},
        id="logs an error",
    ),
    pytest.param(
        {"omit_counters": ["spec_decode_num_accepted_tokens"]},
        {"acceptance", "acceptance-counters", "c1-exact"},
        id="hides its acceptance",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "caught_by"), MUTATIONS)
def test_each_mutation_is_caught_by_the_check_meant_for_it(
    tmp_path: Path, control: Evidence, broken: dict, caught_by: set[str]
) -> None:
    judged = judge(tmp_path, control, broken)
    assert caught_by <= set(judged["blocking"]), judged["counts"]
    assert not accidents(judged, caught_by)


def test_a_crash_blocks_although_the_run_was_continued(tmp_path: Path) -> None:
    """The second process is without fault, and the start as a whole is not."""
    plan = profile(checks={"complete": {}, "service-errors": {}})
    with pytest.raises(ServiceError):
        run(tmp_path, plan, arms(tmp_path, candidate={"die_at": 5}))
    found = run(tmp_path, plan, arms(tmp_path, candidate={}), resume=True)
    rows = {row["check"]: row for row in verdict.judge(found, {})["checks"]}
    assert rows["complete"]["status"] == "pass"
    assert rows["service-errors"]["status"] == "fail"
    assert (
        "candidate start 1, process 1: arm candidate: the service died"
        in (rows["service-errors"]["summary"])
    )


def test_a_foreign_library_is_refused(tmp_path: Path) -> None:
    site = arms(tmp_path, candidate=GOOD | {"library_sha256": "a" * 64, "source_sha256": "b" * 64})
    manifest = tmp_path / "manifest.json"
    fields = {"source_sha256": "b" * 64, "library": {"sha256": "c" * 64}, "files": {}}
    manifest.write_text(json.dumps(fields))
    site.arms["candidate"].manifest = manifest
    with pytest.raises(RefusedError, match=r"reports library aaaaaaaaaaaa, the manifest cccccccc"):
        run(tmp_path, plan(), site)


def test_another_version_than_the_manifests_is_refused(tmp_path: Path) -> None:
    site = arms(tmp_path, candidate=GOOD)  # the stand-in calls itself 0.19.1
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"release": "0.19.1+v100.1", "files": {}}))
    site.arms["candidate"].manifest = manifest
    with pytest.raises(RefusedError, match=r"calls itself 0\.19\.1, the manifest's release is 0\."):
        run(tmp_path, plan(), site)


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        pytest.param({}, set(), id="unbroken"),
        pytest.param({"prefill_s": 0.3}, {"ttft"}, id="slower prefill"),
        pytest.param({"shallow": {"round_s": 0.02}}, {"speculation-pays"}, id="shallow is faster"),
    ],
)
def test_prefill_and_depth_are_judged(tmp_path: Path, broken: dict, caught_by: set[str]) -> None:
    """The margins leave room for a busy machine; the defects are far beyond them."""
    wave = {"concurrency": 1, "input_tokens": 256, "output_tokens": 32, "warmups": 0, "repeats": 4}
    small = profile(
        schedule={"starts_per_arm": 1, "controls": ["shallow"]},
        waves=[{"name": "C1"} | wave],
        checks={"ttft": {"margin": 0.5}, "speculation-pays": {"margin": 0.2}},
    )
    good = GOOD | {"prefill_s": 0.15}
    # Half the depth accepts less in a round that takes as long: here speculation pays.
    shallow = good | {"draft_tokens": 3} | broken.get("shallow", {})
    candidate = good | {key: value for key, value in broken.items() if key != "shallow"}
    site = arms(tmp_path, control=good, candidate=candidate, shallow=shallow)
    site.arms["shallow"].draft_tokens = 3
    judged = verdict.judge(run(tmp_path, small, site), {})
    assert caught_by <= set(judged["blocking"]), judged["counts"]
    assert not accidents(judged, caught_by)


@pytest.mark.parametrize(("mib", "caught_by"), [(29_000, set()), (29_500, {"idle-memory"})])
def test_more_memory_in_use_is_caught(
    tmp_path: Path, monkeypatch, mib: int, caught_by: set[str]
) -> None:
    """nvidia-smi is a stand-in that shows more memory once the candidate's server is there."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f"used=29000; grep -qas {tmp_path}/candidate-moc[k] /proc/[0-9]*/cmdline && used={mib}\n"
        'case "$1" in --query-compute-apps*) ;; *)\n'
        'echo "0, Tesla V100, $used, 32768, 1530, 877, 45.0, 300.00, 40, 0x1";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    wave = {"concurrency": 1, "input_tokens": 64, "output_tokens": 16, "warmups": 0, "repeats": 1}
    small = profile(waves=[{"name": "C1"} | wave], checks={"idle-memory": {"margin_gib": 0.25}})
    found = run(tmp_path, small, arms(tmp_path, control=GOOD, candidate=GOOD))
    assert set(verdict.judge(found, {})["blocking"]) == caught_by


ROLLING = {
    "rates_per_s": [20.0, 60.0],
    "requests": 30,
    "input_tokens": [64, 256],
    "output_tokens": [16, 32],
    # Five times what the good server needs, so that a busy test machine stays inside.
    "ttft_limit_s": 10.0,
    "tpot_limit_s": 0.022,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("broken", "caught_by"),
    [
        pytest.param({}, set(), id="unbroken"),
        pytest.param({"round_s": 0.2}, {"rolling-goodput"}, id="too slow for the limits"),
        pytest.param(
            {"accepted": [3, 1, 6, 0, 4, 2], "round_s": 0.015},
            {"rolling-acceptance"},
            id="lower acceptance",
        ),
        pytest.param({"preemptions_per_request": 1}, {"rolling-preemptions"}, id="preempts"),
    ],
)
def test_rolling_arrivals_catch_what_waves_cannot(
    tmp_path: Path, broken: dict, caught_by: set[str]
) -> None:
    good = GOOD | {"round_s": 0.02}
    checks = {
        "rolling-goodput": {"margin": 0.1},
        "rolling-acceptance": {"margin_points": 2.0},
        "rolling-preemptions": {},
    }
    small = profile(waves=[], rolling=ROLLING, checks=checks)
    found = run(tmp_path, small, arms(tmp_path, control=good, candidate=good | broken))
    judged = verdict.judge(found, {})
    assert set(judged["blocking"]) == caught_by
    sent = {
        name: [
            trace.prompt_sha256 for r in arm.records("rate-20", "rolling") for trace in r.requests
        ]
        for name, arm in found.arms.items()
    }
    assert sent["control"] == sent["candidate"]
