"""A real Ray cluster of both hosts, under the units of docs/multi-node.md. vLLM does not use Ray on
CPU, so a client takes the engine's place: in the sandbox of its unit it reserves four (fake) GPUs
on each host, as vLLM's executor does, and runs a task there.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testbed_hosts import CACHE, CACHE_ON_HOST, DEMO, REPOSITORY, Hosts, RealRelease

VENV = "/opt/ray-venv"
CLIENT = """
import json, os, socket
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

ray.init(log_to_driver=False)
stages = placement_group([{"GPU": 4}] * 2, strategy="STRICT_SPREAD")
ray.get(stages.ready(), timeout=120)

@ray.remote(num_cpus=0, num_gpus=4)
def stage():
    return socket.gethostname(), sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

places = [Place(stages, placement_group_bundle_index=index) for index in range(2)]
print(json.dumps(ray.get([stage.options(scheduling_strategy=place).remote() for place in places])))
"""


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, real: RealRelease) -> None:
    """Ray's environment and ray.env on both hosts; the wheel is in the shared cache."""
    lock = REPOSITORY / "tests" / "deploy" / "ray.txt"
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"ray-{key}-py3.{sys.version_info.minor}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--target", part, "-r", lock], check=True)
        part.rename(folder)
    for node in (1, 2):
        root = hosts.state / f"n{node}" / "root"
        hosts.ssh(node, f"python3 -m venv --without-pip {VENV}; mkdir -p /srv/ray")
        (site,) = (root / VENV[1:] / "lib").glob("python3.*/site-packages")
        paths = [f"{CACHE_ON_HOST}/{folder.name}", real.requirements_on_host]
        (site / "ray.pth").write_text("\n".join(paths))
        ray = root / VENV[1:] / "bin" / "ray"
        ray.write_text(f"#!{VENV}/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
        ray.chmod(0o755)
        (root / "srv" / "ray" / "client.py").write_text(CLIENT)
        (root / "etc" / "vllm-v100" / "ray.env").write_text(
            f"V100_RAY_VENV={VENV}\nRAY_ADDRESS={hosts.address(1)}:6379\n"
            f"VLLM_HOST_IP={hosts.address(node)}\nCUDA_VISIBLE_DEVICES=0,1,2,3\n"
        )


def test_engine_of_a_ray_profile_needs_the_head_and_sees_its_sockets(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    instance = DEMO | {"name": "spread", "profile": "fake-ray", "engine_port": 1, "api_port": 2}
    release = str(releases["1.1.0"])
    played = hosts.play(
        "preflight", "--limit", "node1", release_dir=release, v100_instances=[instance]
    )
    assert played.status == 0, played.output
    drop_in = hosts.ssh(1, "cat /opt/vllm-v100/releases/spread/*/instance.conf").splitlines()
    wanted = ["Requires=vllm-v100-ray@head.service", "EnvironmentFile=/etc/vllm-v100/ray.env"]
    assert {*wanted, "ReadWritePaths=-/run/vllm-v100-ray"} <= set(drop_in)


def test_two_hosts_form_a_cluster_that_the_sandboxed_engine_can_use(
    hosts: Hosts, cluster: None
) -> None:
    for node, role in ((1, "head"), (2, "worker")):
        hosts.ssh(node, f"systemctl start vllm-v100-ray@{role}")
    settings = ["User=vllm", "EnvironmentFile=/etc/vllm-v100/ray.env"]
    settings += ["ReadWritePaths=/run/vllm-v100-ray", "ProtectSystem=strict", "PrivateTmp=yes"]
    settings += ["PrivateIPC=yes", "ProtectProc=invisible", "NoNewPrivileges=yes", "UMask=0027"]
    settings += ["SystemCallFilter=@system-service", "SystemCallErrorNumber=EPERM"]
    run = "systemd-run --quiet --wait --pipe --collect " + " ".join(f"-p {s}" for s in settings)
    try:
        said = hosts.ssh(1, f"timeout 150 {run} {VENV}/bin/python /srv/ray/client.py")
        cards = ["0", "1", "2", "3"]
        assert dict(json.loads(said.splitlines()[-1])) == {"node1": cards, "node2": cards}
    finally:
        for node, role in ((1, "head"), (2, "worker")):
            hosts.ssh(node, f"systemctl stop vllm-v100-ray@{role}")
    assert hosts.unit(1, "vllm-v100-ray@head", "Result")["Result"] == "success"


def test_ray_without_an_address_is_refused_and_not_tried_again(hosts: Hosts, cluster: None) -> None:
    unit = "vllm-v100-ray@worker"
    hosts.ssh(2, f"sed -i /RAY_ADDRESS/d /etc/vllm-v100/ray.env; systemctl start {unit}")
    hosts.ssh(2, f"until systemctl is-failed -q {unit}; do sleep 0.1; done")
    found = hosts.unit(2, unit, "ExecMainStatus", "NRestarts")
    assert found == {"ExecMainStatus": "78", "NRestarts": "0"}
    assert "RAY_ADDRESS" in hosts.ssh(2, f"journalctl -u {unit} -o cat -n 10 --no-pager")
