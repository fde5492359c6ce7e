"""Prometheus and Grafana files: checked by promtool, and the dashboard against its own queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
DOCS = Path(__file__).parents[2] / "docs"

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)"
)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True)


def dashboard() -> dict:
    return json.loads((MONITORING / "dashboard.json").read_text())


def queries() -> list[str]:
    """Every query of the dashboard, with Grafana's own variables replaced."""
    found = [t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", [])]
    return [q.replace("$__rate_interval", "5m").replace("$instance", ".*") for q in found]


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"query{i}", "expr": q} for i, q in enumerate(queries())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_is_one_that_grafana_loads() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert board["schemaVersion"] >= 36
    variables = {v["name"] for v in board["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in board["panels"]:
        position = panel["gridPos"]
        assert position["x"] >= 0 and position["x"] + position["w"] <= 24
        assert panel["type"] in ("row", "timeseries")
        if panel["type"] == "timeseries":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"] and all(t["refId"] and t["expr"] for t in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        p = panel["gridPos"]
        cells = {
            (x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_points_to_a_section_that_exists() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        text = rule["annotations"]["description"]
        page = re.search(r"docs/(\w+\.md)(?:, \"([^\"]+)\")?", text)
        assert page, rule["alert"]
        content = (DOCS / page[1]).read_text()
        assert page[2] is None or f"## {page[2]}" in content, text
        assert rule["labels"]["severity"] in ("page", "ticket")
