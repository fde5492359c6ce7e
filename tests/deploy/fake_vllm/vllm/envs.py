"""Where vLLM 0.19.1 looks for environment variables; v100-serve puts the API key here."""

import os
from collections.abc import Callable
from typing import Any

environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_API_KEY": lambda: os.environ.get("VLLM_API_KEY"),
}


def __getattr__(name: str) -> Any:
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(name)
