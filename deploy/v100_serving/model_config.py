"""A model's ``config.json``: of what kind its layers are, and which geometry its attention has.

A kind of layer that this release does not serve keeps the name that the file gives it, so that it
is refused by name and never counted as attention. Needs neither vLLM nor transformers: a field that
the file leaves to its model type's default is missing here, and said so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from v100_serving.profiles import Gdn, Geometry, Profile

FULL, SLIDING, GDN = "full_attention", "sliding_attention", "linear_attention"
NO_ATTENTION = "feed-forward alone"
SERVED = "this release serves full attention and Gated DeltaNet layers alone"
CAUSAL = (
    "SM70_ATTN serves causal decoder attention alone: with --kv-cache-dtype auto, "
    "--attention-backend TRITON_ATTN runs the rest, slowly"
)

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where a checkpoint of several models keeps its text model's fields."""

LAYER_LISTS: Mapping[str, Mapping[Any, str]] = {
    "layer_types": {"attention": FULL},
    "layers_block_type": {"attention": FULL, "mlp": NO_ATTENTION, "moe": NO_ATTENTION},
    "hybrid_override_pattern": {
        "*": FULL,
        "M": "Mamba-2",
        "-": NO_ATTENTION,
        "E": NO_ATTENTION,
    },
    "attn_type_list": {1: FULL, 0: "lightning attention"},
}
"""Fields that name every layer's kind, the first one stated wins, with what their entries mean
where it is not their name."""

STATE_FIELDS: Mapping[str, str] = {
    "mamba_d_state": "Mamba",
    "mamba_d_ssm": "Mamba",
    "mamba_num_heads": "Mamba-2",
    "ssm_state_size": "Mamba-2",
    "ssm_cfg": "Mamba",
    "state_size": "Mamba",
    "linear_attn_config": "Kimi Delta Attention",
    "layer_group_size": "lightning attention",
    "conv_L_cache": "short convolutions",
    "block_types": "recurrent blocks",
}
"""Fields of models with a state, which say so where no list names the layers."""

ALIBI_TYPES = ("bloom", "jais")
ENCODER_TYPES = (
    *("albert", "electra", "ernie", "esm", "gte", "jina_embeddings_v3", "mpnet", "new"),
    *("big_bird", "funnel", "layoutlm", "longformer", "luke", "nystromformer", "roformer"),
    *("xlm", "xlnet", "yoso", "mra", "tapas", "fnet"),
)
"""Encoders whose model type does not have "bert" in its name."""
PREFIX_TYPES = ("bagel", "molmo2", "paligemma")
STATE_TYPES = ("rwkv", "xlstm", "retnet")

SLIDING_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers one is full, where the file leaves `sliding_window_pattern` out."""

MOST, MOST_LAYERS = 1 << 30, 10_000
"""Bounds beyond which a number in a file is a mistake; layers are written out one by one."""


class ConfigError(ValueError):
    """A config.json that cannot be read, or lacks or garbles what attention is decided by."""


@dataclass(frozen=True)
class ModelConfig:
    """One file's contents.

    Attributes:
        source: the file, for messages.
        fields: the text model's fields over those of the whole checkpoint.
        architectures: what vLLM chooses the model's class by; empty where the file has none.
        model_types: of the checkpoint and of its text model.
        has_vision: whether there is a vision tower.
    """

    source: Path
    fields: Mapping[str, Any]
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    has_vision: bool = False

    def get(self, name: str) -> Any:
        """The field's value, None where it is missing or null."""
        return self.fields.get(name)

    def wrong(self, name: str, what: str) -> ConfigError:
        """The error that `name` does not hold `what`."""
        return ConfigError(f"{self.source}: {name} is {shortened(self.get(name))}, not {what}")

    def count(
        self, *names: str, least: int = 1, most: int = MOST, default: int | None = None
    ) -> int:
        """The first of `names` that is stated.

        Raises:
            ConfigError: none is stated and there is no default, or it is no whole number from
                `least` to `most`.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if type(value) is not int or not least <= value <= most:  # True is no count
                raise self.wrong(name, f"a whole number from {least} to {most}")
            return value
        if default is not None:
            return default
        raise ConfigError(
            f"{self.source} has no {' or '.join(names)}: where it leaves that to its model type's "
            "default, write the value into a copy of the file"
        )

    def object(self, name: str) -> dict[str, Any]:
        """The JSON object of that name, empty where there is none; raises ConfigError."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value or {}


