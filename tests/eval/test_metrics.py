"""The definitions of the figures, on traces small enough to work out on paper."""

from __future__ import annotations

import pytest
from v100_gate import metrics
from v100_gate.traces import Chunk, CounterDelta, RequestTrace


def trace(*chunks: tuple[float, int], index: int = 0, due: float = 0.0, **fields) -> RequestTrace:
    """A finished request whose chunks are (time, number of tokens)."""
    return RequestTrace(
        index=index,
        request_id=f"r{index}",
        prompt_tokens=10,
        prompt_sha256="",
        max_tokens=sum(n for _, n in chunks),
        forced=True,
        seed=0,
        due_at=due,
        status="ok",
        chunks=[Chunk(t=t, token_ids=[7] * n) for t, n in chunks],
        ended_at=chunks[-1][0] if chunks else None,
        **fields,
    )


def test_all_live_window_counts_only_what_arrives_inside() -> None:
    # A: tokens at 1 (1), 2 (4), 3 (4), 4 (2).  B: 2 (1), 3 (8), 5 (1).
    # Window: from max(1, 2) = 2 to min(4, 5) = 4. Inside (2, 4]: A 4 + 2, B 8 = 14 in 2 s.
    window = metrics.all_live(
        [trace((1, 1), (2, 4), (3, 4), (4, 2)), trace((2, 1), (3, 8), (5, 1))]
    )
    assert (window.opens, window.closes, window.tokens) == (2, 4, 14)
    assert window.tokens_per_s == 7.0


def test_all_live_of_one_request_leaves_out_its_first_chunk() -> None:
    window = metrics.all_live([trace((1, 1), (2, 3), (3, 3))])
    assert window.tokens == 6
    assert window.tokens_per_s == 3.0


def test_no_window_when_a_request_ends_before_another_begins() -> None:
    assert metrics.all_live([trace((1, 1), (2, 1)), trace((3, 1), (4, 1))]) is None


def test_no_window_when_a_request_returned_nothing() -> None:
    assert metrics.all_live([trace((1, 1), (2, 1)), trace()]) is None
    assert metrics.all_live([]) is None


def test_empty_chunks_are_neither_first_nor_last_token() -> None:
    one = trace((0.5, 0), (1, 1), (3, 2), (9, 0))
    assert metrics.first_token_at(one) == 1
    assert metrics.last_token_at(one) == 3
    assert metrics.inter_chunk(one) == [2]
    assert metrics.tokens_per_chunk(one) == [1, 2]


def test_ttft_counts_from_the_due_time() -> None:
    assert metrics.ttft(trace((5.0, 1), due=3.5)) == 1.5
    assert metrics.ttft(trace()) is None


def test_tpot_is_the_fields_definition_when_the_first_chunk_has_one_token() -> None:
    # (latency - TTFT) / (output - 1) = (5 - 1) / (9 - 1)
    assert metrics.tpot(trace((1, 1), (3, 4), (5, 4))) == 0.5


def test_tpot_leaves_out_all_tokens_of_a_first_chunk_of_several() -> None:
    # Eight tokens at once take no decode time: 4 s for the other 4.
    assert metrics.tpot(trace((1, 8), (5, 4))) == 1.0
    assert metrics.tpot(trace((1, 8))) is None


def test_acceptance_is_accepted_over_drafted() -> None:
    counters = CounterDelta(drafts=10, draft_tokens=70, accepted_tokens=21)
    assert metrics.acceptance(counters) == 0.3
    assert metrics.emitted_per_round(counters) == 3.1


def test_by_position_is_over_drafts_not_over_the_position_before() -> None:
    counters = CounterDelta(drafts=10, draft_tokens=20, accepted_per_position=[8, 4])
    assert metrics.acceptance_by_position(counters) == [0.8, 0.4]


@pytest.mark.parametrize(
    "counters",
    [
        CounterDelta(),
        CounterDelta(drafts=0, draft_tokens=0, accepted_tokens=0),
        CounterDelta(drafts=1, draft_tokens=7, accepted_tokens=3, reset=["x"]),
    ],
    ids=["missing", "nothing drafted", "reset"],
)
def test_acceptance_is_none_not_zero(counters: CounterDelta) -> None:
    assert metrics.acceptance(counters) is None
    assert metrics.emitted_per_round(counters) is None


def test_step_time_does_not_move_with_acceptance_alone() -> None:
    # Both arms take four rounds of 0.5 s; one emits 8 tokens per round, the other 2.
    fast = trace((1, 1), (1.5, 8), (2.0, 8), (2.5, 8), (3.0, 8))
    slow = trace((1, 1), (1.5, 2), (2.0, 2), (2.5, 2), (3.0, 2))
    rounds = CounterDelta(drafts=4)
    assert metrics.step_time([fast], rounds, drafting=True) == 0.5
    assert metrics.step_time([slow], rounds, drafting=True) == 0.5
    assert metrics.tpot(fast) != metrics.tpot(slow)


def test_step_time_without_speculation_is_time_per_token() -> None:
    assert metrics.step_time([trace((1, 1), (3, 4))], CounterDelta(), drafting=False) == 0.5


def test_step_time_with_missing_counters_is_none() -> None:
    assert metrics.step_time([trace((1, 1), (3, 4))], CounterDelta(), drafting=True) is None


@pytest.mark.parametrize(
    ("a", "b", "index", "distance"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], None, 0.0),
        ([1, 2, 3, 4], [1, 2, 9, 4], 2, 0.5),
        ([1, 2, 3, 4], [9, 2, 3, 4], 0, 1.0),
        ([1, 2, 3, 4], [1, 2, 3], 3, 0.25),
        ([], [], None, 0.0),
    ],
)
def test_token_distance_starts_at_the_first_difference(a, b, index, distance) -> None:
    assert metrics.first_difference(a, b) == index
    assert metrics.token_distance(a, b) == distance


def test_goodput_needs_both_limits_and_a_good_end() -> None:
    good = trace((1, 1), (2, 10))  # TTFT 1, TPOT 0.1
    late = trace((4, 1), (5, 10), index=1)
    slow = trace((1, 1), (10, 9), index=2)
    broken = trace((1, 1), (2, 10), index=3)
    broken.status = "truncated"
    # One good request; the last one ends at 10 s.
    assert metrics.goodput([good, late, slow, broken], 2.0, 0.5) == 0.1


def test_goodput_of_a_request_with_one_chunk_is_judged_by_ttft() -> None:
    assert metrics.within_limits(trace((1, 4)), 2.0, 0.001)


def test_prefix_hit_rate() -> None:
    assert metrics.prefix_hit_rate(CounterDelta(prefix_hits=29664, prefix_queries=32768)) == (
        29664 / 32768
    )
    assert metrics.prefix_hit_rate(CounterDelta(prefix_hits=0, prefix_queries=0)) is None


def test_admission_skew() -> None:
    assert metrics.admission_skew([trace(sent_at=0.25), trace(sent_at=1.0)]) == 0.75
    assert metrics.admission_skew([trace(sent_at=0.25), trace()]) is None
