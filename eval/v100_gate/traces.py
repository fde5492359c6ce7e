"""What a client saw: the record of one request and of one wave, as stored in the raw JSON.

Times are seconds on the client's monotonic clock, relative to the wave's start (the moment the
gate opened for all its requests), so a jump of the wall clock cannot reach a figure.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal[
    "ok",
    "short",  # fewer tokens than were forced
    "truncated",  # the stream closed before [DONE]
    "stalled",  # no byte for limits.stall_s
    "timeout",  # longer than limits.request_timeout_s
    "disconnected",  # the connection broke: the usual sign of a dead server
    "refused",  # HTTP status other than 200
    "error",  # an error object inside the stream, or a chunk that is not JSON
    "cancelled",  # the gate was interrupted
    "in-flight",  # not finished when the record was written
]


class Chunk(BaseModel):
    """One server-sent event that carried tokens. A chunk is not a token: it may hold many."""

    t: float
    token_ids: list[int]
    text: str = ""


class RequestTrace(BaseModel):
    """One request as the client saw it."""

    model_config = ConfigDict(extra="forbid")

    index: int
    request_id: str
    prompt_tokens: int
    prompt_sha256: str
    max_tokens: int
    forced: bool
    seed: int
    due_at: float = 0.0
    """When it was meant to be sent (rolling arrivals); 0 in a wave."""
    sent_at: float | None = None
    """When the last byte of the request was handed to the socket."""
    headers_at: float | None = None
    ended_at: float | None = None
    http_status: int | None = None
    chunks: list[Chunk] = []
    finish_reason: str | None = None
    usage: dict | None = None
    status: Status = "in-flight"
    error: str | None = None
    logprobs: list[dict] = []
    """Raw `logprobs` objects of the chunks, only where they were asked for."""

    @property
    def token_ids(self) -> list[int]:
        """All returned token IDs in order."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        """All returned text."""
        return "".join(chunk.text for chunk in self.chunks)


class CounterDelta(BaseModel):
    """Change of the service's counters over a wave. None: the service has no such counter."""

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_per_position: list[float] | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    generation_tokens: float | None = None
    finished_requests: float | None = None
    queue_seconds: float | None = None
    routes: dict[str, float] | None = None
    """Attention launches of the first rank by "model/route/graph"; None: no such counter."""
    reset: list[str] = []
    """Counters that went backwards: the service restarted, so no delta of it means anything."""


class Look(BaseModel):
    """Who else was on the node at one moment. None: nobody could tell, or nobody looked."""

    active_units: list[str] | None = None
    """Those of the arms file's `stopped_units` that were active."""
    foreign: list[str] | None = None
    """Processes on a GPU that belong to no arm, in words."""

    @property
    def others(self) -> list[str]:
        """Everybody who should not have been there, in words."""
        units = [f"unit {unit} is active" for unit in self.active_units or []]
        foreign = [f"a process that belongs to no arm uses a GPU: {x}" for x in self.foreign or []]
        return units + foreign


class WaveRecord(BaseModel):
    """One wave: what was sent, what came back, what the counters and the log said."""

    schema_version: int = Field(alias="schema", default=1)
    arm: str
    start: int
    service_start_id: str
    wave: str
    kind: Literal["warmup", "measured", "rolling", "quality", "logits"]
    repeat: int
    concurrency: int
    wall_started: float
    """Unix time at the wave's start; for reading logs, never used in arithmetic."""
    wall_seconds: float
    monotonic_seconds: float
    requests: list[RequestTrace]
    counters: CounterDelta = CounterDelta()
    kv_usage_peak: float | None = None
    running_peak: float | None = None
    compile_events: list[str] | None = None
    """Log lines that show a compilation during the wave; None when no log could be read."""
    log_range: tuple[int, int] | None = None
    invalid: list[str] = []
    """Why this wave may not be averaged in; empty for a valid wave."""
    notes: list[str] = []
    gpu: list[dict] = []
    looks: list[Look] = []
    """Who else was there, once a second and as the wave ended; see hygiene.py."""
    fixture_sha256: str | None = None

    model_config = ConfigDict(populate_by_name=True, extra="forbid")
