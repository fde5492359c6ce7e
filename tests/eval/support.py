"""Shared by the gate's tests: the stand-in server as an arm, and a small profile."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from v100_gate.evidence import ArmEvidence, Evidence, Start, load
from v100_gate.runner import Run
from v100_gate.schema import Arms, Profile
from v100_gate.traces import Chunk, CounterDelta, RequestTrace, WaveRecord

EVAL = Path(__file__).resolve().parents[2] / "eval"


def arm(folder: Path, name: str, **behaviour: object) -> dict:
    """An arm that starts the stand-in server with this behaviour."""
    path = folder / f"{name}-mock.json"
    path.write_text(json.dumps(behaviour))
    return {
        "kind": "process",
        "model": "mock",
        "title": f"stand-in {name}",
        "command": [
            sys.executable,
            "-m",
            "v100_gate.mockserver",
            "--port",
            "{port}",
            "--config",
            str(path),
        ],
        "env": {"PYTHONPATH": str(EVAL), "PYTHONUNBUFFERED": "1"},
    }


def arms(folder: Path, **behaviours: dict) -> Arms:
    """Arms by name; each value holds fields of MockConfig."""
    return Arms.model_validate(
        {
            "schema": 1,
            "arms": {
                name: arm(folder, name, **behaviour) for name, behaviour in behaviours.items()
            },
            "hygiene": {"gpu": False},
        }
    )


def profile(**changes: object) -> Profile:
    """A profile of about a second per start; `changes` replace its top-level fields."""
    fields: dict = {
        "schema": 1,
        "name": "test",
        "description": "a small gate for tests",
        "service": {"max_model_len": 8192, "draft_tokens": 7, "page_size": 16},
        "sampling": {"temperature": 0.0, "seed": 5},
        "schedule": {"order": "ABBA", "starts_per_arm": 1},
        "limits": {
            "stall_s": 2.0,
            "admission_skew_s": 1.0,
            "ready_timeout_s": 60,
            "stop_timeout_s": 10,
            "max_extra_repeats": 1,
            "free_disk_mib": 1,
        },
        "waves": [
            {
                "name": "C1",
                "concurrency": 1,
                "input_tokens": 256,
                "output_tokens": 32,
                "shared_prefix_tokens": 128,
                "warmups": 1,
                "repeats": 2,
            },
            {
                "name": "C4",
                "concurrency": 4,
                "input_tokens": 256,
                "output_tokens": 32,
                "shared_prefix_tokens": 128,
                "warmups": 1,
                "repeats": 2,
            },
        ],
        "checks": {"complete": {"required": True}},
    }
    return Profile.model_validate(fields | changes)


def run(folder: Path, plan: Profile, site: Arms, resume: bool = False) -> Evidence:
    """Carry out a run in `folder`/run and read it back."""
    asyncio.run(Run(folder / "run", plan, site).execute(resume))
    return load(folder / "run")


# ------------------------------------------------------------------ evidence without a server


def trace(index: int = 0, tokens: int = 8, **fields: object) -> RequestTrace:
    """A finished request: one token at 1 s, then one every 10 ms."""
    chunks = [Chunk(t=1.0 + 0.01 * place, token_ids=[300 + place]) for place in range(tokens)]
    given = {
        "index": index,
        "request_id": f"r{index}",
        "prompt_tokens": 16,
        "prompt_sha256": "",
        "max_tokens": tokens,
        "forced": True,
        "seed": 0,
        "sent_at": 0.0,
        "ended_at": chunks[-1].t,
        "status": "ok",
        "chunks": chunks,
    }
    return RequestTrace(**(given | fields))


def wave(name: str = "C1", counters: dict | None = None, **fields: object) -> WaveRecord:
    """A counted wave of one request."""
    given = {
        "arm": "candidate",
        "start": 1,
        "service_start_id": "process-1",
        "wave": name,
        "kind": "measured",
        "repeat": 1,
        "concurrency": 1,
        "wall_started": 0.0,
        "wall_seconds": 2.0,
        "monotonic_seconds": 2.0,
        "requests": [trace()],
        "fixture_sha256": "f" * 64,
    }
    return WaveRecord(**(given | fields), counters=CounterDelta(**(counters or {})))


def start(*waves: WaveRecord, processes: list[dict] | None = None, number: int = 1) -> Start:
    """One start with these waves; by default one process that gave them all."""
    return Start(
        number,
        Path("run"),
        list(waves),
        [{"service_start_id": "process-1"}] if processes is None else processes,
    )


def put_together(plan: Profile, site: Arms | None = None, **starts: list[Start]) -> Evidence:
    """Evidence of a run that nobody carried out; each keyword is an arm with its starts."""
    if site is None:
        arm = {"kind": "url", "url": "http://x", "model": "m"}
        site = Arms.model_validate({"schema": 1, "arms": dict.fromkeys(starts, arm)})
    arms = {
        name.replace("_", "-"): ArmEvidence(name.replace("_", "-"), name, found, drafting=True)
        for name, found in starts.items()
    }
    return Evidence(Path("run"), plan, arms, site, {})
