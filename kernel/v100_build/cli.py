"""The command line of the build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from v100_patches import PatchToolError

from . import cubins, manifest, release, wheels
from . import serve as serving
from .errors import BuildError
from .paths import DIST, REPO

app = typer.Typer(
    help="Builds and verifies releases of vllm-v100.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

DEFAULT_RELEASE = DIST / release.release_name(validation=False)

Validation = Annotated[
    bool, typer.Option("--validation", help="Also compile for sm_80 and sm_90 GPUs.")
]


@contextmanager
def _told() -> Iterator[None]:
    """Prints an operator's error without a traceback, and exits with 1."""
    try:
        yield
    except (BuildError, PatchToolError) as error:
        err.print(f"[bold red]error:[/] {error}", markup=True)
        raise typer.Exit(1) from None


def _say(text: str) -> None:
    out.print(f"  {text}", markup=False)


@app.command()
def build(validation: Validation = False) -> None:
    """Build a release into dist/; seconds when nothing changed."""
    with _told():
        folder = release.build(validation, say=_say)
        _print_resources(manifest.read(folder))
        out.print(f"release: {folder.relative_to(REPO)}", markup=False)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A release folder.")] = DEFAULT_RELEASE,
    files_only: Annotated[
        bool, typer.Option(help="Check the files, not that this checkout still matches.")
    ] = False,
) -> None:
    """Re-hash a release; names what differs, and exits with 1 when anything does."""
    with _told():
        have = manifest.read(folder)
        differences = manifest.verify_files(folder, have)
        if not files_only:
            differences += manifest.verify_inputs(have, release.current_inputs())
        for difference in differences:
            err.print(str(difference), markup=False)
        if differences:
            err.print(f"{folder.name}: {len(differences)} differences", markup=False)
            raise typer.Exit(1)
        out.print(
            f"{folder.name}: {len(have['files'])} files as built"
            + ("" if files_only else ", inputs as in this checkout"),
            markup=False,
        )


@app.command()
def fetch() -> None:
    """Download every pinned wheel into the cache and check its hash."""
    with _told():
        for name, pin in wheels.pins().items():
            wheels.fetch(name, _say)
            out.print(f"{pin.file}  {pin.sha256}", markup=False)


@app.command()
def resources(validation: Validation = False) -> None:
    """Compile the kernels alone and print what each takes on its architecture."""
    with _told():
        built = cubins.compile_all(release.archs(validation), _say)
        _print_resources(
            {
                "kernels": {
                    c.file_name: {"resources": {k: vars(r) for k, r in c.resources.items()}}
                    for c in built
                }
            }
        )


@app.command("serve-python")
def serve_python(
    tree: Annotated[str, typer.Argument(help="stock or patched")] = "patched",
) -> None:
    """Print the interpreter and PYTHONPATH that serve a tree on CPU, making them when missing."""
    with _told():
        env = serving.serve_env(tree, lambda text: err.print(f"  {text}", markup=False))
        sys.stdout.write(f"{env.python}\n{env.site}\n")


def _print_resources(have: dict) -> None:
    """A row for each sm_70 kernel; what other architectures take is in the manifest."""
    table = Table(title="sm_70 kernels: per thread, and bytes")
    table.add_column("cubin / kernel", no_wrap=True)
    for name in ("registers", "shared", "stack", "spills"):
        table.add_column(name, justify="right", no_wrap=True)
    for file, entry in sorted(have["kernels"].items()):
        if not file.endswith(f".sm_{cubins.SM70}.cubin"):
            continue
        for kernel, r in sorted(entry["resources"].items()):
            table.add_row(
                f"{file.split('.')[0]} / {kernel}", str(r["registers"]), str(r["shared"]),
                str(r["stack"]), str(r["spill_stores"] + r["spill_loads"]),
            )  # fmt: skip
    out.print(table)
