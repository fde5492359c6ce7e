"""Counters of /metrics: missing is not zero, and a reset is not a change."""

from __future__ import annotations

from v100_gate import counters

PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def test_reads_vllm_names_and_adds_up_labels() -> None:
    found = counters.parse(PAGE)
    assert found.totals["drafts"] == 10
    assert found.totals["finished_requests"] == 6
    assert found.positions == {0: 8, 1: 3}
    assert found.gauges["vllm:kv_cache_usage_perc"] == 0.25


def test_change_per_position_keeps_the_order() -> None:
    later = PAGE.replace('position="0"} 8.0', 'position="0"} 18.0').replace(
        'position="1"} 3.0', 'position="1"} 4.0'
    )
    change = counters.delta(counters.parse(PAGE), counters.parse(later))
    assert change.accepted_per_position == [10, 1]
    assert change.drafts == 0


def test_a_missing_counter_stays_none() -> None:
    change = counters.delta(counters.parse(PAGE), counters.parse(PAGE))
    assert change.preemptions is None
    assert change.prefix_hits is None
    assert change.reset == []


def test_a_counter_that_appears_in_between_is_not_known() -> None:
    before = PAGE.replace('vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0\n', "")
    assert counters.delta(counters.parse(before), counters.parse(PAGE)).drafts is None


def test_a_counter_that_goes_back_is_a_reset() -> None:
    later = PAGE.replace('model_name="m"} 10.0', 'model_name="m"} 2.0')
    change = counters.delta(counters.parse(PAGE), counters.parse(later))
    assert change.reset == ["vllm:spec_decode_num_drafts_total"]
    assert change.drafts is None


def test_another_process_is_a_reset() -> None:
    line = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
    change = counters.delta(
        counters.parse(PAGE + line.format(1.0)), counters.parse(PAGE + line.format(2.0))
    )
    assert change.reset == ["process_start_time_seconds"]
