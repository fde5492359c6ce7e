"""The real patched vLLM of this checkout's release, deployed onto node2 with the tiny CPU profile.

Its requirements (PyTorch and the like, 6.5 GB) are the ones that the project's shared cache holds,
seen read-only by the host; the patched wheel itself is installed there by pip and hashed, and all
else is as for any release: bundle, preflight, readiness, gate with the measuring gate, API. This
instance speaks plain HTTP, as behind a gateway in a network of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from testbed_hosts import GATE_ON_HOST, KEY, REPOSITORY, Hosts, Play, RealRelease

API = 8001


@pytest.fixture(scope="module")
def model(real: RealRelease, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid model, at the profile's path on node2."""
    out = tmp_path_factory.mktemp("tiny")
    script = REPOSITORY / "eval" / "demo" / "tiny_model.py"
    corpus = REPOSITORY / "docs" / "install.md"
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    command = [real.python, script, "--corpus", corpus, out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    target = hosts.state / "n2" / "root" / "srv" / "models" / "tiny"
    shutil.copytree(out, target, dirs_exist_ok=True)
    hosts.ssh(2, "chmod -R a+rX /srv/models/tiny")
    return out


@pytest.fixture(scope="module")
def venv(real: RealRelease, hosts: Hosts) -> str:
    """A virtual environment on node2: the real wheel in it, its requirements from the cache."""
    path = "/opt/real-venv"
    requirements = real.requirements_on_host
    shutil.copy(real.wheel, hosts.state / "n2" / "root" / "opt" / real.wheel.name)
    hosts.ssh(
        2,
        f"python3 -m venv {path} && echo {requirements} > $(echo {path}/lib/python3*/site-packages)"
        f"/requirements.pth && ln -sf {requirements}/../../../bin/ninja {path}/bin/ninja &&"
        f" {path}/bin/pip install -q --no-index --no-deps /opt/{real.wheel.name} &&"
        f" rm /opt/{real.wheel.name}",
    )
    return path


def complete(hosts: Hosts, key: str = KEY, **more: object) -> tuple[int, str]:
    body = {"model": "tiny", "prompt": [100, 101, 102], "max_tokens": 8, "ignore_eos": True}
    return hosts.http(2, API, "/v1/completions", body | more, key, timeout=120, scheme="http")


def measure(profile: str) -> list[str]:
    """The gate command of docs/install.md with that profile, of the repository as the host sees it.

    The project's environment may belong to a Python that the host does not have; its own one of the
    same version takes that environment's packages.
    """
    minor = f"python3.{sys.version_info.minor}"
    folders = ("eval", "kernel", "patches", f".venv/lib/{minor}/site-packages")
    path = ":".join(f"{GATE_ON_HOST}/{folder}" for folder in folders)
    command = ["/usr/bin/env", f"PYTHONPATH={path}", f"/usr/bin/{minor}", "-m", "v100_gate", "run"]
    arguments = "--url {url} --model {model} --api-key-file {key_file} --results {run_dir}/measured"
    return [*command, f"{GATE_ON_HOST}/{profile}", *arguments.split()]


def roll_out(hosts: Hosts, real: RealRelease, venv: str, gate_profile: str) -> Play:
    """Rolls the release of this checkout out to node2 with that profile of the measuring gate."""
    instance = {"name": "tiny", "profile": "tiny-cpu", "engine_port": 18001, "api_port": API}
    return hosts.play(
        "site",
        "--limit",
        "node2",
        release_dir=str(real.wheel.parent),
        release_profiles=str(REPOSITORY / "deploy" / "profiles"),
        release_venv=venv,
        release_wheelhouse="",
        release_gate_command=measure(gate_profile),
        v100_instances=[instance],
        v100_node_tls_pem="",
    )


def test_real_vllm_rolls_out_is_gated_and_serves(
    hosts: Hosts, real: RealRelease, model: Path, venv: str
) -> None:
    played = roll_out(hosts, real, venv, "tests/deploy/node-tiny.yaml")
    assert played.status == 0, played.output
    status, text = complete(hosts, return_token_ids=True)
    assert status == 200
    assert len(json.loads(text)["choices"][0]["token_ids"]) == 8
    assert complete(hosts, "wrong-key-0123456789")[0] == 401


def test_its_gate_and_status_are_kept(hosts: Hosts, real: RealRelease) -> None:
    states = {s["instance"]: s for s in json.loads(hosts.ssh(2, "v100-status"))}
    state = states["tiny"]
    manifest = json.loads((real.wheel.parent / "manifest.json").read_text())
    assert state["release"]["release"] == manifest["release"]
    assert state["release"]["library_sha256"] == manifest["library"]["sha256"]
    assert state["gate"]["passed"] is True
    assert state["metrics"]["vllm:kv_cache_usage_perc" + '{engine="0",model_name="tiny"}'] >= 0
    accepted = [v for k, v in state["metrics"].items() if "num_accepted_tokens" in k]
    assert accepted and accepted[0] > 0


def test_measuring_gate_ran_on_the_node_and_its_records_are_kept(hosts: Hosts) -> None:
    state = next(s for s in json.loads(hosts.ssh(2, "v100-status")) if s["instance"] == "tiny")
    said = state["gate"]["checks"]["gate-command"]
    assert said["result"] == "passed"
    assert "verdict: PASS" in said["detail"]
    folder = "/var/lib/vllm-v100-gate/tiny/latest/measured"
    verdict = json.loads(hosts.ssh(2, f"cat {folder}/verdict.json"))
    assert verdict["profile"] == "node-tiny"
    assert {c["check"]: c["status"] for c in verdict["checks"] if c["required"]} == dict.fromkeys(
        ("complete", "acceptance-counters", "prefix-hits", "preemptions"), "pass"
    )
    wave = hosts.ssh(2, f"cat {folder}/arms/candidate/start-1/waves/C4-measured-1.json")
    tokens = [sum(len(c["token_ids"]) for c in r["chunks"]) for r in json.loads(wave)["requests"]]
    assert tokens == [32] * 4


def test_release_that_the_measuring_gate_fails_is_rolled_back(
    hosts: Hosts, real: RealRelease, venv: str
) -> None:
    """The shipped profile sends 8,000 tokens to a service of 4,096: nothing of it completes."""
    current = "readlink /opt/vllm-v100/instances/tiny/current"
    before = hosts.ssh(2, current)
    played = roll_out(hosts, real, venv, "eval/profiles/node.yaml")
    assert played.status == 2, played.output
    said = " ".join(played.output.split())
    # Other checks may have failed as well; what counts is that this one did, and what follows.
    assert re.search(r"the gate failed: .*gate-command: exit status [1-9]", said), played.output
    assert "which serves" in said, played.output
    assert hosts.ssh(2, current) == before
    assert complete(hosts)[0] == 200
    archive = "$(ls -t /opt/vllm-v100/evidence/tiny-*.tar.gz | head -1)"
    kept = hosts.ssh(2, f"tar -tzf {archive}")
    assert "/gate/measured/run.json" in kept


def test_key_of_the_real_engine_is_nowhere(hosts: Hosts) -> None:
    search = f"""
        key="$(printf '%s' {KEY[:8]})$(printf '%s' {KEY[8:]})"
        journalctl -u vllm-v100@tiny --no-pager -o export | grep -cF "$key"
        for p in $(pgrep -u vllm); do
          tr '\\0' '\\n' < /proc/$p/cmdline | grep -F "$key"
          tr '\\0' '\\n' < /proc/$p/environ | grep -F "$key"
        done
        pgrep -c -u vllm"""
    found, processes = hosts.ssh(2, search).splitlines()
    assert found == "0"
    assert int(processes) >= 2  # API server and engine core at least


def test_sigterm_drains_a_real_stream_to_its_end(hosts: Hosts) -> None:
    answers: list[tuple[int, str]] = []

    def run() -> None:
        answers.append(complete(hosts, max_tokens=2000, stream=True))

    client = threading.Thread(target=run)
    client.start()
    # The node itself stops the service the moment its engine reports the stream as running, so
    # that the test does not depend on how fast the machine is.
    stop_when_running = """
        for _ in $(seq 600); do
          if curl -s localhost:18001/metrics | grep -q '^vllm:num_requests_running.* 1.0$'; then
            systemctl stop vllm-v100@tiny && echo stopped
            exit
          fi
          sleep 0.05
        done
        echo never running"""
    stopped = hosts.ssh(2, stop_when_running).strip()
    client.join(120)
    assert stopped == "stopped"
    status, text = answers[0]
    assert status == 200
    assert '"finish_reason":"length"' in text
    assert text.rstrip().endswith("data: [DONE]")
    unit = hosts.unit(2, "vllm-v100@tiny", "Result", "ExecMainStatus")
    assert unit == {"Result": "success", "ExecMainStatus": "0"}
