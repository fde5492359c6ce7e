"""The workspace bank: sharing, growth, streams, hand-over; the allocator is a recorder."""

from __future__ import annotations

import pytest
from sm70_attention.bank import Contract, WorkspaceBank

CONTEXT = Contract(kv_heads=1, max_seq_len=262144)


class Buffer:
    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device


@pytest.fixture
def made() -> list[Buffer]:
    return []


@pytest.fixture
def bank(made) -> WorkspaceBank:
    def allocate(size, device):
        made.append(Buffer(size, device))
        return made[-1]

    return WorkspaceBank(allocate)


def test_descending_capture_allocates_once_and_no_more_than_its_largest(bank, made):
    panels = {n: bank.get("cuda:0", 1, CONTEXT, n, capturing=True) for n in (4, 3, 2, 1)}
    assert len(made) == 1
    assert len({id(p) for p in panels.values()}) == 1
    assert made[0].size < CONTEXT.bytes_for(5)
    assert bank.bytes_held() == made[0].size


def test_growth_keeps_panels_that_graphs_hold_and_drops_others(bank, made):
    bank.get("cuda:0", 1, CONTEXT, 1)
    second = bank.get("cuda:0", 1, CONTEXT, 2, capturing=True)
    assert bank.bytes_held() == second.size, "an eager panel that was outgrown is not kept"
    third = bank.get("cuda:0", 1, CONTEXT, 8, capturing=True)
    assert third is not second
    assert bank.bytes_held() == second.size + third.size
    assert bank.get("cuda:0", 1, CONTEXT, 2) is third
    assert bank.report()[0]["panels"] == 2


def test_streams_devices_and_contracts_never_share(bank):
    other = Contract(kv_heads=1, max_seq_len=32768)
    panels = [
        bank.get("cuda:0", 1, CONTEXT, 2),
        bank.get("cuda:0", 2, CONTEXT, 2),
        bank.get("cuda:1", 1, CONTEXT, 2),
        bank.get("cuda:0", 1, other, 2),
    ]
    assert len({id(p) for p in panels}) == 4
    assert len(bank.report()) == 4


def test_one_set_of_panels_survives_profiling_capture_and_serving(bank):
    bank.get("cuda:0", 10, CONTEXT, 16)  # warm-up and profiling
    bank.get("cuda:0", 10, CONTEXT, 8, capturing=True)  # a graph that only measures memory
    freed = bank.release("cuda:0", 10, graphs=True)
    assert freed > 0
    assert bank.bytes_held() == 0
    captured = bank.get("cuda:0", 20, CONTEXT, 16, capturing=True)
    assert bank.hand_over("cuda:0", 20, 30) == captured.size
    assert bank.get("cuda:0", 30, CONTEXT, 16) is captured
    assert bank.bytes_held() == captured.size
    assert bank.bytes_held("cuda:0", 20) == 0


def test_hand_over_into_a_stream_that_has_panels_keeps_what_graphs_hold(bank):
    small = bank.get("cuda:0", 1, CONTEXT, 2, capturing=True)
    bank.get("cuda:0", 2, CONTEXT, 1)
    large = bank.get("cuda:0", 2, CONTEXT, 4)
    bank.hand_over("cuda:0", 1, 2)
    assert bank.get("cuda:0", 2, CONTEXT, 4) is large
    assert bank.bytes_held() == small.size + large.size
    assert bank.hand_over("cuda:0", 2, 2) == 0


def test_release_leaves_what_a_graph_holds(bank):
    held = bank.get("cuda:0", 1, CONTEXT, 2, capturing=True)
    bank.get("cuda:0", 2, CONTEXT, 2)
    assert bank.release("cuda:0") == held.size
    assert bank.bytes_held() == held.size
    assert bank.get("cuda:0", 1, CONTEXT, 1) is held


@pytest.mark.parametrize("requests", [0, 17])
def test_a_batch_that_the_kernel_does_not_take_is_refused(bank, requests):
    with pytest.raises(ValueError, match="1 to 16"):
        bank.get("cuda:0", 1, CONTEXT, requests)
