"""What systemd and the node programs do when things break, on a node that test_1_rollout deployed.

GPU facts are fake (a stand-in nvidia-smi with knobs in /etc/fake-nvidia.conf), because these checks
are about them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import pytest
from testbed_hosts import GATEWAY, Hosts, self_signed, wait_until

ENGINE = "vllm-v100@demo.service"
API = "vllm-v100-api@demo.service"


def serving(hosts: Hosts, node: int = 2) -> Callable[[], bool]:
    return lambda: hosts.complete(node, 8000) == 200


def state(hosts: Hosts, node: int = 2) -> str:
    return hosts.unit(node, ENGINE, "ActiveState")["ActiveState"]


def start_again(hosts: Hosts, node: int = 2) -> None:
    hosts.ssh(node, f"systemctl reset-failed {ENGINE}; systemctl start {ENGINE} {API}")
    assert serving(hosts, node)()


def refused_start(hosts: Hosts, words: str) -> None:
    """A restart is refused with these words and status 78, and is not tried again.

    A unit that systemd is going to restart is `activating`, not `failed`.
    """
    hosts.ssh(2, f"systemctl reset-failed {ENGINE}; systemctl restart {ENGINE}", check=False)
    unit = hosts.unit(2, ENGINE, "ActiveState", "ExecMainStatus", "NRestarts")
    assert unit == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    log = hosts.ssh(2, f"journalctl -u {ENGINE} -o cat -n 40 --no-pager")
    assert words in log, log
    assert "To mend:" in log


@contextlib.contextmanager
def behaving(hosts: Hosts, mode: str) -> Iterator[None]:
    """The installed fake engine behaves as `mode` from its next start on, then as it should again.

    The hash check would refuse such an edit, so its record is edited as well.
    """
    venv = hosts.ssh(2, "readlink -f /opt/vllm-v100/instances/demo/current/venv")
    behaviour = f"{venv}/lib/python3*/site-packages/vllm/behaviour.json"
    hosts.ssh(
        2,
        f"cp -a {venv}/installed.json {behaviour} /root/;"
        f'sed -i \'s/"ok"/"{mode}"/\' {behaviour};'
        f"sed -i '/behaviour.json/d' {venv}/installed.json; systemctl reset-failed {ENGINE}",
    )
    try:
        yield
    finally:
        hosts.ssh(
            2,
            f"systemctl stop {ENGINE}; cp -a /root/installed.json {venv}/;"
            f" cp -a /root/behaviour.json {behaviour}",
        )
    start_again(hosts)


def test_stop_lets_a_running_stream_end(hosts: Hosts) -> None:
    running = hosts.stream(2, 8000, 5)
    time.sleep(1.5)
    started = time.monotonic()
    hosts.ssh(2, f"systemctl stop {ENGINE}")
    assert time.monotonic() - started > 2
    text, _ = running.communicate()
    assert text.count("token_ids") == 10
    assert text.rstrip().endswith("data: [DONE]")
    unit = hosts.unit(2, ENGINE, "Result", "ExecMainStatus")
    assert unit == {"Result": "success", "ExecMainStatus": "0"}
    start_again(hosts)


def test_sigterm_to_the_engine_alone_drains_too(hosts: Hosts) -> None:
    """The loopback port, without the API in between: vLLM's own drain."""
    script = (
        "curl -sS -N -m 30 -H 'Authorization: Bearer '$(cat /etc/vllm-v100/instances/demo/api-key)"
        ' -d \'{"prompt": [1], "max_tokens": 10, "stream": true, "seconds": 4}\''
        " localhost:18000/v1/completions > /tmp/stream & sleep 1;"
        f" systemctl stop {ENGINE}; wait; cat /tmp/stream; rm /tmp/stream"
    )
    text = hosts.ssh(2, script)
    assert text.count("token_ids") == 10
    assert text.endswith("data: [DONE]")
    start_again(hosts)


def test_dead_worker_ends_the_engine_and_it_restarts_by_itself(hosts: Hosts) -> None:
    restarts = int(hosts.unit(2, ENGINE, "NRestarts")["NRestarts"])
    hosts.ssh(2, "kill -9 $(pgrep -n -u vllm -f '[f]ake vllm worker')")
    wait_until(
        lambda: int(hosts.unit(2, ENGINE, "NRestarts")["NRestarts"]) > restarts, 20, "no restart"
    )
    wait_until(serving(hosts), 20, "not serving after the restart")
    log = hosts.ssh(2, f"journalctl -u {ENGINE} -o cat --no-pager")
    assert "the engine ended by itself with status 0" in log


