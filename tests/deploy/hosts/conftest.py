"""Boots the test hosts once for all tests of this folder; makes the fake releases."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from fake_release import fake_release, fake_wheelhouse  # noqa: E402
from testbed_hosts import GATEWAY, KEPT, REPOSITORY, Hosts  # noqa: E402

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
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-v100"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        tag = KEPT if os.environ.get("V100_KEEP_HOSTS") else f"v{os.getpid() % 1000000}"
        booted = Hosts.boot(2, tag, {cache: "/srv/v100-cache"})
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        instance = {
            "name": "demo",
            "profile": "fake-tp4",
            "gpus": [0, 1, 2, 3],
            "engine_port": 18000,
            "api_port": 8000,
        }
        booted.write_inventory([instance], gateway=1, count=2)
        booted.variables = {
            # without g++, which the base tree has as a stand-in only
            "node_packages": ["haproxy", "python3-venv", "libnuma1"],
            "release_wheelhouse": str(releases["wheelhouse"]),
            "release_profiles": str(REPOSITORY / "tests" / "deploy" / "profiles"),
            "release_device_allow": FAKE_GPUS,
            "release_restart_sec": 1,
            "release_compiled": str(tmp_path_factory.mktemp("compiled")),
            "service_results": str(tmp_path_factory.mktemp("results")),
            "gateway_port": GATEWAY,
        }
        yield booted
    finally:
        booted.close()
