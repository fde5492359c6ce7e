"""The README says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()


def test_route_table_is_the_generated_one() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "sm70_attention.routes", "--markdown"],
        cwd=REPO / "kernel" / "python", capture_output=True, text=True, check=True,
    )  # fmt: skip
    [table] = re.findall(r"<!-- routes: .*? -->\n(.*?)<!-- /routes -->", README, re.DOTALL)
    assert table.strip() == run.stdout.strip()


def test_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets
    assert [t for t in targets if not (REPO / t).exists()] == []


def test_every_command_is_a_target() -> None:
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", (REPO / "Makefile").read_text()))
    named = set(re.findall(r"\bmake ([a-z0-9-]+)", README))
    assert named <= targets
