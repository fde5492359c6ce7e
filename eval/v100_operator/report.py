"""Tables and a plot of what `bench` wrote, from the files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from .evidence import SCHEMA

Bench = Mapping


def read(path: Path) -> Bench:
    """The content of a bench file.

    Raises:
        ValueError: the file is no bench evidence, with what it is instead.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    kind = (content.get("schema"), content.get("kind")) if isinstance(content, dict) else None
    if kind != (SCHEMA, "bench"):
        raise ValueError(f"{path.name} is {kind}, not what `v100_operator bench` writes")
    return content


def _row(bench: Bench, shape: Mapping) -> list[str]:
    ms = median(shape["samples_ms"])
    rate = shape["kv_bytes"] * bench["working_sets"] / ms / 1e6
    row = [shape["shape"], f"{ms:.3f}", f"{rate:.0f}"]
    control = shape["control_samples_ms"]
    row += [f"{median(control):.3f}", f"{median(control) / ms:.2f}"] if control else ["", ""]
    difference = shape.get("output_difference")
    return [*row, "not compared" if difference is None else f"{difference:.1e}"]


def markdown(bench: Bench) -> str:
    """One table: medians of the raw samples, milliseconds of all working sets."""
    control = next((s["control"] for s in bench["shapes"] if s["control"]), "control")
    op, control = bench["op"], f"{control}, ms"
    head = ["shape", f"{op}, ms", "GB/s of KV", control, "ratio", "outputs differ"]
    rows = [head, ["---", *["---:"] * 5], *(_row(bench, shape) for shape in bench["shapes"])]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    gpu, library = bench["gpu"], bench["library"]
    return (
        f"### {op} on {gpu['name']}, {bench['working_sets']} KV working sets\n\n{table}\n\n"
        f"`{bench['command']}`; medians of {bench['pairs']} samples of {bench['replays']} replays; "
        f"library {library['sha256'][:16]}, sources {library['source_sha256'][:16]}.\n"
    )


def plot(benches: Sequence[Bench], path: Path) -> None:
    """KV bytes a second of every shape, all samples shown, the op beside its control (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(len(bench["shapes"]) for bench in benches)
    figure, axes = pyplot.subplots(
        len(benches), 1, figsize=(2 + 0.5 * longest, 4 * len(benches)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axis, bench in zip(axes[:, 0], benches, strict=True):
        for name, marker in (("op", "o"), ("control", "x")):
            key = "samples_ms" if name == "op" else "control_samples_ms"
            points = [
                (at, shape["kv_bytes"] * bench["working_sets"] / ms / 1e6)
                for at, shape in enumerate(bench["shapes"])
                for ms in shape[key]
            ]
            if points:
                axis.scatter(*zip(*points, strict=True), marker=marker, s=18, label=name)
        names = [shape["shape"] for shape in bench["shapes"]]
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("GB/s of KV")
        axis.set_title(f"{bench['op']} on {bench['gpu']['name']}", fontsize=9)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(files: Sequence[Path], folder: Path) -> str:
    """Writes bench.md and bench.png into the folder; returns the Markdown.

    Raises:
        ValueError: one of the files is no bench evidence.
    """
    benches = [read(path) for path in files]
    text = "\n".join(markdown(bench) for bench in benches)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.md").write_text(text)
    plot(benches, folder / "bench.png")
    return text
