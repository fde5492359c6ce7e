"""Compares the chunked GDN prefill kernels, with their SM70 configurations, to their definition.

    python -m v100_operator.gdn --out gdn.json

Needs a CUDA GPU and the patched vLLM on the path. The configurations are correct or not on any
GPU: each is run end to end (all kernels of the chunk pipeline pinned to theirs) over ragged
sequences with a state, and must be as close to an FP64 recurrence, token by token, as the stock
configurations are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
import triton

OPS = "vllm.model_executor.layers.fla.ops"
KERNELS = {
    "chunk_delta_h": "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_o": "chunk_fwd_kernel_o",
    "chunk_scaled_dot_kkt": "chunk_scaled_dot_kkt_fwd_kernel",
    "wy_fast": "recompute_w_u_fwd_kernel",
    "solve_tril": "merge_16x16_to_64x64_inverse_kernel",
}
LENGTHS = (1, 63, 64, 65, 8, 700)  # tokens of the sequences: chunk ends of 64 and near them
HEADS, KEY_HEADS, DIM = 12, 4, 128  # Qwen3.5-27B at TP4
SLACK = 1.25  # of the stock configurations' error: sums are taken in another order


def autotuner(name: str):
    """The autotuner in a kernel's chain of decorators, and its module's SM70_CONFIGS."""
    module = importlib.import_module(f"{OPS}.{name}")
    layer = getattr(module, KERNELS[name])
    while not hasattr(layer, "configs"):
        layer = layer.fn
    if not hasattr(module, "SM70_CONFIGS"):
        raise SystemExit(
            f"error: {OPS}.{name} has no SM70_CONFIGS; put the patched vLLM on the path"
        )
    return layer, module.SM70_CONFIGS


def inputs(seed: int) -> dict[str, torch.Tensor]:
    """q, k, v float16, gates float32, a state for each sequence."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    tokens = sum(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    unit = torch.nn.functional.normalize
    return {
        "q": unit(normal(1, tokens, KEY_HEADS, DIM), dim=-1).half(),
        "k": unit(normal(1, tokens, KEY_HEADS, DIM), dim=-1).half(),
        "v": normal(1, tokens, HEADS, DIM).half(),
        "g": torch.nn.functional.logsigmoid(normal(1, tokens, HEADS) + 2),
        "beta": normal(1, tokens, HEADS).sigmoid(),
        "initial_state": normal(len(LENGTHS), HEADS, DIM, DIM) * 0.1,
        "cu_seqlens": ends,
    }


def recurrence(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, heads, D] and final states [sequences, heads, V, K] in FP64."""
    repeat = HEADS // KEY_HEADS
    q, k = (x[n][0].double().repeat_interleave(repeat, 1) for n in ("q", "k"))
    v, g, beta = (x[n][0].double() for n in ("v", "g", "beta"))
    out, states, at = torch.empty_like(v), [], 0
    for n, length in enumerate(LENGTHS):
        state = x["initial_state"][n].double()  # [heads, V, K]
        for t in range(at, at + length):
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", error * beta[t][:, None], k[t])
            out[t] = torch.einsum("hvk,hk->hv", state, q[t]) * DIM**-0.5
        states.append(state)
        at += length
    return out, torch.stack(states)


def pipeline(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through vLLM's chunk kernels as they are configured now."""
    chunk = importlib.import_module(f"{OPS}.chunk")
    out, state = chunk.chunk_gated_delta_rule(**x, output_final_state=True)
    return out[0].double(), state.double()


def errors(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> list[float]:
    """Relative L2 errors of output and state; a NaN is a NaN."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def main() -> int:
    """Exit status 0 when every configuration is as close as the stock ones."""
    parser = argparse.ArgumentParser(prog="v100_operator.gdn", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    # Some stock configurations ask Triton for scratch memory, which a server sets up for itself.
    triton.set_allocator(
        lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    tuners = {name: autotuner(name) for name in KERNELS}
    x = inputs(7)
    want = recurrence(x)
    rows = [{"configs": "stock, as autotuned here", "errors": errors(pipeline(x), want)}]
    limit = [e * SLACK for e in rows[0]["errors"]]
    for turn in range(max(len(ours) for _, ours in tuners.values())):
        chosen = {}
        for name, (tuner, ours) in tuners.items():
            config = ours[min(turn, len(ours) - 1)]
            tuner.configs, tuner.cache = [config], {}
            chosen[name] = str(config)
        rows.append({"configs": chosen, "errors": errors(pipeline(x), want)})
    passed = all(e <= most for r in rows[1:] for e, most in zip(r["errors"], limit, strict=True))
    gpu = torch.cuda.get_device_properties(0)
    content = {
        "schema": "v100_operator.gdn/1",
        "gpu": {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"},
        "torch": torch.__version__,
        "lengths": LENGTHS,
        "slack": SLACK,
        "rows": rows,
        "passed": passed,
    }
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    for row in rows:
        print("output {:.2e}, state {:.2e}: {}".format(*row["errors"], row["configs"]))
    print("passed" if passed else "FAILED")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
