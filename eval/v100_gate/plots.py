"""Plots as inline SVG that follow the page's light or dark colours.

Matplotlib draws with marker colours; afterwards those become `currentColor` and CSS variables, so
one SVG serves both colour schemes and needs no script.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

INK = "#010203"
ARM_COLOURS = {
    "control": "#010210",
    "candidate": "#010211",
    "no-spec": "#010212",
    "shallow": "#010213",
}
OTHER = "#010214"
VARIABLES = {
    "#010210": "var(--control)",
    "#010211": "var(--candidate)",
    "#010212": "var(--third)",
    "#010213": "var(--fourth)",
    "#010214": "var(--fifth)",
}
MARKERS = {"control": "o", "candidate": "s", "no-spec": "^", "shallow": "D"}

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "v100-gate",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def colour(arm: str) -> str:
    """Marker colour of an arm."""
    return ARM_COLOURS.get(arm, OTHER)


def line(arm: str) -> dict:
    """Line style of an arm: the control is broad and dashed, so that equal lines both show."""
    if arm == "control":
        return {"linestyle": "--", "linewidth": 3.5, "alpha": 0.6}
    return {"linestyle": "-", "linewidth": 1.5}


def draw(paint: Callable[[Axes], None], title: str, width: float = 5.2, height: float = 3.0) -> str:
    """SVG of one plot; `paint` draws into the axes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        paint(axes)
        axes.set_title(title, fontsize=10, loc="left")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(INK, "currentColor")
    for marker, variable in VARIABLES.items():
        svg = svg.replace(marker, variable)
    # Scale with the page instead of a fixed size in points.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Identifiers must be unique in a page of several plots, and the same in every process.
    salt = f"p{hashlib.sha256(title.encode()).hexdigest()[:8]}-"
    svg = re.sub(r'id="([^"]+)"', rf'id="{salt}\1"', svg)
    svg = re.sub(r'(href="#)([^"]+)"', rf'\1{salt}\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{salt}\1)", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _legend(axes: Axes) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize=8)


def figure_by_wave(
    comparison: dict, figure: str, scale: float, label: str, title: str
) -> str | None:
    """Every raw value of a figure per wave and arm, with the median as a bar."""
    arms = list(comparison["arms"])
    waves = comparison["waves"]
    if not any(w["arms"].get(a, {}).get("figures", {}).get(figure) for w in waves for a in arms):
        return None

    def paint(axes: Axes) -> None:
        width = 0.8 / max(1, len(arms))
        for place, arm in enumerate(arms):
            shown = False
            for index, wave in enumerate(waves):
                found = wave["arms"].get(arm, {}).get("figures", {}).get(figure)
                if not found:
                    continue
                x = index - 0.4 + width * (place + 0.5)
                axes.bar(
                    x,
                    found["median"] * scale,
                    width * 0.9,
                    color=colour(arm),
                    alpha=0.35,
                    label=None if shown else arm,
                )
                shown = True
                values = [value * scale for start in found["values"] for value in start]
                axes.plot(
                    [x] * len(values),
                    values,
                    MARKERS.get(arm, "x"),
                    color=colour(arm),
                    markersize=4,
                )
        axes.set_xticks(range(len(waves)), [wave["wave"] for wave in waves])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        _legend(axes)

    return draw(paint, title)


def acceptance_by_position(comparison: dict, wave: dict) -> str | None:
    """Acceptance of draft position 1..n, one line per arm."""
    lines = {
        arm: wave["arms"][arm]["acceptance_by_position"]
        for arm in comparison["arms"]
        if wave["arms"].get(arm, {}).get("acceptance_by_position")
    }
    if not lines:
        return None

    def paint(axes: Axes) -> None:
        for arm, values in lines.items():
            axes.plot(
                range(1, len(values) + 1),
                [value * 100 for value in values],
                marker=MARKERS.get(arm, "x"),
                color=colour(arm),
                label=arm,
                **line(arm),
                markersize=4,
            )
        axes.set_xlabel("draft position")
        axes.set_ylabel("accepted, %")
        axes.set_ylim(0, 105)
        _legend(axes)

    return draw(paint, f"Acceptance by position, {wave['wave']}")


def distribution(values: dict[str, list[float]], label: str, title: str) -> str | None:
    """Cumulative distribution of a per-request figure, one line per arm."""
    values = {arm: sorted(found) for arm, found in values.items() if found}
    if not values:
        return None

    def paint(axes: Axes) -> None:
        for arm, found in values.items():
            shares = [index / len(found) * 100 for index in range(len(found) + 1)]
            axes.step(
                [found[0], *found],
                shares,
                where="post",
                color=colour(arm),
                label=arm,
                **line(arm),
            )
        axes.set_xlabel(label)
        axes.set_ylabel("requests, %")
        axes.set_ylim(0, 105)
        axes.set_xlim(left=0)
        _legend(axes)

    return draw(paint, title)


def step_by_context(comparison: dict) -> str | None:
    """Time per decode round against total live context of the wave."""
    points: dict[str, list[tuple[float, float]]] = {}
    for wave in comparison["waves"]:
        context = sum(wave["input_tokens"])
        for arm in comparison["arms"]:
            found = wave["arms"].get(arm, {}).get("figures", {}).get("step_s")
            if found:
                points.setdefault(arm, []).append((context, found["median"] * 1000))
    if not points:
        return None

    def paint(axes: Axes) -> None:
        for arm, pairs in points.items():
            pairs.sort()
            axes.plot(
                [x for x, _ in pairs],
                [y for _, y in pairs],
                marker=MARKERS.get(arm, "x"),
                color=colour(arm),
                label=arm,
                **line(arm),
                markersize=4,
            )
        axes.set_xlabel("live context of the wave, tokens")
        axes.set_ylabel("decode round, ms")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        _legend(axes)

    return draw(paint, "Step time against context")


def rolling_goodput(rows: list[dict]) -> str | None:
    """Goodput against arrival rate, one line per arm; starts averaged, each start a point."""
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["goodput"] is not None:
            points.setdefault(row["arm"], {}).setdefault(row["rate"], []).append(row["goodput"])
    if not points:
        return None

    def paint(axes: Axes) -> None:
        rates = sorted({rate for found in points.values() for rate in found})
        axes.plot(rates, rates, color=INK, linewidth=0.7, linestyle=":", label="all arrivals")
        for arm, found in points.items():
            ordered = sorted(found)
            axes.plot(
                ordered,
                [sum(found[rate]) / len(found[rate]) for rate in ordered],
                marker=MARKERS.get(arm, "x"),
                color=colour(arm),
                label=arm,
                **line(arm),
                markersize=4,
            )
            for rate in ordered:
                axes.plot(
                    [rate] * len(found[rate]), found[rate], ".", color=colour(arm), markersize=3
                )
        axes.set_xlabel("arrivals, requests/s")
        axes.set_ylabel("within limits, requests/s")
        axes.set_ylim(bottom=0)
        _legend(axes)

    return draw(paint, "Goodput under rolling arrivals")


def rolling_acceptance(rows: list[dict]) -> str | None:
    """Tokens per chunk against context length under rolling arrivals, one line per arm."""
    points: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for length, value in row["tokens_per_chunk_by_length"].items():
            points.setdefault(row["arm"], {}).setdefault(int(length), []).append(value)
    if not points:
        return None

    def paint(axes: Axes) -> None:
        for arm, found in points.items():
            ordered = sorted(found)
            axes.plot(
                ordered,
                [sum(found[length]) / len(found[length]) for length in ordered],
                marker=MARKERS.get(arm, "x"),
                color=colour(arm),
                label=arm,
                **line(arm),
                markersize=4,
            )
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("tokens per chunk")
        axes.set_ylim(bottom=0)
        _legend(axes)

    return draw(paint, "Tokens per chunk by context length")


def memory(rows: list[dict]) -> str | None:
    """KV budget and graph pool per arm, worst rank."""
    values: dict[str, tuple[float, float]] = {}
    for row in rows:
        kv, pool = row["kv_gib"].values(), row["graph_pool_gib"].values()
        if kv:
            values[row["arm"]] = (min(kv), max(pool, default=0.0))
    if not values:
        return None

    def paint(axes: Axes) -> None:
        width = 0.8 / len(values)
        for place, (arm, pair) in enumerate(values.items()):
            xs = [index - 0.4 + width * (place + 0.5) for index in range(2)]
            bars = axes.bar(xs, pair, width * 0.9, color=colour(arm), alpha=0.6, label=arm)
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
        axes.set_xticks(range(2), ["KV budget", "graph pool"])
        axes.set_ylabel("GiB per rank")
        _legend(axes)

    return draw(paint, "Memory")
