"""Lets vLLM's Triton kernels run on a machine without a GPU, in Triton's own interpreter.

Import this before vLLM, with TRITON_INTERPRET=1. Three things of Triton 3.6 stand in the way:

* `triton.autotune` times configurations on a device: here the first one is taken.
* A grid function may put tensors into its META argument, as causal_conv1d does; the interpreter
  expects pointers there.
* A builtin with a second name (`exp = tl.exp` in a kernel's module) escapes the interpreter, which
  replaces builtins in `triton.language` only.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1"


class FirstConfiguration:
    """An autotuned kernel that does not tune."""

    def __init__(self, kernel, configs) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names
        self.settings = dict(configs[0].kwargs)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, **kwargs):
        return self.kernel.run(*args, **(self.settings | kwargs))


def autotune(configs, key=None, **_):
    return lambda kernel: FirstConfiguration(kernel, configs)


class GridExecutor(interpreter.GridExecutor):
    """Takes tensors that a grid function left in META."""

    def __init__(self, fn, arg_names, grid, *rest) -> None:
        super().__init__(fn, arg_names, grid, *rest)
        if not callable(grid):
            return

        def with_pointers(meta):
            size = grid(meta)
            for name, value in meta.items():
                if hasattr(value, "data_ptr") and name not in self.constexprs:
                    meta[name] = interpreter._implicit_cvt(value)
            return size

        self.grid = with_pointers


def patch_lang(fn, original=interpreter._patch_lang):
    """Redirects second names of builtins through `triton.language`, then patches that."""
    for name, value in list(fn.__globals__.items()):
        builtin = getattr(value, "__name__", "")
        if getattr(value, "__triton_builtin__", False) and hasattr(tl, builtin):
            fn.__globals__[name] = lambda *a, _name=builtin, **k: getattr(tl, _name)(*a, **k)
    return original(fn)


triton.autotune = autotune
interpreter.GridExecutor = GridExecutor
interpreter._patch_lang = patch_lang
