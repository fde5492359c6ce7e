"""The service's Prometheus counters: scrape, and the change over a wave.

A counter the service does not export is None, and what depends on it is `not-run`: a missing
counter read as zero would turn "nobody knows" into "no preemptions".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from v100_gate.traces import CounterDelta

SCALARS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "finished_requests": "vllm:request_success_total",
    "queue_seconds": "vllm:request_queue_time_seconds_sum",
}
"""Field of CounterDelta -> sample name; samples of several engines or reasons are added up."""

PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ROUTES = "vllm:attention_route_launches_total"


@dataclass
class Snapshot:
    """One scrape of /metrics."""

    totals: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)
    routes: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    created: dict[str, float] = field(default_factory=dict)
    raw: str = ""


def parse(text: str) -> Snapshot:
    """Parse the text exposition of a vLLM server."""
    snapshot = Snapshot(raw=text)
    names = {name: key for key, name in SCALARS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                key = names[sample.name]
                snapshot.totals[key] = snapshot.totals.get(key, 0.0) + sample.value
            elif sample.name == PER_POSITION:
                position = int(sample.labels["position"])
                snapshot.positions[position] = snapshot.positions.get(position, 0.0) + sample.value
            elif sample.name == ROUTES:
                labels = sample.labels
                key = f"{labels['model']}/{labels['route']}/{labels['graph']}"
                snapshot.routes[key] = snapshot.routes.get(key, 0.0) + sample.value
            elif sample.name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                snapshot.gauges[sample.name] = snapshot.gauges.get(sample.name, 0.0) + sample.value
            elif sample.name == "vllm:kv_cache_usage_perc":
                snapshot.gauges[sample.name] = max(
                    snapshot.gauges.get(sample.name, 0.0), sample.value
                )
            elif sample.name == "vllm:cache_config_info":
                snapshot.info.update(sample.labels)
            elif sample.name == "process_start_time_seconds":
                snapshot.created["process"] = sample.value
    return snapshot


def delta(before: Snapshot, after: Snapshot) -> CounterDelta:
    """Change between two scrapes.

    A counter that is missing on either side stays None. One that went backwards is listed in
    `reset`, as is a process that started in between: then the service restarted and no change
    can be trusted.
    """
    values: dict[str, float | None] = {}
    reset: list[str] = []
    for key, name in SCALARS.items():
        old, new = before.totals.get(key), after.totals.get(key)
        if old is None or new is None:
            values[key] = None
        elif new < old:
            values[key] = None
            reset.append(name)
        else:
            values[key] = new - old
    if before.created.get("process") != after.created.get("process"):
        reset.append("process_start_time_seconds")
    positions = None
    if before.positions and before.positions.keys() == after.positions.keys():
        changes = [after.positions[p] - before.positions[p] for p in sorted(after.positions)]
        if min(changes) < 0:
            reset.append(PER_POSITION)
        else:
            positions = changes
    # A route's series appears with its first launch, so what is missing before was zero then.
    routes = None
    if after.routes:
        routes = {key: new - before.routes.get(key, 0.0) for key, new in after.routes.items()}
        if min(routes.values()) < 0:
            reset.append(ROUTES)
            routes = None
    return CounterDelta(**values, accepted_per_position=positions, routes=routes, reset=reset)
