"""What several test folders share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def requirements_python() -> Callable[[], Path]:
    """Makes, once, the interpreter that holds vLLM's CPU requirements (PyTorch among them)."""
    from v100_build.serve import requirements_env

    return requirements_env
