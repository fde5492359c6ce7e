"""The schedule and the service's log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support import EVAL, arms, profile
from typer.testing import CliRunner
from v100_gate import cli, overhead, servicelog
from v100_gate.checks.routes import _launches
from v100_gate.errors import RefusedError
from v100_gate.overhead import measure
from v100_gate.runner import Run, schedule
from v100_gate.schema import Arms


def site(*names: str) -> Arms:
    arm = {"kind": "url", "url": "http://x", "model": "m"}
    return Arms.model_validate({"schema": 1, "arms": dict.fromkeys(names, arm)})


@pytest.mark.parametrize(
    ("order", "starts", "expected"),
    [
        ("ABBA", 2, ["control 1", "candidate 1", "candidate 2", "control 2"]),
        (
            "ABBA",
            3,
            ["control 1", "candidate 1", "candidate 2", "control 2", "control 3", "candidate 3"],
        ),
        ("interleaved", 2, ["control 1", "candidate 1", "control 2", "candidate 2"]),
    ],
)
def test_order_of_starts(order: str, starts: int, expected: list[str]) -> None:
    plan = profile(schedule={"order": order, "starts_per_arm": starts, "controls": ["no-spec"]})
    found = schedule(plan, site("control", "candidate", "no-spec"))
    assert [f"{arm} {number}" for arm, number in found] == [*expected, "no-spec 1"]


def test_a_candidate_can_be_checked_alone() -> None:
    plan = profile(schedule={"starts_per_arm": 2})
    assert schedule(plan, site("candidate")) == [("candidate", 1), ("candidate", 2)]


def test_a_control_that_is_not_there_is_refused() -> None:
    plan = profile(schedule={"controls": ["shallow"]})
    with pytest.raises(RefusedError, match="asks for the control 'shallow'"):
        schedule(plan, site("control", "candidate"))


LOG = """\
(Worker_TP0 pid=11) INFO 11-30 [cuda.py:274] Using SM70_ATTN backend.
(Worker_TP1 pid=12) INFO 11-30 [cuda.py:274] Using SM70_ATTN backend.
(Worker_TP1 pid=12) INFO SM70_ATTN serves 6 query / 1 KV heads x 256 over a fp8_e4m3 cache; \
long route on, up to 16 requests
(Worker_TP1 pid=12) INFO SM70_ATTN workspaces: 134,217,728 bytes, counted before the KV cache is \
sized
(Worker_TP0 pid=11) INFO First target launch of attention route long (bounded)
(Worker_TP1 pid=12) INFO First draft launch of attention route paged (eager)
(Worker_TP0 pid=11) INFO Attention route launches of this rank: draft/paged/eager 70, \
target/long/bounded 1600
(Worker_TP0 pid=11) \x1b[32mINFO\x1b[0m [gpu_worker.py:437] Available KV cache memory: 11.00 GiB
(Worker_TP1 pid=12) INFO [gpu_worker.py:437] Available KV cache memory: 10.98 GiB
(EngineCore pid=10) INFO [kv_cache_utils.py:1319] GPU KV cache size: 1,009,312 tokens
(EngineCore pid=10) INFO [kv_cache_utils.py:1324] Maximum concurrency for 262,144 tokens per \
request: 4.01x
(Worker_TP0 pid=11) INFO [gpu_worker.py:598] CUDA graph pool memory: 0.99 GiB (actual), \
0.90 GiB (estimated)
(Worker_TP0 pid=11) INFO [model_runner.py:1] Model loading took 6.42 GiB memory and 30 seconds
(APIServer pid=9) ERROR something broke
"""


def test_facts_of_a_log_by_rank() -> None:
    found = servicelog.facts(LOG)
    assert found.attention_backends == ["SM70_ATTN"]
    assert found.kv_tokens == 1_009_312
    assert found.kv_gib_by_rank == {"0": 11.0, "1": 10.98}
    assert found.graph_pool_gib_by_rank == {"0": 0.99}
    assert found.max_concurrency == 4.01
    assert found.launches_by_rank == {
        "0": {"target/long/bounded": 1600, "draft/paged/eager": 70},
        "1": {"draft/paged/eager": 1},
    }
    assert found.workspace_gib_by_rank == {"1": 0.125}
    assert found.served_geometries == [
        "SM70_ATTN serves 6 query / 1 KV heads x 256 over a fp8_e4m3 cache; "
        "long route on, up to 16 requests"
    ]
    assert found.errors == ["(APIServer pid=9) ERROR something broke"]


@pytest.mark.parametrize(
    "line",
    [
        # What Triton 3.6 prints with TRITON_PRINT_AUTOTUNING=1, over several lines.
        "Triton autotuning for function chunk_fwd_kernel_o,",
        "INFO [backends.py:267] Compiling a graph for compile range (1, 8192) takes 4.05 s",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 1/2",
    ],
)
def test_what_the_log_shows_of_compilations(line: str) -> None:
    assert servicelog.compile_lines(["INFO a line", line, "with key as (64, 64),"]) == [line]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RuntimeError: Ninja is required to load C++ extensions", "ninja is not on"),
        ("torch.OutOfMemoryError: CUDA out of memory", "out of memory"),
        ("OSError: [Errno 98] Address already in use", "port is taken"),
        ("AssertionError: spec decode is not supported.", "cannot speculate on CPU"),
        ("ModuleNotFoundError: No module named 'torchvision'", "(torchvision)"),
    ],
)
def test_causes_of_a_failed_start(line: str, words: str) -> None:
    assert words in servicelog.cause_of_failure(line)


def test_launches_are_counted_by_route_and_by_graph() -> None:
    counts = {"target/long/bounded": 5, "target/long/ordinary": 2, "draft/paged/eager": 9}
    assert _launches(counts, "long") == 7
    assert _launches(counts, "long/bounded") == 5
    assert _launches(counts, "paged") == 9
    assert _launches(counts, "lon") == 0


def test_both_arms_are_sent_the_same_prompts(tmp_path: Path) -> None:
    small = profile()
    found = arms(tmp_path, control={}, candidate={})
    asyncio.run(Run(tmp_path / "run", small, found).execute())
    from v100_gate.evidence import load

    run = load(tmp_path / "run")
    sent = {
        name: {
            (trace.prompt_sha256, trace.seed)
            for record in arm.records("C4")
            for trace in record.requests
        }
        for name, arm in run.arms.items()
    }
    assert sent["control"] == sent["candidate"]
    assert len(sent["control"]) == 4
    assert {r.fixture_sha256 for arm in run.arms.values() for r in arm.records("C4")} == {
        run.control.records("C4")[0].fixture_sha256
    }


def test_the_client_loses_no_token_and_adds_little() -> None:
    found = measure(streams=16, tokens_per_s=1000.0, seconds=3.0)
    assert found["lost_tokens"] == 0
    # Processor time, because the wall time of a busy test machine belongs to its neighbours.
    assert found["client_cpu_us_per_chunk"] < 1000


@pytest.mark.parametrize(
    "arguments",
    [("--streams", "0"), ("--tokens-per-s", "0"), ("--tokens-per-s", "nan"), ("--seconds", "-1")],
)
def test_a_measurement_of_nothing_is_refused(arguments: tuple[str, str]) -> None:
    done = CliRunner().invoke(cli.app, ["overhead", *arguments])
    assert done.exit_code == 2
    assert f"{arguments[0]} {arguments[1]}: must be a number above 0" in done.output


@pytest.mark.parametrize(
    ("lost", "p99", "words"),
    [
        (0, 1.0, []),
        (0, 1.7, ["added_ms.p99 is 1.70 ms, the limit is 1.0 ms"]),
        (3, 1.7, ["lost_tokens is 3, the limit is 0", "added_ms.p99 is 1.70 ms"]),
    ],
)
def test_a_client_in_the_way_is_told_by_which_figure(
    monkeypatch, lost: int, p99: float, words: list[str]
) -> None:
    found = {"lost_tokens": lost, "added_ms": {"p99": p99}}
    monkeypatch.setattr(overhead, "measure", lambda *_: found)
    done = CliRunner().invoke(cli.app, ["overhead"])
    assert done.exit_code == bool(words)
    assert json.loads(done.stdout) == found
    assert all(text in done.stderr for text in words)
    assert bool(done.stderr) == bool(words)


@pytest.mark.parametrize("broken", ["folder", "binary"])
def test_profiles_says_what_is_no_profile(tmp_path: Path, broken: str) -> None:
    path = tmp_path
    if broken == "binary":
        path = tmp_path / "x"
        path.write_bytes(b"\x80\x81")
    done = CliRunner().invoke(cli.app, ["profiles", str(path)])
    assert done.exit_code == 2
    assert "gate: " in done.output


def test_the_tiny_models_builder_is_a_program_of_its_own() -> None:
    """It runs in the serving interpreter, so it may not import the gate."""
    text = (EVAL / "demo" / "tiny_model.py").read_text()
    assert "v100_" not in text.replace("vllm-v100", "")
