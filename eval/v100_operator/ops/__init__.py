"""The ops that can be checked and timed, by name: each is one small module of this package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..case import Batch, Case

NAMES = ("paged", "long", "prefill")


@dataclass(frozen=True)
class BenchShape:
    """A timed shape: its name and one layer's case."""

    name: str
    case: Case


@dataclass(frozen=True)
class Op:
    """One op.

    call(batch, workspace) runs it; workspace_bytes(case) is what it needs, 0 for none. limits are
    the largest error over the largest value of a request and head, and the relative L2 error.
    control, where there is one, is what bench alternates with: (name, function like call);
    control_error is how far their outputs may differ, over the largest value (None: the control
    writes no output that could be compared).
    sequences are checks that no single batch can make: (name, function that returns failures).
    sources are globs below kernel/ whose change makes the op's evidence stale.
    """

    name: str
    sources: tuple[str, ...]
    cases: Sequence[Case]
    bench: Sequence[BenchShape]
    call: Callable[[Batch, torch.Tensor], object]
    workspace_bytes: Callable[[Case], int]
    max_error: float = 2e-3
    l2_error: float = 1e-3
    control: tuple[str, Callable[[Batch, torch.Tensor], object]] | None = None
    control_error: float | None = None
    batch_invariant: bool = True
    sequences: Sequence[tuple[str, Callable[[], list[str]]]] = ()


def get(name: str) -> Op:
    """The op of that name; ValueError lists the names, or says that it has no module yet."""
    if name not in NAMES:
        raise ValueError(f"there is no op {name!r}; expected one of {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise ValueError(f"op {name!r} has no module in {__name__}") from None
    return module.OP


def sources(name: str) -> tuple[str, ...]:
    """Globs of an op's sources without importing PyTorch."""
    return SOURCES[name]


_SHARED = ("src/common/*", "csrc/contract.h")
SOURCES = {
    "paged": (*_SHARED, "src/paged*", "csrc/paged.cpp"),
    "long": (*_SHARED, "src/long*", "csrc/long.cpp"),
    "prefill": (*_SHARED, "src/prefill*", "src/prefill/*", "csrc/prefill.cpp"),
}
