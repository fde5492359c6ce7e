"""The schema of a serving profile (one YAML file per profile in ``deploy/profiles``).

Fields carry their unit in their name: ``_gib`` is 2**30 bytes, ``_s`` is seconds, ``tokens`` counts
token IDs. Unknown and duplicate keys are errors, so that a misspelt option never passes silently.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element of a model or state dtype, by the name vLLM gives it."""

KV_DTYPE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one element of a quantized KV cache; ``auto`` follows the model's dtype."""

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile file cannot be read or does not fit the schema; the text names file and field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gdn(_Strict):
    """Gated delta net layers (linear attention): their state does not grow with the context."""

    layers: PositiveInt
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_kernel: PositiveInt
    conv_dtype: Literal["half", "float32"]
    state_dtype: Literal["half", "float32"]


class Geometry(_Strict):
    """What of the model decides the KV cache. Counts are of the whole model, not of a rank."""

    hidden_size: PositiveInt
    full_attention_layers: PositiveInt
    draft_attention_layers: int = Field(0, ge=0, description="MTP layers, which cache KV as well")
    query_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    max_position: PositiveInt
    gdn: Gdn | None = None

    @model_validator(mode="after")
    def _heads(self) -> Geometry:
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads {self.query_heads} is no multiple of kv_heads {self.kv_heads}"
            )
        return self


class Weights(_Strict):
    """Size of the weights as loaded. `replicated_gib` is the part that every rank holds whole."""

    total_gib: NonNegativeFloat
    replicated_gib: NonNegativeFloat = 0.0
    source: str = Field(min_length=10, description="where the figure comes from")

    @model_validator(mode="after")
    def _parts(self) -> Weights:
        if self.replicated_gib > self.total_gib:
            raise ValueError("replicated_gib is larger than total_gib")
        return self


class Model(_Strict):
    path: str = Field(description="folder on the node; nodes do not reach a model hub")
    served_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    geometry: Geometry
    weights: Weights

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path")
        return value


class Hardware(_Strict):
    """`accelerator: cpu` is for tests: the engine runs, but no kernel of ours does."""

    accelerator: Literal["v100", "cpu"]
    compute_capability: str | None = None
    min_card_gib: NonNegativeFloat = 0.0
    min_driver: str | None = None

    @model_validator(mode="after")
    def _gpu_facts(self) -> Hardware:
        if self.accelerator == "v100" and not (self.compute_capability and self.min_driver):
            raise ValueError("a v100 profile needs compute_capability and min_driver")
        return self


class Speculative(_Strict):
    method: Literal["mtp", "dflash", "ngram", "draft_model"]
    num_speculative_tokens: PositiveInt
    model: str | None = Field(None, description="folder of the draft model on the node")

    @model_validator(mode="after")
    def _draft(self) -> Speculative:
        if self.method in ("dflash", "draft_model") and not self.model:
            raise ValueError(f"method {self.method} needs the folder of its draft model")
        return self


class Engine(_Strict):
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    distributed_executor: Literal["mp", "ray", "uni"] = "mp"
    dtype: Literal["half", "bfloat16", "float32"]
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    max_model_len: PositiveInt
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    prefix_caching: bool = True
    block_size: PositiveInt | None = None
    gpu_memory_utilization: float | None = Field(None, gt=0, lt=1)
    cpu_kv_cache_gib: PositiveInt | None = None
    speculative: Speculative | None = None
    extra_args: tuple[str, ...] = ()
    environment: dict[str, str] = {}

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name):
                raise ValueError(f"{name} looks like a credential: use LoadCredential")
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return value


class Estimates(_Strict):
    """Memory of a rank that is neither weights nor KV. Estimates until a gate has measured them."""

    activation_gib: NonNegativeFloat = Field(description="peak of the profile run, minus weights")
    runtime_gib: NonNegativeFloat = Field(description="CUDA context, NCCL, allocator slack")
    graph_pool_gib: NonNegativeFloat = Field(
        description="graphs and workspaces: vLLM does not deduct them from the KV budget"
    )
    source: str = Field(min_length=10)


class Demand(_Strict):
    """`requests` contexts of `tokens` each (prompt and output) that must fit at the same moment."""

    requests: PositiveInt
    tokens: PositiveInt


class WarmUp(_Strict):
    """One wave sent before the service reports ready, so that no user's request compiles."""

    requests: PositiveInt
    prompt_tokens: PositiveInt
    output_tokens: PositiveInt


class Service(_Strict):
    start_timeout_s: PositiveInt
    drain_timeout_s: PositiveInt
    warm_up: tuple[WarmUp, ...] = Field(min_length=1)
    cache_space_gib: PositiveInt = Field(description="free space that the caches need")


class Profile(_Strict):
    """A serving profile. `load_profile` is the way to get one."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    description: str
    model: Model
    hardware: Hardware
    engine: Engine
    estimates: Estimates
    demand: tuple[Demand, ...] = Field(min_length=1)
    service: Service

    @property
    def ranks(self) -> int:
        """GPUs (or CPU workers) that one instance occupies, over all its nodes."""
        return self.engine.tensor_parallel * self.engine.pipeline_parallel

    @property
    def draft_tokens(self) -> int:
        """Draft tokens that one verify step checks; 0 without speculation."""
        return self.engine.speculative.num_speculative_tokens if self.engine.speculative else 0

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one element of the KV cache."""
        return KV_DTYPE_BYTES.get(self.engine.kv_cache_dtype, DTYPE_BYTES[self.engine.dtype])


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key win over an earlier one; here that is an error."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            line = node.start_mark.line + 1
            raise ProfileError(f"key {key!r} appears twice in the mapping of line {line}")
    return dict(
        zip(keys, (loader.construct_object(v, deep=True) for _, v in node.value), strict=True)
    )


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_profile(path: str | Path) -> Profile:
    """Reads and checks the profile in `path`.

    Raises:
        ProfileError: unreadable, no YAML, or not the schema; one line per wrong field.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError(f"{path}: {error}") from error
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise ProfileError("\n".join(f"{path}: {line}" for line in wrong)) from None
    if profile.name != path.stem:
        raise ProfileError(f"{path}: name {profile.name!r} must be the file's name {path.stem!r}")
    return profile
