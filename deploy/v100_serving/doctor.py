"""What a model will do on V100 cards, said before anybody waits for a load.

From a model's ``config.json`` and a serving profile: the attention route of each layer type, the KV
page and budget per card, what is compiled at start and with which tools, and what cannot work. The
route rules are the backend's own (``sm70_attention.dispatch``), the KV arithmetic the profiles'.
Needs no GPU, no vLLM and no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from v100_serving.memory import CARDS_GIB, ImpossibleProfile, plan_memory
from v100_serving.model_config import (
    FULL,
    GDN,
    NO_ATTENTION,
    SERVED,
    SLIDING,
    ConfigError,
    ModelConfig,
    geometry_of,
    layer_kinds,
    ruled_out,
)
from v100_serving.pages import kv_pages
from v100_serving.profiles import Geometry, Profile

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

EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")

REFUSED_FIELDS = {
    "attn_logit_softcapping": "a soft cap on attention logits",
    "alibi": "ALiBi",
    "attention_chunk_size": "attention in chunks",
}
"""Fields of config.json that, when set, ask for what no SM70 kernel does."""


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
    path = path.resolve()
    wrapper = load_wrapper()
    checks = importlib.import_module(f"{wrapper.__name__}.library")
    try:
        info = wrapper.read_info(path)
        checks.check_info(info, checks.expected_source_hash())
    except wrapper.LibraryError as error:
        if "libtorch" in str(error) and importlib.util.find_spec("torch") is None:
            raise ConfigError(
                f"{path} needs PyTorch's libraries, and this Python ({sys.executable}) has no "
                f"PyTorch, which says nothing about the library: {_with_torch()}"
            ) from error
        raise ConfigError(str(error)) from error
    return load_dispatch().Library(
        abi=info.abi,
        archs=frozenset(info.archs),
        kernels=info.kernels,
        long_batch_capacity=info.long_batch_capacity,
        source_sha256=info.source_sha256,
    )


def _with_torch() -> str:
    """Which interpreter has the PyTorch of a release."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-v100")
    here = sorted(mark.parent for mark in cache.glob("serve-cpu-*/complete"))
    return (
        "run the doctor with the release's environment (on a node "
        "/opt/vllm-v100/instances/INSTANCE/current/venv/bin/python), or in a checkout with the "
        f"serving environment ({here[-1] if here else cache / 'serve-cpu-*'}/bin/python"
        + (")" if here else ", which `make demo` makes)")
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


def _weights(config: ModelConfig, found: Diagnosis) -> None:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "unstated").split(".")[-1]
    quantization = config.object("quantization_config") or config.object("compression_config")
    refused = [t for t in config.model_types if t in NO_FLOAT16]
    if refused:
        found.problems.append(
            f"vLLM does not run {refused[-1]} in float16 (it overflows), and SM70 has no bfloat16 "
            "and no float32 attention: use another model on these cards"
        )
    if not quantization:
        found.weights = f"{dtype}, not quantised" + ("" if refused else "; runs in float16")
        if dtype == "bfloat16" and not refused:
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
    if not (isinstance(groups, dict) and all(isinstance(g, dict) for g in groups.values())):
        raise ConfigError(
            f"{config.source}: quantization_config's config_groups is no object of objects"
        )
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


def _refused_layers(config: ModelConfig, kinds: list[str], found: Diagnosis) -> bool:
    """Whether there is a kind of layer that is not known; says what no SM70 kernel does."""
    known = (FULL, SLIDING, GDN, NO_ATTENTION)
    strange = {kind: kinds.count(kind) for kind in kinds if kind not in known}
    for kind, count in strange.items():
        found.layers.append(LayerType(kind, count, ("refused",)))
        found.problems.append(f"{count} of {len(kinds)} layers are of type {kind}: {SERVED}")
    if count := kinds.count(SLIDING):
        found.layers.append(LayerType("sliding-window attention", count, ("refused",)))
        found.problems.append(
            f"{count} layers have a sliding window of {config.get('sliding_window')} tokens, and "
            "SM70_ATTN has none: with --kv-cache-dtype auto, --attention-backend TRITON_ATTN runs "
            "them, slowly"
        )
    for name, what in REFUSED_FIELDS.items():
        if config.get(name):
            found.problems.append(f"{what} has no SM70 kernel")
    return bool(strange)


def _routes(
    config: ModelConfig, profile: Profile, geometry: Geometry, library: Any, found: Diagnosis
) -> None:
    d = load_dispatch()
    engine, tp, kinds = profile.engine, profile.engine.tensor_parallel, layer_kinds(config)
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

    why = d.refusal(layer, library, CAPABILITY, disabled)
    full = kinds.count(FULL)
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
    if any(config.get(name) for name in EXPERTS):
        found.layers.append(
            LayerType("mixture of experts", len(kinds), ("vLLM's Triton fused_moe in float16",))
        )
    if config.has_vision and "--language-model-only" not in engine.extra_args:
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


def _compiled(geometry: Geometry, config: ModelConfig, found: Diagnosis) -> None:
    triton = ["sampling and rejection", "rotary and norm fusions (Inductor)"]
    if geometry.gdn:
        triton.insert(0, "gated delta net, with autotuning of its prefill kernels")
    if any(config.get(name) for name in EXPERTS):
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
    config: ModelConfig,
    profile: Profile,
    cards: Iterable[str | float] = tuple(CARDS_GIB),
    library: Any = None,
) -> Diagnosis:
    """What `config` does on V100 under `profile`.

    Args:
        config: from `model_config.read_config`.
        cards: names of `CARDS_GIB`, or GiB.
        library: what the extension reports; None for a complete release's.
    Raises:
        ConfigError: the file lacks or garbles a field that decides attention, and nothing else
            rules the model out.
    """
    model_name = ", ".join(config.architectures) or "unknown architecture"
    found = Diagnosis(model=model_name, profile=profile.name)
    _weights(config, found)
    # The model's type comes first: files that leave their head counts out are refused for what
    # they are, and routes and pages of a foreign kind of model would be made up.
    found.problems += (foreign := ruled_out(config))
    if foreign:
        return found
    try:
        if _refused_layers(config, layer_kinds(config), found):
            return found
        geometry = geometry_of(config, profile)
    except ConfigError as error:
        if not found.problems:
            raise
        found.notes.append(f"no routes, pages and budgets: {error}")
        return found
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
