"""The workspace bank: sharing, growth, lanes; the allocator is a recorder."""

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
    assert len(made) == 3


def test_lanes_devices_and_contracts_never_share(bank):
    other = Contract(kv_heads=1, max_seq_len=32768)
    panels = [
        bank.get("cuda:0", 1, CONTEXT, 2),
        bank.get("cuda:0", 2, CONTEXT, 2),
        bank.get("cuda:1", 1, CONTEXT, 2),
        bank.get("cuda:0", 1, other, 2),
    ]
    assert len({id(p) for p in panels}) == 4
    assert bank.bytes_held() == sum(p.size for p in panels)


@pytest.mark.parametrize("requests", [0, 17])
def test_a_batch_that_the_kernel_does_not_take_is_refused(bank, requests):
    with pytest.raises(ValueError, match="1 to 16"):
        bank.get("cuda:0", 1, CONTEXT, requests)
