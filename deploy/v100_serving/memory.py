"""Does a profile fit a card? Every refusal is the arithmetic that leads to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from v100_serving.pages import KERNEL_BLOCK_TOKENS, KvPages, kv_pages
from v100_serving.profiles import Profile

GIB = 1 << 30

CARDS_GIB = {"v100-16gb": 15.77, "v100-32gb": 31.74}
"""Memory that the driver leaves to programs on each card (GiB, ECC on)."""


class ImpossibleProfile(ValueError):
    """A combination that cannot work; `reasons` holds one sentence with its arithmetic for each."""

    def __init__(self, name: str, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(f"profile {name} is impossible:\n" + "\n".join(f"- {r}" for r in reasons))


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank, in GiB, and what fits into its KV cache.

    Attributes:
        card_gib: memory of the card (0 on CPU).
        weights_gib, other_gib: inside the utilization limit, beside the KV cache.
        kv_gib: left for the KV cache.
        outside_gib: beyond the limit; graph pool and workspaces must fit there.
        blocks: usable blocks of the pool (its null block is not counted).
        full_contexts: how many requests of `max_model_len` fit at once (may be fractional).
        demands: (requests, tokens, needed blocks) of each demand of the profile.
    """

    pages: KvPages
    card_gib: float
    weights_gib: float
    other_gib: float
    kv_gib: float
    outside_gib: float
    blocks: int
    full_contexts: float
    demands: tuple[tuple[int, int, int], ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        return asdict(self) | {"block_bytes": self.pages.block_bytes}


def _shape_reasons(profile: Profile) -> list[str]:
    geometry, engine, tp = profile.model.geometry, profile.engine, profile.engine.tensor_parallel
    reasons = []
    if geometry.query_heads % tp:
        reasons.append(
            f"{geometry.query_heads} query heads do not divide among {tp} ranks: "
            f"{geometry.query_heads} % {tp} = {geometry.query_heads % tp}"
        )
    if geometry.kv_heads % tp and tp % geometry.kv_heads:
        reasons.append(
            f"{geometry.kv_heads} KV heads neither divide among {tp} ranks nor replicate evenly"
        )
    if geometry.gdn:
        for what, count in (("key", geometry.gdn.key_heads), ("value", geometry.gdn.value_heads)):
            if count % tp:
                reasons.append(f"{count} GDN {what} heads do not divide among {tp} ranks")
    if engine.max_model_len > geometry.max_position:
        reasons.append(
            f"max_model_len {engine.max_model_len} exceeds the model's "
            f"{geometry.max_position} positions"
        )
    if engine.block_size and engine.block_size % KERNEL_BLOCK_TOKENS:
        reasons.append(f"block_size {engine.block_size} is no multiple of {KERNEL_BLOCK_TOKENS}")
    for demand in profile.demand:
        if demand.tokens > engine.max_model_len:
            reasons.append(
                f"demand of {demand.tokens} tokens exceeds max_model_len {engine.max_model_len}"
            )
        if demand.requests > engine.max_num_seqs:
            reasons.append(
                f"demand of {demand.requests} requests exceeds max_num_seqs {engine.max_num_seqs}"
            )
    return reasons


def _platform_reasons(profile: Profile) -> list[str]:
    engine, reasons = profile.engine, []
    if profile.hardware.accelerator == "v100":
        if engine.gpu_memory_utilization is None:
            reasons.append("a v100 profile must state gpu_memory_utilization")
        if engine.dtype != "half":
            reasons.append(f"dtype {engine.dtype}: compute capability 7.0 serves half only")
        if engine.cpu_kv_cache_gib:
            reasons.append("cpu_kv_cache_gib has no meaning on a GPU")
    else:
        if engine.cpu_kv_cache_gib is None:
            reasons.append("a cpu profile must state cpu_kv_cache_gib (vLLM takes half the memory)")
        if engine.gpu_memory_utilization is not None:
            reasons.append("gpu_memory_utilization has no meaning on a CPU")
        if engine.kv_cache_dtype != "auto":
            reasons.append(f"kv_cache_dtype {engine.kv_cache_dtype}: vLLM 0.19.1 has none on CPU")
        if profile.ranks != 1:
            reasons.append(f"{profile.ranks} ranks: the cpu profile runs one")
    if profile.model.geometry.gdn and engine.speculative:
        method = engine.speculative.method
        if method == "ngram":
            reasons.append(
                "ngram drafts corrupt GDN state in vLLM 0.19.1 (a step without drafts after an "
                "accepted one reads the wrong state slot): use mtp"
            )
    return reasons


def plan_memory(profile: Profile, card_gib: float | None = None) -> MemoryPlan:
    """What a rank of `profile` needs on a card of `card_gib` GiB (`CARDS_GIB` has the usual ones).

    `card_gib` is ignored for a cpu profile; without it a GPU profile is planned on the smallest
    card that it admits (`hardware.min_card_gib`).

    Raises:
        ImpossibleProfile: with one sentence for each thing that cannot work.
    """
    reasons = _shape_reasons(profile) + _platform_reasons(profile)
    if reasons:
        raise ImpossibleProfile(profile.name, reasons)
    pages, engine = kv_pages(profile), profile.engine
    stepped = bool(profile.model.geometry.gdn) and engine.prefix_caching
    if stepped and pages.block_tokens > engine.max_num_batched_tokens:
        reasons.append(
            f"a page of {pages.block_tokens} tokens is larger than max_num_batched_tokens "
            f"{engine.max_num_batched_tokens}: prefix caching of a hybrid cannot step over it"
        )

    weights, estimates = profile.model.weights, profile.estimates
    rank_weights = (
        weights.total_gib - weights.replicated_gib
    ) / profile.ranks + weights.replicated_gib
    other = estimates.activation_gib + estimates.runtime_gib
    if profile.hardware.accelerator == "cpu":
        card, kv, outside = 0.0, float(engine.cpu_kv_cache_gib or 0), 0.0
        origin = f"cpu_kv_cache_gib {kv:.2f}"
    else:
        card = profile.hardware.min_card_gib if card_gib is None else card_gib
        limit = card * (engine.gpu_memory_utilization or 0)
        kv, outside = limit - rank_weights - other, card - limit
        origin = (
            f"{card:.2f} x {engine.gpu_memory_utilization} = {limit:.2f} GiB, minus weights "
            f"{weights.total_gib:.2f} over {profile.ranks} ranks = {rank_weights:.2f}, minus "
            f"activations {estimates.activation_gib:.2f} and runtime {estimates.runtime_gib:.2f} "
            f"= {kv:.2f} GiB for KV"
        )
        if card < profile.hardware.min_card_gib:
            reasons.append(
                f"the card has {card:.2f} GiB, hardware.min_card_gib is "
                f"{profile.hardware.min_card_gib:.2f}"
            )
        if outside < estimates.graph_pool_gib:
            reasons.append(
                f"graphs and workspaces need {estimates.graph_pool_gib:.2f} GiB outside the limit, "
                f"but {card:.2f} - {limit:.2f} = {outside:.2f} GiB is left there"
            )

    blocks = max(0, int(kv * GIB) // pages.block_bytes - 1)  # block 0 is vLLM's null block
    one_context = pages.blocks(engine.max_model_len)
    demands = tuple(
        (d.requests, d.tokens, d.requests * pages.blocks(d.tokens)) for d in profile.demand
    )
    needs = [(1, engine.max_model_len, one_context), *demands]
    for requests, tokens, needed in dict.fromkeys(needs):
        if needed > blocks:
            reasons.append(
                f"{requests} x {tokens} tokens need {requests} x {pages.blocks(tokens)} blocks of "
                f"{pages.block_bytes} bytes = {needed * pages.block_bytes / GIB:.2f} GiB, the KV "
                f"cache holds {blocks} blocks ({origin})"
            )
    if reasons:
        raise ImpossibleProfile(profile.name, reasons)
    return MemoryPlan(
        pages=pages,
        card_gib=card,
        weights_gib=rank_weights,
        other_gib=other,
        kv_gib=kv,
        outside_gib=outside,
        blocks=blocks,
        full_contexts=blocks / one_context,
        demands=demands,
    )
