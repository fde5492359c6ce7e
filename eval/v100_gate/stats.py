"""Statistics that do not flatter: bootstrap intervals, a yardstick, three-way decisions.

Values come as a list per service start, each holding one value per measured repeat. The
bootstrap draws starts first and repeats within them second, so what differs from one start to
the next (memory placement, clocks, capture) widens the interval as it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["pass", "fail", "inconclusive"]
Groups = Sequence[Sequence[float]]

DRAWS = 4000
LEVEL = 0.95
FEWEST_VALUES = 3
"""Fewer values per arm than this never decide anything."""


@dataclass(frozen=True)
class Summary:
    """Median, range and every value."""

    median: float
    minimum: float
    maximum: float
    values: list[list[float]]


def flat(groups: Groups) -> list[float]:
    """All values of all starts."""
    return [value for group in groups for value in group]


def summary(groups: Groups) -> Summary | None:
    """Summary of all values; None without any."""
    values = flat(groups)
    if not values:
        return None
    return Summary(
        float(np.median(values)),
        float(min(values)),
        float(max(values)),
        [[float(value) for value in group] for group in groups],
    )


def _draw(rng: np.random.Generator, groups: Groups, draws: int) -> np.ndarray:
    """Bootstrap medians, float64 [draws]: starts with replacement, then repeats in each."""
    filled = [group for group in groups if len(group)]
    counts = np.array([len(group) for group in filled])
    values = np.full((len(filled), counts.max()), np.nan)
    for start, group in enumerate(filled):
        values[start, : len(group)] = group
    picked = rng.integers(len(filled), size=(draws, len(filled)))
    size = counts[picked][..., None]
    repeat = (rng.random((*picked.shape, counts.max())) * size).astype(int)
    sample = values[picked[..., None], repeat]
    if counts.min() == counts.max():
        return np.median(sample.reshape(draws, -1), axis=1)
    # A start with fewer repeats fills fewer places.
    sample[np.arange(counts.max()) >= size] = np.nan
    return np.nanmedian(sample.reshape(draws, -1), axis=1)


def interval(
    control: Groups, candidate: Groups, relative: bool, seed: int = 0, draws: int = DRAWS
) -> tuple[float, float] | None:
    """Bootstrap interval (95 %) of candidate against control medians.

    relative: candidate / control - 1; else candidate - control, in the values' own unit.
    None when an arm has no value, or when nothing can be relative to a control of zero.
    """
    if not flat(control) or not flat(candidate):
        return None
    rng = np.random.default_rng(seed)
    base, new = _draw(rng, control, draws), _draw(rng, candidate, draws)
    if relative and not base.all():
        return None
    change = new / base - 1.0 if relative else new - base
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(change, [tail, 1.0 - tail])
    return float(low), float(high)


def yardstick(control: Groups, relative: bool) -> float | None:
    """The control's own run-to-run distance.

    With several starts: the range of the starts' medians. With one start: half the range of its
    repeats, which is all that can be known. Relative to the control's median if `relative`.
    """
    values = flat(control)
    if not values:
        return None
    medians = [float(np.median(group)) for group in control if len(group)]
    spread = max(medians) - min(medians) if len(medians) > 1 else (max(values) - min(values)) / 2
    if not relative:
        return spread
    middle = float(np.median(values))
    return spread / abs(middle) if middle else None


@dataclass(frozen=True)
class Decision:
    """Outcome of a non-inferiority test, with everything that led to it.

    `change` is the point estimate (relative, or in the values' unit); positive means more.
    """

    verdict: Verdict
    change: float
    low: float
    high: float
    yardstick: float
    margin: float
    reason: str


def non_inferior(
    control: Groups,
    candidate: Groups,
    margin: float,
    *,
    higher_is_better: bool,
    relative: bool,
    fewest: int = FEWEST_VALUES,
) -> Decision | None:
    """Is the candidate at most `margin` worse than the control?

    The bootstrap interval is widened on both sides by the yardstick, because a difference that
    the control shows against itself is no evidence about the candidate. Then:
    pass when the whole widened interval is on the good side of -margin, fail when all of it is
    on the bad side, inconclusive otherwise. With fewer than `fewest` values in an arm nothing
    but inconclusive is possible.
    """
    bounds = interval(control, candidate, relative)
    noise = yardstick(control, relative)
    base, new = summary(control), summary(candidate)
    if bounds is None or noise is None or base is None or new is None:
        return None
    change = new.median / base.median - 1.0 if relative else new.median - base.median
    sign = 1.0 if higher_is_better else -1.0
    worst = min(sign * bounds[0], sign * bounds[1]) - noise
    best = max(sign * bounds[0], sign * bounds[1]) + noise
    values = min(len(flat(control)), len(flat(candidate)))
    if values < fewest:
        verdict, reason = "inconclusive", f"{values} values per arm; {fewest} are needed"
    elif worst >= -margin:
        verdict, reason = "pass", "the interval and the control's own noise are inside the margin"
    elif best < -margin:
        verdict, reason = "fail", "worse by more than the margin, beyond the noise"
    else:
        verdict, reason = "inconclusive", "the noise does not support a verdict at this margin"
    return Decision(verdict, change, bounds[0], bounds[1], noise, margin, reason)


def paired_interval(
    control: Sequence[float], candidate: Sequence[float], seed: int = 0, draws: int = DRAWS
) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the mean of candidate - control over the same requests."""
    difference = np.asarray(candidate, dtype=float) - np.asarray(control, dtype=float)
    rng = np.random.default_rng(seed)
    picks = rng.integers(difference.size, size=(draws, difference.size))
    means = difference[picks].mean(axis=1)
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)
