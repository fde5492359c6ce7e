"""Applies patches exactly: every hunk at its own line, every context line equal, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from v100_patches.errors import HunkError, PatchToolError
from v100_patches.series import SERIES_DIR, FileDiff, Hunk, Patch, load
from v100_patches.trees import Folder, Overlay

REBASE = "`python -m v100_patches refresh` moves hunks whose lines are unchanged"


@dataclass(frozen=True)
class AppliedPatch:
    """What was applied: the patch's name and SHA-256, and the files it touched."""

    name: str
    sha256: str
    files: tuple[str, ...]


def apply_series(
    tree: Path, flavour: str, series_dir: Path = SERIES_DIR, through: str | None = None
) -> list[AppliedPatch]:
    """Applies the series of `flavour` ('cuda' or 'cpu') to an unpacked wheel, all or nothing.

    `tree` holds `vllm/`. With `through`, stops after the patch of that name. Raises PatchToolError
    (HunkError for a hunk that does not fit) and then leaves the tree as it was.
    """
    series = load(series_dir)
    last = series.get(through).name if through else None
    overlay = Overlay(Folder(tree))
    applied = []
    for patch in series.for_flavour(flavour):
        apply_patch(overlay, patch)
        applied.append(AppliedPatch(patch.name, patch.sha256, tuple(f.path for f in patch.files)))
        if patch.name == last:
            break
    else:
        if last is not None:
            raise PatchToolError(
                f"patch {last} is not in the {flavour} flavour", "name a patch that is"
            )
    overlay.flush(tree)
    return applied


Locate = Callable[[Patch, FileDiff, int, list[str], int], int]


def apply_patch(tree: Overlay, patch: Patch, locate: Locate | None = None) -> None:
    """Applies one patch to `tree`; `locate` says where a hunk goes (default: exactly there)."""
    for diff in patch.files:
        text = tree.read(diff.path)
        tree.write(diff.path, _patched(patch, diff, text, locate or exactly))


def _patched(patch: Patch, diff: FileDiff, text: str | None, locate: Locate) -> str | None:
    if diff.kind == "add" and text is not None:
        raise PatchToolError(
            f"patch {patch.name} adds {diff.path}, but the tree already has that file",
            "start from a fresh unpacked wheel: this tree may have been patched before",
        )
    if diff.kind != "add" and text is None:
        raise PatchToolError(
            f"patch {patch.name} changes {diff.path}, but the tree has no such file",
            "check that the tree is the wheel that base.toml pins and the patch's group is right",
        )
    lines = split(text or "")
    result: list[str] = []
    cursor = 0
    for index, hunk in enumerate(diff.hunks):
        at = locate(patch, diff, index, lines, cursor)
        result += lines[cursor:at]
        if locate is exactly and len(result) != hunk.target_index:
            raise PatchToolError(
                f"patch {patch.name}, file {diff.path}, hunk {index + 1}: {hunk.header}\n"
                f"  the line numbers of the two sides contradict each other: the new text would "
                f"start at line {len(result) + 1}",
                f"regenerate it with `python -m v100_patches refresh {patch.name} --tree TREE`",
            )
        result += hunk.target
        cursor = at + len(hunk.source)
    result += lines[cursor:]
    if diff.kind == "remove":
        if result:
            raise PatchToolError(
                f"patch {patch.name} removes {diff.path}, but lines would be left over",
                f"regenerate it with `python -m v100_patches refresh {patch.name} --tree TREE`",
            )
        return None
    return "".join(result)


def exactly(patch: Patch, diff: FileDiff, index: int, lines: list[str], cursor: int) -> int:
    """The hunk's own line, when all its lines are there; raises HunkError otherwise."""
    hunk = diff.hunks[index]
    at = hunk.source_index
    if at >= cursor and lines[at : at + len(hunk.source)] == hunk.source:
        return at
    raise _mismatch(patch, diff, index, lines)


def anywhere(patch: Patch, diff: FileDiff, index: int, lines: list[str], cursor: int) -> int:
    """The only place where the hunk's lines are, at or after `cursor`. For `refresh` only."""
    hunk = diff.hunks[index]
    places = _places(hunk.source, lines, cursor) if hunk.source else [hunk.source_index]
    if len(places) == 1:
        return places[0]
    raise _mismatch(patch, diff, index, lines)


def split(text: str) -> list[str]:
    """Lines with their ends; only '\\n' ends a line."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _places(block: list[str], lines: list[str], start: int = 0) -> list[int]:
    size = len(block)
    return [at for at in range(start, len(lines) - size + 1) if lines[at : at + size] == block]


def _mismatch(patch: Patch, diff: FileDiff, index: int, lines: list[str]) -> HunkError:
    hunk = diff.hunks[index]
    at = hunk.source_index
    return HunkError(
        patch=patch.name,
        file=diff.path,
        hunk=index + 1,
        hunks=len(diff.hunks),
        header=hunk.header,
        line=at + 1,
        expected=hunk.source,
        found=lines[at : at + len(hunk.source)],
        todo=_advice(hunk, lines),
    )


def _advice(hunk: Hunk, lines: list[str]) -> str:
    if hunk.source and (places := _places(hunk.source, lines)):
        where = ", ".join(str(place + 1) for place in places)
        return (
            f"the hunk's lines are in the file, at line {where} instead of "
            f"{hunk.source_index + 1}: an earlier patch changed. {REBASE}"
        )
    if hunk.target and _places(hunk.target, lines):
        return "the change is already in the file: start from a fresh unpacked wheel"
    return (
        "if the tree is not the wheel that base.toml pins, use that one; if the patch was edited, "
        "restore it; if vLLM or an earlier patch changed, make the change again in a tree and run "
        "`python -m v100_patches refresh NAME --tree TREE`"
    )
