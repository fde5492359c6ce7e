"""Instances and GPU sets on node2: sets that do not overlap serve side by side, sets that do
exclude each other. Goes on from test_2_faults, after which `demo` serves there on all four GPUs,
which are fake.
"""

from __future__ import annotations

import json
from pathlib import Path

from testbed_hosts import DEMO, KEY, Hosts, Play

LEFT = DEMO | {
    "name": "left",
    "profile": "fake-tp2",
    "gpus": [0, 1],
    "engine_port": 18010,
    "api_port": 8010,
}
RIGHT = LEFT | {"name": "right", "gpus": [2, 3], "engine_port": 18011, "api_port": 8011}
STANDBY = {"standby": True}
ALL = (DEMO, LEFT, RIGHT)


def roll_out(hosts: Hosts, releases: dict[str, Path], *instances: dict[str, object]) -> Play:
    release = str(releases["1.1.0"])
    return hosts.play(
        "site", "--limit", "node2", release_dir=release, v100_instances=list(instances)
    )


def running(hosts: Hosts) -> list[str]:
    """Units of engines and APIs that are active, `NAME` and `api NAME`."""
    units = {f"vllm-v100@{i['name']}": str(i["name"]) for i in ALL}
    units |= {f"vllm-v100-api@{i['name']}": f"api {i['name']}" for i in ALL}
    states = hosts.ssh(2, f"systemctl is-active {' '.join(units)}", check=False).split()
    return sorted(n for n, s in zip(units.values(), states, strict=True) if s == "active")


def start(hosts: Hosts, name: str) -> None:
    hosts.ssh(2, f"systemctl start vllm-v100@{name} vllm-v100-api@{name}")


def moment(hosts: Hosts, name: str, what: str) -> int:
    """When a unit last began to start (InactiveExit) or had ended (InactiveEnter), microseconds."""
    unit = f"vllm-v100@{name}.service"
    return int(hosts.unit(2, unit, f"{what}TimestampMonotonic")[f"{what}TimestampMonotonic"])


def test_instances_that_would_share_gpus_at_the_same_time_are_refused(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    played = roll_out(hosts, releases, DEMO, LEFT)
    assert played.status == 2
    assert "Mark all but one of those that share" in " ".join(played.output.split())
    assert running(hosts) == ["api demo", "demo"]


def test_disjoint_sets_serve_side_by_side_while_their_rival_stands_by(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    instances = (LEFT, RIGHT, DEMO | STANDBY)
    played = roll_out(hosts, releases, *instances)
    assert played.status == 0, played.output
    assert running(hosts) == ["api left", "api right", "left", "right"]
    for instance, cards in ((LEFT, "0,1"), (RIGHT, "2,3")):
        plan = hosts.ssh(2, f"cat /opt/vllm-v100/instances/{instance['name']}/current/launch.json")
        assert json.loads(plan)["environment"]["CUDA_VISIBLE_DEVICES"] == cards
        assert hosts.complete(2, int(str(instance["api_port"]))) == 200
        body = {"model": "demo", "prompt": [1], "max_tokens": 1}
        port = int(str(instance["api_port"]))
        assert hosts.http(2, port, "/v1/completions", body, KEY + "x")[0] == 401
    played = roll_out(hosts, releases, *instances)
    assert played.status == 0, played.output
    assert played.recap("node2")["changed"] == 0, played.output


def test_starting_the_rival_stops_both_when_their_requests_have_ended(hosts: Hosts) -> None:
    client = hosts.stream(2, 8010, 4)
    hosts.ssh(
        2,
        "until curl -s localhost:18010/metrics | grep -q 'running 1'; do sleep 0.05; done;"
        " systemctl start vllm-v100@demo vllm-v100-api@demo",
    )
    text, _ = client.communicate()
    assert text.count("token_ids") == 10
    assert text.rstrip().endswith("data: [DONE]")
    assert running(hosts) == ["api demo", "demo"]
    for name in ("left", "right"):
        assert hosts.unit(2, f"vllm-v100@{name}", "Result")["Result"] == "success"
        assert moment(hosts, "demo", "InactiveExit") >= moment(hosts, name, "InactiveEnter")
    assert hosts.complete(2, 8000) == 200


def test_starting_one_half_stops_the_whole_and_not_the_other_half(hosts: Hosts) -> None:
    start(hosts, "left")
    assert running(hosts) == ["api left", "left"]
    assert moment(hosts, "left", "InactiveExit") >= moment(hosts, "demo", "InactiveEnter")
    start(hosts, "right")
    assert running(hosts) == ["api left", "api right", "left", "right"]


def test_moving_the_mark_switches_in_the_right_order(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    played = roll_out(hosts, releases, DEMO, LEFT | STANDBY, RIGHT | STANDBY)
    assert played.status == 0, played.output
    assert running(hosts) == ["api demo", "demo"]
    assert moment(hosts, "demo", "InactiveExit") >= moment(hosts, "right", "InactiveEnter")
    assert hosts.complete(2, 8000) == 200
    assert hosts.gateway()["node2-demo"]["status"] == "UP"
    enabled = hosts.ssh(2, "systemctl is-enabled vllm-v100@{demo,left,right}", check=False)
    assert enabled.split() == ["enabled", "disabled", "disabled"]
