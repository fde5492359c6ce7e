"""From what the engines wrote to evidence: each claim with its figures and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from server_proof.scenarios import FULL_LAYERS, RANKS

TIE = 0.1
"""Two tokens whose log-probabilities are closer than this are a tie: FP16 decides either way."""

Results = Mapping[str, Mapping[str, Any]]


def claim(name: str, holds: bool, **figures: Any) -> dict[str, Any]:
    """One line of evidence."""
    return {"claim": name, "holds": bool(holds), **figures}


def compare_tokens(
    a: Mapping[str, Any], b: Mapping[str, Any], round_a: int = 0, round_b: int = 0
) -> list[dict[str, Any]]:
    """Per request: tokens until the first difference, and the margin there in both runs.

    The margin is how much better the own token was than the other run's, by log-probability; None
    where the other run's token was not among the best that the engine kept.
    """
    first, second = a["rounds"][round_a], b["rounds"][round_b]
    rows = []
    for i, (x, y) in enumerate(zip(first["tokens"], second["tokens"], strict=True)):
        at = next((k for k, (s, t) in enumerate(zip(x, y, strict=False)) if s != t), None)
        shorter = min(len(x), len(y))
        row: dict[str, Any] = {"length": a["lengths"][i], "same": shorter if at is None else at}
        row["of"] = max(len(x), len(y))
        if at is None and len(x) != len(y):
            row["margins"] = [None, None]  # one run ended before the other: that is no tie
        elif at is not None:
            row["margins"] = [
                _margin(run["top"][i][at], own[at], other[at]) if run["top"] else None
                for run, own, other in ((first, x, y), (second, y, x))
            ]
        rows.append(row)
    return rows


def _margin(top: list[Any], own: int, other: int) -> float | None:
    found = {token: value for token, value in top}
    return round(found[own] - found[other], 5) if own in found and other in found else None


def until_ties(rows: list[dict[str, Any]]) -> bool:
    """Whether every difference is at a tie, in both runs."""
    return all(
        row["same"] == row["of"] or all(m is not None and abs(m) <= TIE for m in row["margins"])
        for row in rows
    )


def errors(task: Mapping[str, Any], reference: str) -> dict[str, float]:
    """Mean and largest distance of the engine's log-probabilities from a reference's."""
    gaps = [
        abs(x - y)
        for row in task["sequences"]
        for x, y in zip(row["engine"], row[reference], strict=True)
    ]
    return {"mean": round(statistics.fmean(gaps), 6), "max": round(max(gaps), 5)}


def between(task: Mapping[str, Any], one: str, other: str) -> dict[str, float]:
    """Mean and largest distance of two references."""
    gaps = [
        abs(x - y) for row in task["sequences"] for x, y in zip(row[one], row[other], strict=True)
    ]
    return {"mean": round(statistics.fmean(gaps), 6), "max": round(max(gaps), 5)}


def _tasks(results: Results, label: str) -> Mapping[str, Any]:
    return results[label]["tasks"]


def _pair(name: str, results: Results, a: str, b: str, task: str) -> dict[str, Any]:
    rows = compare_tokens(_tasks(results, a)[task], _tasks(results, b)[task])
    return claim(name, until_ties(rows), runs=[a, b], task=task, requests=rows)


def judge_dense(results: Results) -> list[dict[str, Any]]:
    """Claims of the part `dense`."""
    sm70 = _tasks(results, "dense-sm70-fp16")
    mine = errors(sm70["teacher"], "fp32")
    stock = {
        label: errors(_tasks(results, label)["teacher"], "fp32")
        for label in ("dense-flash-fp16", "dense-triton-fp16")
    }
    worst = max(e["mean"] for e in stock.values())
    claims = [
        claim(
            "FP16 KV: as near to FP32 as the stock backends",
            mine["mean"] <= 1.25 * worst + 1e-4,
            sm70=mine,
            stock=stock,
        ),
        _pair(
            "FP16 KV: greedy tokens of FLASH_ATTN until a tie, 16 ragged requests",
            results,
            "dense-sm70-fp16",
            "dense-flash-fp16",
            "ragged16",
        ),
        _pair(
            "FP16 KV: greedy tokens of TRITON_ATTN until a tie, 16 ragged requests",
            results,
            "dense-sm70-fp16",
            "dense-triton-fp16",
            "ragged16",
        ),
        _attention_decides(sm70),
        _prefix_hits(sm70["again"], "dense-sm70-fp16"),
    ]
    for kv in ("e4m3", "e5m2"):
        teacher = _tasks(results, f"dense-sm70-{kv}")["teacher"]
        rounding = between(teacher, "fp32", f"fp8_{kv}")
        same = errors(teacher, f"fp8_{kv}")
        claims.append(
            claim(
                f"{kv.upper()} KV: no further from FP32 than the rounding of the cache itself",
                errors(teacher, "fp32")["mean"] <= 1.15 * rounding["mean"]
                and same["mean"] <= 0.5 * rounding["mean"],
                from_fp32=errors(teacher, "fp32"),
                from_fp32_with_such_a_cache=same,
                rounding_of_the_cache=rounding,
            )
        )
    triton = _tasks(results, "dense-triton-e4m3").get("teacher")
    if triton and "sequences" in triton:
        claims[-2]["triton_which_also_rounds_queries"] = errors(triton, "fp32")
    preempted = _tasks(results, "dense-sm70-preempted")["growing16"]
    rows = compare_tokens(sm70["growing16"], preempted)
    count = preempted["counted"].get("vllm:num_preemptions", 0)
    claims.append(
        claim(
            "Preempted and resumed requests give the same tokens until a tie",
            count > 0 and until_ties(rows),
            preemptions=count,
            requests=rows,
        )
    )
    return claims


def _attention_decides(tasks: Mapping[str, Any]) -> dict[str, Any]:
    rows = compare_tokens(tasks["plain"], tasks["shuffled"])
    return claim(
        "Attention decides: shuffling the first half of a prompt changes its tokens",
        all(row["same"] < row["of"] for row in rows),
        requests=rows,
    )


def _prefix_hits(task: Mapping[str, Any], label: str) -> dict[str, Any]:
    rows = compare_tokens(task, task, 0, 1)
    cached = task["rounds"][1]["cached"]
    return claim(
        "Prefix cache hits give the same tokens until a tie",
        all(cached) and until_ties(rows),
        run=label,
        cached=cached,
        requests=rows,
    )


def route_counts(task: Mapping[str, Any]) -> dict[str, float]:
    """Launches by "model/route/graph" that the service's metrics counted during a task."""
    return {
        name.split(" ")[1]: value
        for name, value in task["counted"].items()
        if name.startswith("vllm:attention_route_launches ")
    }


