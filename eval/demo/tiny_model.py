#!/usr/bin/env python3
"""Build a tiny hybrid model with random weights and its tokenizer; nothing is downloaded.

Runs in the interpreter that serves vLLM (it needs torch, transformers and tokenizers):

    python tiny_model.py --corpus text.txt OUT

The model has the shape of Qwen3.5-27B in small: three Gated DeltaNet layers and one full-attention
layer (head_dim 256, six query heads per KV head), a stub vision tower that the class insists on,
and one MTP layer for drafting. 6.8 million parameters, bfloat16.

Plain random weights make text without structure, in which no draft is ever accepted. So the
embedding and the output head are built such that token t is usually followed by next(t), where
`next` runs through cycles of CYCLE tokens; and the layers' outputs are loud enough to break the
cycle now and then. Drafts are then accepted in half to three quarters of the cases, and the text
depends on its whole context: a fault of attention, GDN state or caching changes tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

VOCABULARY = 2048
HIDDEN = 256
FULL_ATTENTION_LAYER = 3
CYCLE = 12
HEAD_GAIN = 0.25
"""Scale of the output head: how sure the model is of next(t)."""
LAYER_GAIN = 4.0
"""Scale of the layers' output projections: how often context overrules next(t)."""
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ORDINARY = 10
"""First token ID that takes part in the cycles; those below are special or unused."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(out: Path, corpus: Path) -> None:
    """Byte-level BPE of VOCABULARY tokens from the project's text and the standard library's
    sources (the project's text alone has too few distinct words)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in (corpus, *sources)], trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the corpus made {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=8192,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def hybrid_config() -> Qwen3_5Config:
    """Configuration of the tiny hybrid."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": FULL_ATTENTION_LAYER + 1,
        "full_attention_interval": FULL_ATTENTION_LAYER + 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    }
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=SPECIAL.index("<|vision_end|>"),
        image_token_id=SPECIAL.index("<|image_pad|>"),
        video_token_id=SPECIAL.index("<|video_pad|>"),
    )


def successor(generator: torch.Generator) -> torch.Tensor:
    """next(t) for every token, int64 [VOCABULARY]: cycles of CYCLE ordinary tokens."""
    order = torch.randperm(VOCABULARY - ORDINARY, generator=generator) + ORDINARY
    following = torch.arange(VOCABULARY)
    for start in range(0, len(order), CYCLE):
        cycle = order[start : start + CYCLE]
        following[cycle] = cycle.roll(-1)
    following[:ORDINARY] = order[:ORDINARY]
    return following


def shape_weights(weights: dict[str, torch.Tensor]) -> None:
    """Give random weights a predictable course and a draft layer, in place."""
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[successor(generator)] = embedding
    head[:ORDINARY] = 0
    name = next(key for key in weights if key.endswith("embed_tokens.weight"))
    weights[name] = embedding.bfloat16()
    weights["lm_head.weight"] = (head * HEAD_GAIN).bfloat16()
    for key in weights:
        loud = key.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
        if loud and "layers." in key and "visual" not in key:
            weights[key] = weights[key] * LAYER_GAIN
    # The draft layer is the model's own full-attention layer, fed with the token's embedding and
    # a little of the hidden state.
    prefix = f"model.language_model.layers.{FULL_ATTENTION_LAYER}."
    draft = {
        "mtp.layers.0." + key[len(prefix) :]: value.clone()
        for key, value in weights.items()
        if key.startswith(prefix)
    }
    weights.update(draft)
    mixing = torch.cat(
        [torch.eye(HIDDEN), 0.05 * torch.randn(HIDDEN, HIDDEN, generator=generator)], dim=1
    )
    weights["mtp.fc.weight"] = mixing.bfloat16()
    for key in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        weights[key + ".weight"] = torch.zeros(HIDDEN).bfloat16()


def write_processors(out: Path) -> None:
    """Image and video processor files: never used, but the model class asks for them."""
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    image = common | {
        "size": {"longest_edge": 262144, "shortest_edge": 65536},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = common | {
        "size": {"longest_edge": 262144, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    (out / "preprocessor_config.json").write_text(json.dumps(image))
    (out / "video_preprocessor_config.json").write_text(json.dumps(video))


def build(out: Path, corpus: Path) -> int:
    """Write the model to `out`; returns its number of parameters."""
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(out, corpus)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(hybrid_config()).to(torch.bfloat16).save_pretrained(out)
    config_path, weights_path = out / "config.json", out / "model.safetensors"
    config = json.loads(config_path.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    config_path.write_text(json.dumps(config, indent=1))
    weights = load_file(weights_path)
    shape_weights(weights)
    save_file(weights, weights_path, metadata={"format": "pt"})
    write_processors(out)
    return sum(value.numel() for value in weights.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--corpus", type=Path, required=True, help="text to train the tokenizer on")
    arguments = parser.parse_args()
    count = build(arguments.out, arguments.corpus)
    print(f"{arguments.out}: {count} parameters")


if __name__ == "__main__":
    main()
