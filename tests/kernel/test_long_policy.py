"""The split policy and workspace size: Python's copy against the header's, and their properties."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sm70_attention import dispatch, long

HEADER = Path(__file__).resolve().parents[2] / "kernel/src/long_args.h"
CONTEXTS = [1, 64, 65, 4096, 8192, 32768, 131072, 133120, 133121, 262144]


def constant(name: str) -> int:
    return int(re.search(rf"constexpr int {name} = (\d+);", HEADER.read_text()).group(1))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (long.TILE_TOKENS, "kLongTileTokens"),
        (long.BLOCK_LEAVES, "kLongBlock"),
        (long.LEAVES, "kLongLeaves"),
        (long.MIN_LEAF_TILES, "kLongMinLeafTiles"),
        (long.MAX_LEAF_TILES, "kLongMaxLeafTiles"),
        (long.LONG_HEAD_DIM, "kLongHeadDim"),
        (long.LONG_GROUP, "kLongGroup"),
        (long.LONG_QUERY, "kLongQueryTokens"),
        (long.LONG_MAX_CONTEXT, "kLongMaxContext"),
        (dispatch.LONG_MAX_BATCH, "kLongRequests"),
    ],
)
def test_constants_are_those_of_the_header(ours, theirs):
    assert ours == constant(theirs)


def test_leaves_grow_with_the_length_and_stay_within_bounds():
    counts = [long.leaves(n) for n in range(1, long.LONG_MAX_CONTEXT + 1, 61)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert max(counts) == 2 * long.LEAVES
    for length in CONTEXTS:
        tiles = -(-length // long.TILE_TOKENS)
        assert -(-tiles // long.leaves(length)) <= long.MAX_LEAF_TILES


def test_a_workspace_for_more_is_enough_for_less():
    sizes = [long.long_workspace_bytes(16, 1, n) for n in CONTEXTS]
    assert sizes == sorted(sizes)
    assert long.long_workspace_bytes(16, 2, 4096) == 32 * long.long_workspace_bytes(1, 1, 4096)


def test_workspace_is_below_a_tenth_of_the_cache_at_128k():
    # Written once and read once, against 512 bytes of K and V for each token.
    traffic = 2 * long.long_workspace_bytes(1, 1, 131072)
    assert traffic < 0.1 * 131072 * 512


@pytest.mark.parametrize("requests, contract", [(17, 4096), (-1, 4096), (1, 0), (1, 262145)])
def test_a_batch_or_contract_out_of_bounds_is_refused(requests, contract):
    with pytest.raises(ValueError, match=r"16|262144"):
        long.long_workspace_bytes(requests, 1, contract)
