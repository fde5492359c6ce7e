"""The command line: check, check-all, bench, report, sanitize, verify."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import evidence, ops

if TYPE_CHECKING:
    from .check import CaseResult

sys.path.append(str(evidence.KERNEL / "python"))


def _library(path: Path):
    """Loads the library; refuses one that was not built from this tree."""
    from sm70_attention import library

    try:
        import torch
    except ImportError:
        raise SystemExit(f"error: {sys.executable} has no PyTorch; use one that has") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU here, and these kernels run on nothing else")
    try:
        info = library.read_info(path)
    except library.LibraryError as error:
        raise SystemExit(f"error: {error}") from None
    tree = library.source_tree_hash(evidence.KERNEL)
    if info.source_sha256 != tree:
        raise SystemExit(
            f"error: {path.name} was built from sources {info.source_sha256[:16]} and this tree is "
            f"{tree[:16]}: evidence would name the wrong sources; build the library again"
        )
    return library.load(path)


def _results(op: ops.Op, only: str | None) -> Iterator[tuple[dict, CaseResult]]:
    """What each case, then each sequence, is and gave."""
    from .check import CaseResult, check_case

    for number, case in enumerate(op.cases):
        if not only or only in case.name:
            yield dict(vars(case)), check_case(op, case, 100 + number)
    for name, sequence in op.sequences:
        if not only or only in name:
            yield {"name": name}, CaseResult(name, failures=sequence())


def _check(arguments: argparse.Namespace) -> int:
    info = _library(arguments.library)
    op = ops.get(arguments.op)
    rows, failed = [], 0
    start = time.monotonic()
    for case, result in _results(op, arguments.only):
        failed += bool(result.failures)
        rows.append(
            {
                "case": case,
                "max_error": result.max_error,
                "l2_error": result.l2_error,
                "failures": result.failures,
            }
        )
        error = "-" if result.max_error is None else f"{result.max_error:.2e}"
        print(f"{'FAIL' if result.failures else 'ok':5}{error:>10}  {result.name}", flush=True)
        for failure in result.failures:
            print(f"      {failure}", flush=True)
    seconds = time.monotonic() - start
    worst = max((r["max_error"] for r in rows if r["max_error"] is not None), default=0.0)
    print(f"{len(rows)} cases, {failed} failed, largest error {worst:.2e}, {seconds:.0f} s")
    content = evidence.header(op.name, "check", arguments.library, info)
    content |= {
        "passed": failed == 0 and bool(rows) and not arguments.only,
        "limits": {"max_error": op.max_error, "l2_error": op.l2_error},
        "seconds": round(seconds, 1),
        "cases": rows,
    }
    evidence.write(arguments.out, content)
    return int(failed > 0 or not rows)


def _bench(arguments: argparse.Namespace) -> int:
    info = _library(arguments.library)
    from .bench import PAIRS, REPLAYS, WORKING_SETS, time_shape

    op = ops.get(arguments.op)
    print(f"{'shape':16}{'median ms':>11}{'GB/s':>8}{'control ms':>12}{'ratio':>8}")
    rows: list[dict] = []
    content = evidence.header(op.name, "bench", arguments.library, info) | {
        "only": arguments.only,  # each shape stands by itself; this says which were asked for
        "working_sets": WORKING_SETS,
        "pairs": PAIRS,
        "replays": REPLAYS,
        "shapes": rows,
    }
    for shape in op.bench:
        if arguments.only and arguments.only not in shape.name:
            continue
        t = time_shape(op, shape)
        control = t.control_median_ms
        ratio = t.median_ms / control if control else None
        tail = f"{control:12.3f}{ratio:8.2f}" if ratio else ""
        print(f"{t.name:16}{t.median_ms:11.3f}{t.gigabytes_per_second:8.0f}{tail}", flush=True)
        for failure in t.failures:
            print(f"      {failure}", flush=True)
        rows.append(
            {
                "shape": t.name,
                "case": vars(shape.case),
                "kv_bytes": t.kv_bytes,
                "median_ms": t.median_ms,
                "samples_ms": t.op_ms,
                "control": t.control,
                "control_median_ms": control,
                "control_samples_ms": t.control_ms,
                "output_difference": t.output_difference,
                "failures": t.failures,
            }
        )
        # After each shape: what a run that is cut short has measured is kept.
        passed = not any(row["failures"] for row in rows)
        evidence.write(arguments.out, content | {"passed": passed})
    if not rows:
        print(f"no shape of {op.name} has {arguments.only!r} in its name", file=sys.stderr)
    return int(not rows or not passed)


def _verify(arguments: argparse.Namespace) -> int:
    findings = evidence.verify(arguments.folder, arguments.kernel)
    for f in findings:
        print(f"{'stale' if f.problem else 'good':6} {f.op:8} {f.kind:6} {f.file}", end="")
        print(f": {f.problem}" if f.problem else "")
    bad = [f for f in findings if f.problem]
    if bad:
        print(
            "run `python -m v100_operator check` (and bench) again on a GPU with a validation "
            "build of this tree, and commit what it writes"
        )
    return int(bool(bad))


def _check_all(arguments: argparse.Namespace) -> int:
    from . import here

    return int(here.check_all(arguments.out) > 0)


def _sanitize(arguments: argparse.Namespace) -> int:
    from . import sanitize

    sanitize.program()  # before anything takes time
    info = _library(arguments.library)
    op, rows = ops.get(arguments.op), []
    content = evidence.header(op.name, "sanitizer", arguments.library, info) | {"cases": rows}
    with tempfile.TemporaryDirectory() as scratch:
        hands_over = op.name in sanitize.HANDS_OVER
        controls = sanitize.run_controls("racecheck", Path(scratch)) if hands_over else []
        content["controls"] = controls
        blind = not all(control["as_expected"] for control in controls)
        for control in controls:
            word = "ok" if control["as_expected"] else "blind"
            print(f"{word:6}racecheck  {control['case']}: {control['summary']}", flush=True)
        for tool in sanitize.TOOLS:
            for case in sanitize.CASES[op.name]:
                row = sanitize.run_case(op, case, tool, arguments.library, Path(scratch))
                row["counts"] = not (blind and tool == "racecheck")
                rows.append(row)
                word = "ok" if row["clean"] else "FAIL" if row["counts"] else "blind"
                print(f"{word:6}{tool:10} {case}: {row['summary'] or row['output']}", flush=True)
                passed = all(r["clean"] for r in rows if r["counts"])
                evidence.write(arguments.out, content | {"passed": passed})
    if blind:
        print(
            "racecheck names hazards in a control that has none, or misses those of one that has: "
            "it cannot judge this op, whose sm_70 code is held to the emulator's race check"
        )
    return int(not passed)


def _report(arguments: argparse.Namespace) -> int:
    from . import report

    try:
        print(report.write(arguments.files, arguments.out), end="")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"\nwrote {arguments.out}/bench.md and {arguments.out}/bench.png")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 when all is well, 1 when something failed."""
    parser = argparse.ArgumentParser(prog="v100_operator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, function, text in (
        ("check", _check, "compare an op with the FP64 oracle and with itself"),
        ("bench", _bench, "time an op by graph replay"),
        ("sanitize", _sanitize, "run small cases under compute-sanitizer"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--op", required=True, choices=ops.NAMES)
        command.add_argument("--library", required=True, type=Path, help="_vllm_fa2_C.abi3.so")
        command.add_argument("--out", required=True, type=Path, help="the JSON file to write")
        if function is not _sanitize:
            command.add_argument("--only", help="cases or shapes whose name contains this")
        command.set_defaults(run=function)
    command = commands.add_parser("check-all", help="build here, then check every op")
    command.add_argument("--out", type=Path, default=Path("results/operator"), help="folder")
    command.set_defaults(run=_check_all)
    command = commands.add_parser("report", help="table and plot of what bench wrote")
    command.add_argument("files", type=Path, nargs="+", help="JSON files of bench")
    command.add_argument("--out", type=Path, default=Path("results/operator"), help="folder")
    command.set_defaults(run=_report)
    command = commands.add_parser("verify", help="whether evidence belongs to this tree's sources")
    command.add_argument("folder", type=Path)
    command.add_argument("--kernel", type=Path, default=evidence.KERNEL, help="the tree's kernel/")
    command.set_defaults(run=_verify)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)
