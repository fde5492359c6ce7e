"""What the cycle model times: one adapter module per operation.

An adapter ``cases/<op>.py`` defines

    NAME: str                                 # in the table, "long" for example
    def prepare(shape: Shape) -> Work: ...    # inputs in simulated memory, and the launches
    SHAPES: tuple[Shape, ...]                 # optional; BENCHMARK_SHAPES otherwise
    LAYERS: int                               # optional; 16 otherwise

It takes the cubin that the release ships from v100_build.cubins and repeats what the C++
launcher does: grid, block, shared memory, parameters.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from ..module import Module


@dataclass(frozen=True)
class Shape:
    """A batch: context length of each request, page size in tokens, query tokens a request."""

    lengths: tuple[int, ...]
    page: int = 1648
    query: int = 8
    q_heads: int = 6
    kv_heads: int = 1
    head_dim: int = 256
    kv_bytes: int = 1

    @classmethod
    def uniform(cls, length: int, requests: int, **more) -> Shape:
        """All requests of one length."""
        return cls((length,) * requests, **more)

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1
        text = f"{self.lengths[0]:,} x {len(self.lengths)}" if same else f"ragged {self.tokens:,}"
        return f"{text}, {self.query} query tokens"

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return sum(self.lengths)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that one layer must read."""
        return self.tokens * self.kv_heads * self.head_dim * 2 * self.kv_bytes

    @property
    def fma(self) -> int:
        """Multiply-adds of both products of one layer (masked positions counted)."""
        return self.tokens * self.query * self.q_heads * self.head_dim * 2


BENCHMARK_SHAPES = tuple(
    Shape.uniform(length, requests)
    for length, requests in ((32768, 1), (32768, 4), (32768, 8), (131072, 4), (131072, 8))
)


@dataclass
class Launch:
    """One kernel launch.  once_per_step: runs once for all layers, and is reported apart."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: object
    smem: int = 0
    once_per_step: bool = False


@dataclass
class Work:
    """What prepare() returns: the launches in order (L2 is carried from one to the next), and
    check(), which returns the largest error over the largest value against the oracle and
    raises if it is too large.  cubins: modules by kernel, where there are several."""

    module: Module
    launches: list[Launch]
    check: Callable[[], float] | None = None
    modules: dict[str, Module] = field(default_factory=dict)


def adapters() -> dict[str, ModuleType]:
    """NAME -> adapter module, of all modules in this folder."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "prepare"):
            found[module.NAME] = module
    return found
