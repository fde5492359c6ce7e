"""The parameters of the cycle model: v100.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from ..errors import SimError

PATH = Path(__file__).with_name("v100.toml")
# In the order of enum Pipe in machine/trace.h.
PIPES = [
    "ALU",
    "FMA",
    "FP16",
    "FP64",
    "XU",
    "TENSOR",
    "CTL",
    "SHARED",
    "LOAD",
    "STORE",
    "ATOMIC",
    "SHUFFLE",
    "CONSTANT",
    "MISC",
    "BARRIER",
    "FENCE",
    "NONE",
]  # Short names that measure() takes, for the clocks that one changes most.
ALIASES = {"core": "machine.core_mhz", "mem": "machine.memory_mhz", "nsm": "machine.sms"}


@dataclass(frozen=True)
class Parameter:
    """A number of the model, its plausible ends, unit and source."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    source: str


@functools.cache
def table() -> dict[str, Parameter]:
    """Name ("l2.latency", "pipes.XU.interval") -> parameter."""
    out: dict[str, Parameter] = {}

    def add(prefix: str, entries: dict) -> None:
        for key, entry in entries.items():
            name = f"{prefix}.{key}"
            if not isinstance(entry, dict):
                continue
            if "value" not in entry:
                add(name, entry)
                continue
            value = float(entry["value"])
            low, high = float(entry.get("low", value)), float(entry.get("high", value))
            out[name] = Parameter(name, value, low, high, entry["unit"], entry["source"])

    for section, entries in tomllib.loads(PATH.read_text()).items():
        add(section, entries)
    return out


@functools.cache
def pipe_of() -> dict[str, str]:
    """Opcode -> pipe."""
    pipes = tomllib.loads(PATH.read_text())["pipes"]
    return {op: pipe for pipe, entry in pipes.items() for op in entry["opcodes"].split()}


def values(which: str = "value", **changes: float) -> dict[str, float]:
    """Name -> number: the set "value", "low" or "high", with changes.

    changes: by name (dots or underscores between section and key) or alias.
    """
    out = {name: getattr(p, which) for name, p in table().items()}
    by_identifier = {name.replace(".", "_"): name for name in out}
    for key, number in changes.items():
        name = ALIASES.get(key) or by_identifier.get(key.replace(".", "_"))
        if name is None:
            raise SimError(f"the model has no parameter {key}; it has {', '.join(out)}")
        out[name] = float(number)
    return out
