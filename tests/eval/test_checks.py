"""Single checks on evidence that was put together by hand: what they compare, and what they do
with what is missing."""

from __future__ import annotations

from math import log

import pytest
from support import profile, put_together, start, trace, wave
from v100_gate.checks import CHECKS, Result
from v100_gate.errors import GateError
from v100_gate.evidence import Evidence, side_by_side, with_attribution
from v100_gate.schema import Arms, CheckPolicy


def judged(name: str, evidence: Evidence, **policy: object) -> Result:
    """The result of one check."""
    return CHECKS[name](evidence, CheckPolicy(**policy))


# ------------------------------------------------------------------------- logits


def teacher_forced(*steps: dict[str, float]):
    """A `logits` wave of one request with these top log-probabilities, step by step."""
    request = trace(tokens=len(steps), logprobs=[{"top_logprobs": list(steps)}])
    return wave("logits", kind="logits", requests=[request])


SURE = {"a": log(0.99), "b": log(0.009)}
RARE = {"a": log(0.99), "b": log(0.009) + 0.3}
"""An unlikely token moved by 0.3: the larger |dlog p|, hardly any KL."""
EVEN = {"a": log(0.5), "b": log(0.4)}
MOVED = {"a": log(0.5) - 0.2, "b": log(0.4) + 0.2}
"""Likely tokens moved by 0.2: the smaller |dlog p|, the larger KL."""


def test_logits_take_the_worst_of_each_component() -> None:
    plan = profile(
        logits={"input_tokens": 64, "positions": 1, "steps": 2, "max_abs": 1, "kl": 0.01}
    )
    control = [
        start(teacher_forced(SURE, EVEN), number=1),
        start(teacher_forced(RARE), number=2),
    ]
    candidate = [start(teacher_forced(SURE, MOVED))]
    (row,) = judged("logits", put_together(plan, control=control, candidate=candidate)).rows
    assert row["max_abs"] == pytest.approx(0.3)  # against the second start
    # Against the first: 0.5 x 0.2 - 0.4 x 0.2 + 0.1 ln(0.1 / 0.102074).
    assert row["kl"] == pytest.approx(0.017947, rel=1e-3)
    assert row["positions"] == 1
    assert row["status"] == "fail"


def test_a_control_without_a_common_token_excuses_nothing() -> None:
    """Its distance to itself is then unknown, and no limit can be drawn from it."""
    plan = profile(logits={"input_tokens": 64, "positions": 1, "steps": 1, "max_abs": 0.05})
    control = [
        start(teacher_forced({"a": -0.1}), number=1),
        start(teacher_forced({"b": -0.1}), number=2),
    ]
    candidate = [start(teacher_forced({"a": -0.2}))]
    result = judged("logits", put_together(plan, control=control, candidate=candidate))
    assert result.status == "inconclusive"


def test_a_candidate_without_a_common_token_fails() -> None:
    plan = profile(logits={"input_tokens": 64, "positions": 1, "steps": 1, "max_abs": 0.05})
    control = [start(teacher_forced({"a": -0.1})), start(teacher_forced({"a": -0.1}), number=2)]
    candidate = [start(teacher_forced({"b": -0.1}))]
    result = judged("logits", put_together(plan, control=control, candidate=candidate))
    assert result.status == "fail"
    assert result.rows[0]["max_abs"] is None  # JSON has no infinity


# ------------------------------------------------------------------------- None is never zero


def one_wave_each(control: dict, candidate: dict) -> Evidence:
    """Both arms with one counted wave C1; the fields of each wave."""
    plan = profile(waves=[profile().waves[0].model_dump()])
    return put_together(
        plan, control=[start(wave(**control))], candidate=[start(wave(**candidate))]
    )


def test_a_control_without_a_prefix_counter_is_no_control_with_no_hits() -> None:
    evidence = one_wave_each({}, {"counters": {"prefix_hits": 128}})
    result = judged("prefix-hits", evidence)
    assert (result.status, result.summary) == ("not-run", "C1: no prefix-cache counters of control")


