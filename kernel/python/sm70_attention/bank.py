"""Workspaces of the long kernel, shared by everything that may share them.

A *bank* has one growing buffer (a panel) for each (device, stream, context contract). Batches of
any size use the front of the same panel: within a stream, calls run one after another, and the
kernel needs nothing kept between calls.

- Graphs are captured largest batch first, so the panel is allocated once, at the largest batch that
  the deployment captures: a deployment of four requests never holds a panel for sixteen.
- When a call needs more than the panel has, a larger one is allocated and the older one is kept:
  CUDA graphs captured before hold its address.
- Two streams never share a panel: their kernels may run at the same time.
- Warm-up, memory profiling, capture and serving run on different streams, one after another.
  :meth:`WorkspaceBank.hand_over` passes the panels of a stream that is done to the next one, and
  :meth:`WorkspaceBank.release` frees those of which nothing captured remains. So the bank holds
  one set of panels, not one for each stream that ever was.

No torch is imported before the first allocation, and the allocator can be given: the bank's rules
are tested on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .long import BATCH_CAPACITY, long_workspace_bytes

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
    """Who uses a panel. ``stream`` is the stream's handle (an address)."""

    device: Hashable
    stream: int
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
    """Panels by device, stream and context contract. Safe to use from several threads."""

    def __init__(self, allocate: Allocator = _allocate) -> None:
        """``allocate`` makes a buffer; by default a torch tensor."""
        self._allocate = allocate
        self._panels: dict[Key, _Panels] = {}
        self._lock = threading.Lock()

    def get(
        self,
        device: Hashable,
        stream: int,
        contract: Contract,
        requests: int,
        *,
        capturing: bool = False,
    ) -> Any:
        """A buffer for a batch of ``requests`` on ``stream``.

        The same buffer as at the last call unless it is too small. A buffer handed out while
        ``capturing`` is never freed by :meth:`release`: the graph holds its address.

        Raises:
            ValueError: more requests than the kernel takes, or a contract that it does not take.
        """
        if not 1 <= requests <= BATCH_CAPACITY:
            raise ValueError(f"a batch of {requests} requests; expected 1 to {BATCH_CAPACITY}")
        needed = _aligned(contract.bytes_for(requests))
        key = Key(device, stream, contract)
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

    def hand_over(self, device: Hashable, old_stream: int, new_stream: int) -> int:
        """Gives all panels of ``old_stream`` to ``new_stream``; returns their bytes.

        For when work moves from one stream to another for good, as from capture to serving. The
        caller guarantees that the old stream's work is complete, or ordered before the new
        stream's, and that nothing will run on the old stream again, replays of its graphs on the
        new stream excepted.
        """
        if old_stream == new_stream:
            return 0
        moved = 0
        with self._lock:
            for key in [k for k in self._panels if k.device == device and k.stream == old_stream]:
                old = self._panels.pop(key)
                new = self._panels.setdefault(Key(device, new_stream, key.contract), _Panels())
                moved += sum(old.sizes)
                rows = [
                    *zip(old.sizes, old.captured, old.buffers, strict=True),
                    *zip(new.sizes, new.captured, new.buffers, strict=True),
                ]
                rows.sort(key=lambda row: row[0])
                # Of several, only the largest is used from now on; a smaller one stays if a graph
                # holds its address.
                rows = [row for i, row in enumerate(rows) if row[1] or i == len(rows) - 1]
                new.sizes = [row[0] for row in rows]
                new.captured = [row[1] for row in rows]
                new.buffers = [row[2] for row in rows]
        return moved

    def release(self, device: Hashable, stream: int | None = None, *, graphs: bool = False) -> int:
        """Frees panels of ``stream`` (of all streams by default); returns the bytes freed.

        Panels that a graph was captured with stay, unless ``graphs`` says that those graphs are
        gone (as after a profiling capture). The caller guarantees that the stream's work is
        complete or that the allocator is ordered with it, as PyTorch's is on one stream.
        """
        freed = 0
        with self._lock:
            for key in list(self._panels):
                if key.device != device or stream not in (None, key.stream):
                    continue
                panels = self._panels[key]
                keep = [i for i, c in enumerate(panels.captured) if c and not graphs]
                freed += sum(panels.sizes) - sum(panels.sizes[i] for i in keep)
                if keep:
                    panels.buffers = [panels.buffers[i] for i in keep]
                    panels.sizes = [panels.sizes[i] for i in keep]
                    panels.captured = [True] * len(keep)
                else:
                    del self._panels[key]
        return freed

    def bytes_held(self, device: Hashable | None = None, stream: int | None = None) -> int:
        """Bytes of all panels, of one device or stream where given."""
        with self._lock:
            return sum(
                sum(panels.sizes)
                for key, panels in self._panels.items()
                if device in (None, key.device) and stream in (None, key.stream)
            )

    def report(self) -> list[dict[str, Any]]:
        """One entry a key: device, stream, kv_heads, max_seq_len, bytes, panels."""
        with self._lock:
            return [
                {
                    "device": str(key.device),
                    "stream": key.stream,
                    "kv_heads": key.contract.kv_heads,
                    "max_seq_len": key.contract.max_seq_len,
                    "bytes": sum(panels.sizes),
                    "panels": len(panels.sizes),
                }
                for key, panels in self._panels.items()
            ]
