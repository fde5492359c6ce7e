"""Verdict, waivers, comparison and report, on a run of the stand-in server."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support import EVAL, arms, profile, put_together, run, start, wave
from v100_gate import evidence, report, verdict
from v100_gate.errors import GateError
from v100_gate.evidence import Evidence
from v100_gate.schema import Arms, Waiver

CHECKS = {
    "complete": {},
    "c1-exact": {},
    "acceptance": {"margin_points": 2.0},
    "gpu-state": {},
    "idle-memory": {"required": False},
    "rolling-goodput": {"margin": 0.2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A run of three arms with waves and rolling arrivals; `gpu-state` cannot run here."""
    folder = tmp_path_factory.mktemp("report")
    plan = profile(
        schedule={"starts_per_arm": 2, "controls": ["no-spec"]},
        checks=CHECKS,
        rolling={
            "rates_per_s": [20.0, 60.0],
            "requests": 12,
            "input_tokens": [64, 256],
            "output_tokens": [16],
            "ttft_limit_s": 5.0,
            "tpot_limit_s": 5.0,
        },
    )
    site = arms(folder, control={}, candidate={}, **{"no-spec": {"draft_tokens": 0}})
    site.arms["no-spec"].draft_tokens = 0
    return run(folder, plan, site)


def waiver(check: str, **fields) -> dict[str, Waiver]:
    return {
        check: Waiver.model_validate(
            {
                "profile": "test",
                "check": check,
                "reason": "there is no GPU on this machine",
                "owner": "release owner",
                "date": dt.date(2026, 11, 1),
                "expires": dt.date(2026, 12, 1),
            }
            | fields
        )
    }


def test_a_check_that_did_not_run_fails_the_gate(finished: Evidence) -> None:
    judged = verdict.judge(finished, {})
    assert judged["verdict"] == "fail"
    assert judged["blocking"] == ["gpu-state"]


def test_a_waived_check_is_shown_as_waived_never_as_passed(finished: Evidence) -> None:
    judged = verdict.judge(finished, waiver("gpu-state"))
    row = next(row for row in judged["checks"] if row["check"] == "gpu-state")
    assert (row["status"], row["measured"]) == ("waived", "not-run")
    assert judged["verdict"] == "pass"
    assert judged["waived"] == ["gpu-state"]
    comparison = verdict.compare(finished)
    assert "| gpu-state | yes | waived |" in report.markdown(judged, comparison)
    assert "(1 waived)" in report.markdown(judged, comparison)
    assert "Waived, not passed: gpu-state" in report.html(finished, judged, comparison)


def test_a_waiver_covers_only_the_statuses_it_names(finished: Evidence) -> None:
    judged = verdict.judge(finished, waiver("gpu-state", statuses=["inconclusive"]))
    assert judged["verdict"] == "fail"


def test_a_waiver_nothing_needed_is_reported(finished: Evidence) -> None:
    assert verdict.judge(finished, waiver("complete"))["unused_waivers"] == ["complete"]


def test_an_optional_check_never_decides(finished: Evidence) -> None:
    judged = verdict.judge(finished, waiver("gpu-state"))
    row = next(row for row in judged["checks"] if row["check"] == "idle-memory")
    assert row["status"] == "not-run"
    assert judged["verdict"] == "pass"


def test_comparison_keeps_every_raw_value(finished: Evidence) -> None:
    comparison = verdict.compare(finished)
    wave = comparison["waves"][0]
    figure = wave["arms"]["candidate"]["figures"]["decode_tokens_per_s"]
    assert [len(start) for start in figure["values"]] == [2, 2]
    assert figure["minimum"] <= figure["median"] <= figure["maximum"]
    assert wave["against_control"]["acceptance"]["change"] == 0.0
    assert wave["arms"]["no-spec"]["figures"]["acceptance"] is None
    assert json.loads(json.dumps(comparison)) == comparison


def test_no_document_holds_a_number_that_json_does_not_have() -> None:
    """The queue was empty in both arms: 0 against 0 is no ratio."""
    idle = [start(*(wave(counters={"queue_seconds": 0.0}) for _ in range(3)))]
    found = put_together(profile(), control=idle, candidate=idle)
    comparison = verdict.compare(found)
    assert comparison["waves"][0]["against_control"]["queue_s"] is None
    assert "NaN" not in json.dumps(comparison)