SAMPLE = {
    "index": "0",
    "clocks.sm": "1530",
    "clocks.mem": "877",
    "power.limit": "300.00",
    "clocks_throttle_reasons.active": "0x0000000000000001",
}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({}, "pass", "no throttling"),
        ({"clocks_throttle_reasons.active": "[N/A]"}, "not-run", "no throttle reasons in 1 of 1"),
        ({"clocks_throttle_reasons.active": "0x0000000000000004"}, "fail", "was throttled"),
        ({"power.limit": "250.00"}, "fail", "GPU 0 power cap: 250, control 300"),
        ({"power.limit": "[N/A]"}, "not-run", "GPU 0 power cap"),
        ({"clocks.sm": "1290"}, "fail", "GPU 0 SM clock: 1290, control 1530"),
        ({"clocks.sm": "1500"}, "pass", "no throttling"),
        ({"clocks.mem": "[N/A]"}, "not-run", "GPU 0 memory clock"),
        ({"index": "1"}, "not-run", "does not say it for both arms"),
    ],
)
def test_gpu_state(change: dict, status: str, words: str) -> None:
    evidence = one_wave_each({"gpu": [SAMPLE]}, {"gpu": [SAMPLE | change]})
    result = judged("gpu-state", evidence)
    assert result.status == status
    assert words in result.summary


def test_memory_that_nvidia_smi_does_not_say_is_not_run() -> None:
    def arm(used: str) -> list:
        rows = [{"index": "0", "memory.used": used}]
        return [start(processes=[{"gpu": {"loaded": rows, "after": rows}}])]

    evidence = put_together(profile(), control=arm("9000"), candidate=arm("[N/A]"))
    assert judged("idle-memory", evidence).status == "not-run"
    evidence = put_together(profile(), control=arm("9000"), candidate=arm("9000"))
    assert judged("idle-memory", evidence).status == "pass"


# ------------------------------------------------------------------------- missing figures

DRAFTED = {"drafts": 4, "draft_tokens": 28, "accepted_tokens": 12}


@pytest.mark.parametrize("arm", ["control", "candidate"])
def test_a_repeat_without_the_figure_is_not_left_out(arm: str) -> None:
    """Three repeats have counters and one has none: that one may be the one that matters."""
    plan = profile(waves=[profile().waves[0].model_dump()])
    whole = [start(*(wave(counters=DRAFTED) for _ in range(4)))]
    holed = [start(*(wave(counters=DRAFTED) for _ in range(3)), wave())]
    evidence = put_together(plan, **({"control": whole, "candidate": whole} | {arm: holed}))
    for name, policy in (("acceptance", {"margin_points": 1}), ("step-time", {"margin": 0.1})):
        result = judged(name, evidence, **policy)
        assert result.status == "not-run"
        assert f"C1: 1 of 4 valid repeats of {arm} have no" in result.summary
    whole = put_together(plan, control=whole, candidate=whole)
    assert judged("acceptance", whole, margin_points=1).status == "pass"


@pytest.mark.parametrize("arm", ["shallow", "candidate"])
def test_speculation_pays_needs_every_repeat(arm: str) -> None:
    plan = profile(waves=[profile().waves[0].model_dump()], schedule={"controls": ["shallow"]})
    at_once = wave(requests=[trace(tokens=1)])  # one chunk: no window in which it decodes
    whole = [start(*(wave() for _ in range(4)))]
    holed = [start(*(wave() for _ in range(3)), at_once)]
    evidence = put_together(plan, **({"shallow": whole, "candidate": whole} | {arm: holed}))
    result = judged("speculation-pays", evidence)
    assert result.status == "not-run"
    assert f"1 of 4 valid repeats of {arm} have no decode throughput" in result.summary
    whole = put_together(plan, shallow=whole, candidate=whole)
    assert judged("speculation-pays", whole).status == "pass"


# ------------------------------------------------------------------------- side by side


def test_runs_with_other_prompts_are_not_compared() -> None:
    def measured(sha: str, name: str = "C1") -> Evidence:
        return put_together(profile(), candidate=[start(wave(name, fixture_sha256=sha))])

    one = measured("a" * 64)
    side_by_side(one, "candidate", measured("a" * 64), "candidate")
    side_by_side(one, "candidate", measured("b" * 64, "C4"), "candidate")  # `complete` sees that
    with pytest.raises(GateError, match="prompts of C1 differ"):
        side_by_side(one, "candidate", measured("b" * 64), "candidate")


