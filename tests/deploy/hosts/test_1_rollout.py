"""Roll-outs on two real systemd hosts over SSH, in the order of a life: each test goes on from the
state that the one before left. The GPUs and vLLM are fake and named so; systemd, SSH, Ansible, pip,
HAProxy and everything of this repository are real.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
from testbed_hosts import GATEWAY, KEY, Hosts, Play

API, ENGINE = 8000, 18000


def roll_out(hosts: Hosts, releases: dict[str, Path], version: str, *arguments: str) -> Play:
    return hosts.play("site", *arguments, release_dir=str(releases[version]))


def invocations(hosts: Hosts) -> list[str]:
    """Identities of the runs of engine, API and gateway on both hosts."""
    units = "vllm-v100@demo vllm-v100-api@demo vllm-v100-gateway"
    return [hosts.ssh(n, f"systemctl show -p InvocationID --value {units}") for n in (1, 2)]


def evidence(hosts: Hosts, node: int) -> list[str]:
    return hosts.ssh(node, "ls /opt/vllm-v100/evidence").split()


def assert_back_on(hosts: Hosts, version: str, played: Play, words: str) -> None:
    """node1 failed, says why, and serves `version`; node2 was not reached."""
    assert played.status == 2, played.output
    assert words in played.output
    assert f"Back on {version}" in played.output
    assert not played.recap("node2")
    assert hosts.release(1) == version
    assert hosts.complete(1, API) == 200
    assert hosts.complete(1, GATEWAY) == 200


def test_first_roll_out_serves_on_both_hosts_and_through_the_gateway(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    played = hosts.play("site", release_dir=str(releases["1.0.0"]), v100_serial=2)
    assert played.status == 0, played.output
    assert [hosts.release(n) for n in (1, 2)] == ["1.0.0", "1.0.0"]
    assert [hosts.complete(n, API) for n in (1, 2)] == [200, 200]
    assert hosts.complete(1, GATEWAY) == 200


def test_second_run_changes_and_restarts_nothing(hosts: Hosts, releases: dict[str, Path]) -> None:
    before = invocations(hosts)
    played = hosts.make(
        "deploy", f"RELEASE={releases['1.0.0']}", f"WHEELHOUSE={releases['wheelhouse']}"
    )
    assert played.status == 0, played.output
    assert [played.recap(n)["changed"] for n in ("node1", "node2")] == [0, 0], played.output
    assert invocations(hosts) == before


@pytest.mark.parametrize("length", [1, 30_000], ids=["short", "longer-than-the-proxy-reads"])
def test_wrong_key_gets_401_everywhere(hosts: Hosts, length: int) -> None:
    body = {"model": "demo", "prompt": [1] * length, "max_tokens": 1}
    for port in (GATEWAY, API):
        for key in (None, "wrong-key-0123456789", KEY + "x"):
            assert hosts.http(1, port, "/v1/completions", body, key)[0] == 401
    curl = "curl -s -o /dev/null -w '%{http_code}' localhost:18000/v1/models"
    assert hosts.ssh(1, f"{curl} -H 'Authorization: Bearer wrong'") == "401"


@pytest.mark.parametrize(
    ("port", "folder"), [(GATEWAY, "gateway"), (API, "instances/demo")], ids=["gateway", "node"]
)
def test_api_speaks_tls_only_and_its_private_key_is_readable_by_root_only(
    hosts: Hosts, port: int, folder: str
) -> None:
    assert hosts.http(1, port, "/health", key=None)[0] == 200
    assert hosts.http(1, port, "/health", key=None, scheme="http")[0] != 200
    assert hosts.ssh(1, f"stat -c '%a %U' /etc/vllm-v100/{folder}/tls.pem") == "600 root"


def test_requests_of_a_session_go_to_one_node(hosts: Hosts) -> None:
    used = set()
    for session in ("a", "b", "c", "d"):
        nodes = {hosts.served_by(session, [prompt] * 9) for prompt in range(2)}
        assert len(nodes) == 1
        used |= nodes
    assert used == {"node1-demo", "node2-demo"}


def test_engine_is_not_reachable_from_outside_and_the_api_shows_only_its_paths(
    hosts: Hosts,
) -> None:
    assert hosts.http(1, ENGINE, "/v1/models", scheme="http")[0] == 0
    assert hosts.http(1, API, "/metrics")[0] == 404
    assert hosts.http(1, API, "/version")[0] == 404
    assert hosts.http(1, API, "/health", key=None)[0] == 200


def test_metrics_are_there_for_the_addresses_that_may_scrape_them(hosts: Hosts) -> None:
    scraped = hosts.ssh(1, f"curl -skf https://127.0.0.1:{API}/metrics")
    assert "vllm:num_requests_running 0" in scraped
    assert "haproxy_server_status" in hosts.ssh(1, "curl -sf 127.0.0.1:8405/metrics")


def test_key_is_in_no_log_no_argument_and_no_environment(hosts: Hosts) -> None:
    hosts.complete(1, GATEWAY)
    for node in (1, 2):
        # the pattern is assembled on the host, so that the search does not find itself
        search = f"""
            key="$(printf '%s' {KEY[:8]})$(printf '%s' {KEY[8:]})"
            journalctl --no-pager -o export | grep -cF "$key"
            for p in /proc/[0-9]*; do
              [ "$p" = "/proc/$$" ] && continue
              tr '\\0' '\\n' < $p/cmdline 2>/dev/null | grep -F "$key"
              tr '\\0' '\\n' < $p/environ 2>/dev/null | grep -F "$key"
            done
            systemctl show 'vllm-v100*' | grep -F "$key"
            grep -rlF "$key" /opt/vllm-v100 /var/lib/vllm-v100* /var/cache/vllm-v100 /etc/systemd
            true"""
        assert hosts.ssh(node, search) == "0"
    modes = hosts.ssh(1, "stat -c '%a %U' /etc/vllm-v100/instances/demo/{api-key,bearer}")
    assert modes.splitlines() == ["600 root"] * 2


def test_check_mode_tells_what_an_upgrade_changes_and_changes_nothing(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    releases_there = "ls /opt/vllm-v100/releases/demo /opt/vllm-v100/artifacts /opt/vllm-v100/venvs"
    before, there = invocations(hosts), hosts.ssh(1, releases_there)
    played = roll_out(hosts, releases, "1.1.0", "--check", "--diff", "--limit", "node1")
    assert played.status == 0, played.output
    assert "would stage /opt/vllm-v100/releases/demo/1.1.0-" in played.output
    assert "+/tmp/" in played.output or "1.1.0-" in played.output
    assert played.recap("node1")["changed"] > 0
    assert hosts.release(1) == "1.0.0"
    assert hosts.ssh(1, releases_there) == there
    assert invocations(hosts) == before


def fetched(releases: dict[str, Path], version: str, web: str) -> dict[str, str]:
    """Variables of a roll-out whose nodes fetch the release themselves."""
    return {
        "release_dir": str(releases[version]),
        "release_source": "fetch",
        "release_url": f"{web}/{version}",
        "release_wheelhouse_url": f"{web}/wheelhouse",
    }


def test_preflight_lets_the_nodes_fetch_the_next_release_and_touches_nothing(
    hosts: Hosts, releases: dict[str, Path], web: str
) -> None:
    before = invocations(hosts)
    played = hosts.play("preflight", **fetched(releases, "1.1.0", web))
    assert played.status == 0, played.output
    assert invocations(hosts) == before
    log = hosts.ssh(1, "journalctl -u web -o cat --no-pager")
    for node in (1, 2):
        for path in ("1.1.0/vllm-1.1.0", "wheelhouse/ninja-1.13.0+fake"):
            wheel = f"/{path}-py3-none-any.whl".replace("+", "%2B")
            got = [line for line in log.splitlines() if line.startswith(hosts.address(node))]
            assert any(f"GET {wheel}" in line.replace("+", "%2B") for line in got), log
        hosts.ssh(node, "test -x /opt/vllm-v100/releases/demo/1.1.0-*/venv/bin/ninja")
        assert hosts.release(node) == "1.0.0"


class Clients(threading.Thread):
    """Sends completions through the gateway until it is stopped; keeps every status."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(daemon=True)
        self.hosts, self.statuses, self.over = hosts, [], threading.Event()

    def run(self) -> None:
        request = 0
        while not self.over.is_set():
            request += 1
            # another beginning each time, so that affinity uses both nodes
            prompt = [request % 50] * 20
            self.statuses.append(self.hosts.complete(1, GATEWAY, prompt=prompt, seconds=0.3))


