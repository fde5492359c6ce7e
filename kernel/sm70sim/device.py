"""Simulated global memory."""

from __future__ import annotations

import mmap

import numpy as np

from .errors import SimError

BASE_ADDRESS = 0x7F0000000000


class DevArray:
    """A buffer in simulated memory.

    ``addr`` is its device address; ``np`` the same bytes as a numpy array, in place.
    """

    def __init__(self, device: Device, addr: int, array: np.ndarray):
        self.device, self.addr, self.np = device, addr, array

    def __int__(self) -> int:
        return self.addr

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.np.nbytes

    def mark_initialised(self) -> DevArray:
        """Count all bytes as written (after filling ``np`` of an ``empty`` buffer)."""
        self.device._mark(self.addr, self.np.nbytes, True)
        return self


class Device:
    """One block of simulated global memory; allocations are 512-byte aligned.

    size: bytes.  track_init: kernels that read a byte of global, shared or local memory that
    nobody wrote fail with SimError; ``put`` and ``zeros`` write, ``empty`` does not.
    """

    def __init__(self, size: int = 1 << 30, track_init: bool = False):
        self.size, self.base = size, BASE_ADDRESS
        self._map = mmap.mmap(-1, size)
        self.mem = np.frombuffer(self._map, dtype=np.uint8)
        self.init: np.ndarray | None = None
        if track_init:
            self._init_map = mmap.mmap(-1, size)
            self.init = np.frombuffer(self._init_map, dtype=np.uint8)
        self._top = 512

    def _mark(self, addr: int, nbytes: int, value: bool) -> None:
        if self.init is not None:
            self.init[addr - self.base : addr - self.base + nbytes] = value

    def alloc(self, nbytes: int, align: int = 512) -> int:
        """Device address of ``nbytes`` fresh bytes."""
        offset = (self._top + align - 1) // align * align
        if offset + nbytes > self.size:
            raise SimError(
                f"out of simulated memory: {nbytes} bytes asked, {self.size - offset} of "
                f"{self.size} left; give Device a larger size"
            )
        self._top = offset + nbytes
        return self.base + offset

    def view(self, addr: int, shape, dtype) -> np.ndarray:
        """The bytes at a device address as an array."""
        shape = (shape,) if np.isscalar(shape) else tuple(shape)
        offset = addr - self.base
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.mem[offset : offset + nbytes].view(dtype).reshape(shape)

    def empty(self, shape, dtype, align: int = 512) -> DevArray:
        """A buffer whose bytes count as uninitialised."""
        shape = (shape,) if np.isscalar(shape) else tuple(shape)
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        addr = self.alloc(max(nbytes, 1), align)
        return DevArray(self, addr, self.view(addr, shape, dtype))

    def zeros(self, shape, dtype, align: int = 512) -> DevArray:
        """A buffer of zeros."""
        out = self.empty(shape, dtype, align)
        out.np[...] = 0
        return out.mark_initialised()

    def put(self, array, align: int = 512) -> DevArray:
        """A copy of a numpy array."""
        array = np.ascontiguousarray(array)
        out = self.empty(array.shape, array.dtype, align)
        out.np[...] = array
        return out.mark_initialised()