def test_runs_of_services_with_other_limits_are_not_compared() -> None:
    one = put_together(profile(), candidate=[start(wave())])
    service = {"max_model_len": 8192, "draft_tokens": 3, "page_size": 16}
    other = put_together(profile(service=service), candidate=[start(wave())])
    with pytest.raises(GateError, match="differ in `service`"):
        side_by_side(one, "candidate", other, "candidate")


# ------------------------------------------------------------------------- attributed memory


def memory_run(
    kv_gib: float, kv_tokens: int, pool: float, used: float, attribution: list[dict]
) -> Evidence:
    """A control of 10 GiB KV in 1,000,000 tokens, 0.90 GiB pool and 9.0 GiB used, and a candidate
    with these figures."""

    def arm(gib: float, tokens: int, pool: float, used: float) -> list:
        rows = [{"index": "0", "memory.used": str(used * 1024)}]
        facts = {
            "kv_tokens": tokens,
            "kv_gib_by_rank": {"0": gib},
            "graph_pool_gib_by_rank": {"0": pool},
        }
        return [start(processes=[{"facts": facts, "gpu": {"loaded": rows, "after": rows}}])]

    evidence = put_together(
        profile(),
        control=arm(10.0, 1_000_000, 0.90, 9.0),
        candidate=arm(kv_gib, kv_tokens, pool, used),
    )
    site = evidence.site.model_dump(by_alias=True) | {"memory_attribution": attribution}
    return with_attribution(evidence, Arms.model_validate(site))


WORKSPACE = {"what": "long-attention workspace", "gib": 0.5}


@pytest.mark.parametrize("name", ["kv-budget", "graph-pool", "idle-memory"])
@pytest.mark.parametrize(
    ("attribution", "status"),
    [
        ([], "fail"),
        ([WORKSPACE], "pass"),
        ([WORKSPACE | {"gib": 0.3}], "fail"),
        ([WORKSPACE | {"gib": 0.3}, {"what": "tables", "gib": 0.2}], "pass"),
    ],
    ids=["nobody", "all of it", "too little", "two parts"],
)
def test_a_memory_difference_passes_only_when_all_of_it_is_attributed(
    name: str, attribution: list[dict], status: str
) -> None:
    evidence = memory_run(9.5, 950_000, 1.40, 9.5, attribution)
    result = judged(name, evidence, margin_gib=0.1)
    assert result.status == status
    for item in attribution:
        if status == "pass":
            assert f"{item['what']} {item['gib']} GiB" in result.summary
    if status == "fail":
        assert "nobody attributed it" in result.summary


def test_an_attribution_speaks_for_the_checks_it_names() -> None:
    evidence = memory_run(9.5, 950_000, 1.40, 9.5, [WORKSPACE | {"checks": ["kv-budget"]}])
    assert judged("kv-budget", evidence).status == "pass"
    assert judged("graph-pool", evidence, margin_gib=0.1).status == "fail"
    assert judged("idle-memory", evidence, margin_gib=0.1).status == "fail"


def test_lost_tokens_are_not_explained_by_memory_that_is_there() -> None:
    """The GiB are equal and a fifth of the tokens is gone: 2 GiB worth of them."""
    assert judged("kv-budget", memory_run(10.0, 800_000, 0.9, 9.0, [WORKSPACE])).status == "fail"


def test_an_attribution_for_other_arms_is_refused() -> None:
    evidence = memory_run(9.5, 950_000, 0.9, 9.0, [])
    site = evidence.site.model_copy(deep=True)
    site.arms["candidate"].url = "http://elsewhere"
    with pytest.raises(GateError, match=r"measured with other arms \(changed: candidate: url\)"):
        with_attribution(evidence, site)


# ------------------------------------------------------------------------- hygiene

CLEAN = {"active_units": [], "foreign": []}


