"""Command line of the patch tool: `python -m v100_patches --help`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from v100_patches import refresh as refreshing
from v100_patches.apply import AppliedPatch, apply_series
from v100_patches.errors import PatchToolError
from v100_patches.series import FLAVOURS, GROUPS, SERIES_DIR, load
from v100_patches.trees import Folder, default_wheel_dir, open_wheel
from v100_patches.verify import check, patched_tree

STAMP = ".v100-patches.json"

app = typer.Typer(
    help="Applies, verifies and refreshes the patch series against vLLM (see docs/patches.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

SeriesDir = Annotated[Path, typer.Option("--series-dir", help="Folder of the series.")]
WheelDir = Annotated[
    Path | None, typer.Option("--wheel-dir", help="Wheel cache (default: the shared one).")
]
Flavour = Annotated[str, typer.Option("--flavour", help=f"One of {', '.join(FLAVOURS)}.")]


@app.command()
def apply(
    tree: Annotated[Path, typer.Argument(help="Unpacked wheel: the folder that holds vllm/.")],
    flavour: Flavour = "cuda",
    through: Annotated[
        str | None, typer.Option(help="Stop after this patch (file name or number).")
    ] = None,
    unpack: Annotated[
        bool, typer.Option("--unpack", help="First unpack the pinned wheel to TREE.")
    ] = False,
    series_dir: SeriesDir = SERIES_DIR,
    wheel_dir: WheelDir = None,
) -> None:
    """Apply the series of a flavour to an unpacked wheel: exactly, all or nothing."""
    if unpack:
        if tree.exists():
            raise PatchToolError(f"{tree} exists already", "name a folder that does not exist")
        open_wheel(load(series_dir), flavour, wheel_dir or default_wheel_dir()).extract(tree)
    applied = apply_series(tree, flavour, series_dir, through)
    _write_stamp(tree, flavour, applied)
    for patch in applied:
        out.print(f"applied {patch.name}  ({len(patch.files)} files)", markup=False)
    out.print(f"{len(applied)} patches applied to {tree} ({flavour})", markup=False)


@app.command()
def verify(
    flavours: Annotated[
        list[str] | None, typer.Option("--flavour", help="Only this flavour; may be repeated.")
    ] = None,
    series_dir: SeriesDir = SERIES_DIR,
    wheel_dir: WheelDir = None,
) -> None:
    """Check headers, the series file and folder, exact application and the recorded hashes."""
    series = load(series_dir)
    problems, trees = check(
        series,
        repository=series_dir.resolve().parents[1],
        wheel_dir=wheel_dir or default_wheel_dir(),
        flavours=flavours or FLAVOURS,
    )
    if problems:
        raise PatchToolError(
            "\n".join(["the series does not verify:", *(f"  - {text}" for text in problems)]),
            "mend the headers or the series; after a wanted change run "
            "`python -m v100_patches refresh`",
        )
    for flavour, digest in trees.items():
        count = len(list(series.for_flavour(flavour)))
        out.print(f"{flavour}: {count} patches apply exactly; tree {digest}", markup=False)


@app.command()
def refresh(
    patch: Annotated[
        str | None, typer.Argument(help="Patch to regenerate from --tree (name or number).")
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Edited tree, with the series applied through PATCH.")
    ] = None,
    flavour: Annotated[
        str | None, typer.Option("--flavour", help="Flavour of the tree (default: as applied).")
    ] = None,
    series_dir: SeriesDir = SERIES_DIR,
    wheel_dir: WheelDir = None,
) -> None:
    """Regenerate PATCH from an edited tree; then move later hunks and write series.lock."""
    series = load(series_dir)
    wheels = {name: open_wheel(series, name, wheel_dir or default_wheel_dir()) for name in FLAVOURS}
    if (patch is None) != (tree is None):
        raise PatchToolError(
            "PATCH and --tree belong together",
            "name both to regenerate a patch, or neither to move hunks and write series.lock",
        )
    if patch is not None and tree is not None:
        name = series.get(patch).name
        flavour = _tree_flavour(tree, name, flavour, [p.name for p in series.patches])
        if refreshing.regenerate(series, name, flavour, wheels[flavour], Folder(tree)):
            out.print(f"regenerated {name}", markup=False)
    for name in refreshing.reanchor(series, dict(wheels)):
        out.print(f"moved hunks of {name}", markup=False)
    series = load(series_dir)
    trees = {name: patched_tree(series, name, wheels[name]).digest() for name in FLAVOURS}
    if refreshing.write_lock(series, trees):
        out.print("wrote series.lock", markup=False)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="File name, like 0042-what-it-does.patch.")],
    group: Annotated[str, typer.Option(help=f"One of {', '.join(GROUPS)}.")] = "core",
    series_dir: SeriesDir = SERIES_DIR,
) -> None:
    """Start a patch: its header as a template, and its line in the series."""
    if group not in GROUPS:
        raise PatchToolError(f"unknown group '{group}'", f"use one of {', '.join(GROUPS)}")
    path = refreshing.new(load(series_dir), name, group)
    out.print(f"wrote {path}; next: edit a tree, then refresh (docs/patches.md)", markup=False)


@app.command("list")
def list_(series_dir: SeriesDir = SERIES_DIR) -> None:
    """List the patches with group, size, subject and upstream state."""
    for patch in load(series_dir).patches:
        ops = [op for diff in patch.files for hunk in diff.hunks for op, _ in hunk.ops]
        size = f"{len(patch.files)} files, +{ops.count('+')} -{ops.count('-')}"
        # Lines and no table: other commands take the names, so nothing may be cut.
        out.print(f"{patch.group:<5} {patch.name}  ({size})", markup=False)
        out.print(f"      {patch.fields.get('Subject', '')}", markup=False)
        upstream = patch.fields.get("Upstream", "").split("\n")[0]
        out.print(f"      upstream: {upstream}", markup=False)


def _write_stamp(tree: Path, flavour: str, applied: list[AppliedPatch]) -> None:
    """Remembers, for `refresh`, what a tree for editing holds. The build does not write it."""
    stamp = {"flavour": flavour, "patches": [patch.name for patch in applied]}
    (tree / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")


def _tree_flavour(tree: Path, name: str, flavour: str | None, order: list[str]) -> str:
    """The tree's flavour; refuses a tree that holds patches later than the one to regenerate."""
    path = tree / STAMP
    if not path.is_file():
        if flavour is None:
            raise PatchToolError(
                f"{tree} was not made by `apply`, so its flavour is not known", "give --flavour"
            )
        return flavour
    stamp = json.loads(path.read_text("utf-8"))
    if flavour is not None and flavour != stamp["flavour"]:
        raise PatchToolError(
            f"{tree} is a {stamp['flavour']} tree", f"leave out --flavour {flavour}"
        )
    late = [other for other in stamp["patches"] if order.index(other) > order.index(name)]
    if late:
        raise PatchToolError(
            f"{tree} holds {late[0]}, which comes after {name}",
            f"make the change in a tree from `apply --through {name}`",
        )
    return stamp["flavour"]


def main() -> None:
    """Runs the command line; an error that the user can act on ends with exit status 1."""
    try:
        app()
    except PatchToolError as error:
        err.print(f"error: {error}", markup=False)
        raise SystemExit(1) from None
