"""The test hosts as Python objects: boot, SSH, HTTP, Ansible. Used by conftest.py and the tests."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TESTBED = REPOSITORY / "tests" / "deploy" / "testbed" / "testbed.sh"
KEY = "test-key-0123456789"
GATEWAY = 8443
DEMO = {
    "name": "demo",
    "profile": "fake-tp4",
    "gpus": [0, 1, 2, 3],
    "engine_port": 18000,
    "api_port": 8000,
}
"""The instance that both hosts get."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-v100"
CACHE_ON_HOST = "/srv/v100-cache"
"""The shared cache, and where hosts see it, read-only."""

GATE_ON_HOST = "/opt/vllm-v100-gate"
"""Where hosts see this repository, read-only: as docs/install.md puts it for the measuring gate."""

KEPT = "vkept"
"""Tag of hosts that stay up between runs (V100_KEEP_HOSTS=1, for work on these tests)."""


@dataclass(frozen=True)
class RealRelease:
    """The release of this checkout and the interpreter with its requirements."""

    python: Path
    site: Path
    wheel: Path

    @property
    def requirements_on_host(self) -> str:
        """site-packages of the requirements, as hosts see them."""
        (folder,) = (self.python.parents[1] / "lib").glob("python3.*/site-packages")
        return f"{CACHE_ON_HOST}/{folder.relative_to(CACHE)}"


@dataclass
class Play:
    """What one ansible-playbook run did."""

    status: int
    output: str

    def recap(self, host: str) -> dict[str, int]:
        """Counters of a host (ok, changed, failed, ...); empty when it was not reached."""
        lines = re.findall(rf"^{host}\s+: (.*)$", self.output, re.M)
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", lines[-1])} if lines else {}


