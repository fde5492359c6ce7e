"""Boots the test hosts once for all tests of this folder; makes the fake releases."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fake_release import fake_release, fake_wheelhouse  # noqa: E402
from testbed_hosts import (  # noqa: E402
    CACHE,
    CACHE_ON_HOST,
    DEMO,
    GATE_ON_HOST,
    GATEWAY,
    KEPT,
    REPOSITORY,
    Hosts,
    RealRelease,
)

FAKE_GPUS = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia3", "/dev/nvidiactl"]
RELEASES = {
    "1.0.0": {},
    "1.1.0": {},
    "2.0.0": {"mode": "crash"},
    "2.1.0": {"mode": "unhealthy"},
    "2.2.0": {"mode": "nondeterministic"},
    "2.3.0": {"ninja": False},
    "3.0.0": {},
}
PROFILES: dict[str, dict[str, str]] = {
    "fake-tp4": {},
    "fake-short-start": {"start_timeout_s: 30": "start_timeout_s: 3"},
    "fake-tp2": {"tensor_parallel: 4": "tensor_parallel: 2", "total_gib: 52.0": "total_gib: 20.0"},
    "fake-ray": {
        "tensor_parallel: 4": "tensor_parallel: 4\n  pipeline_parallel: 2",
        "dtype: half\n  kv": "dtype: half\n  distributed_executor: ray\n  kv",
    },
}
"""Serving profiles of the tests: what each changes in fake-tp4."""

ASK = """
import json
from v100_build.serve import serve_env
env = serve_env("patched")
print(json.dumps([str(env.python), str(env.site), str(env.wheel)]))
"""


def write_profiles(folder: Path) -> Path:
    """The serving profiles of the tests, in `folder`."""
    text = (REPOSITORY / "tests" / "deploy" / "profiles" / "fake-tp4.yaml").read_text()
    for name, changes in PROFILES.items():
        changed = text.replace("name: fake-tp4", f"name: {name}")
        for before, after in changes.items():
            assert changed.count(before) == 1
            changed = changed.replace(before, after)
        (folder / f"{name}.yaml").write_text(changed)
    return folder


def _terminate(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fake releases by version; `wheelhouse` is among them."""
    folder = tmp_path_factory.mktemp("releases")
    wheelhouse = fake_wheelhouse(folder / "wheelhouse")
    built = {v: fake_release(folder, wheelhouse, v, **how) for v, how in RELEASES.items()}
    return built | {"wheelhouse": wheelhouse}


@pytest.fixture(scope="session")
def hosts(releases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two booted hosts with an inventory: a fake-GPU instance on both, a gateway on node1.

    A machine that cannot boot them makes every test of this folder fail, with the reason: nothing
    here passes or is left out silently.
    """
    if os.geteuid() != 0:
        pytest.fail("the deployment tests boot systemd hosts and need root", pytrace=False)
    for tool in ("systemd-nspawn", "mmdebstrap", "ip", "ssh", "curl"):
        if not shutil.which(tool):
            pytest.fail(f"{tool} is missing: install tests/deploy/apt.txt", pytrace=False)
    signal.signal(signal.SIGTERM, _terminate)
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        tag = KEPT if os.environ.get("V100_KEEP_HOSTS") else f"v{os.getpid() % 1000000}"
        booted = Hosts.boot(2, tag, {CACHE: CACHE_ON_HOST, REPOSITORY: GATE_ON_HOST})
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        booted.write_inventory([DEMO], gateway=1, count=2)
        results = str(tmp_path_factory.mktemp("results"))
        booted.variables = {
            # without g++, which the base tree has as a stand-in only
            "node_packages": ["haproxy", "python3-venv", "libnuma1"],
            "release_wheelhouse": str(releases["wheelhouse"]),
            "release_profiles": str(write_profiles(tmp_path_factory.mktemp("profiles"))),
            "release_device_allow": FAKE_GPUS,
            "release_restart_sec": 1,
            "release_compiled": str(tmp_path_factory.mktemp("compiled")),
            "service_results": results,
            "gate_results": results,
            "gateway_port": GATEWAY,
        }
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="session")
def web(hosts: Hosts, releases: dict[str, Path]) -> str:
    """URL of a web server, on node1, with a copy of the releases in /srv/releases."""
    folder = hosts.state / "n1" / "root" / "srv" / "releases"
    shutil.copytree(releases["wheelhouse"].parent, folder, dirs_exist_ok=True)
    serve = "python3 -m http.server --directory /srv/releases 8899"
    hosts.ssh(1, f"systemctl is-active -q web || systemd-run --unit=web {serve}")
    return f"http://{hosts.address(1)}:8899"


@pytest.fixture(scope="session")
def real() -> RealRelease:
    """This checkout's release, built when not up to date, with the project's own Python."""
    python = REPOSITORY / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.fail("the project's environment is missing: make venv", pytrace=False)
    path = ":".join(str(REPOSITORY / folder) for folder in ("kernel", "patches"))
    done = subprocess.run(
        [python, "-c", ASK], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return RealRelease(*map(Path, json.loads(done.stdout.splitlines()[-1])))
