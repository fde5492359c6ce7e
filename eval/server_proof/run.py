"""Runs a part's engines on this machine's GPU, several at once, and writes its evidence.

    python -m server_proof.run --part dense --stage STAGE --site SITE --out OUT

SITE is where the stock vLLM lies (the folder that holds vllm/); STAGE is what `stage.py` made, and
is laid over SITE first. The evidence is OUT/server-PART.json. Exit status: 0 all claims hold,
1 some do not (the evidence says which), 2 engines failed.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_proof.judge import JUDGES, timings
from server_proof.models import CONFIGS, write_model
from server_proof.scenarios import PARTS


def lay_over(stage: Path, site: Path) -> dict[str, Any]:
    """Copies the staged files over the installed vLLM; returns the staged hashes."""
    for source in sorted((stage / "vllm").rglob("*")):
        if source.is_file():
            target = site / "vllm" / source.relative_to(stage / "vllm")
            if target.exists() and filecmp.cmp(source, target, shallow=False):
                continue  # another part's engines may be reading it
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    compileall.compile_dir(site / "vllm" / "v1", quiet=2, workers=0)
    return json.loads((stage / "hashes.json").read_text())


def engine_command(scenario: Path, result: Path) -> list[str]:
    """The program that runs one engine."""
    return [sys.executable, "-m", "server_proof.engine", str(scenario), str(result)]


def run_engines(
    scenarios: list[dict[str, Any]], scratch: Path, limit_s: float, at_once: int
) -> dict[str, dict[str, Any]]:
    """Runs the scenarios, at most `at_once` at a time; ends those that outlast `limit_s`."""
    waiting, running, until = list(scenarios), {}, time.time() + limit_s
    started: dict[str, float] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            scenario = waiting.pop(0)
            label = scenario["label"]
            (scratch / f"{label}.scenario").write_text(json.dumps(scenario))
            command = engine_command(scratch / f"{label}.scenario", scratch / f"{label}.json")
            started[label] = time.time()
            with open(scratch / f"{label}.log", "w") as log:
                running[label] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        for label, process in list(running.items()):
            if process.poll() is None and time.time() > until:
                _end_session(process)
                process.wait()
            if process.poll() is not None:
                _end_session(process)
                print(
                    f"{label}: exit {process.returncode}, {time.time() - started[label]:.0f} s",
                    flush=True,
                )
                del running[label]
        time.sleep(0.2)
    results: dict[str, dict[str, Any]] = {}
    for scenario in scenarios:
        written = scratch / f"{scenario['label']}.json"
        if written.exists():
            results[scenario["label"]] = json.loads(written.read_text())
    return results


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends an engine's session: ranks that outlive their engine would keep their GPUs' memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def unfinished(
    scenarios: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Label -> what failed, of every engine that did not do all its tasks."""
    found: dict[str, Any] = {}
    for label in (s["label"] for s in scenarios):
        if label not in results:
            found[label] = "wrote nothing"
        elif results[label]["failed"]:
            found[label] = results[label]["failed"]
        elif "worker_routes" not in results[label]:  # what an engine writes last
            found[label] = "ended or was ended (--limit) before its last task was done"
    return found


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--stage", type=Path)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/server-proof"))
    parser.add_argument("--limit", type=float, default=300, help="seconds for all engines")
    parser.add_argument("--at-once", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="labels of engines")
    parser.add_argument(
        "--engine-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="more options of vLLM's LLM for every engine; the evidence names them",
    )
    options = parser.parse_args()
    scratch = options.scratch / options.part
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    options.out.mkdir(parents=True, exist_ok=True)
    staged = lay_over(options.stage, options.site) if options.stage else {}
    for kind in CONFIGS:
        write_model(scratch / "models", kind)
    scenarios = [s for s in PARTS[options.part]() if not options.only or s["label"] in options.only]
    for scenario in scenarios:
        scenario["options"] = scenario.get("options", {}) | options.engine_options
    began = time.time()
    results = run_engines(scenarios, scratch, options.limit, options.at_once)
    failures = unfinished(scenarios, results)
    try:
        claims = JUDGES[options.part](results)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        claims = [{"claim": "all engines finished", "holds": False, "missing": repr(error)}]
    evidence = {
        "part": options.part,
        "hashes": staged,
        "gpu": next((r["facts"]["gpu"] for r in results.values() if "facts" in r), None),
        "note": "functional proof; timings are of this GPU and say nothing about a V100",
        "engine_options": options.engine_options,
        "seconds": round(time.time() - began, 1),
        "claims": claims,
        "failures": failures,
        "timings": timings(results),
        "facts": {label: r.get("facts") for label, r in results.items()},
        "worker_routes": {label: r.get("worker_routes") for label, r in results.items()},
        "task_seconds": {
            label: {name: t.get("task_s") for name, t in r["tasks"].items()}
            for label, r in results.items()
        },
    }
    (options.out / f"server-{options.part}.json").write_text(json.dumps(evidence, indent=1))
    archive = shutil.make_archive(str(options.scratch / f"raw-{options.part}"), "gztar", scratch)
    shutil.copy(archive, options.out / f"server-{options.part}-raw.tar.gz")
    for one in claims:
        print("holds" if one["holds"] else "FAILS", one["claim"], flush=True)
    for label, what in failures.items():
        text = what if isinstance(what, str) else what[0]["error"].strip().splitlines()[-1]
        print("FAILED", label, text[:300], flush=True)
        log = scratch / f"{label}.log"
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
            errors = [x for x in lines if "Error" in x]
            print("\n".join(x[:300] for x in (errors or lines)[-4:]), flush=True)
    print(json.dumps(evidence["timings"]), flush=True)
    return 2 if failures else 0 if all(c["holds"] for c in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