def self_signed(name: str) -> str:
    """A throw-away certificate with its key (PEM)."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    arguments = [*command.split(), "-subj", f"/CN={name}", "-keyout", "-", "-out", "-"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def certificate(pem: str) -> str:
    """The certificate of a PEM file, without the key."""
    return pem[pem.index("-----BEGIN CERTIFICATE") :]


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until `condition()`; fails with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def reap_with_us(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that takes the hosts down when this one ends, however it ends.

    It waits for the end of its pipe, which an orderly close, Ctrl-C, a crash and SIGKILL all bring.
    """
    return subprocess.Popen(
        ["bash", "-c", f"trap '' INT TERM HUP; read -r _; exec {shlex.quote(str(TESTBED))} down"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


@dataclass
class Hosts:
    """Booted test hosts; `close` ends them, and so does any end of this process."""

    state: Path
    tag: str
    network: str
    reaper: subprocess.Popen[bytes] | None
    environment: dict[str, str]
    variables: dict[str, object] = field(default_factory=dict)

    @classmethod
    def boot(cls, count: int, tag: str, bind_read_only: dict[Path, str]) -> Hosts:
        """Boots `count` hosts, or raises RuntimeError with what the attempt printed."""
        state = Path("/run") / f"v100-{tag}"
        # one /24 of the benchmarking range (RFC 2544) for each run; its namespace has no way out
        network = f"198.18.{251 if tag == KEPT else os.getpid() % 250}"
        environment = os.environ | {
            "V100_TB_TAG": tag,
            "V100_TB_STATE": str(state),
            "V100_TB_NET": network,
            "V100_TB_BIND_RO": " ".join(f"{k}:{v}" for k, v in bind_read_only.items()),
        }
        hosts = cls(state, tag, network, None, environment)
        if tag != KEPT:
            hosts.reaper = reap_with_us(environment)
        elif state.is_dir():
            return hosts
        started = subprocess.run(
            [TESTBED, "up", str(count)], env=environment, capture_output=True, text=True
        )
        print(started.stderr)
        if started.returncode:
            hosts.close()
            raise RuntimeError(f"the test hosts do not boot:\n{started.stdout}{started.stderr}")
        return hosts

    def close(self) -> None:
        """Takes the hosts down and waits for it."""
        if self.reaper and self.reaper.stdin:
            self.reaper.stdin.close()
            self.reaper.wait(120)

    def address(self, node: int) -> str:
        """Address of a host."""
        return f"{self.network}.1{node}"

    def testbed(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One command of testbed.sh."""
        return subprocess.run(
            [TESTBED, *command], env=self.environment, capture_output=True, text=True
        )

    def ssh(self, node: int, script: str, check: bool = True) -> str:
        """Standard output of a shell script that runs as root on a host."""
        done = self.testbed("ssh", str(node), f"sudo bash -c {shlex.quote(script)}")
        if check and done.returncode:
            raise AssertionError(f"on node{node}: {script}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def unit(self, node: int, name: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.ssh(node, f"systemctl show {name} -p {','.join(properties)}")
        return dict(line.split("=", 1) for line in text.splitlines())

    def http(
        self,
        node: int,
        port: int,
        path: str,
        body: dict[str, object] | None = None,
        key: str | None = KEY,
        timeout: float = 30,
        scheme: str = "https",
        headers: tuple[str, ...] = (),
    ) -> tuple[int, str]:
        """(status, body) of a request from the controller's network; status 0: no answer."""
        command = ["curl", "-sSk", "-m", str(timeout), "-w", "\n%{http_code}"]
        if key:
            command += ["-H", f"Authorization: Bearer {key}"]
        for header in headers:
            command += ["-H", header]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        url = f"{scheme}://{self.address(node)}:{port}{path}"
        text = self.testbed("exec", *command, url).stdout
        answer, _, status = text.rpartition("\n")
        return int(status or 0), answer

    def complete(self, node: int, port: int, model: str = "demo", **more: object) -> int:
        """Status of a small completion."""
        body = {"model": model, "prompt": [100, 101, 102], "max_tokens": 4, **more}
        return self.http(node, port, "/v1/completions", body)[0]

    def stream(
        self, node: int, port: int, seconds: float, headers: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        """A streamed completion of ten tokens that takes that long; curl gives up after 60 s."""
        body = f'{{"prompt": [1], "max_tokens": 10, "stream": true, "seconds": {seconds}}}'
        command = ["exec", "curl", "-sSkN", "-m", "60", "-d", body]
        for header in (f"Authorization: Bearer {KEY}", *headers):
            command += ["-H", header]
        command.append(f"https://{self.address(node)}:{port}/v1/completions")
        return subprocess.Popen(
            [TESTBED, *command], env=self.environment, stdout=subprocess.PIPE, text=True
        )

    def gateway(self) -> dict[str, dict[str, object]]:
        """The gateway's servers by name; it runs on node1."""
        return json.loads(self.ssh(1, "v100-gateway-ctl state"))

    def served_by(self, session: str, prompt: list[int]) -> str:
        """The server to which the gateway sends a request of that session."""
        before = self.gateway()
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
        headers = (f"X-Session-Id: {session}",)
        assert self.http(1, GATEWAY, "/v1/completions", body, headers=headers)[0] == 200
        after = self.gateway()
        (name,) = (n for n, server in after.items() if server["total"] != before[n]["total"])
        return name

    def release(self, node: int, instance: str = "demo") -> str:
        """Version of the release that is current on a host."""
        text = self.ssh(node, f"cat /opt/vllm-v100/instances/{instance}/current/release.json")
        return str(json.loads(text)["release"])

    def play(self, playbook: str, *arguments: str, **variables: object) -> Play:
        """Runs a playbook of deploy/ from the controller's network."""
        command = [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            str(self.state / "inventory.json"),
            str(REPOSITORY / "deploy" / "playbooks" / f"{playbook}.yml"),
            "-e",
            json.dumps(self.variables | variables),
            *arguments,
        ]
        return self._run(playbook, command)

    def make(self, target: str, *arguments: str, limit: str = "all") -> Play:
        """`make TARGET INVENTORY=... ARGUMENTS` from the controller's network, as an operator."""
        path = self.state / "variables.json"
        path.write_text(json.dumps(self.variables))
        command = ["make", "--no-print-directory", "-C", str(REPOSITORY), target]
        command += [f"INVENTORY={self.state / 'inventory.json'}", *arguments]
        command.append(f"ARGS=-e @{path} --limit {limit}")
        return self._run(f"make {target}", command)

    def _run(self, what: str, command: list[str]) -> Play:
        """Runs Ansible and says what it cost."""
        process = subprocess.Popen(
            [TESTBED, "exec", *command],
            env=self.environment | {"ANSIBLE_CONFIG": str(REPOSITORY / "deploy" / "ansible.cfg")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # Ansible's workers as well
            process.wait()
            raise
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        print(f"{what}: {time.monotonic() - started:.0f} s, {cpu:.0f} s CPU on the controller")
        return Play(process.returncode, output)

    def write_inventory(self, instances: list[dict[str, object]], gateway: int, count: int) -> None:
        """An inventory with every host a node, one of them a gateway as well."""
        nodes = {f"node{i}": {"ansible_host": self.address(i)} for i in range(1, count + 1)}
        tls = {}
        for kind in ("gateway", "node"):
            path = self.state / f"{kind}.pem"
            if not path.exists():  # hosts that stay up keep theirs
                path.write_text(self_signed(f"{kind}.test"))
            tls[kind] = path.read_text()
        inventory = {
            "all": {
                "vars": {
                    "ansible_user": "deploy",
                    "ansible_ssh_private_key_file": str(self.state / "key"),
                    "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.state}/known_hosts",
                    "v100_api_key": KEY,
                    "v100_gateway_tls_pem": tls["gateway"],
                    "v100_node_tls_pem": tls["node"],
                    "v100_node_ca": certificate(tls["node"]),
                },
                "children": {
                    "v100_nodes": {"hosts": nodes, "vars": {"v100_instances": instances}},
                    "v100_gateways": {"hosts": {f"node{gateway}": {}}},
                },
            }
        }
        (self.state / "inventory.json").write_text(json.dumps(inventory, indent=1))
