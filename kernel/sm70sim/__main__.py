"""Command line: python -m sm70sim {time,validate,model} --help."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from v100_build.errors import BuildError

from . import Device, Module, SimError, cases, measure, report
from .model import benchmark, validation


def _argument(dev: Device, text: str, rng: np.random.Generator):
    """A kernel argument from its text on the command line."""
    kind, _, value = text.partition(":")
    try:
        return _argument_of(dev, kind, value, rng)
    except (ValueError, OverflowError) as error:
        raise SimError(f"argument not understood: {text} ({error})") from None


def _argument_of(dev: Device, kind: str, value: str, rng: np.random.Generator):
    if kind == "file":
        return dev.put(np.fromfile(value, np.uint8))
    if kind in ("i32", "i64"):
        return (np.int32 if kind == "i32" else np.int64)(int(value, 0))
    if kind == "f32":
        return np.float32(value)
    if kind == "buf":
        size, _, fill = value.partition(":")
        n = int(size, 0)
        fills = {
            "": lambda: np.zeros(n, np.uint8),
            "rand": lambda: rng.integers(0, 256, n, dtype=np.uint8),
            "f16": lambda: rng.standard_normal(n // 2).astype(np.float16),
            "f32": lambda: rng.standard_normal(n // 4).astype(np.float32),
            "i32": lambda: rng.integers(0, 1 << 16, n // 4).astype(np.int32),
        }
        if fill in fills:
            return dev.put(fills[fill]())
    raise ValueError("there are buf:BYTES[:rand|f16|f32|i32], file:PATH, i32:V, i64:V, f32:V")


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise SimError(f"--set {text}: expected PARAMETER=NUMBER, like l2_latency=160") from None


def _time(o: argparse.Namespace) -> int:
    dev = Device(o.memory << 20)
    rng = np.random.default_rng(0)
    args = [_argument(dev, a, rng) for a in o.arg]
    changes = dict(_change(text) for text in o.set)
    t = measure(
        Module(o.cubin, dev), o.kernel, o.grid, o.block, args, o.smem, range=True, **changes
    )
    print(report(t, o.top))
    return 0


def _validate(o: argparse.Namespace) -> int:
    chosen = [c for c in validation.CHECKS if o.only in c.name]
    if not chosen:
        raise SimError(f"no check has {o.only!r} in its name")
    outcomes = validation.validate(chosen)
    print(validation.markdown(outcomes))
    return int(any(abs(x.deviation) > 0.1 for x in outcomes))


def _model(o: argparse.Namespace) -> int:
    adapters = cases.adapters()
    names = o.op or list(adapters)
    if unknown := set(names) - set(adapters):
        raise SimError(f"no case {', '.join(unknown)}: there are {', '.join(adapters)}")
    o.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(benchmark.HEADER + "\n" + "|---" * (benchmark.HEADER.count("|") - 1) + "|")
    for name in names:
        for shape in benchmark.shapes_of(adapters[name]):
            if o.shape and not any(s in str(shape) for s in o.shape):
                continue
            with tempfile.TemporaryDirectory(prefix="sm70sim-") as folder:
                row = benchmark.measure_shape(
                    adapters[name], shape, Path(folder), ("value",) if o.quick else benchmark.SETS
                )
            rows.append(row)
            print(benchmark.markdown_row(row), flush=True)
            if o.verbose:
                for launch, t in row.launches:
                    print(f"<!-- {launch.kernel}\n{report(t, o.verbose)}\n-->", flush=True)
    if not rows:
        raise SimError("no shape matches")
    benchmark.write_json(rows, o.out / "v100-model.json")
    benchmark.plot(rows, o.out / "v100-model.png")
    print(f"\nwritten: {o.out / 'v100-model.json'}, {o.out / 'v100-model.png'}", file=sys.stderr)
    return 0


def _triple(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sm70sim", description="Time sm_70 code with no V100.")
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("time", help="emulate and time one launch of a cubin")
    p.add_argument("cubin")
    p.add_argument("kernel")
    p.add_argument("--grid", type=_triple, default=(1,))
    p.add_argument("--block", type=_triple, default=(32,))
    p.add_argument("--smem", type=int, default=0, help="dynamic shared memory, bytes")
    p.add_argument(
        "--arg",
        action="append",
        default=[],
        help="in order: buf:BYTES[:rand|f16|f32|i32], file:PATH, i32:V, i64:V, f32:V",
    )
    p.add_argument("--memory", type=int, default=2048, help="simulated memory, MiB")
    p.add_argument("--set", action="append", default=[], help="parameter=value of the model")
    p.add_argument("--top", type=int, default=25, help="instructions that wait most")
    p.set_defaults(run=_time)
    p = commands.add_parser("validate", help="micro-kernels against published V100 figures")
    p.add_argument("--only", default="", help="checks whose name contains this")
    p.set_defaults(run=_validate)
    p = commands.add_parser("model", help="the benchmark shapes: table, JSON and plot")
    p.add_argument("--op", action="append", help="case (all by default)")
    p.add_argument("--shape", action="append", help='shapes that contain this: "32,768 x 4"')
    p.add_argument("--quick", action="store_true", help="without the low and high parameters")
    p.add_argument("--verbose", type=int, default=0, metavar="N", help="N waiting instructions")
    p.add_argument("--out", type=Path, default=Path("results/v100-model"))
    p.set_defaults(run=_model)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except (SimError, BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
