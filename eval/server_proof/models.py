"""Model folders without weights, and weights with real variance put into a loaded engine.

vLLM's dummy weights are within 1e-3: the residual stream stays the embedding and any attention
gives the same tokens. Here every matrix has the variance that keeps activations at 1, and the q and
k norms have weight 2, so that attention logits have a deviation of about 4: a few tokens of a long
context get most of the weight, whichever they are, and the next token depends on them.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

VOCAB = 32768
QK_NORM = 2.0
LOGIT_DEVIATION = 3.0


def dense_config() -> dict[str, Any]:
    """A small dense Qwen3: head dimension 128, groups of four."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float16",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
    }


def hybrid_config(layers: int = 8, ranks: int = 1) -> dict[str, Any]:
    """`ranks` ranks of Qwen3.5-27B at TP4 in shape: on each, 6 query heads and 1 KV head of 256,
    4 key and 12 value heads of GDN."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 4352 * ranks,
        "num_hidden_layers": layers,
        "num_attention_heads": 6 * ranks,
        "num_key_value_heads": ranks,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4 * ranks,
        "linear_num_value_heads": 12 * ranks,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "partial_rotary_factor": 0.25,
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 256,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 5120,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float16",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 32760,
        "video_token_id": 32761,
        "vision_start_token_id": 32762,
        "vision_end_token_id": 32763,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }


CONFIGS = {
    "dense": dense_config,
    "hybrid": hybrid_config,
    "hybrid-shallow": lambda: hybrid_config(layers=4),
    "hybrid-tp2": lambda: hybrid_config(ranks=2),
    "hybrid-tp4": lambda: hybrid_config(ranks=4),
}


def write_model(folder: Path, kind: str) -> Path:
    """Writes config.json and a tokenizer of `kind` into `folder`/`kind`; returns that folder."""
    target = folder / kind
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(CONFIGS[kind](), indent=1))
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    vocabulary = {"<|end|>": 0, "<|stop|>": 1} | {f"w{i:05d}": i for i in range(2, VOCAB)}
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|end|>")).save(
        str(target / "tokenizer.json")
    )
    (target / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|stop|>",
                "pad_token": "<|end|>",
                "model_max_length": 262144,
            }
        )
    )
    return target


def seed_weights(worker: Any, seed: int) -> dict[str, float]:
    """Fills the worker's target model, and its MTP drafter, in place.

    Graphs stay valid: they hold addresses. Each parameter has a generator of its own, seeded by its
    name and rank, so that engines with other options hold the same weights.

    Returns:
        The number of parameters, and their mean absolute value as a fingerprint.
    """
    import torch

    runner = worker.model_runner
    rank = worker.rank
    models = {"target": runner.get_model()}
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    if isinstance(drafter, torch.nn.Module):
        models["draft"] = drafter
    done: set[int] = set()
    total, count = 0.0, 0
    with torch.no_grad():
        for label, model in models.items():
            for module_name, module in model.named_modules():
                for name, weight in module.named_parameters(recurse=False):
                    if weight.data_ptr() in done or "visual" in module_name:
                        continue
                    done.add(weight.data_ptr())
                    _fill(weight, module, f"{label}.{module_name}.{name}", seed + 7919 * rank)
                    total += weight.float().abs().sum().item()
                    count += weight.numel()
    return {"parameters": count, "mean_abs": total / count}


def _fill(weight: Any, module: Any, name: str, seed: int) -> None:
    import torch

    generator = torch.Generator(device=weight.device)
    generator.manual_seed(zlib.crc32(name.encode()) ^ seed)

    def normal(deviation: float) -> Any:
        return torch.randn(
            weight.shape, generator=generator, device=weight.device, dtype=torch.float32
        ).mul_(deviation)

    kind = type(module).__name__
    if "Norm" in kind or name.endswith("norm.weight"):
        gain = QK_NORM if ("q_norm" in name or "k_norm" in name) else 1.0
        weight.fill_(gain - 1.0 if kind.startswith("Gemma") else gain)
    elif name.endswith("A_log"):
        rates = torch.rand(weight.shape, generator=generator, device=weight.device)
        weight.copy_((1 + 15 * rates).log())
    elif name.endswith("dt_bias"):
        weight.copy_(normal(0.5) - 4.0)  # states remember some tens of tokens
    elif "embed" in name or "lm_head" in name:
        weight.copy_(normal(LOGIT_DEVIATION / math.sqrt(weight.shape[-1])))
    elif weight.dim() >= 2:
        weight.copy_(normal(1.0 / math.sqrt(weight.shape[-1])))
    else:
        weight.zero_()