def test_upgrade_loses_no_request_and_the_second_node_does_not_compile(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    clients = [Clients(hosts) for _ in range(2)]
    for client in clients:
        client.start()
    played = roll_out(hosts, releases, "1.1.0")
    for client in clients:
        client.over.set()
    for client in clients:
        client.join(60)
    assert played.status == 0, played.output
    assert [hosts.release(n) for n in (1, 2)] == ["1.1.0", "1.1.0"]
    statuses = [status for client in clients for status in client.statuses]
    assert len(statuses) > 20
    assert set(statuses) == {200}
    compiled = (
        "journalctl -u vllm-v100@demo _SYSTEMD_INVOCATION_ID=$(systemctl show -p InvocationID"
    )
    compiled += " --value vllm-v100@demo) -o cat | grep -c 'fake JIT' || true"
    assert hosts.ssh(1, compiled) == "1"
    assert hosts.ssh(2, compiled) == "0"
    for node in (1, 2):
        index = hosts.ssh(node, "cat /opt/vllm-v100/instances/demo/current/compiled.json")
        assert "triton/kernel.cubin" in json.loads(index)["files"]


def test_release_that_crashes_at_start_is_rolled_back(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    played = roll_out(hosts, releases, "2.0.0")
    assert_back_on(hosts, "1.1.0", played, "'Switch to the release and wait until it serves'")
    (archive,) = evidence(hosts, 1)
    log = hosts.ssh(1, f"tar -xOzf /opt/vllm-v100/evidence/{archive} --wildcards '*/vllm-v100.log'")
    assert "CUDA out of memory (fake)" in log
    fetched = Path(str(hosts.variables["service_results"])) / "node1" / archive
    assert fetched.is_file()


def test_release_that_never_gets_healthy_is_rolled_back(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    profiles = str(hosts.variables["release_profiles"])
    played = hosts.play(
        "site",
        release_dir=str(releases["2.1.0"]),
        release_profile_path=f"{profiles}/fake-short-start.yaml",
    )
    assert_back_on(hosts, "1.1.0", played, "'Switch to the release and wait until it serves'")


def test_release_that_fails_its_gate_is_rolled_back_and_its_verdict_kept(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    played = roll_out(hosts, releases, "2.2.0")
    assert_back_on(hosts, "1.1.0", played, "the gate failed: repeatable: CheckFailed")
    archive = evidence(hosts, 1)[-1]
    verdict = hosts.ssh(
        1, f"tar -xOzf /opt/vllm-v100/evidence/{archive} --wildcards '*/gate/verdict.json'"
    )
    assert json.loads(verdict)["checks"]["repeatable"]["result"] == "failed"
    assert json.loads(verdict)["checks"]["api-stayed-stopped"]["result"] == "passed"


def refused(hosts: Hosts, played: Play, words: str, before: list[str]) -> None:
    """The roll-out was refused for that reason before anything that serves was touched."""
    assert played.status == 2, played.output
    assert words in played.output, played.output
    assert "is refused in" in played.output
    assert played.recap("node1")["rescued"] == 1
    assert invocations(hosts) == before
    assert hosts.release(1) == "1.1.0"


def test_missing_ninja_is_named_before_the_old_service_stops(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    before = invocations(hosts)
    played = roll_out(hosts, releases, "2.3.0")
    refused(hosts, played, "ninja is not on PATH=/opt/vllm-v100/releases/demo/2.3.0-", before)


def test_wheel_that_is_corrupt_on_the_node_is_refused(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    before, source = invocations(hosts), releases["3.0.0"]
    digest = subprocess.run(
        ["sha256sum", source / "manifest.json"], capture_output=True, text=True, check=True
    ).stdout[:12]
    folder = f"/opt/vllm-v100/artifacts/3.0.0-{digest}"
    hosts.ssh(1, f"mkdir -p {folder}")
    for path in source.iterdir():
        data = path.read_bytes()
        if path.suffix == ".whl":
            data = data[:200] + bytes([data[200] ^ 1]) + data[201:]
        target = hosts.state / "n1" / "root" / folder[1:] / path.name
        target.write_bytes(data)
    played = hosts.play(
        "site",
        "--limit",
        "node1",
        release_dir=str(source),
        release_source="staged",
        release_wheelhouse="/nonexistent",
    )
    refused(hosts, played, "vllm-3.0.0-py3-none-any.whl is corrupt", before)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("3.0.0/vllm-3.0.0-py3-none-any.whl", "vllm-3.0.0-py3-none-any.whl: The checksum for"),
        ("wheelhouse/ninja-1.13.0+fake-py3-none-any.whl", "DO NOT MATCH THE HASHES"),
    ],
    ids=["release", "requirement"],
)
def test_file_that_was_tampered_with_on_its_server_is_refused(
    hosts: Hosts, releases: dict[str, Path], web: str, changed: str, words: str
) -> None:
    before = invocations(hosts)
    path = hosts.state / "n1" / "root" / "srv" / "releases" / changed
    right = path.read_bytes()
    path.write_bytes(right[:200] + bytes([right[200] ^ 1]) + right[201:])
    try:
        played = hosts.play("site", "--limit", "node1", **fetched(releases, "3.0.0", web))
    finally:
        path.write_bytes(right)
    refused(hosts, played, words, before)
    assert "3.0.0" not in hosts.ssh(1, "ls /opt/vllm-v100/artifacts /opt/vllm-v100/venvs")


def test_full_disk_is_refused_before_the_old_service_stops(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    before = invocations(hosts)
    hosts.ssh(1, "mount -t tmpfs -o size=16m full /opt/vllm-v100/artifacts")
    hosts.ssh(1, "dd if=/dev/zero of=/opt/vllm-v100/artifacts/fill bs=1M count=20 || true")
    try:
        played = roll_out(hosts, releases, "3.0.0", "--limit", "node1")
        assert "No space left on device" in played.output or "free" in played.output
        refused(hosts, played, "the service that runs was not touched", before)
    finally:
        hosts.ssh(1, "umount /opt/vllm-v100/artifacts")


def test_rotated_key_takes_effect_and_the_old_one_ends(
    hosts: Hosts, releases: dict[str, Path]
) -> None:
    new = "rotated-key-0123456789"
    played = hosts.play(
        "site", "--limit", "node2", release_dir=str(releases["1.1.0"]), v100_api_key=new
    )
    assert played.status == 0, played.output
    assert new not in played.output
    body = {"model": "demo", "prompt": [1], "max_tokens": 1}
    assert hosts.http(2, API, "/v1/completions", body, new)[0] == 200
    assert hosts.http(2, API, "/v1/completions", body, KEY)[0] == 401
    played = hosts.play("site", "--limit", "node2", release_dir=str(releases["1.1.0"]))
    assert played.status == 0, played.output
    assert hosts.http(2, API, "/v1/completions", body, KEY)[0] == 200


def test_rollback_returns_to_the_release_before_quickly(hosts: Hosts) -> None:
    lost: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if hosts.complete(1, API) != 200:
                lost.append(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    played = hosts.play("rollback", "--limit", "node1")
    over.set()
    watcher.join(30)
    assert played.status == 0, played.output
    assert hosts.release(1) == "1.0.0"
    assert lost
    assert lost[-1] - lost[0] < 30, "seconds without service; the fake loads in 0.5 s"


def test_status_shows_release_units_plan_and_gate(hosts: Hosts) -> None:
    state = json.loads(hosts.ssh(2, "v100-status"))[0]
    assert state["release"]["release"] == "1.1.0"
    assert state["engine"]["ActiveState"] == state["api"]["ActiveState"] == "active"
    assert state["plan"]["pages"]["block_tokens"] == 1648
    assert state["gate"]["passed"] is True
    played = hosts.make("status")
    assert played.status == 0, played.output
    assert "node1-demo" in played.output
    assert all(played.recap(n)["changed"] == 0 for n in ("node1", "node2"))


def test_gate_of_what_runs_keeps_its_verdict_and_opens_the_api_again(hosts: Hosts) -> None:
    before = invocations(hosts)[1].split()
    latest = "readlink /var/lib/vllm-v100-gate/demo/latest"
    run = hosts.ssh(2, latest)
    played = hosts.make("gate-nodes", limit="node2")
    assert played.status == 0, played.output
    assert hosts.ssh(2, latest) != run
    verdict = Path(str(hosts.variables["gate_results"])) / "node2" / "demo-verdict.json"
    assert json.loads(verdict.read_text())["passed"] is True
    assert invocations(hosts)[1].split()[0] == before[0]  # the engine was not restarted
    assert hosts.complete(2, API) == 200
    assert hosts.gateway()["node2-demo"]["status"] == "UP"


def test_drain_takes_a_node_out_and_puts_it_back(hosts: Hosts) -> None:
    played = hosts.play("drain", "--limit", "node2")
    assert played.status == 0, played.output
    assert hosts.unit(2, "vllm-v100@demo", "ActiveState")["ActiveState"] == "inactive"
    assert [hosts.complete(1, GATEWAY, prompt=[i] * 9) for i in range(4)] == [200] * 4
    played = hosts.play("drain", "--limit", "node2", v100_back=True)
    assert played.status == 0, played.output
    assert {name: s["status"] for name, s in hosts.gateway().items()} == {
        "node1-demo": "UP",
        "node2-demo": "UP",
    }


def test_impossible_profile_is_refused_with_the_arithmetic(
    hosts: Hosts, releases: dict[str, Path], tmp_path: Path
) -> None:
    text = (Path(str(hosts.variables["release_profiles"])) / "fake-tp4.yaml").read_text()
    path = tmp_path / "fake-tp4.yaml"
    path.write_text(text.replace("{requests: 8, tokens: 33024}", "{requests: 16, tokens: 262144}"))
    before = invocations(hosts)
    played = hosts.play(
        "preflight", release_dir=str(releases["1.1.0"]), release_profile_path=str(path)
    )
    assert played.status == 2
    assert "16 x 262144 tokens need 16 x 187 blocks" in played.output
    assert invocations(hosts) == before


@pytest.mark.parametrize("node", [1, 2])
def test_nothing_is_left_over(hosts: Hosts, node: int) -> None:
    """Failed releases, their environments and scratch folders are gone."""
    assert "2." not in hosts.ssh(node, "ls /opt/vllm-v100/releases/demo /opt/vllm-v100/venvs")
    assert hosts.ssh(node, "ls -d /tmp/*-1.*-* 2>/dev/null || true") == ""