def test_the_page_is_the_same_in_every_process() -> None:
    """Python salts `hash` anew in each process; a plot's identifiers must not follow it."""
    draw = "from v100_gate import plots; print(plots.draw(lambda axes: axes.plot([1, 2]), 'A'))"
    pages = {
        subprocess.run(
            [sys.executable, "-c", draw],
            env=os.environ | {"PYTHONPATH": str(EVAL), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(pages) == 1


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("href", "src", "xlink:href") and value:
                self.links.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data) -> None:
        self.text.append(data)


def test_the_page_stands_alone_and_its_links_lead_somewhere(finished: Evidence) -> None:
    judged, comparison = verdict.judge(finished, {}), verdict.compare(finished)
    path = report.write(finished, judged, comparison, finished.root)
    report.write(finished, judged, comparison, finished.root)  # now the list has all files
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert "script" not in page.tags and "img" not in page.tags and "link" not in page.tags
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
    targets = [link for link in page.links if not link.startswith("#")]
    assert targets and all((finished.root / link).is_file() for link in targets)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    raw = {p.relative_to(finished.root).as_posix() for p in finished.root.rglob("waves/*.json")}
    assert raw <= set(targets)


def test_the_verdict_comes_first_and_every_plot_is_there(finished: Evidence) -> None:
    judged, comparison = verdict.judge(finished, {}), verdict.compare(finished)
    text = report.html(finished, judged, comparison)
    assert text.index(">FAIL<") < text.index("<h2>Comparison")
    for title in (
        "Decode throughput (all live)",
        "Time per decode round",
        "Step time against context",
        "Acceptance by position, C4",
        "TTFT of requests, C1",
        "TPOT of requests, C4",
        "Goodput under rolling arrivals",
        "Tokens per chunk by context length",
        "Memory",
    ):
        assert f'aria-label="{title}"' in text
    assert "prefers-color-scheme: dark" in text
    assert "#010203" not in text and "#010210" not in text


def test_values_from_a_service_cannot_break_the_page(finished: Evidence) -> None:
    judged = verdict.judge(finished, {})
    judged["checks"][0]["summary"] = "<script>alert(1)</script> | pipe"
    comparison = verdict.compare(finished)
    assert "<script>" not in report.html(finished, judged, comparison)
    assert "\\| pipe" in report.markdown(judged, comparison)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "v100_gate", *arguments],
        env=os.environ | {"PYTHONPATH": str(EVAL), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_commands_work_on_stored_runs_alone(finished: Evidence, tmp_path: Path) -> None:
    run_folder = str(finished.root)
    done = command("verdict", run_folder)
    assert done.returncode == 1, done.stdout
    assert "blocked by gpu-state" in done.stdout
    done = command("report", run_folder, "--markdown")
    assert done.returncode == 0
    assert done.stdout.startswith("### Gate `test`: **FAIL**")
    done = command(
        "compare", f"{run_folder}:control", f"{run_folder}:candidate", "--output", str(tmp_path)
    )
    assert done.returncode == 1, done.stdout
    sources = json.loads((tmp_path / "verdict.json").read_text())["sources"]
    assert sources == {
        "control": "run:control",
        "candidate": "run:candidate",
        "no-spec": "run:no-spec",
    }
    page = Page()
    page.feed((tmp_path / "report.html").read_text())
    targets = [link for link in page.links if not link.startswith("#")]
    assert any(link.endswith("/run.json") for link in targets)
    assert all((tmp_path / link).is_file() for link in targets)


ORACLE = {"complete": {}, "greedy-oracle": {}, "prefix-hits": {}, "c1-exact": {}}


@pytest.fixture(scope="module")
def with_oracle(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A run that passes with the help of its arm without speculation."""
    folder = tmp_path_factory.mktemp("oracle")
    plan = profile(schedule={"starts_per_arm": 1, "controls": ["no-spec"]}, checks=ORACLE)
    site = arms(folder, control={}, candidate={}, **{"no-spec": {"draft_tokens": 0}})
    site.arms["no-spec"].draft_tokens = 0
    return run(folder, plan, site)


@pytest.mark.parametrize("control", ["control", "candidate", "no-spec"])
def test_a_comparison_keeps_the_further_controls(with_oracle: Evidence, control: str) -> None:
    joined = evidence.side_by_side(with_oracle, control, with_oracle, "candidate")
    judged = verdict.judge(joined, {})
    assert judged["verdict"] == "pass", judged["blocking"]
    assert judged["sources"]["no-spec"] == "run:no-spec"


def test_the_further_controls_come_from_the_controls_run_or_else_the_candidates(
    with_oracle: Evidence, tmp_path: Path
) -> None:
    plan = profile(checks=ORACLE)
    bare = run(tmp_path / "bare", plan, arms(tmp_path, candidate={}))
    for sides in ((with_oracle, "control", bare), (bare, "candidate", with_oracle)):
        joined = evidence.side_by_side(*sides, "candidate")
        assert verdict.judge(joined, {})["verdict"] == "pass"
        assert joined.arms["no-spec"].starts == with_oracle.arms["no-spec"].starts


def test_a_further_control_can_be_the_candidate_but_not_its_own_oracle(
    with_oracle: Evidence,
) -> None:
    joined = evidence.side_by_side(with_oracle, "control", with_oracle, "no-spec")
    rows = {row["check"]: row for row in verdict.judge(joined, {})["checks"]}
    assert rows["greedy-oracle"]["status"] == "not-run"
    assert rows["prefix-hits"]["status"] == "pass"
    assert rows["c1-exact"]["status"] == "pass"
    assert joined.candidate.title == "stand-in no-spec"


def test_a_candidate_is_judged_by_its_own_figures_whatever_its_arm_was_called() -> None:
    """Both sides were called `candidate`, and one must not stand in for the other."""
    plan = profile(checks={"prefix-hits": {}}, waves=[profile().waves[0].model_dump()])
    warm, cold = (
        put_together(plan, candidate=[start(wave(counters={"prefix_hits": hits}))])
        for hits in (200.0, 100.0)
    )
    joined = evidence.side_by_side(warm, "candidate", cold, "candidate")
    (row,) = verdict.judge(joined, {})["checks"]
    assert (row["status"], row["summary"]) == ("fail", "C1: 100 tokens hit, the control 200")


def test_an_arm_that_was_not_measured_is_named_with_those_that_were(with_oracle: Evidence) -> None:
    with pytest.raises(GateError, match=r"arm 'shallow', only of control, candidate, no-spec"):
        evidence.side_by_side(with_oracle, "shallow", with_oracle, "candidate")


def test_memory_is_attributed_after_the_gate_found_the_difference(tmp_path: Path) -> None:
    """By `verdict --arms` on the stored run, and by continuing it."""
    plan = profile(checks={"kv-budget": {}})
    less = {"kv_tokens": 960_000, "kv_gib": 11.0}  # 0.45 GiB and 4 % less
    site = arms(tmp_path, control={}, candidate=less)
    found = run(tmp_path, plan, site)
    assert verdict.judge(found, {})["blocking"] == ["kv-budget"]
    fields = site.model_dump(mode="json", by_alias=True)
    fields["memory_attribution"] = [{"what": "long-attention workspace", "gib": 0.46}]
    path = tmp_path / "arms.json"
    path.write_text(json.dumps(fields))
    done = command("verdict", str(found.root), "--arms", str(path))
    assert done.returncode == 0, done.stdout
    written = json.loads((found.root / "verdict.json").read_text())
    assert written["memory_attribution"][0]["gib"] == 0.46
    assert "attributed: long-attention workspace 0.46 GiB" in written["checks"][0]["summary"]
    found = run(tmp_path, plan, Arms.model_validate(fields), resume=True)
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_an_expired_waiver_stops_the_command(finished: Evidence, tmp_path: Path) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text(
        "schema: 1\nwaivers:\n"
        "- {profile: test, check: gpu-state, reason: no GPU on this machine, owner: owner,"
        " date: 2020-01-01, expires: 2020-02-01}\n"
    )
    done = command("verdict", str(finished.root), "--waivers", str(path))
    assert done.returncode == 2
    assert "expired on 2020-02-01" in done.stdout


def test_runs_of_different_profiles_are_not_compared(finished: Evidence, tmp_path: Path) -> None:
    other = run(tmp_path, profile(waves=[], rolling=None), arms(tmp_path, candidate={}))
    with pytest.raises(GateError, match="differ in `waves`"):
        evidence.side_by_side(finished, "control", other, "candidate")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"no run\.json"):
        evidence.load(tmp_path)
