"""What a model will do on V100 cards, said before anybody waits for a load.

From a model's ``config.json`` and a serving profile: the attention route of each layer type, the KV
page and budget per card, what is compiled at start and with which tools, and what cannot work. The
route rules are the backend's own (``sm70_attention.dispatch``), the KV arithmetic the profiles'.
Needs no GPU, no vLLM and no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from v100_serving.memory import CARDS_GIB, ImpossibleProfile, plan_memory
from v100_serving.pages import kv_pages
from v100_serving.profiles import Gdn, Geometry, Profile

CAPABILITY = 70

# Weight formats by quantization method: None runs on SM70, a text says why it does not.
_SMALLEST = "its kernels start at compute capability"
FORMATS: Mapping[str, str | None] = {
    "gptq": None,
    "gguf": None,
    "bitsandbytes": None,
    "moe_wna16": None,
    "awq": f"{_SMALLEST} 7.5",
    "fp8": f"{_SMALLEST} 7.5",
    "fbgemm_fp8": f"{_SMALLEST} 8.0",
    "experts_int8": f"{_SMALLEST} 8.0",
    "modelopt": f"FP8, {_SMALLEST} 8.9",
    "modelopt_fp4": f"NVFP4, {_SMALLEST} 7.5",
    "mxfp4": f"{_SMALLEST} 8.0",
    "compressed_tensors": f"{_SMALLEST} 7.5 in every scheme (NVFP4, FP8, INT8, WNA16)",
}
RUNS_INSTEAD = (
    "serve float16 or bfloat16 weights (cast by --dtype half), GPTQ, GGUF or bitsandbytes"
)
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "plamo2", "glm4")
"""Model types that vLLM refuses in float16; SM70 has nothing else for them."""


REFUSED_FIELDS = {
    "attn_logit_softcapping": "a soft cap on attention logits",
    "alibi": "ALiBi",
    "attention_chunk_size": "attention in chunks",
}
"""Fields of config.json that, when set, ask for what no SM70 kernel does."""


class ConfigError(ValueError):
    """A config.json that cannot be read, or lacks what attention is decided by."""


@dataclass(frozen=True)
class LayerType:
    """One kind of layer and what serves it."""

    name: str
    count: int
    routes: tuple[str, ...]


@dataclass
class Diagnosis:
    """Everything the doctor found; `problems` non-empty means that it cannot work."""

    model: str
    profile: str
    weights: str = ""
    layers: list[LayerType] = field(default_factory=list)
    page: dict[str, Any] = field(default_factory=dict)
    graphs: str = ""
    cards: dict[str, str] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    tools: dict[str, str | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON-ready data."""
        return asdict(self) | {"works": not self.problems}

    def text(self) -> str:
        """The diagnosis for people."""
        lines = [f"{self.model} with profile {self.profile} on V100 (SM70)", ""]
        lines.append(f"weights   {self.weights}")
        for layer in self.layers:
            lines.append(f"layers    {layer.count} x {layer.name}")
            lines += [f"            {route}" for route in layer.routes]
        if self.page:
            lines.append(
                "page      {block_tokens} tokens, {page_bytes} bytes a rank; the kernels see "
                "pages of the same size".format(**self.page)
            )
            if self.page["state_bytes"]:
                lines.append(
                    "            GDN state {state_bytes} bytes; {attention_groups} attention + "
                    "{state_groups} GDN group(s) of {layers_per_group} layers".format(**self.page)
                )
        if self.graphs:
            lines.append(f"graphs    {self.graphs}")
        lines += [f"card      {card}: {budget}" for card, budget in self.cards.items()]
        lines += [f"compiled  {what}" for what in self.compiled]
        lines += [
            f"tool      {tool}: {where or 'not found on this machine'}"
            for tool, where in self.tools.items()
        ]
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"PROBLEM   {problem}" for problem in self.problems]
        lines += ["", "This cannot work." if self.problems else "Nothing stands against it."]
        return "\n".join(lines)


def load_wrapper() -> ModuleType:
    """The kernels' wrapper (the package sm70_attention) without vLLM around it: its route rules and
    its library checks need no PyTorch.

    Raises:
        ConfigError: neither this repository nor an installed release has it.
    """
    name = "v100_serving._sm70_attention"
    if name in sys.modules:
        return sys.modules[name]
    folders: list[Path] = [Path(__file__).resolve().parents[2] / "kernel/python/sm70_attention"]
    for package in ("sm70_attention", "vllm"):
        found = importlib.util.find_spec(package)  # does not import a top-level package
        for folder in (found.submodule_search_locations or []) if found else []:
            inside = "vllm_flash_attn/sm70_attention" if package == "vllm" else "."
            folders.append(Path(folder) / inside)
    for folder in folders:
        if (folder / "dispatch.py").is_file():
            spec = importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
    raise ConfigError(
        "the route rules (sm70_attention/dispatch.py) are not here: install a release"
    )


