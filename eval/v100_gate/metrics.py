"""The definitions of every figure, as pure functions over request traces.

A reader who doubts a number in a report should be able to recompute it from the raw JSON with
nothing but this file. tests/eval/test_metrics.py holds hand-made traces whose right answer can
be worked out on paper.

Conventions, fixed here and nowhere else:
- A request's *first token* is its first chunk that carries at least one token ID, its *last
  token* the last such chunk. A chunk's tokens all arrive at the chunk's time.
- A token belongs to a window (a, b] when a < t <= b: the tokens that arrive exactly when the
  window opens were produced before it.
- None means "not measured". It is never zero, and never takes part in an average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from v100_gate.traces import Chunk, CounterDelta, RequestTrace


def token_chunks(trace: RequestTrace) -> list[Chunk]:
    """The chunks of a request that carried tokens, in order."""
    return [chunk for chunk in trace.chunks if chunk.token_ids]


def first_token_at(trace: RequestTrace) -> float | None:
    """Time of the first token, seconds since the wave's start."""
    chunks = token_chunks(trace)
    return chunks[0].t if chunks else None


def last_token_at(trace: RequestTrace) -> float | None:
    """Time of the last token, seconds since the wave's start."""
    chunks = token_chunks(trace)
    return chunks[-1].t if chunks else None


def ttft(trace: RequestTrace) -> float | None:
    """Time to first token, seconds, from the moment the request was meant to be sent.

    In a wave that is the moment the gate opened; with rolling arrivals the due time of the
    request. Counting from the due time, not from the send, keeps a client that falls behind
    from hiding the wait (coordinated omission).
    """
    first = first_token_at(trace)
    return None if first is None else first - trace.due_at


def tpot(trace: RequestTrace) -> float | None:
    """Mean time per output token after the first chunk, seconds.

    (last - first) / (tokens after the first chunk). With one token in the first chunk this is
    the field's (latency - TTFT) / (output - 1). It can include the prefill of requests that were
    admitted with this one. None when all tokens came in one chunk.
    """
    chunks = token_chunks(trace)
    later = sum(len(chunk.token_ids) for chunk in chunks[1:])
    if later == 0:
        return None
    return (chunks[-1].t - chunks[0].t) / later


def inter_chunk(trace: RequestTrace) -> list[float]:
    """Times between successive token-carrying chunks, seconds."""
    return [b.t - a.t for a, b in pairwise(token_chunks(trace))]


def tokens_per_chunk(trace: RequestTrace) -> list[int]:
    """Number of token IDs in each token-carrying chunk."""
    return [len(chunk.token_ids) for chunk in token_chunks(trace)]


@dataclass(frozen=True)
class AllLive:
    """The all-live window of a wave: every request is decoding in it."""

    opens: float
    closes: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.closes - self.opens

    @property
    def tokens_per_s(self) -> float:
        """Decode throughput of the wave: token IDs returned in the window over its length."""
        return self.tokens / self.seconds


def all_live(traces: Sequence[RequestTrace]) -> AllLive | None:
    """The window from the last request's first token to the first request's last token.

    None when there is no such window: a request returned nothing, or one had finished before
    another began. It is a client window: it excludes prefill and is not worker-step throughput.
    """
    firsts = [first_token_at(trace) for trace in traces]
    lasts = [last_token_at(trace) for trace in traces]
    if not traces or any(value is None for value in (*firsts, *lasts)):
        return None
    opens, closes = max(firsts), min(lasts)
    if closes <= opens:
        return None
    tokens = sum(
        len(chunk.token_ids)
        for trace in traces
        for chunk in trace.chunks
        if opens < chunk.t <= closes
    )
    return AllLive(opens, closes, tokens)


def admission_skew(traces: Sequence[RequestTrace]) -> float | None:
    """Latest minus earliest time at which a request was fully sent, seconds."""
    sent = [trace.sent_at for trace in traces]
    if not sent or any(value is None for value in sent):
        return None
    return max(sent) - min(sent)


def acceptance(counters: CounterDelta) -> float | None:
    """Accepted / drafted tokens over a wave, 0..1. None without counters or without drafts."""
    if counters.reset or counters.accepted_tokens is None or not counters.draft_tokens:
        return None
    return counters.accepted_tokens / counters.draft_tokens


def acceptance_by_position(counters: CounterDelta) -> list[float] | None:
    """Share of drafts whose token at each position was accepted, 0..1 each."""
    if counters.reset or counters.accepted_per_position is None or not counters.drafts:
        return None
    return [value / counters.drafts for value in counters.accepted_per_position]


def emitted_per_round(counters: CounterDelta) -> float | None:
    """Tokens a decode round emits for one request: 1 + accepted / drafts. 1.0 means no gain."""
    if counters.reset or counters.accepted_tokens is None or not counters.drafts:
        return None
    return 1.0 + counters.accepted_tokens / counters.drafts


def prefix_hit_rate(counters: CounterDelta) -> float | None:
    """Prefix-cache hits / queries, tokens, 0..1."""
    if counters.reset or counters.prefix_hits is None or not counters.prefix_queries:
        return None
    return counters.prefix_hits / counters.prefix_queries


def step_time(
    traces: Sequence[RequestTrace], counters: CounterDelta, drafting: bool
) -> float | None:
    """Mean wall time of one decode round of one request, seconds.

    The requests' decode times (first to last token) added up, over the rounds they took. With
    speculation the rounds are the service's count of drafts, so a change of acceptance alone
    does not move this figure: it is what to compare when emitted tokens and acceptance both
    changed. Without speculation a round emits one token. Nothing is scaled by an assumption.
    """
    busy, tokens = 0.0, 0
    for trace in traces:
        chunks = token_chunks(trace)
        if len(chunks) < 2:
            return None
        busy += chunks[-1].t - chunks[0].t
        tokens += sum(len(chunk.token_ids) for chunk in chunks[1:])
    if not drafting:
        return busy / tokens if tokens else None
    if counters.reset or not counters.drafts:
        return None
    return busy / counters.drafts


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length for a prefix); None if equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def token_distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Share of a request's tokens at and after the first difference, 0 (equal) .. 1.

    After the first difference two generations are different texts, so counting agreements
    beyond it would measure chance.
    """
    longest = max(len(a), len(b))
    index = first_difference(a, b)
    return 0.0 if index is None or longest == 0 else (longest - index) / longest


def within_limits(trace: RequestTrace, ttft_limit_s: float, tpot_limit_s: float) -> bool:
    """True when a finished request met both limits: what goodput counts.

    A request whose tokens all came in one chunk has no TPOT and is judged by its TTFT.
    """
    if trace.status != "ok":
        return False
    first, per_token = ttft(trace), tpot(trace)
    if first is None or first > ttft_limit_s:
        return False
    return per_token is None or per_token <= tpot_limit_s


def goodput(
    traces: Sequence[RequestTrace], ttft_limit_s: float, tpot_limit_s: float
) -> float | None:
    """Requests per second that met both limits, over the whole run of the trace.

    The run lasts from 0 to the last token of any request (or the last arrival, if later).
    """
    ends = [trace.ended_at for trace in traces if trace.ended_at is not None]
    if not ends:
        return None
    duration = max(*ends, *(trace.due_at for trace in traces))
    if duration <= 0:
        return None
    good = sum(within_limits(trace, ttft_limit_s, tpot_limit_s) for trace in traces)
    return good / duration