def looked(
    before: dict = CLEAN, during: dict = CLEAN, gpu: bool = True, kind: str = "process"
) -> Evidence:
    """One start whose process and wave were looked at like this."""
    candidate = {"kind": kind, "url": "http://x", "model": "m"}
    if kind == "process":
        candidate["command"] = ["serve"]
    hygiene = {"gpu": gpu, "stopped_units": ["gateway.service"]}
    site = Arms.model_validate({"schema": 1, "arms": {"candidate": candidate}, "hygiene": hygiene})
    moments = {"before": before, "loaded": CLEAN, "after": CLEAN}
    process = {"service_start_id": "process-1", "hygiene": moments}
    one = start(wave(looks=[during]), processes=[process])
    return put_together(profile(), site, candidate=[one])


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "pass", "none of 1 named units at 4 looks before, during and after"),
        ({"before": CLEAN | {"foreign": ["x (pid 1)"]}}, "fail", "start 1, before: a process that"),
        ({"before": CLEAN | {"foreign": None}}, "not-run", "nvidia-smi could not say"),
        ({"before": CLEAN | {"active_units": None}}, "not-run", "systemctl could not say"),
        ({"during": CLEAN | {"active_units": ["a.service"]}}, "fail", "unit a.service is active"),
        ({"during": CLEAN | {"foreign": None}}, "not-run", "during C1 measured 1: nvidia-smi"),
        ({"gpu": False}, "not-run", "hygiene.gpu: false, so nobody looked"),
        (
            {"kind": "url", "during": CLEAN | {"foreign": None}},
            "not-run",
            "of a url arm cannot be told from foreign ones",
        ),
    ],
)
def test_hygiene_passes_only_where_somebody_looked(changes: dict, status: str, words: str) -> None:
    result = judged("hygiene", looked(**changes))
    assert result.status == status
    assert words in result.summary


def test_a_wave_at_which_nobody_looked_is_not_clean() -> None:
    evidence = looked()
    evidence.candidate.starts[0].waves[0].looks = []
    assert judged("hygiene", evidence).status == "not-run"
    evidence = looked()
    del evidence.candidate.starts[0].processes[0]["hygiene"]
    assert judged("hygiene", evidence).status == "not-run"


# ------------------------------------------------------------------------- routes


def routed(ranks: int, log: dict | None, counters: dict | None) -> Evidence:
    """One start: launches by rank from its log (None: no log), and a wave's counters."""
    plan = profile(
        service={"max_model_len": 8192, "tensor_parallel": ranks},
        waves=[profile().waves[0].model_dump()],
        routes=["long/bounded"],
    )
    facts = None if log is None else {"launches_by_rank": log}
    process = {"service_start_id": "process-1", "facts": facts}
    waves = [wave(counters={"routes": counters})]
    return put_together(plan, candidate=[start(*waves, processes=[process])])


FIRST = {"target/long/bounded": 1}
"""What the line of a first launch says."""
BOUNDED = {"target/long/bounded": 960.0}
ORDINARY = {"target/long/ordinary": 960.0}


@pytest.mark.parametrize(
    ("ranks", "log", "counters", "status", "words"),
    [
        (2, {"0": FIRST, "1": FIRST}, BOUNDED, "pass", "long/bounded 960"),
        (2, {"0": FIRST}, BOUNDED, "not-run", "rank 1, long/bounded: no route lines"),
        (2, {"0": FIRST, "1": ORDINARY}, BOUNDED, "fail", "rank 1, long/bounded: never launched"),
        (1, None, BOUNDED, "pass", "long/bounded 960"),
        (1, None, None, "not-run", "rank 0, long/bounded: no log could be read"),
        (2, None, BOUNDED, "not-run", "rank 1, long/bounded: no log could be read"),
        (1, {"0": FIRST}, ORDINARY, "fail", "counted waves, long/bounded: never launched"),
        (1, {"0": FIRST}, None, "not-run", "counted waves, long/bounded: no vllm:attention_route"),
    ],
)
def test_routes_need_first_launches_of_every_rank_and_counters_of_the_waves(
    ranks: int, log: dict | None, counters: dict | None, status: str, words: str
) -> None:
    result = judged("routes", routed(ranks, log, counters))
    assert result.status == status
    assert words in result.summary