def _counted(results: Results, label: str, task: str, graph: str, route: str) -> dict[str, Any]:
    """Route counter against layers x verify steps, for a wave of one request."""
    done = _tasks(results, label)[task]
    layers = FULL_LAYERS[results[label]["scenario"]["kind"]]
    launches = route_counts(done).get(f"target/{route}/{graph}", 0)
    steps = done["counted"].get("vllm:spec_decode_num_drafts", 0)
    return claim(
        f"{label}, {task}: {route} launches = {layers} layers x verify steps",
        every_step_counted(launches, layers, steps),
        launches=route_counts(done),
        verify_steps=steps,
        steps_dropped_after_the_end=launches / layers - steps,
    )


def every_step_counted(launches: float, layers: int, steps: float) -> bool:
    """Whether each layer was launched in every verify step.

    Async scheduling may run a step or two of a finished request and drop its tokens.
    """
    return launches > 0 and launches % layers == 0 and 0 <= launches / layers - steps <= 2


def _routes_agree(
    results: Results, on: str, off: str, waves: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The same tokens with the long route on and off.  waves: how a claim names a task -> task."""
    text = "same tokens with the long route on and off, until a tie"
    return [_pair(f"{name}: {text}", results, on, off, task) for name, task in waves.items()]


def judge_hybrid(results: Results) -> list[dict[str, Any]]:
    """Claims of the part `hybrid`."""
    on, off = "hybrid-sm70-e4m3-mtp", "hybrid-sm70-e4m3-mtp-nolong"
    graphs = {label: results[label]["facts"]["graphs"] for label in results}
    bounded = {
        label: sum(n for name, n in keys.items() if "bounded" in name)
        for label, keys in graphs.items()
    }
    wanted = {on: 16, "hybrid-sm70-e4m3-ngram": 16}
    claims = [
        claim(
            "Bounded graphs exist for the long geometry with its route on, and nowhere else",
            bounded == {label: wanted.get(label, 0) for label in results},
            graphs=graphs,
        ),
        _counted(results, on, "c1", "bounded", "long"),
        _counted(results, off, "c1", "ordinary", "paged"),
        *_routes_agree(
            results, on, off, {"C1": "c1", "C4": "c4", "16 ragged requests": "ragged16"}
        ),
        _pair(
            "FP16 KV: greedy tokens of FLASH_ATTN until a tie, 16 ragged requests",
            results,
            "hybrid-sm70-fp16",
            "hybrid-flash-fp16",
            "ragged16",
        ),
        _attention_decides(_tasks(results, "hybrid-sm70-fp16")),
        _prefix_hits(_tasks(results, on)["again"], on),
    ]
    ngram = _tasks(results, "hybrid-sm70-e4m3-ngram")["repetitive"]
    claims.append(
        claim(
            "n-gram drafts are accepted, and their verification takes the bounded graphs",
            route_counts(ngram).get("target/long/bounded", 0) > 0
            and ngram["counted"].get("vllm:spec_decode_num_accepted_tokens", 0) > 0,
            counted=ngram["counted"],
        )
    )
    groups = results[on]["facts"]["groups"]
    attention = [g for g in groups if g["backend"] == "SM70_ATTN"]
    claims.append(
        claim(
            "The kernel sees the cache manager's pages of 1648 tokens",
            all(g["kernel_block_tokens"] == g["block_tokens"] == 1648 for g in attention),
            groups=groups,
        )
    )
    return claims


def judge_long(results: Results) -> list[dict[str, Any]]:
    """Claims of the part `long`."""
    on, off = "long-sm70-e4m3-mtp", "long-sm70-e4m3-mtp-nolong"
    limit = _tasks(results, on)["limit"]["rounds"][0]
    return [
        _counted(results, on, "c1-65536", "bounded", "long"),
        _counted(results, off, "c1-65536", "ordinary", "paged"),
        *_routes_agree(results, on, off, {"c1-65536": "c1-65536", "ragged": "ragged"}),
        claim(
            "A request runs to the service limit of 262,144, its last steps with fewer drafts",
            [len(t) for t in limit["tokens"]] == [24],
            seconds=limit["seconds"],
            launches=route_counts(_tasks(results, on)["limit"]),
        ),
    ]


def _bounded_by_rank(results: Results, label: str) -> list[int]:
    return [
        sum(n for name, n in graphs.items() if "bounded" in name)
        for graphs in results[label]["facts"]["graphs_by_rank"]
    ]


def judge_tensor_parallel(part: str, results: Results) -> list[dict[str, Any]]:
    """Claims of the parts `tp2` and `tp4`: each is about every rank."""
    ranks, on, off = RANKS[part], f"{part}-sm70-e4m3-mtp", f"{part}-sm70-e4m3-mtp-nolong"
    bounded = {label: _bounded_by_rank(results, label) for label in (on, off)}
    routes = results[on]["worker_routes"]
    taken = [rank.get("target/long/bounded", 0) for rank in routes]
    c1 = _tasks(results, on)["c1"]
    steps = c1["counted"].get("vllm:spec_decode_num_drafts", 0)
    layers = FULL_LAYERS[results[on]["scenario"]["kind"]]
    in_c1 = [rank.get("target/long/bounded", 0) for rank in c1["routes_by_rank"]]
    return [
        claim(
            "Every rank captured its bounded graphs, and none with the long route off",
            bounded == {on: [16] * ranks, off: [0] * ranks},
            bounded=bounded,
            custom_all_reduce=results[on]["facts"].get("custom_all_reduce"),
            devices=results[on]["facts"].get("devices_by_rank"),
        ),
        claim(
            "Every rank took them, and each as often as the others",
            len(taken) == ranks and min(taken) > 0 and all(rank == routes[0] for rank in routes),
            launches=routes,
        ),
        claim(
            f"C1: long launches of every rank = {layers} layers x verify steps",
            len(in_c1) == ranks and all(every_step_counted(n, layers, steps) for n in in_c1),
            launches=c1["routes_by_rank"],
            verify_steps=steps,
        ),
        _counted(results, on, "c1", "bounded", "long"),
        _counted(results, off, "c1", "ordinary", "paged"),
        *_routes_agree(results, on, off, {"C1": "c1", "C4": "c4"}),
    ]


JUDGES = {"dense": judge_dense, "hybrid": judge_hybrid, "long": judge_long}
JUDGES |= {part: partial(judge_tensor_parallel, part) for part in RANKS}


def timings(results: Results) -> dict[str, Any]:
    """Medians of the timing tasks: on the GPU at hand, which says nothing about a V100."""
    table = {}
    for label, result in results.items():
        done = result["tasks"].get("timing")
        if not done or "prefill_s" not in done:
            continue
        prefill, decode = statistics.median(done["prefill_s"]), statistics.median(done["decode_s"])
        tokens = done["requests"] * done["max_tokens"]
        table[label] = {
            "prefill_tokens_per_s": round(done["requests"] * done["length"] / prefill),
            "decode_tokens_per_s": round(tokens / decode, 1),
            "raw": {"prefill_s": done["prefill_s"], "decode_s": done["decode_s"]},
            "shape": f"{done['requests']} x {done['length']} tokens, {done['max_tokens']} decoded",
        }
    return table
