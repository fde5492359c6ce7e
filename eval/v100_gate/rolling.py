"""Rolling arrivals: a Poisson trace from a seed, stored and sent alike to every arm."""

from __future__ import annotations

import random

from v100_gate.client import Request
from v100_gate.prompts import Tokenise, exact_tokens, seal
from v100_gate.schema import Profile, RollingSpec


def arrivals(spec: RollingSpec, rate: float) -> list[dict]:
    """Arrival times and lengths for one rate.

    Returns one dict per request: at (s), input_tokens, output_tokens. The lengths of request i
    are the same at every rate, so that rates differ in pace alone.
    """
    pace = random.Random(f"pace-{spec.seed}-{rate}")
    mix = random.Random(f"mix-{spec.seed}")
    now, trace = 0.0, []
    for _ in range(spec.requests):
        now += pace.expovariate(rate)
        trace.append(
            {
                "at": round(now, 6),
                "input_tokens": mix.choice(spec.input_tokens),
                "output_tokens": mix.choice(spec.output_tokens),
            }
        )
    return trace


async def fixture(tokenise: Tokenise, spec: RollingSpec) -> dict:
    """The traces of all rates and the prompts of their requests, sealed with a hash."""
    traces = {f"{rate:g}": arrivals(spec, rate) for rate in spec.rates_per_s}
    prefix = await exact_tokens(tokenise, "shared", spec.shared_prefix_tokens)
    suffixes = []
    for index, item in enumerate(next(iter(traces.values()))):
        length = max(1, item["input_tokens"] - len(prefix))
        suffixes.append(await exact_tokens(tokenise, f"rolling-{index}", length))
    return seal({"prefix": prefix, "suffixes": suffixes, "traces": traces})


def requests(fixture: dict, rate: str, profile: Profile) -> list[Request]:
    """The requests of one rate, each with the time it is due."""
    return [
        Request(
            (fixture["prefix"] + suffix)[: item["input_tokens"]],
            item["output_tokens"],
            profile.sampling.seed + index,
            due_at=item["at"],
        )
        for index, (item, suffix) in enumerate(
            zip(fixture["traces"][rate], fixture["suffixes"], strict=True)
        )
    ]
