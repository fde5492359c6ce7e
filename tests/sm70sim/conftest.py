"""Fixtures: CUDA sources to modules on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest
from sm70sim import Device, Module
from sm70sim.model.nvrtc import compile_cubin


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture
def load():
    """load(source, megabytes, options): a Module that reports uninitialised reads."""

    def build(source: str, megabytes: int = 16, options: tuple[str, ...] = ()) -> Module:
        cubin = compile_cubin(source, ("--device-int128", *options))
        return Module(cubin, Device(megabytes << 20, track_init=True))

    return build
