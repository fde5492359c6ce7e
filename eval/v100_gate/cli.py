"""Commands of the gate.

Exit status: 0 pass, 1 fail, 2 wrong input, 3 refused, 4 service, 5 disk.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from v100_gate import evidence as stored
from v100_gate import report as reports
from v100_gate import verdict as verdicts
from v100_gate import waivers as waiver_files
from v100_gate.checks import beyond_a_url
from v100_gate.errors import GateError, ProfileError, RefusedError, ServiceError
from v100_gate.progress import Reporter
from v100_gate.runner import Run, refuse_taken
from v100_gate.schema import Arms, Hygiene, Profile, UrlArm, Waiver, explain, read_yaml

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
console = Console(highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    # A log file has no width; 80 columns would fold every cell.
    console = Console(highlight=False, width=132)

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "inconclusive": "yellow",
    "not-run": "yellow",
    "waived": "magenta",
}

Waivers = Annotated[
    Path | None, typer.Option("--waivers", help="reviewed waiver file (YAML)", exists=True)
]
RunFolder = Annotated[Path, typer.Argument(help="folder that `run` wrote", file_okay=False)]


def finish(coroutine: Coroutine) -> None:
    """Run to the end; SIGINT and SIGTERM cancel it, so that services are stopped first."""

    async def supervised() -> None:
        task = asyncio.ensure_future(coroutine)
        loop = asyncio.get_running_loop()
        asked = False

        def stop() -> None:
            # A second signal must not break off the stopping of services, which has a time limit
            # of its own and ends with SIGKILL.
            nonlocal asked
            if asked:
                console.print("still stopping the services; please wait", markup=False)
                return
            asked = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        await task

    try:
        asyncio.run(supervised())
    except asyncio.CancelledError:
        console.print("interrupted; services are stopped, finished waves are kept", markup=False)
        raise typer.Exit(130) from None


def say(error: GateError) -> None:
    """Print an error the way an operator can use it."""
    console.print(f"gate: {error}", style="red", markup=False)


def accept(path: Path | None, plan: Profile) -> dict[str, Waiver]:
    """The waivers of a profile from a reviewed file; see `waivers.load`."""
    return waiver_files.load(path, plan, dt.date.today(), waiver_files.shipped_profiles() or None)


def judge(evidence: stored.Evidence, waivers: Path | None, folder: Path) -> dict:
    """Give the verdict, write all documents, print the tables."""
    accepted = accept(waivers, evidence.profile)
    verdict = verdicts.judge(evidence, accepted)
    comparison = verdicts.compare(evidence)
    page = reports.write(evidence, verdict, comparison, folder)
    show(verdict, comparison)
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return verdict


def show(verdict: dict, comparison: dict) -> None:
    """The short tables on the screen."""
    figures = Table(title=f"gate {verdict['profile']}", title_justify="left")
    for name in ("wave", "figure", "control", "candidate", "change", "95 % interval", "noise"):
        figures.add_column(name, justify="left" if name in ("wave", "figure") else "right")
    for row in reports.table(comparison):
        figures.add_row(
            row["wave"],
            row["figure"],
            row["control"],
            row["candidate"],
            row["change"],
            row["interval"].replace("[", "\\["),
            row["noise"],
        )
    if figures.row_count:
        console.print(figures)
    checks = Table(title="checks", title_justify="left")
    for name in ("check", "status", "required", "what was found"):
        checks.add_column(name, overflow="fold")
    for row in verdict["checks"]:
        checks.add_row(
            row["check"],
            f"[{STYLES[row['status']]}]{row['status']}[/]",
            "yes" if row["required"] else "no",
            row["summary"].replace("[", "\\["),
        )
    console.print(checks)
    style = STYLES[verdict["verdict"]]
    text = f"verdict: [{style}]{verdict['verdict'].upper()}[/]"
    if verdict["blocking"]:
        text += f"  blocked by {', '.join(verdict['blocking'])}"
    if verdict["waived"]:
        text += f"  waived: {', '.join(verdict['waived'])}"
    console.print(text)


def one_service(url: str | None, model: str, api_key_file: Path | None) -> Arms:
    """Arms with a candidate alone: a service that is up.

    Raises: ProfileError when neither arms nor a URL with a model were given.
    """
    if url is None or not model:
        raise ProfileError("give --arms FILE, or --url URL with --model NAME")
    try:
        arm = UrlArm(kind="url", url=url, model=model, title=url, api_key_file=api_key_file)
    except ValidationError as error:
        raise ProfileError(f"--url and --model are wrong:\n{explain(error)}") from None
    return Arms(schema=1, arms={"candidate": arm}, hygiene=Hygiene(gpu=False))


def refuse_hopeless(plan: Profile, waivers: dict[str, Waiver]) -> None:
    """Refuse to measure by a URL alone what would fail however good the service is.

    Raises: RefusedError naming the required checks that cannot run then.
    """
    hopeless = [
        f"{name} ({lacking})"
        for name, lacking in beyond_a_url(plan).items()
        if not (name in waivers and "not-run" in waivers[name].statuses)
    ]
    if hopeless:
        raise RefusedError(
            f"profile {plan.name} cannot pass with --url alone; it requires what a URL does not "
            f"give:\n  {', '.join(hopeless)}\nFor a service that is up, use "
            "eval/profiles/node.yaml; for this profile, describe the arms in a file (--arms)."
        )


@app.command()
def run(
    profile: Annotated[Path, typer.Argument(help="profile (YAML)")],
    results: Annotated[Path, typer.Option("--results", help="new folder for the results")],
    arms: Annotated[Path | None, typer.Option("--arms", help="arms of this site (YAML)")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="instead of --arms: a service that is up")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="model name for --url")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="file with the key for --url")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    waivers: Waivers = None,
) -> None:
    """Measure control and candidate, give the verdict, write the report."""
    try:
        plan = read_yaml(profile, Profile)
        site = one_service(url, model, api_key_file) if arms is None else read_yaml(arms, Arms)
        # A wrong waiver file must not cost an hour of measurement.
        accepted = accept(waivers, plan)
        if arms is None:
            refuse_hopeless(plan, accepted)
        measuring = Run(results, plan, site, Reporter(console))
        try:
            finish(measuring.execute(resume))
        except GateError as error:
            # What this process put on record is judged; so is a service that failed beside what
            # an earlier one measured. A mere refusal must not pass judgement on somebody's run.
            kept = any(results.glob("arms/*/start-*/waves/*.json"))
            if measuring.recorded or (kept and isinstance(error, ServiceError)):
                judge(stored.load(results), waivers, results)
            raise
        verdict = judge(stored.load(results), waivers, results)
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if verdict["verdict"] == "pass" else 1)


@app.command()
def verdict(
    run: RunFolder,
    waivers: Waivers = None,
    arms: Annotated[
        Path | None,
        typer.Option("--arms", help="the run's arms file, with a memory_attribution added since"),
    ] = None,
) -> None:
    """Judge a stored run again."""
    try:
        evidence = stored.load(run)
        if arms is not None:
            evidence = stored.with_attribution(evidence, read_yaml(arms, Arms))
        found = judge(evidence, waivers, run)
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if found["verdict"] == "pass" else 1)


@app.command()
def compare(
    control: Annotated[str, typer.Argument(help="RUN or RUN:ARM to compare with")],
    candidate: Annotated[str, typer.Argument(help="RUN or RUN:ARM under test")],
    output: Annotated[Path, typer.Option("--output", help="folder for the documents")],
    waivers: Waivers = None,
) -> None:
    """Put two arms of stored runs side by side (default arm: candidate)."""
    try:
        sides = []
        for text in (control, candidate):
            path, _, arm = text.rpartition(":") if ":" in text else (text, "", "candidate")
            sides += [stored.load(Path(path)), arm]
        joined = stored.side_by_side(*sides)
        found = judge(joined, waivers, output)
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if found["verdict"] == "pass" else 1)


@app.command()
def report(
    run: RunFolder,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the table, write nothing")
    ] = False,
) -> None:
    """Write the HTML report of a stored run again, from its stored verdict."""
    try:
        evidence = stored.load(run)
        path = run / "verdict.json"
        if not path.exists():
            raise GateError(f"{run}: no verdict.json; run `verdict` first")
        found = json.loads(path.read_text())
        comparison = verdicts.compare(evidence)
        if markdown:
            print(reports.markdown(found, comparison))
            return
        page = reports.write(evidence, found, comparison, run)
        console.print(f"report: {page}", markup=False, soft_wrap=True)
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None


@app.command()
def profiles(paths: Annotated[list[Path], typer.Argument(help="profiles to check")]) -> None:
    """Check profiles against the schema and print what each one asks for."""
    from v100_gate import kv

    broken = 0
    for path in paths:
        try:
            plan = read_yaml(path, Profile)
            kv.refuse_impossible(plan, plan.service.kv_budget_tokens, "kv_budget_tokens")
        except GateError as error:
            say(error)
            broken += 1
            continue
        console.print(f"{path.name}: {plan.description}", markup=False)
        for spec in plan.waves:
            console.print(f"  {spec.name}: {kv.explain(spec, plan.service)}", markup=False)
        required = [name for name, policy in plan.checks.items() if policy.required]
        console.print(f"  required: {', '.join(required)}", markup=False)
    raise typer.Exit(2 if broken else 0)


@app.command()
def demo(
    results: Annotated[
        Path | None, typer.Option("--results", help="new folder (default: results/demo-N)")
    ] = None,
    starts: Annotated[int, typer.Option("--starts", help="fresh starts per arm", min=1)] = 1,
) -> None:
    """Build, serve on CPU and gate the patched vLLM against its control."""
    from v100_build.errors import BuildError
    from v100_build.paths import REPO
    from v100_patches.errors import PatchToolError

    from v100_gate import demo as demonstration

    reporter = Reporter(console)
    try:
        if results is not None:
            refuse_taken(results)  # before it is built for, and its arms file written over
        plan = read_yaml(demonstration.PROFILE, Profile)
        plan.schedule.starts_per_arm = starts
        site = demonstration.prepare(reporter)
        if results is None:
            taken = len(list((REPO / "results").glob("demo-*")))
            results = REPO / "results" / f"demo-{taken + 1}"
        demonstration.write_site(site, results / "arms.yaml")
        began = reporter.began
        finish(Run(results, plan, site, reporter).execute())
        found = judge(stored.load(results), None, results)
        console.print(f"measured in {time.monotonic() - began:.0f} s", markup=False)
    except (GateError, BuildError, PatchToolError) as error:
        console.print(f"gate: {error}", style="red", markup=False)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    except KeyboardInterrupt:
        console.print("interrupted while preparing; nothing is running", markup=False)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if found["verdict"] == "pass" else 1)


@app.command()
def merge(
    parts: Annotated[list[str] | None, typer.Argument(help="only these parts")] = None,
) -> None:
    """Run what a pull request has to show here, and write docs/evidence/merge-gate.json."""
    import tempfile

    from v100_gate import merge as merging

    def heading(text: str) -> None:
        console.print(text, style="bold", markup=False)

    try:
        with tempfile.TemporaryDirectory(prefix="v100-gate-") as scratch:
            document = merging.merge(parts or [], heading, Path(scratch))
        table = Table(title="merge gate", title_justify="left")
        for name in ("part", "status", "required", "what", "reason"):
            table.add_column(name, overflow="fold")
        for name, row in document["parts"].items():
            table.add_row(
                name,
                f"[{STYLES[row['status']]}]{row['status']}[/]",
                "yes" if row["required"] else "no",
                row["what"],
                row["reason"].replace("[", "\\["),
            )
        console.print(table)
        wrong = merging.problems()
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None
    for text in wrong:
        console.print(text, style="red", markup=False)
    console.print(f"written: {merging.FILE.relative_to(merging.REPO)}", markup=False)
    raise typer.Exit(1 if wrong else 0)


@app.command("merge-check")
def merge_check() -> None:
    """Say whether the committed merge file stands for this tree (for CI)."""
    from v100_gate import merge as merging

    wrong = merging.problems()
    for text in wrong:
        console.print(text, style="red", markup=False)
    if not wrong:
        console.print("the merge gate's file stands for this tree")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def overhead(
    streams: Annotated[int, typer.Option(help="concurrent streams")] = 16,
    tokens_per_s: Annotated[float, typer.Option(help="tokens per second, all streams")] = 1000.0,
    seconds: Annotated[float, typer.Option(help="length of the measurement")] = 10.0,
) -> None:
    """Measure what this client itself adds to inter-chunk times, against a local stand-in.

    Prints the figures as JSON. Exit status 1 when a token was lost or added_ms.p99 exceeds its
    limit of 1.0 ms; what missed its limit is said on stderr.
    """
    from v100_gate.overhead import measure, missed

    try:
        found = measure(streams, tokens_per_s, seconds)
    except GateError as error:
        say(error)
        raise typer.Exit(error.exit_code) from None
    console.print_json(json.dumps(found))
    wrong = missed(found)
    for text in wrong:
        Console(stderr=True, soft_wrap=True).print(f"gate: {text}", style="red", markup=False)
    raise typer.Exit(1 if wrong else 0)
