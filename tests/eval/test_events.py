"""Server-sent events as they come off a socket, and the status of a stream."""

from __future__ import annotations

import json

import pytest
from v100_gate.client import Request, _Live, digest, split_events
from v100_gate.schema import Sampling
from v100_gate.traces import RequestTrace


def event(*tokens: int, finish: str | None = None, **fields) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]} | fields).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(*reads: bytes, wanted: int = 3, forced: bool = True) -> RequestTrace:
    """Digest a stream whose i-th read came at i seconds."""
    trace = RequestTrace(
        index=0,
        request_id="r",
        prompt_tokens=1,
        prompt_sha256="",
        max_tokens=wanted,
        forced=forced,
        seed=0,
    )
    return digest(_Live(trace, reads=[(float(i), block) for i, block in enumerate(reads)]))


def test_an_event_has_the_time_of_the_read_that_completes_it() -> None:
    whole = event(1, 2)
    found = split_events([(1.0, whole[:9]), (2.0, whole[9:20]), (3.0, whole[20:])])
    assert [stamp for stamp, _ in found] == [3.0]


def test_several_events_in_one_read() -> None:
    found = split_events([(1.0, event(1) + event(2)[:-1]), (2.0, b"\n" + DONE)])
    assert [stamp for stamp, _ in found] == [1.0, 2.0, 2.0]


def test_comments_carriage_returns_and_split_data_fields() -> None:
    block = b": keep-alive\r\n\r\ndata: a\r\ndata: b\r\n\r\nevent: x\n\n"
    assert split_events([(0.0, block)]) == [(0.0, b"a\nb")]


def test_a_chunk_is_not_a_token() -> None:
    trace = read(event(1), event(2, 3), DONE)
    assert trace.status == "ok"
    assert [(chunk.t, len(chunk.token_ids)) for chunk in trace.chunks] == [(0.0, 1), (1.0, 2)]


def test_usage_chunk_has_no_choice() -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    assert read(event(1, 2, 3, finish="length"), usage, DONE).usage == {"completion_tokens": 3}


@pytest.mark.parametrize(
    ("reads", "status", "words"),
    [
        ([event(1, 2), DONE], "short", "2 token IDs came back, 3 were forced"),
        ([event(1, 2, 3)], "truncated", "closed after 3 tokens without"),
        ([event(1), b'data: {"error": {"message": "engine died"}}\n\n'], "error", "engine died"),
        ([b"data: <html>\n\n"], "error", "not JSON"),
        (
            [event(1, 2, 3, usage={"completion_tokens": 4}), DONE],
            "error",
            "usage says 4",
        ),
    ],
)
def test_a_bad_stream_is_named(reads: list[bytes], status: str, words: str) -> None:
    trace = read(*reads)
    assert trace.status == status
    assert words in trace.error


def test_natural_end_may_be_short() -> None:
    trace = read(event(1, finish="stop"), DONE, forced=False)
    assert (trace.status, trace.finish_reason) == ("ok", "stop")


def test_every_sampling_field_is_sent() -> None:
    body = json.loads(Request([1, 2], 3, seed=9).body("m", Sampling(temperature=0.7)))
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ):
        assert body[name] is not None
    assert body["ignore_eos"] is True
    assert body["return_token_ids"] is True
