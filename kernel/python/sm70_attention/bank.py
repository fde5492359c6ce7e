"""Workspaces of the long kernel, shared by everything that may share them.

A *bank* has one growing buffer (a panel) for each (device, lane, context contract). A lane is a
sequence of calls that run one after another: batches of any size use the front of the same panel,
because the kernel needs nothing kept between calls.

- Graphs are captured largest batch first, so the panel is allocated once, at the largest batch that
  the deployment captures: a deployment of four requests never holds a panel for sixteen.
- When a call needs more than the panel has, a larger one is allocated and the older one is kept:
  CUDA graphs captured before hold its address.
- Two lanes never share a panel: their kernels may run at the same time.
- A lane is not a stream. Warm-up, memory profiling, capture and serving run on streams of their
  own, strictly one after another, and a replay runs on the serving stream: they are one lane, so
  the bank holds one set of panels and not one for each stream that ever was. What does overlap
  (vLLM's microbatches) gets a lane each.

No torch is imported before the first allocation, and the allocator can be given: the bank's rules
are tested on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .dispatch import LONG_MAX_BATCH
from .long import long_workspace_bytes

Allocator = Callable[[int, Any], Any]
"""(bytes, device) -> a contiguous uint8 buffer on the device, at least 16-byte aligned."""


@dataclass(frozen=True)
class Contract:
    """What a panel serves: KV heads of the rank, longest context in tokens."""

    kv_heads: int
    max_seq_len: int

    def bytes_for(self, requests: int) -> int:
        """Bytes that a batch of ``requests`` needs."""
        return long_workspace_bytes(requests, self.kv_heads, self.max_seq_len)


@dataclass(frozen=True)
class Key:
    """Who uses a panel."""

    device: Hashable
    lane: int
    contract: Contract


@dataclass
class _Panels:
    buffers: list[Any] = field(default_factory=list)  # oldest first; the last one is in use
    sizes: list[int] = field(default_factory=list)  # bytes of each
    captured: list[bool] = field(default_factory=list)  # a graph holds its address


def _allocate(size: int, device: Any) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)


def _aligned(size: int) -> int:
    return -(-size // 512) * 512


class WorkspaceBank:
    """Panels by device, lane and context contract. Safe to use from several threads."""

    def __init__(self, allocate: Allocator = _allocate) -> None:
        """``allocate`` makes a buffer; by default a torch tensor."""
        self._allocate = allocate
        self._panels: dict[Key, _Panels] = {}
        self._lock = threading.Lock()

    def get(
        self,
        device: Hashable,
        lane: int,
        contract: Contract,
        requests: int,
        *,
        capturing: bool = False,
    ) -> Any:
        """A buffer for a batch of ``requests`` in ``lane``.

        The same buffer as at the last call unless it is too small. A buffer handed out while
        ``capturing`` is kept for ever: the graph holds its address.

        Raises:
            ValueError: more requests than the kernel takes, or a contract that it does not take.
        """
        if not 1 <= requests <= LONG_MAX_BATCH:
            raise ValueError(f"a batch of {requests} requests; expected 1 to {LONG_MAX_BATCH}")
        needed = _aligned(contract.bytes_for(requests))
        key = Key(device, lane, contract)
        with self._lock:
            panels = self._panels.setdefault(key, _Panels())
            if not panels.sizes or panels.sizes[-1] < needed:
                # The older panel stays in the list while a graph may point at it.
                if panels.sizes and not panels.captured[-1]:
                    self._drop_last(panels)
                panels.buffers.append(self._allocate(needed, device))
                panels.sizes.append(needed)
                panels.captured.append(False)
            if capturing:
                panels.captured[-1] = True
            return panels.buffers[-1]

    @staticmethod
    def _drop_last(panels: _Panels) -> None:
        panels.buffers.pop()
        panels.sizes.pop()
        panels.captured.pop()

    def bytes_held(self) -> int:
        """Bytes of all panels."""
        with self._lock:
            return sum(sum(panels.sizes) for panels in self._panels.values())
