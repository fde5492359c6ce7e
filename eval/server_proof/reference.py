"""The dense model in FP32, with the engine's own weights: what log-probabilities should be.

Written from the architecture and not from vLLM's code: full attention by one softmax over all
positions, no cache, no pages. `kv` rounds K and V as a cache of that dtype would (descale 1).
"""

from __future__ import annotations

from typing import Any


def dense_logprobs(worker: Any, tokens: list[int], kv: str) -> list[float]:
    """Log-probability of tokens[i + 1] after tokens[: i + 1], for every i.

    Args:
        tokens: the sequence.
        kv: "fp32" (no rounding), "fp16", "fp8_e4m3" or "fp8_e5m2".
    """
    import torch
    import torch.nn.functional as F

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    model = worker.model_runner.get_model().model
    device = next(model.parameters()).device
    rounding = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }[kv]

    def norm(x: Any, module: Any) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return x * scale * module.weight.float()

    with torch.no_grad():
        ids = torch.tensor(tokens, device=device)
        x = model.embed_tokens.weight.float()[ids]
        n = len(tokens)
        future = torch.full((n, n), float("-inf"), device=device).triu(1)
        for layer in model.layers:
            attention = layer.self_attn
            heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
            h = norm(x, layer.input_layernorm)
            q, k, v = (h @ attention.qkv_proj.weight.float().T).split(
                [heads * dim, kv_heads * dim, kv_heads * dim], -1
            )
            q = _rotate(norm(q.view(n, heads, dim), attention.q_norm))
            k = _rotate(norm(k.view(n, kv_heads, dim), attention.k_norm))
            k, v = (
                t.view(n, kv_heads, dim)
                .to(rounding)
                .float()
                .repeat_interleave(heads // kv_heads, 1)
                for t in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5 + future
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, heads * dim)
            x = x + out @ attention.o_proj.weight.float().T
            h = norm(x, layer.post_attention_layernorm)
            gate, up = (h @ layer.mlp.gate_up_proj.weight.float().T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer.mlp.down_proj.weight.float().T
        logits = norm(x, model.norm) @ model.embed_tokens.weight.float().T
        chosen = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.set_float32_matmul_precision(precision)
        return chosen.cpu().tolist()


def _rotate(x: Any, theta: float = 1000000.0) -> Any:
    """Rotary embedding, halves apart, positions 0.. along the first axis."""
    import torch

    n, _, dim = x.shape
    frequency = theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = torch.arange(n, device=x.device, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