def load_dispatch() -> ModuleType:
    """The backend's route rules; raises as :func:`load_wrapper` does."""
    return importlib.import_module(f"{load_wrapper().__name__}.dispatch")


def read_library(path: Path) -> Any:
    """What the extension at `path` reports of itself (a ``dispatch.Library``).

    Raises:
        ConfigError: it does not load, is not ours, or a service would refuse it at its start.
    """
    wrapper = load_wrapper()
    checks = importlib.import_module(f"{wrapper.__name__}.library")
    try:
        info = wrapper.read_info(path)
        checks.check_info(info, checks.expected_source_hash())
    except wrapper.LibraryError as error:
        raise ConfigError(str(error)) from error
    return load_dispatch().Library(
        abi=info.abi,
        archs=frozenset(info.archs),
        kernels=info.kernels,
        long_batch_capacity=info.long_batch_capacity,
        source_sha256=info.source_sha256,
    )


def release_library() -> Any:
    """What a complete release's extension reports: every kernel, for sm_70."""
    d = load_dispatch()
    kernels = {
        f"{route}_d{dim}_{kv.removeprefix('fp8_')}"
        for route in ("paged", "prefill")
        for dim in d.HEAD_DIMS
        for kv in d.KV_DTYPES
    }
    return d.Library(
        abi=d.ABI,
        archs=frozenset({CAPABILITY}),
        kernels=frozenset(kernels),
        long_batch_capacity=d.LONG_MAX_BATCH,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The text model's configuration, with ``quantization_config`` of the whole checkpoint.

    Args:
        path: a config.json, or the folder that holds one.
    Raises:
        ConfigError: unreadable, or no JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"{path}: not a JSON object")
    text = {**whole, **whole.get("text_config", {})}
    text["has_vision"] = "vision_config" in whole
    text["architectures"] = whole.get("architectures") or ["unknown architecture"]
    return text