def test_killed_service_restarts_and_a_boot_loop_stops(hosts: Hosts) -> None:
    hosts.ssh(2, f"systemctl kill -s KILL {ENGINE}")
    wait_until(serving(hosts), 20, "not serving after kill -9")
    with behaving(hosts, "crash"):
        hosts.ssh(2, f"systemctl kill -s KILL {ENGINE}")
        wait_until(lambda: state(hosts) == "failed", 60, "the boot loop does not stop")
        assert hosts.unit(2, ENGINE, "Result")["Result"] == "start-limit-hit" or (
            "Start request repeated too quickly"
            in hosts.ssh(2, f"journalctl -u {ENGINE} -n 20 --no-pager -o cat")
        )


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("mute", "the engine does not serve: HTTP Error 503"),
        ("open", "the engine does not serve: the engine accepts a wrong API key"),
    ],
)
def test_engine_that_is_healthy_but_does_not_serve_never_gets_ready(
    hosts: Hosts, mode: str, words: str
) -> None:
    with behaving(hosts, mode):
        started = hosts.testbed("ssh", "2", f"sudo systemctl restart {ENGINE}")
        assert started.returncode != 0
        assert words in hosts.ssh(2, f"journalctl -u {ENGINE} -n 40 --no-pager -o cat")


def test_gate_fails_an_engine_that_compiles_during_requests(hosts: Hosts) -> None:
    with behaving(hosts, "lazy"):
        hosts.ssh(2, f"systemctl restart {ENGINE}")
        started = hosts.testbed("ssh", "2", "sudo systemctl start vllm-v100-gate@demo")
        assert started.returncode != 0
        verdict = json.loads(hosts.ssh(2, "cat /var/lib/vllm-v100-gate/demo/latest/verdict.json"))
        failed = [n for n, c in verdict["checks"].items() if c["result"] != "passed"]
        assert failed == ["nothing-compiled"]
        assert "late.cubin" in verdict["checks"]["nothing-compiled"]["detail"]
    hosts.ssh(2, "rm /var/cache/vllm-v100/demo/*/triton/late.cubin")


def test_changed_file_of_the_installed_release_stops_the_start(hosts: Hosts) -> None:
    venv = hosts.ssh(2, "readlink -f /opt/vllm-v100/instances/demo/current/venv")
    behaviour = f"{venv}/lib/python3*/site-packages/vllm/behaviour.json"
    hosts.ssh(2, f"cp -a {behaviour} /root/; echo ' ' >> {behaviour}")
    try:
        refused_start(hosts, "behaviour.json has another hash than when it was installed")
    finally:
        hosts.ssh(2, f"cp -a /root/behaviour.json {behaviour}")
    start_again(hosts)


def test_changed_compiled_artefact_stops_the_start(hosts: Hosts) -> None:
    launch = json.loads(hosts.ssh(2, "cat /opt/vllm-v100/instances/demo/current/launch.json"))
    kernel = f"/var/cache/vllm-v100/demo/{launch['cache_key']}/triton/kernel.cubin"
    hosts.ssh(2, f"cp -a {kernel} /root/; echo x >> {kernel}")
    try:
        refused_start(hosts, "kernel.cubin has another hash")
    finally:
        hosts.ssh(2, f"cp -a /root/kernel.cubin {kernel}")
    start_again(hosts)


def test_fake_gpu_facts_that_do_not_fit_stop_the_start(hosts: Hosts) -> None:
    cases = {
        "N=3": "GPU 3 of the set [0, 1, 2, 3] is absent",
        "CC=8.0": "has compute capability 8.0, the profile fake-tp4 is for 7.0",
        "DRIVER=535.54": "driver 535.54 is older than 570.26",
        "MEM=16384": "has 16384 MiB, the profile needs 32256 MiB",
        "USED=9000": "already holds 9000 MiB",
        "APPS='GPU-fake-2, 4242, 900'": "process 4242 uses GPU 2",
    }
    try:
        for knob, words in cases.items():
            hosts.ssh(2, f'echo "{knob}" > /etc/fake-nvidia.conf; systemctl stop {ENGINE}')
            hosts.ssh(2, f"systemctl reset-failed {ENGINE}; systemctl start {ENGINE}", check=False)
            assert hosts.unit(2, ENGINE, "ExecMainStatus")["ExecMainStatus"] == "78"
            assert words in hosts.ssh(2, f"journalctl -u {ENGINE} -o cat -n 12 --no-pager")
    finally:
        hosts.ssh(2, "rm -f /etc/fake-nvidia.conf")
    start_again(hosts)


@pytest.mark.parametrize(
    ("spoil", "mend", "words"),
    [
        (
            "mount -t tmpfs -o size=64m,mode=755,uid=$(id -u vllm) full /var/cache/vllm-v100/demo",
            "umount /var/cache/vllm-v100/demo",
            "GiB free, the caches need 1 GiB",
        ),
        (
            "systemd-run --quiet --unit=squatter python3 -m http.server --bind 127.0.0.1 18000;"
            " until ss -ltn | grep -q 127.0.0.1:18000; do sleep 0.1; done",
            "systemctl stop squatter",
            "port 18000 of 127.0.0.1 is taken",
        ),
        (
            "chmod 700 /srv/models/demo",
            "chmod 755 /srv/models/demo",
            "/srv/models/demo/config.json is not readable",
        ),
    ],
    ids=["space", "port", "model"],
)
def test_node_that_does_not_fit_stops_the_start(
    hosts: Hosts, spoil: str, mend: str, words: str
) -> None:
    hosts.ssh(2, f"systemctl stop {ENGINE}; {spoil}")
    try:
        refused_start(hosts, words)
    finally:
        hosts.ssh(2, mend)
    start_again(hosts)


