"""Writes patches: from an edited tree, moved to new line numbers, or as a new template."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from v100_patches.apply import anywhere, apply_patch
from v100_patches.errors import PatchToolError
from v100_patches.series import GROUPS, NAME, NUMBERS, SEPARATOR, Patch, Series, load
from v100_patches.trees import Overlay, Tree, encode
from v100_patches.verify import LOCK, lock_text

TEMPLATE = """Subject: {area}: TODO one line, imperative

What: TODO what changes, in the terms of the code.

Why: TODO what goes wrong without it, and for whom.

Tests: TODO tests/patches/test_TODO.py

Upstream: TODO numbers of issues and pull requests (#12345), or 'not submitted: REASON'
{separator}
"""


def new(series: Series, name: str, group: str) -> Path:
    """Starts a patch: writes its header as a template and lists it in the series."""
    if not NAME.match(name):
        raise PatchToolError(
            f"'{name}' is not a patch file name", "use a name like 0042-what-it-does.patch"
        )
    if int(name[:4]) not in (numbers := NUMBERS[group]):
        raise PatchToolError(
            f"number {name[:4]} is not one of group {group}",
            f"use {numbers[0]:04d} to {numbers[-1]:04d}, or another --group (docs/patches.md)",
        )
    path = series.directory / name
    if path.exists() or any(patch.name[:4] == name[:4] for patch in series.patches):
        raise PatchToolError(
            f"number {name[:4]} is taken", "see `python -m v100_patches list` for the next free one"
        )
    path.write_text(TEMPLATE.format(area="AREA", separator=SEPARATOR), "utf-8")
    series_file = series.directory / "series"
    lines = series_file.read_text("utf-8").splitlines()
    order = (GROUPS.index(group), name)
    at = 0
    for index, line in enumerate(lines):
        words = line.partition("#")[0].split()
        if not words or (GROUPS.index(words[0]), words[1]) < order:
            at = index + 1
    lines.insert(at, f"{group:<5} {name}")
    series_file.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def regenerate(series: Series, name: str, flavour: str, base: Tree, edited: Tree) -> bool:
    """Makes patch `name` what leads from the series before it to `edited`.

    `base` is the stock wheel of `flavour`; `edited` holds the series up to and including the
    patch, and no later one. Returns whether the patch file changed.
    """
    patch = series.get(name)
    if patch.group not in ("core", flavour):
        raise PatchToolError(
            f"{patch.name} is not in the {flavour} flavour", f"use --flavour {patch.group}"
        )
    before = Overlay(base)
    for earlier in series.for_flavour(flavour):
        if earlier.name == patch.name:
            break
        apply_patch(before, earlier)
    changes = {
        path: (old, new)
        for path in sorted(set(before.paths()) | set(edited.paths()))
        if (old := before.read(path)) != (new := edited.read(path))
    }
    if not changes:
        raise PatchToolError(
            f"the tree does not differ from the series before {patch.name}",
            "edit the tree first, and name the one that you edited",
        )
    return _rewrite(patch, changes)


def reanchor(series: Series, bases: dict[str, Tree]) -> list[str]:
    """Moves hunks whose lines are unchanged to where they are now; returns the patches changed.

    Goes through the series once per flavour in `bases`. Raises PatchToolError when a hunk's lines
    are gone or occur more than once: such a patch has to be made again.
    """
    changed = []
    for flavour, base in bases.items():
        tree = Overlay(base)
        for patch in load(series.directory).for_flavour(flavour):
            before = {diff.path: tree.read(diff.path) for diff in patch.files}
            apply_patch(tree, patch, anywhere)
            changes = {path: (old, tree.read(path)) for path, old in before.items()}
            if changes and not _applies_as_is(patch, before, base):
                _rewrite(patch, changes)
                changed.append(patch.name)
    return sorted(set(changed))


def _applies_as_is(patch: Patch, before: dict[str, str | None], base: Tree) -> bool:
    probe = Overlay(base)
    probe.changed.update(before)
    try:
        apply_patch(probe, patch)
    except PatchToolError:
        return False
    return True


def write_lock(series: Series, trees: dict[str, str]) -> bool:
    """Writes series.lock; returns whether it changed."""
    path = series.directory / LOCK
    text = lock_text(series, trees)
    if path.is_file() and path.read_text("utf-8") == text:
        return False
    path.write_text(text, "utf-8")
    return True


def _rewrite(patch: Patch, changes: dict[str, tuple[str | None, str | None]]) -> bool:
    text = f"{patch.header_text}\n{SEPARATOR}\n{unified_diff(changes)}".encode()
    if text == patch.data:
        return False
    patch.path.write_bytes(text)
    return True


def unified_diff(changes: dict[str, tuple[str | None, str | None]]) -> str:
    """A unified diff with three lines of context of {path: (old text, new text)}.

    Made by git, whose hunks are the most readable ones; its settings are fixed, so that the same
    change gives the same bytes on every machine.
    """
    git = shutil.which("git")
    if git is None:
        raise PatchToolError("git was not found; it makes the diffs", "install git")
    with tempfile.TemporaryDirectory() as folder:
        for path, texts in changes.items():
            for side, text in zip("ab", texts, strict=True):
                file = Path(folder, side, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                if text is not None:
                    file.write_bytes(encode(text))
        command = [git, "diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff"]
        command += ["--no-renames", "--unified=3", "--diff-algorithm=histogram", "a", "b"]
        environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, check=False
        )
    if done.returncode not in (0, 1):
        raise PatchToolError(
            f"git diff failed: {done.stderr.decode(errors='replace').strip()}",
            "run it by hand in a scratch folder to see why",
        )
    lines = done.stdout.decode("utf-8").split("\n")
    # The blob names and the names of the scratch folder say nothing about the change.
    return "\n".join(line for line in lines if not line.startswith("index "))