def _need(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return config[name]
    raise ConfigError(f"config.json has no {' or '.join(names)}")


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of every layer: full_attention, sliding_attention or linear_attention."""
    if types := config.get("layer_types"):
        return list(types)
    layers = _need(config, "num_hidden_layers")
    if "linear_num_key_heads" in config:
        every = int(config.get("full_attention_interval", 4))
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if window else "full_attention"] * layers


def geometry_of(config: Mapping[str, Any], profile: Profile) -> Geometry:
    """The model's geometry as profiles state it. GDN's dtypes are the profile's where it has any.

    Raises:
        ConfigError: a field that decides attention is missing.
    """
    types = layer_types(config)
    heads = _need(config, "num_attention_heads")
    hidden = _need(config, "hidden_size")
    gdn = None
    if "linear_attention" in types:
        stated = profile.model.geometry.gdn
        gdn = Gdn(
            layers=types.count("linear_attention"),
            key_heads=_need(config, "linear_num_key_heads"),
            value_heads=_need(config, "linear_num_value_heads"),
            key_dim=_need(config, "linear_key_head_dim"),
            value_dim=_need(config, "linear_value_head_dim"),
            conv_kernel=_need(config, "linear_conv_kernel_dim"),
            conv_dtype=stated.conv_dtype if stated else "half",
            state_dtype=stated.state_dtype if stated else "float32",
        )
    speculative = profile.engine.speculative
    mtp = int(config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0)
    return Geometry(
        hidden_size=hidden,
        full_attention_layers=max(1, len(types) - types.count("linear_attention")),
        draft_attention_layers=mtp if speculative and speculative.method == "mtp" else 0,
        query_heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        max_position=_need(config, "max_position_embeddings", "max_seq_len", "n_positions"),
        gdn=gdn,
    )


def _weights(config: Mapping[str, Any], found: Diagnosis) -> None:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "unstated").split(".")[-1]
    quantization = config.get("quantization_config") or config.get("compression_config")
    model_type = str(config.get("model_type", ""))
    if model_type in NO_FLOAT16:
        found.problems.append(
            f"vLLM does not run {model_type} in float16 (it overflows), and SM70 has no bfloat16 "
            "and no float32 attention: use another model on these cards"
        )
    if not quantization:
        found.weights = f"{dtype}, not quantised; runs in float16"
        if dtype == "bfloat16":
            found.notes.append(
                "bfloat16 weights are cast to float16 (--dtype half): values beyond 65,504 would "
                "overflow, so gate the quality once"
            )
        return
    method = str(quantization.get("quant_method", "unknown")).lower().replace("-", "_")
    algorithm = str(quantization.get("quant_algo", "")).upper()
    if method == "modelopt" and "FP4" in algorithm:
        method = "modelopt_fp4"
    groups = quantization.get("config_groups") or {}
    inside = sorted({str(g.get("format") or quantization.get("format")) for g in groups.values()})
    detail = algorithm or ", ".join(inside) or str(quantization.get("bits", ""))
    if method == "compressed_tensors" and not groups:
        found.weights = f"{dtype}; compressed-tensors for the KV cache's scales alone"
        return
    name = method.replace("compressed_", "compressed-")
    found.weights = name + (f" ({detail})" if detail else "")
    why = FORMATS.get(method, "this release knows nothing of it")
    if why:
        found.problems.append(
            f"weights in {found.weights} cannot run on SM70: {why}; {RUNS_INSTEAD}"
        )


def _routes(
    config: Mapping[str, Any], profile: Profile, geometry: Geometry, library: Any, found: Diagnosis
) -> None:
    d = load_dispatch()
    engine, tp, types = profile.engine, profile.engine.tensor_parallel, layer_types(config)
    kv = {"auto": "fp16"}.get(engine.kv_cache_dtype, engine.kv_cache_dtype)
    layer = d.Geometry(
        q_heads=geometry.query_heads // tp,
        kv_heads=max(1, geometry.kv_heads // tp),
        head_dim=geometry.head_dim,
        kv_dtype=kv,
        page_size=engine.block_size,
    )
    disabled = d.disabled_routes(engine.environment)
    shape = f"{layer.q_heads} query / {layer.kv_heads} KV heads x {layer.head_dim}, {kv} KV"

    if config.get("kv_lora_rank"):
        found.problems.append("multi-head latent attention (MLA) has no SM70 kernel")
        return
    if count := types.count("sliding_attention"):
        found.layers.append(LayerType("sliding-window attention", count, ("refused",)))
        found.problems.append(
            f"{count} layers have a sliding window of {config.get('sliding_window')} tokens, and "
            "SM70_ATTN has none: with --kv-cache-dtype auto, --attention-backend TRITON_ATTN runs "
            "them, slowly"
        )
    for name, what in REFUSED_FIELDS.items():
        if config.get(name):
            found.problems.append(f"{what} has no SM70 kernel")

    why = d.refusal(layer, library, CAPABILITY, disabled)
    full = types.count("full_attention")
    if full and why:
        found.layers.append(LayerType(f"full attention ({shape})", full, ("refused",)))
        found.problems.append(f"attention: {why}")
    elif full:
        found.layers.append(
            LayerType(f"full attention ({shape})", full, _full_routes(d, layer, profile, library))
        )
        if geometry.draft_attention_layers:
            drafts = tuple(
                _say(d.decide(layer, [n] * 2, library, disabled, 1), f"{n}-token draft steps")
                for n in (1, 1 + profile.draft_tokens)
            )
            found.layers.append(
                LayerType("MTP draft layer", geometry.draft_attention_layers, drafts)
            )
        found.graphs = _graphs(d, layer, profile, library)
    if geometry.gdn:
        found.layers.append(
            LayerType(
                "gated delta net",
                geometry.gdn.layers,
                ("prefill: vLLM's Triton (FLA) kernels", "decode: Triton, fused recurrent"),
            )
        )
    if config.get("num_experts") or config.get("num_local_experts"):
        found.layers.append(
            LayerType("mixture of experts", len(types), ("vLLM's Triton fused_moe in float16",))
        )
    if config["has_vision"] and "--language-model-only" not in engine.extra_args:
        found.notes.append(
            "the vision tower attends through torch's SDPA; --language-model-only leaves it out"
        )


def _say(decision: Any, rows: str) -> str:
    return f"{rows}: {decision.route.value} ({decision.reason})"


def _full_routes(d: ModuleType, layer: Any, profile: Profile, library: Any) -> tuple[str, ...]:
    engine = profile.engine
    disabled, limit = d.disabled_routes(engine.environment), engine.max_model_len
    verify = 1 + profile.draft_tokens
    routes = [_say(d.decide(layer, [1] * 4, library, disabled, limit), "decode")]
    if verify > 1:
        for batch in sorted({1, min(4, engine.max_num_seqs), engine.max_num_seqs}):
            decision = d.decide(layer, [verify] * batch, library, disabled, limit)
            routes.append(_say(decision, f"verify {verify} tokens, batch {batch}"))
    chunk = [engine.max_num_batched_tokens]
    routes.append(_say(d.decide(layer, chunk, library, disabled, limit), "prompt chunks"))
    return tuple(routes)


def _graphs(d: ModuleType, layer: Any, profile: Profile, library: Any) -> str:
    engine, verify = profile.engine, 1 + profile.draft_tokens
    disabled = d.disabled_routes(engine.environment)
    bounded = {
        batch: bounds
        for batch in range(1, engine.max_num_seqs + 1)
        if (
            bounds := d.context_bounds(
                layer, library, disabled, engine.max_model_len, batch, verify
            )
        )
    }
    if not bounded:
        return "vLLM's ordinary ones; no context-bounded graph for this geometry"
    bounds = sorted({b for several in bounded.values() for b in several})
    return (
        f"beside the ordinary ones, long-attention graphs for {len(bounded)} verify batches "
        f"(1 to {max(bounded)}) bounded at {', '.join(map(str, bounds))} tokens"
    )


def _cards(profile: Profile, found: Diagnosis, cards: Iterable[str | float]) -> None:
    fits = False
    reasons: list[str] = []
    for card in cards:
        gib = CARDS_GIB[card] if isinstance(card, str) else card
        name = card if isinstance(card, str) else f"{card} GiB"
        try:
            plan = plan_memory(profile, gib)
        except ImpossibleProfile as error:
            found.cards[name] = "does not fit: " + "; ".join(error.reasons)
            reasons += [f"{name}: {reason}" for reason in error.reasons]
            continue
        fits = True
        found.cards[name] = (
            f"KV {plan.kv_gib:.2f} GiB = {plan.blocks} blocks, {plan.full_contexts:.2f} contexts "
            f"of {profile.engine.max_model_len} tokens; weights {plan.weights_gib:.2f} GiB"
        )
    if not fits:
        found.problems += reasons


def _compiled(geometry: Geometry, config: Mapping[str, Any], found: Diagnosis) -> None:
    triton = ["sampling and rejection", "rotary and norm fusions (Inductor)"]
    if geometry.gdn:
        triton.insert(0, "gated delta net, with autotuning of its prefill kernels")
    if config.get("num_experts") or config.get("num_local_experts"):
        triton.append("fused_moe")
    found.compiled += [
        "by Inductor (torch.compile), at the first start for a model: minutes, then cached",
        "by Triton, at first use: " + "; ".join(triton),
        "nothing of attention: its kernels are machine code in the extension",
    ]
    found.tools = {
        "cc": shutil.which("cc") or shutil.which("gcc"),
        "c++": shutil.which("c++") or shutil.which("g++"),
    }
    found.notes.append(
        "Triton and Inductor need a C and a C++ compiler with Python's headers on the service's "
        "PATH; ptxas comes with the triton wheel. Nothing above is known to need ninja or nvcc; "
        "a node's preflight asks for them all the same, for extensions that JIT-compile at start"
    )


def diagnose(
    config: Mapping[str, Any],
    profile: Profile,
    cards: Iterable[str | float] = tuple(CARDS_GIB),
    library: Any = None,
) -> Diagnosis:
    """What `config` does on V100 under `profile`.

    Args:
        config: from `read_config`.
        cards: names of `CARDS_GIB`, or GiB.
        library: what the extension reports; None for a complete release's.
    Raises:
        ConfigError: config.json lacks a field that decides attention.
    """
    found = Diagnosis(model=", ".join(config["architectures"]), profile=profile.name)
    geometry = geometry_of(config, profile)
    stated = profile.model.geometry
    differs = [
        f"{name} {getattr(stated, name)} (model {getattr(geometry, name)})"
        for name in type(stated).model_fields
        if name != "hidden_size" and getattr(stated, name) != getattr(geometry, name)
    ]
    if differs:
        found.notes.append(
            "the profile describes another model: " + ", ".join(differs) + "; the pages below "
            "are the model's, its weights the profile's figure"
        )
    model = profile.model.model_copy(update={"geometry": geometry})
    profile = profile.model_copy(update={"model": model})

    _weights(config, found)
    _routes(config, profile, geometry, library or release_library(), found)
    try:
        plan_memory(profile, max(CARDS_GIB.values()) * 64)  # the shapes alone
    except ImpossibleProfile as error:
        found.problems += error.reasons
        return found
    found.page = asdict(kv_pages(profile))
    _cards(profile, found, cards)
    _compiled(geometry, config, found)
    return found
