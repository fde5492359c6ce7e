"""Can the waves of a profile be live at once: in the scheduler's slots, and in the KV cache?"""

from __future__ import annotations

from math import ceil

from v100_gate.errors import RefusedError
from v100_gate.schema import Profile, ServiceContract, WaveSpec


def demand_tokens(spec: WaveSpec, service: ServiceContract) -> int:
    """KV tokens that a wave holds at its end: whole pages per request, drafts included.

    A shared prefix is counted once when the service caches prefixes, in whole pages.
    """
    page = service.page_size
    shared = spec.shared_prefix_tokens // page * page if service.prefix_caching else 0
    total = shared
    for length in spec.lengths:
        own = length - shared + spec.output_tokens + service.draft_tokens
        total += ceil(own / page) * page
    return total


def explain(spec: WaveSpec, service: ServiceContract) -> str:
    """The arithmetic of `demand_tokens` in one line."""
    page = service.page_size
    shared = spec.shared_prefix_tokens // page * page if service.prefix_caching else 0
    parts = [
        f"{ceil((n - shared + spec.output_tokens + service.draft_tokens) / page)}"
        for n in spec.lengths
    ]
    same = len(set(parts)) == 1
    own = f"{len(parts)} x {parts[0]}" if same else "(" + " + ".join(parts) + ")"
    return (
        f"{own} pages of {page} tokens (input + {spec.output_tokens} output + "
        f"{service.draft_tokens} drafts each)"
        + (f" + {shared} shared tokens" if shared else "")
        + f" = {demand_tokens(spec, service)} tokens"
    )


def refuse_impossible(profile: Profile, capacity_tokens: int | None, source: str) -> None:
    """Refuse a profile whose waves cannot be live together.

    Args: capacity_tokens: KV capacity; None when nobody knows it (then it refuses nothing);
        source: who says so, for the message.
    Raises: RefusedError with the arithmetic.
    """
    slots = profile.service.max_num_seqs
    for spec in profile.waves:
        if spec.concurrency > slots:
            raise RefusedError(
                f"profile {profile.name}, wave {spec.name} cannot be live at once: it sends "
                f"{spec.concurrency} requests, the service runs {slots} (service.max_num_seqs), so "
                f"{spec.concurrency - slots} would queue until others have ended. Lower the "
                "concurrency, or raise max_num_seqs here and in the service."
            )
    if capacity_tokens is None:
        return
    for spec in profile.waves:
        demand = demand_tokens(spec, profile.service)
        if demand > capacity_tokens:
            raise RefusedError(
                f"profile {profile.name}, wave {spec.name} cannot be live at once: it needs "
                f"{explain(spec, profile.service)}, the KV cache holds {capacity_tokens} "
                f"({source}). The service would preempt, and the figures would be of something "
                "else. Lower the concurrency or the lengths, or raise the KV budget."
            )
