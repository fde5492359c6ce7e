"""The units as text: what systemd says of them, how exposed they are, what excludes what."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from v100_serving import load_profile

REPOSITORY = Path(__file__).parents[2]
UNITS = sorted((REPOSITORY / "systemd" / "units").iterdir())
PROFILES = sorted((REPOSITORY / "deploy" / "profiles").glob("*.yaml"))

pytestmark = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="needs systemd-analyze (Debian: systemd)"
)


def verify(folder: Path, text: dict[str, str]) -> str:
    """What `systemd-analyze verify` prints for these units; programs are replaced by /bin/true."""
    for name, content in text.items():
        programs = r"(?m)^(Exec\w+=[-+]?)(?:/opt/vllm-v100|/usr/sbin/haproxy|/usr/local/sbin)\S*"
        (folder / name).write_text(re.sub(programs, r"\1/bin/true", content))
    command = ["systemd-analyze", "verify", *(n.replace("@.", "@a.") for n in text)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def directives(path: Path) -> dict[str, list[str]]:
    """All values of each directive, whatever its section."""
    values: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and line[0] not in "#[":
            name, value = line.split("=", 1)
            values.setdefault(name, []).append(value)
    return values


def test_systemd_takes_every_unit_without_a_word(tmp_path: Path) -> None:
    assert verify(tmp_path, {unit.name: unit.read_text() for unit in UNITS}) == ""


def test_that_check_notices_a_misspelt_directive(tmp_path: Path) -> None:
    """The exit status would not tell: systemd only warns."""
    text = UNITS[0].read_text().replace("ProtectSystem=", "ProtectSytem=")
    assert "ProtectSytem" in verify(tmp_path, {UNITS[0].name: text})


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_exposure_is_at_most_two(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:]


def unit(name: str) -> dict[str, list[str]]:
    return directives(REPOSITORY / "systemd" / "units" / name)


def test_a_refusal_is_not_restarted_and_a_boot_loop_ends() -> None:
    engine = unit("vllm-v100@.service")
    assert engine["RestartPreventExitStatus"] == ["78"]
    assert engine["Restart"] == ["always"]  # vLLM ends with 0 when its engine dies
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(REPOSITORY / "systemd" / "units" / "vllm-v100@.service")
    # systemd ignores the limit without a word when it stands in [Service]
    assert parser["Unit"]["StartLimitBurst"] == "4"


def test_gate_and_public_api_exclude_each_other() -> None:
    assert unit("vllm-v100-gate@.service")["Conflicts"] == ["vllm-v100-api@%i.service"]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_stop_timeout_is_longer_than_the_drain(path: Path) -> None:
    stop = int(unit("vllm-v100@.service")["TimeoutStopSec"][0].rstrip("s"))
    assert load_profile(path).service.drain_timeout_s + 30 < stop


def test_no_unit_has_a_credential_in_its_environment() -> None:
    for path in UNITS:
        for value in directives(path).get("Environment", []):
            assert not re.search(r"KEY|TOKEN|SECRET", value), path.name
