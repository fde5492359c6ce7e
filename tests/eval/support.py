"""Shared by the gate's tests: the stand-in server as an arm, and a small profile."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from v100_gate.evidence import Evidence, load
from v100_gate.runner import Run
from v100_gate.schema import Arms, Profile

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
