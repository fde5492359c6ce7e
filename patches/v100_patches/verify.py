"""Checks the series as a whole: its form, its headers, and that it gives the recorded trees."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from v100_patches.apply import apply_patch
from v100_patches.errors import PatchToolError
from v100_patches.series import FIELDS, FLAVOURS, GROUPS, Patch, Series
from v100_patches.trees import Overlay, Tree, open_wheel

LOCK = "series.lock"
LOCK_HEAD = "# Written by `python -m v100_patches refresh`; do not edit.\n"
UPSTREAM = re.compile(r"#\d+|https://|^not (submitted|applicable): \S")
TODO_MARK = "TODO"


def check(
    series: Series, repository: Path, wheel_dir: Path, flavours: Iterable[str] = FLAVOURS
) -> tuple[list[str], dict[str, str]]:
    """All that is wrong with a series, and the digests of the trees that it gives by flavour.

    `repository` is where the headers' test paths start, `wheel_dir` holds the pinned wheels.
    """
    problems = form_problems(series, repository)
    trees: dict[str, str] = {}
    if all(patch.path.is_file() for patch in series.patches):
        for flavour in flavours:
            try:
                wheel = open_wheel(series, flavour, wheel_dir)
                trees[flavour] = patched_tree(series, flavour, wheel).digest()
            except PatchToolError as error:
                problems.append(f"{flavour}: {error}")
    try:
        problems += lock_problems(series, trees)
    except PatchToolError as error:
        problems.append(str(error))
    return problems, trees


def form_problems(series: Series, repository: Path) -> list[str]:
    """What is wrong with the series file, the folder and the headers (nothing: empty list)."""
    return [
        *_order_problems(series),
        *_folder_problems(series),
        *(problem for patch in series.patches for problem in _header_problems(patch, repository)),
    ]


def _order_problems(series: Series) -> Iterable[str]:
    names = [patch.name for patch in series.patches]
    for previous, patch in zip(series.patches, series.patches[1:], strict=False):
        if patch.name[:4] <= previous.name[:4]:
            yield f"series: {patch.name} stands after {previous.name}; order by number"
        if GROUPS.index(patch.group) < GROUPS.index(previous.group):
            yield (
                f"series: {patch.name} ({patch.group}) stands after {previous.name} "
                f"({previous.group}); the order of groups is {', '.join(GROUPS)}"
            )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"series: {name} is listed more than once"


def _folder_problems(series: Series) -> Iterable[str]:
    listed = {patch.name for patch in series.patches}
    present = {path.name for path in series.directory.glob("*.patch")}
    for name in sorted(listed - present):
        yield f"series lists {name}, but {series.directory} has no such file"
    for name in sorted(present - listed):
        yield f"{series.directory} holds {name}, but series does not list it"


def _header_problems(patch: Patch, repository: Path) -> Iterable[str]:
    if not patch.path.is_file():
        return
    try:
        fields, files = patch.fields, patch.files
    except PatchToolError as error:
        yield error.problem
        return
    for field in FIELDS:
        text = fields.get(field, "")
        if not text or TODO_MARK in text:
            yield f"{patch.name}: the header says nothing under '{field}:'"
    if not files:
        yield f"{patch.name}: has no diff"
    tests = re.findall(r"tests/[\w/.-]+\.py", fields.get("Tests", ""))
    if fields.get("Tests") and not tests:
        yield f"{patch.name}: 'Tests:' names no file like tests/patches/test_x.py"
    for test in tests:
        if not (repository / test).is_file():
            yield f"{patch.name}: 'Tests:' names {test}, which is not in the repository"
    upstream = fields.get("Upstream", "")
    if upstream and not UPSTREAM.search(upstream):
        yield (
            f"{patch.name}: 'Upstream:' has neither a number (#12345) nor a link; "
            f"write 'not submitted: REASON' or 'not applicable: REASON' if there is none"
        )


def patched_tree(series: Series, flavour: str, base: Tree) -> Overlay:
    """The tree after the whole series of a flavour; raises PatchToolError when one fails."""
    overlay = Overlay(base)
    for patch in series.for_flavour(flavour):
        apply_patch(overlay, patch)
    return overlay


def lock_text(series: Series, trees: dict[str, str]) -> str:
    """The text of series.lock for these tree digests."""
    rows = [LOCK_HEAD, "\n[trees]\n"]
    rows += [f'{flavour} = "{trees[flavour]}"\n' for flavour in FLAVOURS if flavour in trees]
    rows.append("\n[patches]\n")
    rows += [f'"{patch.name}" = "{patch.sha256}"\n' for patch in series.patches]
    return "".join(rows)


def read_lock(series: Series) -> dict[str, dict[str, str]]:
    """series.lock as tables; raises PatchToolError when it is missing or damaged."""
    path = series.directory / LOCK
    todo = "run `python -m v100_patches refresh` and commit the file"
    if not path.is_file():
        raise PatchToolError(f"{path} is missing", todo)
    try:
        lock = tomllib.loads(path.read_text("utf-8"))
        return {"trees": dict(lock["trees"]), "patches": dict(lock["patches"])}
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchToolError(f"{path} is damaged: {error!r}", todo) from error


def lock_problems(series: Series, trees: dict[str, str]) -> list[str]:
    """Where patches or patched trees differ from what series.lock records."""
    lock = read_lock(series)
    found = {patch.name: patch.sha256 for patch in series.patches if patch.path.is_file()}
    problems = [
        f"{name}: SHA-256 is {found.get(name, 'of no file')}, series.lock has "
        f"{lock['patches'].get(name, 'no entry')}"
        for name in sorted(found.keys() | lock["patches"].keys())
        if found.get(name) != lock["patches"].get(name)
    ]
    problems += [
        f"patched {flavour} tree: digest is {digest}, series.lock has "
        f"{lock['trees'].get(flavour, 'no entry')}"
        for flavour, digest in trees.items()
        if lock["trees"].get(flavour) != digest
    ]
    return problems
