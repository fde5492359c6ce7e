"""The report: one HTML page without network, and the table for a pull request as Markdown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jinja2

from v100_gate import metrics, plots
from v100_gate.evidence import Evidence

COLUMNS = (
    ("decode_tokens_per_s", "decode tok/s", 1.0, "{:.1f}", True),
    ("step_s", "decode round, ms", 1000.0, "{:.2f}", True),
    ("acceptance", "acceptance", 100.0, "{:.2f} %", False),
    ("ttft_s", "TTFT, s", 1.0, "{:.3f}", True),
    ("tpot_s", "TPOT, ms", 1000.0, "{:.2f}", True),
)


def table(comparison: dict) -> list[dict]:
    """Rows of the reviewer's table: one per wave and figure, ready to print.

    Each row: wave, figure, control, candidate, change, interval, noise (strings; "-" where
    there is nothing).
    """
    rows = []
    for wave in comparison["waves"]:
        for figure, label, scale, form, relative in COLUMNS:
            cells = {}
            for arm in ("control", "candidate"):
                found = wave["arms"].get(arm, {}).get("figures", {}).get(figure)
                cells[arm] = form.format(found["median"] * scale) if found else "-"
                cells[arm + "_range"] = (
                    f"{form.format(found['minimum'] * scale)} .. "
                    f"{form.format(found['maximum'] * scale)}"
                    if found
                    else ""
                )
            against = wave["against_control"].get(figure)
            change = interval = noise = "-"
            if against:
                unit, factor = (" %", 100) if relative else (" points", 100)
                change = f"{against['change'] * factor:+.2f}{unit}"
                interval = f"[{against['low'] * factor:+.2f}, {against['high'] * factor:+.2f}]"
                noise = f"{against['yardstick'] * factor:.2f}"
            if cells["control"] == cells["candidate"] == "-":
                continue
            rows.append(
                {
                    "wave": wave["wave"],
                    "figure": label,
                    "change": change,
                    "interval": interval,
                    "noise": noise,
                    **cells,
                }
            )
    return rows


def markdown(verdict: dict, comparison: dict) -> str:
    """What a reviewer pastes into a pull request."""
    waived = f" ({len(verdict['waived'])} waived)" if verdict["waived"] else ""
    lines = [
        f"### Gate `{verdict['profile']}`: **{verdict['verdict'].upper()}**{waived}",
        "",
        f"Control: {comparison['arms'].get('control', 'none')}. "
        f"Candidate: {comparison['arms'].get('candidate', '?')}. "
        f"Release: {verdict['release'] or 'not bound to a manifest'}.",
        "",
        "| Wave | Figure | Control | Candidate | Change | 95 % interval | Control's own noise |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table(comparison):
        lines.append(
            f"| {row['wave']} | {row['figure']} | {row['control']} | {row['candidate']} | "
            f"{row['change']} | {row['interval']} | {row['noise']} |"
        )
    lines += ["", "| Check | Required | Status | What was found |", "|---|---|---|---|"]
    for check in verdict["checks"]:
        summary = check["summary"].replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| {check['check']} | {'yes' if check['required'] else 'no'} | {check['status']} | "
            f"{summary} |"
        )
    for check in verdict["checks"]:
        if check["waiver"]:
            w = check["waiver"]
            lines.append(
                f"\nWaived: **{check['check']}** ({check['measured']}) until {w['expires']} by "
                f"{w['owner']}: {w['reason']}"
            )
    lines += [
        "",
        "Medians of all valid repeats; the throughput is a client all-live decode window and "
        "excludes prefill. Nothing is scaled by an assumed acceptance.",
        "",
    ]
    return "\n".join(lines)


def _distributions(evidence: Evidence) -> list[str]:
    drawings = []
    for spec in evidence.profile.waves:
        for label, title, figure, scale in (
            ("TTFT, s", "TTFT", metrics.ttft, 1.0),
            ("TPOT, ms", "TPOT", metrics.tpot, 1000.0),
        ):
            values = {}
            for name, arm in evidence.arms.items():
                found = [
                    figure(trace) for record in arm.records(spec.name) for trace in record.requests
                ]
                values[name] = [value * scale for value in found if value is not None]
            drawings.append(plots.distribution(values, label, f"{title} of requests, {spec.name}"))
    return [svg for svg in drawings if svg]


def _files(root: Path, page: Path) -> list[dict]:
    """Raw files of a run for the list of links, grouped by folder; links start at `page`, the
    folder of the page."""
    groups: dict[str, list[dict]] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        relative = path.relative_to(root)
        groups.setdefault(relative.parent.as_posix(), []).append(
            {
                "href": Path(os.path.relpath(path, page)).as_posix(),
                "name": relative.name,
                "bytes": path.stat().st_size,
            }
        )
    return [{"folder": folder, "files": files} for folder, files in groups.items()]


def _starts(evidence: Evidence) -> list[dict]:
    rows = []
    for name, arm in evidence.arms.items():
        for start in arm.starts:
            for process in start.processes:
                who = process.get("identity") or {}
                rows.append(
                    {
                        "arm": name,
                        "title": arm.title,
                        "start": start.number,
                        "ready": process.get("ready_s"),
                        "end": process.get("end"),
                        "release": who.get("release"),
                        "tree": (who.get("tree_sha256") or "")[:16],
                        "library": (
                            who.get("library_sha256")
                            or next(iter(who.get("log_library_sha256", [])), "")
                            or ""
                        )[:16],
                        "verified": ", ".join(who.get("verified", [])),
                        "backends": ", ".join(
                            (process.get("facts") or {}).get("attention_backends", [])
                        ),
                    }
                )
    return rows


def _invalid(evidence: Evidence) -> list[dict]:
    return [
        {
            "arm": name,
            "start": record.start,
            "wave": record.wave,
            "kind": record.kind,
            "repeat": record.repeat,
            "reason": reason,
        }
        for name, arm in evidence.arms.items()
        for start in arm.starts
        for record in start.waves
        for reason in record.invalid
    ]


def html(evidence: Evidence, verdict: dict, comparison: dict, folder: Path | None = None) -> str:
    """The page, for `folder` (None: the run's). Deterministic for the same inputs, apart from the
    time the verdict was given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("v100_gate", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    drawings = [
        plots.figure_by_wave(
            comparison, "decode_tokens_per_s", 1.0, "tokens/s", "Decode throughput (all live)"
        ),
        plots.figure_by_wave(comparison, "step_s", 1000.0, "ms", "Time per decode round"),
        plots.step_by_context(comparison),
        *(plots.acceptance_by_position(comparison, wave) for wave in comparison["waves"]),
        *_distributions(evidence),
        plots.rolling_goodput(comparison["rolling"]),
        plots.rolling_acceptance(comparison["rolling"]),
        plots.memory(comparison["memory"]),
    ]
    return environment.get_template("report.html.j2").render(
        verdict=verdict,
        comparison=comparison,
        table=table(comparison),
        plots=[svg for svg in drawings if svg],
        starts=_starts(evidence),
        invalid=_invalid(evidence),
        notes=[
            note
            for arm in evidence.arms.values()
            for start in arm.starts
            for record in start.waves
            for note in record.notes
        ],
        files=_files(evidence.root, folder or evidence.root),
        profile=evidence.profile,
        run=evidence.run,
        markdown=markdown(verdict, comparison),
        sources=evidence.sources,
    )


def write(evidence: Evidence, verdict: dict, comparison: dict, folder: Path) -> Path:
    """Write verdict.json, comparison.json, report.md and report.html; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (("verdict", verdict), ("comparison", comparison)):
        text = json.dumps(document, indent=1, allow_nan=False)
        (folder / f"{name}.json").write_text(text + "\n")
    (folder / "report.md").write_text(markdown(verdict, comparison))
    page = folder / "report.html"
    page.write_text(html(evidence, verdict, comparison, folder))
    return page
