"""Which configurations the chunked GDN kernels have on a GPU, and what they take on sm_70.

    python gdn_configs.py OPS CAPABILITY list
    python gdn_configs.py OPS CAPABILITY compile CUOBJDUMP

OPS is vllm/model_executor/layers/fla/ops of some tree, CAPABILITY like 7.0. Prints JSON: the
autotuner's configurations by kernel, or for each of them its registers and its stack in bytes, from
compiling for sm_70 with TP4's shapes of Qwen3.5-27B. Needs PyTorch and Triton on the path, no GPU:
the reported device is the only thing that is made up.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import types

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice

HALF, FLOAT, INT = "*fp16", "*fp32", "*i32"
HEADS = {"H": 12, "Hg": 4}  # value and key heads of a rank
KERNELS = {
    "chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (
        {
            **dict.fromkeys(("k", "v", "w", "v_new", "h"), HALF),
            **dict.fromkeys(("g", "h0", "ht"), FLOAT),
            **dict.fromkeys(("cu_seqlens", "chunk_offsets"), INT),
            "T": "i32",
        },
        {
            **HEADS, "K": 128, "V": 128, "BT": 64, "gk": None, "USE_G": True, "USE_GK": False,
            "USE_INITIAL_STATE": True, "STORE_FINAL_STATE": True, "SAVE_NEW_VALUE": True,
            "IS_VARLEN": True,
        },
    ),
    "chunk_o.chunk_fwd_kernel_o": (
        {
            **dict.fromkeys(("q", "k", "v", "h", "o"), HALF),
            "g": FLOAT,
            **dict.fromkeys(("cu_seqlens", "chunk_indices"), INT),
            "scale": "fp32",
            "T": "i32",
        },
        {**HEADS, "K": 128, "V": 128, "BT": 64, "USE_G": True, "IS_VARLEN": True},
    ),
    "chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd_kernel": (
        {
            "k": HALF,
            **dict.fromkeys(("beta", "g", "A"), FLOAT),
            **dict.fromkeys(("cu_seqlens", "chunk_indices"), INT),
            "T": "i32",
        },
        {**HEADS, "K": 128, "BT": 64, "USE_G": True, "IS_VARLEN": True},
    ),
    "wy_fast.recompute_w_u_fwd_kernel": (
        {
            **dict.fromkeys(("k", "v", "w", "u", "A"), HALF),
            **dict.fromkeys(("beta", "g"), FLOAT),
            **dict.fromkeys(("cu_seqlens", "chunk_indices"), INT),
            "T": "i32",
        },
        {**HEADS, "K": 128, "V": 128, "BT": 64, "BK": 64, "BV": 64, "IS_VARLEN": True},
    ),
    "solve_tril.merge_16x16_to_64x64_inverse_kernel": (
        {"A": FLOAT, "Ai": HALF, **dict.fromkeys(("cu_seqlens", "chunk_indices"), INT), "T": "i32"},
        {"H": 12, "BT": 64, "USE_TMA": False, "IS_VARLEN": True, "DOT_PRECISION": "ieee"},
    ),
}  # fmt: skip


def pretend(capability: tuple[int, int]) -> None:
    """Reports a CUDA GPU of this capability, and gives the kernels' files what they import."""
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    active = types.SimpleNamespace(get_current_target=lambda: target)
    triton.runtime.driver = types.SimpleNamespace(active=active)
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_name = lambda *_: "a GPU"
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.triton_utils")}
    modules["vllm"].__path__ = []
    vars(modules["vllm.triton_utils"]).update(tl=tl, triton=triton, tldevice=libdevice)
    platform = types.SimpleNamespace(is_cuda_alike=lambda: True)
    modules["vllm.platforms"] = types.SimpleNamespace(current_platform=platform)
    sys.modules.update(modules)


def layers(kernel) -> list:
    """The decorators of a kernel, outermost first, and the kernel function."""
    out = [kernel]
    while hasattr(out[-1], "fn") and not isinstance(out[-1], triton.runtime.JITFunction):
        out.append(out[-1].fn)
    return out


def resources(kernel, config, pointers: dict, constants: dict, cuobjdump: str) -> dict[str, int]:
    """Registers and stack bytes of a thread on sm_70."""
    function = layers(kernel)[-1]
    fixed = {**constants, **config.kwargs}
    signature = {name: pointers.get(name, "constexpr") for name in function.arg_names}
    at = function.arg_names.index
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(at(name),): value for name, value in fixed.items()},
        attrs={
            (at(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.startswith("*")
        },
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", 70, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return {"registers": registers, "stack": stack}


def main(ops: str, capability: str, verb: str, cuobjdump: str = "") -> None:
    major, minor = map(int, capability.split("."))
    pretend((major, minor))
    package = types.ModuleType("ops")
    package.__path__ = [ops]
    sys.modules["ops"] = package
    out = {}
    for name, (pointers, constants) in KERNELS.items():
        file, kernel_name = name.split(".")
        kernel = getattr(importlib.import_module(f"ops.{file}"), kernel_name)
        configs = next(layer.configs for layer in layers(kernel) if hasattr(layer, "configs"))
        out[name] = {}
        for config in configs:
            out[name][str(config)] = (
                resources(kernel, config, pointers, constants, cuobjdump)
                if verb == "compile"
                else {}
            )
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
