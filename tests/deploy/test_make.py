"""What `make` says before Ansible starts: a roll-out to nobody is an error."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / "build" / "venv-deploy" / ".ready"
needs_ansible = pytest.mark.skipif(
    not ENVIRONMENT.exists(),
    reason="needs the deployment's environment (make test-deploy makes it)",
)


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-s", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def release(tmp_path: Path) -> Path:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "manifest.json").write_text("{}")
    return tmp_path / "release"


@pytest.mark.parametrize("target", ["deploy", "preflight", "status", "rollback", "drain"])
def test_an_inventory_has_to_be_named_and_there(target: str) -> None:
    done = make(target)
    assert done.returncode != 0 and "say INVENTORY=FILE" in done.stderr
    done = make(target, "INVENTORY=/nowhere/hosts.yml")
    assert done.returncode != 0 and "there is no inventory /nowhere/hosts.yml" in done.stderr


@pytest.mark.parametrize("target", ["deploy", "preflight", "wheelhouse"])
def test_a_release_has_to_be_named(target: str, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all: {}\n")
    done = make(target, f"INVENTORY={inventory}")
    assert done.returncode != 0 and "say RELEASE=FOLDER" in done.stderr


@needs_ansible
@pytest.mark.parametrize(
    "text",
    ["a: [", "hello: world\n", "all: {}\n", "all: {children: {v100_nodes: {hosts: {}}}}\n"],
    ids=["not YAML", "no inventory", "no group", "no host in it"],
)
@pytest.mark.parametrize("target", ["deploy", "status"])
def test_a_roll_out_to_nobody_is_an_error(
    target: str, text: str, tmp_path: Path, release: Path
) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(text)
    done = make(target, f"INVENTORY={inventory}", f"RELEASE={release}")
    assert done.returncode != 0
    assert f"{inventory} has no host in the group v100_nodes" in done.stderr
    assert "PLAY RECAP" not in done.stdout


@needs_ansible
def test_a_host_of_a_subgroup_counts(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "all: {children: {v100_nodes: {children: {rack1: {hosts: {node1: {}}}}}}}\n"
    )
    assert make("hosts-args", f"INVENTORY={inventory}").returncode == 0