def test_device_that_the_unit_may_not_open_is_named(hosts: Hosts) -> None:
    drop_in = f"/run/systemd/system/{ENGINE}.d"
    hosts.ssh(
        2,
        f"mkdir -p {drop_in}; printf '[Service]\\nDeviceAllow=\\nDeviceAllow=/dev/null rw\\n'"
        f" > {drop_in}/99.conf; systemctl daemon-reload",
    )
    try:
        refused_start(hosts, "/dev/nvidia0 cannot be opened from inside the unit")
    finally:
        hosts.ssh(2, f"rm -r {drop_in}; systemctl daemon-reload")
    start_again(hosts)


def test_fake_xid_of_its_gpu_forbids_every_restart(hosts: Hosts) -> None:
    drop_in = f"/run/systemd/system/{ENGINE}.d"
    line = "NVRM: Xid (PCI:0000:02:00): 62, pid=7, name=python"
    hosts.ssh(
        2,
        f"mkdir -p {drop_in}; printf '[Service]\\nEnvironment=V100_KERNEL_LOG=/run/fake-kmsg\\n'"
        f" > {drop_in}/99.conf; systemctl daemon-reload; systemctl restart {ENGINE};"
        f' echo "$(date +%s).5 node2 kernel: {line}" > /run/fake-kmsg;'
        f" systemctl kill -s KILL {ENGINE}",
    )
    try:
        wait_until(lambda: state(hosts) == "failed", 20, "it restarts in spite of an Xid")
        assert hosts.unit(2, ENGINE, "ExecMainStatus")["ExecMainStatus"] == "78"
        log = hosts.ssh(2, f"journalctl -u {ENGINE} -o cat -n 80 --no-pager | grep preflight:")
        assert "a GPU of this instance failed" in log
        assert "reset the GPU or reboot" in log
        assert "Xid (PCI:0000:02:00): 62" in hosts.ssh(2, "v100-status")
    finally:
        hosts.ssh(
            2, f"rm -r {drop_in} /run/fake-kmsg /run/vllm-v100-xid/demo; systemctl daemon-reload"
        )
    start_again(hosts)


def test_gate_and_api_exclude_each_other(hosts: Hosts) -> None:
    gate = "vllm-v100-gate@demo.service"
    hosts.ssh(2, f"systemctl start {gate}")
    assert hosts.unit(2, API, "ActiveState")["ActiveState"] == "inactive"
    hosts.ssh(2, f"systemctl start {API}")
    assert serving(hosts)()


def in_gateway(hosts: Hosts, status: str) -> Callable[[], bool]:
    return lambda: str(hosts.gateway()["node2-demo"]["status"]) == status


def test_gateway_sends_nothing_to_a_node_whose_certificate_it_cannot_verify(hosts: Hosts) -> None:
    path = "/etc/vllm-v100/instances/demo/tls.pem"
    foreign = self_signed("node.test")
    hosts.ssh(2, f"cp -a {path} /root/; echo '{foreign}' > {path}; systemctl restart {API}")
    try:
        wait_until(in_gateway(hosts, "DOWN"), 20, "the gateway trusts any certificate")
        assert serving(hosts)()  # to a client that does not verify
        assert [hosts.complete(1, GATEWAY, prompt=[i] * 9) for i in range(4)] == [200] * 4
    finally:
        hosts.ssh(2, f"cp -a /root/tls.pem {path}; systemctl restart {API}")
    wait_until(in_gateway(hosts, "UP"), 20, "not back in the gateway")


def test_node_that_is_cut_off_costs_no_new_request_and_hangs_no_running_one(hosts: Hosts) -> None:
    there = (s for s in "abcdefgh" if hosts.served_by(s, [1] * 9) == "node2-demo")
    running = hosts.stream(1, GATEWAY, 20, headers=(f"X-Session-Id: {next(there)}",))
    wait_until(lambda: hosts.gateway()["node2-demo"]["requests"] == 1, 10, "no stream")
    hosts.testbed("unplug", "2")
    try:
        assert [hosts.complete(1, GATEWAY, prompt=[i] * 9) for i in range(4)] == [200] * 4
        wait_until(in_gateway(hosts, "DOWN"), 30, "the gateway does not notice")
        text, _ = running.communicate()
        assert "[DONE]" not in text
        assert running.returncode not in (0, 28), "curl had to give up by itself"
    finally:
        hosts.testbed("plug", "2")
    wait_until(in_gateway(hosts, "UP"), 30, "not back in the gateway")


def test_reboot_brings_the_service_back(hosts: Hosts) -> None:
    hosts.testbed("ssh", "2", "sudo systemctl reboot")
    time.sleep(2)
    wait_until(serving(hosts), 60, "not serving after a reboot")
    assert hosts.unit(2, ENGINE, "NRestarts")["NRestarts"] == "0"


def test_run_after_all_that_changes_nothing(hosts: Hosts, releases: dict) -> None:
    played = hosts.play("site", "--limit", "node2", release_dir=str(releases["1.1.0"]))
    assert played.status == 0, played.output
    assert played.recap("node2")["changed"] == 0, played.output
