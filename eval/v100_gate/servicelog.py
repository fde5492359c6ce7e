"""Facts in a service's log: backend, routes, graph selections, memory, compile events, errors.

The patterns follow vLLM 0.19.1's own lines and the lines of this project's attention backend
(patches 0104 to 0106 of the series). One table, because a changed wording upstream must show
up as a missing fact (and so as `not-run`), in one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel

ANSI = re.compile(r"\x1b\[[0-9;]*m")
RANK = re.compile(r"\(\w*?Worker\w*?TP(\d+)|\bWorker_TP(\d+)|\brank[ =:](\d+)")
BACKEND = re.compile(r"Using ([A-Z][A-Z0-9_]+)(?: attention)? backend")
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
KV_GIB = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
GRAPH_POOL = re.compile(r"CUDA graph pool memory: ([\d.]+) GiB")
GRAPH_TOOK = re.compile(r"Graph capturing finished in [\d.]+ secs?, took ([\d.]+) GiB")
MODEL_GIB = re.compile(r"Model loading took ([\d.]+) GiB")
FIRST_LAUNCH = re.compile(r"First (\w+) launch of attention route (\w+) \((\w+)\)")
LAUNCHES = re.compile(r"Attention route launches of this rank: (.+)$")
LAUNCH = re.compile(r"(\w+)/(\w+)/(\w+) (\d+)")
SERVES = re.compile(r"(SM70_ATTN serves .+)$")
IDENTITY = re.compile(r"sm70_attention: library sha256=([0-9a-f]{64}) source sha256=([0-9a-f]{64})")
WORKSPACE = re.compile(r"(\w+) workspaces: ([\d,]+) bytes")
COMPILE = re.compile(
    r"torch\.compile|Dynamo bytecode|Compiling a graph|Triton autotuning|autotun\w+ .*took"
    r"|JIT compil|Building extension|Capturing CUDA graph|inductor.*compil",
    re.IGNORECASE,
)
ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback \(most recent call last\)|Xid|out of memory")
CAUSES = (
    (
        re.compile(r"Ninja is required|No such file or directory: 'ninja'|ninja: not found"),
        "ninja is not on the service's PATH (a systemd unit inherits none: add the Python "
        "environment's bin folder to Environment=PATH=...)",
    ),
    (
        re.compile(r"Address already in use"),
        "the port is taken: another service still runs (see `ss -ltnp`)",
    ),
    (
        re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE),
        "the GPU (or the machine) ran out of memory: another process holds some of it, or the "
        "memory utilization is too high",
    ),
    (
        re.compile(r"No available memory for the cache blocks|larger than the available KV cache"),
        "the KV cache does not fit: lower max-model-len or raise the memory utilization",
    ),
    (
        re.compile(r"spec decode is not supported"),
        "this tree cannot speculate on CPU: stock vLLM 0.19.1 asserts it away; serve a tree with "
        "the `cpu` patch group",
    ),
    (
        re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'"),
        "a Python module is missing from the service's environment",
    ),
    (
        re.compile(r"(config\.json|does not appear to have a file named|Can't load)"),
        "the model folder is incomplete or the path is wrong",
    ),
)


class LogFacts(BaseModel):
    """What a log says. None: no such line was found."""

    attention_backends: list[str] = []
    kv_tokens: int | None = None
    kv_gib_by_rank: dict[str, float] = {}
    max_concurrency: float | None = None
    graph_pool_gib_by_rank: dict[str, float] = {}
    model_gib_by_rank: dict[str, float] = {}
    served_geometries: list[str] = []
    """The backend's own words on which layers it serves, and whether the long route is on."""
    launches_by_rank: dict[str, dict[str, int]] = {}
    """Rank -> "model/route/graph" -> launches; 1 where only the first launch was logged."""
    library_sha256: list[str] = []
    source_sha256: list[str] = []
    workspace_gib_by_rank: dict[str, float] = {}
    compile_events: int = 0
    errors: list[str] = []


def rank_of(line: str) -> str:
    """Tensor-parallel rank a line belongs to; "0" for a service with one worker."""
    match = RANK.search(line)
    return next(group for group in match.groups() if group) if match else "0"


def compile_lines(lines: Iterable[str]) -> list[str]:
    """Lines that show that something was compiled or captured."""
    return [line.strip()[:300] for line in lines if COMPILE.search(line)]


def facts(text: str) -> LogFacts:
    """Collect the facts of a whole log."""
    found = LogFacts()
    for raw in text.splitlines():
        line = ANSI.sub("", raw)
        rank = rank_of(line)
        match = BACKEND.search(line)
        if match and match[1] not in found.attention_backends:
            found.attention_backends.append(match[1])
        if match := KV_TOKENS.search(line):
            found.kv_tokens = int(match[1].replace(",", ""))
        if match := KV_GIB.search(line):
            found.kv_gib_by_rank[rank] = float(match[1])
        if match := CONCURRENCY.search(line):
            found.max_concurrency = float(match[1])
        if match := GRAPH_POOL.search(line) or GRAPH_TOOK.search(line):
            found.graph_pool_gib_by_rank[rank] = float(match[1])
        if match := MODEL_GIB.search(line):
            found.model_gib_by_rank[rank] = float(match[1])
        if match := FIRST_LAUNCH.search(line):
            found.launches_by_rank.setdefault(rank, {}).setdefault("/".join(match.groups()), 1)
        if match := LAUNCHES.search(line):
            for model, route, graph, count in LAUNCH.findall(match[1]):
                found.launches_by_rank.setdefault(rank, {})[f"{model}/{route}/{graph}"] = int(count)
        if (match := SERVES.search(line)) and match[1] not in found.served_geometries:
            found.served_geometries.append(match[1])
        if match := IDENTITY.search(line):
            for values, value in (
                (found.library_sha256, match[1]),
                (found.source_sha256, match[2]),
            ):
                if value not in values:
                    values.append(value)
        if match := WORKSPACE.search(line):
            found.workspace_gib_by_rank[rank] = (
                found.workspace_gib_by_rank.get(rank, 0.0) + int(match[2].replace(",", "")) / 2**30
            )
        if COMPILE.search(line):
            found.compile_events += 1
        if ERROR.search(line) and len(found.errors) < 50:
            found.errors.append(line.strip()[:300])
    return found


def cause_of_failure(text: str) -> str | None:
    """The likely cause of a failed start, in an operator's words; None when none is known."""
    for pattern, words in CAUSES:
        if match := pattern.search(text):
            detail = f" ({match[1]})" if match.groups() and match[1] else ""
            return words + detail
    return None
