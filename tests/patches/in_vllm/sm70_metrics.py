"""Route counters: from the worker's launches to the service's metrics."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
from vllm.v1.attention import route_stats as module
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput


def test_counts_are_drained_once_and_totals_stay() -> None:
    stats = module.RouteStats()
    assert stats.drain() is None
    stats.record("target", "long", "bounded", 16)
    stats.record("target", "long", "bounded", 16)
    stats.record("draft", "paged", "eager")
    assert stats.drain() == [("draft", "paged", "eager", 1), ("target", "long", "bounded", 32)]
    assert stats.drain() is None
    stats.record("target", "paged", "ordinary", 16)
    assert stats.totals() == {
        ("target", "long", "bounded"): 32,
        ("draft", "paged", "eager"): 1,
        ("target", "paged", "ordinary"): 16,
    }


def test_each_rank_logs_its_first_launch_and_its_totals(monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module.logger, "info", lambda text, *a: lines.append(text % a))
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.000001")
    stats = module.RouteStats()
    for _ in range(2):
        stats.record("target", "long", "bounded", 8)
        stats.record("target", "long", "bounded", 8)
        stats.drain()
    stats.log()
    assert lines == [
        "First target launch of attention route long (bounded)",
        "Attention route launches of this rank: target/long/bounded 16",
        "Attention route launches of this rank: target/long/bounded 32",
    ]


def test_counts_survive_the_way_to_the_front_end() -> None:
    rows = [("target", "long", "bounded", 32)]
    assert ModelRunnerOutput([], {}, attention_routes=rows).attention_routes == rows
    assert ModelRunnerOutput([], {}).attention_routes is None
    sent = msgspec.msgpack.encode(SchedulerStats(attention_routes=rows))
    assert msgspec.msgpack.decode(sent, type=SchedulerStats).attention_routes == rows


def test_the_scheduler_hands_them_on() -> None:
    """A step whose requests have all gone still carries its counts to a front end."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler.__new__(Scheduler)
    scheduler.__dict__.update(
        perf_metrics=None, connector=None, requests={}, finished_req_ids_dict=None,
        kv_cache_manager=SimpleNamespace(take_events=lambda: None),
        make_stats=lambda *_: SchedulerStats(),
    )  # fmt: skip
    rows = [("target", "long", "bounded", 32)]
    step = SimpleNamespace(num_scheduled_tokens={})
    for routes in (rows, None):
        output = ModelRunnerOutput([], {}, attention_routes=routes)
        (front_end,) = scheduler.update_from_output(step, output).values()
        assert front_end.scheduler_stats.attention_routes == routes


def test_what_was_counted_last_is_logged_at_exit() -> None:
    """A worker that ends between two intervals says its totals, drained or not."""
    program = (
        "from vllm.v1.attention.route_stats import route_stats\n"
        "route_stats.record('target', 'long', 'bounded', 16)\n"
        "route_stats.drain()\n"
        "route_stats.record('target', 'long', 'bounded', 4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert last.endswith("Attention route launches of this rank: target/long/bounded 20")


@pytest.fixture
def prometheus(tmp_path):
    """vLLM's Prometheus logger for a small local model."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float16",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 128,
        "vocab_size": 128,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    logging.disable(logging.WARNING)
    made = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    logging.disable(logging.NOTSET)
    return PrometheusStatLogger(made)


def test_the_counter_has_a_series_for_each_route_taken(prometheus) -> None:
    from prometheus_client import REGISTRY

    name = "vllm:attention_route_launches_total"

    def series() -> dict[tuple[str, str, str], float]:
        return {
            (s.labels["model"], s.labels["route"], s.labels["graph"]): s.value
            for metric in REGISTRY.collect()
            for s in metric.samples
            if s.name == name
        }

    assert series() == {}  # a backend without routes shows none: not run, and not zero
    rows = [("draft", "paged", "eager", 6), ("target", "long", "bounded", 16)]
    for _ in range(3):
        prometheus.record(SchedulerStats(attention_routes=rows), None)
    prometheus.record(SchedulerStats(), None)
    assert series() == {("draft", "paged", "eager"): 18, ("target", "long", "bounded"): 48}