def read_config(path: Path) -> ModelConfig:
    """Reads a config.json.

    Args:
        path: the file, or the folder that holds it as config.json.
    Raises:
        ConfigError: unreadable, or not of a config.json's form.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"{path}: not a JSON object")
    checkpoint = ModelConfig(path, whole)
    inner = next((name for name in TEXT_CONFIGS if name in whole), None)
    text = whole[inner] if inner else {}
    if inner and not isinstance(text, dict):
        raise checkpoint.wrong(inner, "a JSON object")
    architectures = whole.get("architectures") or []
    if not (isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)):
        raise checkpoint.wrong("architectures", "a list of names")
    types = [str(t) for t in (whole.get("model_type"), text.get("model_type")) if t]
    return ModelConfig(
        source=path,
        fields={**whole, **text},
        architectures=tuple(architectures),
        model_types=tuple(dict.fromkeys(types)),
        has_vision="vision_config" in whole,
    )


def _layer_list(config: ModelConfig) -> str | None:
    """The field that names the layers."""
    return next((name for name in LAYER_LISTS if config.get(name) is not None), None)


def _is_encoder(config: ModelConfig) -> bool:
    named = any(
        t in ENCODER_TYPES or ("bert" in t and "decoder" not in t) for t in config.model_types
    )
    return (
        named
        or any(a.endswith("ForMaskedLM") for a in config.architectures)
        or config.get("is_encoder_decoder") is True
        or config.get("is_causal") is False
        or config.get("use_bidirectional_attention") is True
    )


def ruled_out(config: ModelConfig) -> list[str]:
    """What its type alone says of a model that cannot work, whatever its geometry: one sentence
    each. Of such a model no route, page or budget can be computed."""
    reasons = []
    if _is_encoder(config):
        reasons.append(f"an encoder, or a model with one: its attention looks both ways; {CAUSAL}")
    elif prefixed := [t for t in config.model_types if t in PREFIX_TYPES]:
        reasons.append(f"{prefixed[0]} attends both ways over the tokens of an image; {CAUSAL}")
    if config.get("kv_lora_rank") is not None:
        reasons.append("multi-head latent attention (MLA) has no SM70 kernel")
    if any(t in ALIBI_TYPES for t in config.model_types):
        reasons.append("ALiBi has no SM70 kernel")
    if config.get("block_configs") is not None:
        reasons.append(f"block_configs makes layers differ from one another: {SERVED}, all alike")
    stated = _layer_list(config)
    if stated is None and config.get("linear_num_key_heads") is None:
        marks = {f: kind for f, kind in STATE_FIELDS.items() if config.get(f) is not None}
        marks |= {f"model type {t}": t for t in config.model_types if t in STATE_TYPES}
        for name, kind in list(marks.items())[:1]:
            reasons.append(f"a state-space or recurrent model ({kind}, by its {name}): {SERVED}")
    if stated and config.get("linear_num_key_heads") is None and GDN in layer_kinds(config):
        reasons.append(
            f"linear attention that is no Gated DeltaNet (no linear_num_key_heads): {SERVED}"
        )
    return reasons


def layer_kinds(config: ModelConfig) -> list[str]:
    """The kind of every layer: FULL, SLIDING, GDN, NO_ATTENTION, or a name that is none of these
    and that nothing here serves.

    Raises:
        ConfigError: the list is none, or shorter than the model; or nothing says how many layers.
    """
    if name := _layer_list(config):
        entries, meanings = config.get(name), LAYER_LISTS[name]
        text = isinstance(entries, str) and name == "hybrid_override_pattern"
        if not entries or not (text or isinstance(entries, list)):
            raise config.wrong(name, "a list of the layers' kinds")
        kinds = [
            meanings.get(entry, str(entry)) if isinstance(entry, str | int) else shortened(entry)
            for entry in entries
        ]
        layers = config.count("num_hidden_layers", most=MOST_LAYERS, default=len(kinds))
        if layers > len(kinds):
            raise ConfigError(
                f"{config.source}: {name} names {len(kinds)} layers, num_hidden_layers is {layers}"
            )
        return kinds[:layers]  # entries beyond are those of draft layers
    layers = config.count("num_hidden_layers", "n_layer", most=MOST_LAYERS)
    if config.get("linear_num_key_heads") is not None:
        every = config.count("full_attention_interval", default=4)
        return [GDN if (i + 1) % every else FULL for i in range(layers)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * layers
    usual = next((SLIDING_PERIOD[t] for t in config.model_types if t in SLIDING_PERIOD), 0)
    every = config.get("sliding_window_pattern") or usual
    if type(every) is not int or every < 1:
        return [SLIDING] * layers
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _kv_heads(config: ModelConfig, heads: int) -> int:
    """As vLLM reads it: Falcon's first size has one for all, its later ones a count."""
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    return config.count(*names, default=heads)


def geometry_of(config: ModelConfig, profile: Profile) -> Geometry:
    """The model's geometry as profiles state it. GDN's dtypes are the profile's where it has any.

    Raises:
        ConfigError: a field that decides attention is missing or cannot be.
    """
    kinds = layer_kinds(config)
    heads = config.count("num_attention_heads", "n_head")
    hidden = config.count("hidden_size", "n_embd")
    kv_heads = _kv_heads(config, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.source}: {heads} query heads do not divide among {kv_heads} KV heads"
        )
    if hidden < heads and config.get("head_dim") is None:
        raise ConfigError(f"{config.source}: hidden_size {hidden} is less than {heads} heads")
    gdn = None
    if GDN in kinds:
        stated = profile.model.geometry.gdn
        gdn = Gdn(
            layers=kinds.count(GDN),
            key_heads=config.count("linear_num_key_heads"),
            value_heads=config.count("linear_num_value_heads"),
            key_dim=config.count("linear_key_head_dim"),
            value_dim=config.count("linear_value_head_dim"),
            conv_kernel=config.count("linear_conv_kernel_dim"),
            conv_dtype=stated.conv_dtype if stated else "half",
            state_dtype=stated.state_dtype if stated else "float32",
        )
    speculative = profile.engine.speculative
    drafts = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    mtp = config.count(*drafts, least=0, default=0)
    return Geometry(
        hidden_size=hidden,
        full_attention_layers=max(1, kinds.count(FULL) + kinds.count(SLIDING)),
        draft_attention_layers=mtp if speculative and speculative.method == "mtp" else 0,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=config.count("head_dim", default=hidden // heads),
        max_position=config.count("max_position_embeddings", "max_seq_len", "n_positions"),
        gdn=gdn,
    )
