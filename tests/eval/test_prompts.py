"""Prompts: token IDs from any tokenizer, exact lengths, hashes, retrieval answers."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from support import profile
from tokenizers import Tokenizer, models, pre_tokenizers
from v100_gate import prompts, rolling
from v100_gate.errors import GateError
from v100_gate.schema import RollingSpec


class BatchEncoding(dict):
    """What transformers returns: a mapping that also has attributes."""

    @property
    def input_ids(self):
        return self["input_ids"]


def encoding():
    """A real tokenizers.Encoding of three tokens."""
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2, "c": 3, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.encode("a b c")


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]]),
        {"tokens": [1, 2, 3], "count": 3},
        {"input_ids": [1, 2, 3]},
        BatchEncoding(input_ids=np.array([[1, 2, 3]]), attention_mask=np.ones((1, 3))),
        encoding(),
        [encoding()],
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_tokenizer_returns_becomes_a_list(value) -> None:
    assert prompts.as_token_ids(value) == [1, 2, 3]


@pytest.mark.parametrize("value", ["abc", 7, [[1], [2]], {"text": "x"}, [1.5], [True]])
def test_what_is_not_token_ids_is_refused(value) -> None:
    with pytest.raises(GateError):
        prompts.as_token_ids(value)


async def words(text: str) -> list[int]:
    """A tokenizer for tests: one token per word."""
    return [len(word) for word in text.split()]


def test_prompts_have_exact_lengths_a_shared_prefix_and_own_suffixes() -> None:
    spec = profile().waves[1]
    fixture = asyncio.run(prompts.wave_prompts(words, spec))
    requests = prompts.wave_requests(fixture, spec, profile())
    assert [len(request.prompt) for request in requests] == [256] * 4
    assert len({tuple(request.prompt[:128]) for request in requests}) == 1
    assert len({tuple(request.prompt) for request in requests}) == 4
    assert [request.seed for request in requests] == [5, 6, 7, 8]


def test_the_same_fixture_is_made_again() -> None:
    spec = profile().waves[1]
    assert asyncio.run(prompts.wave_prompts(words, spec)) == asyncio.run(
        prompts.wave_prompts(words, spec)
    )


def test_a_changed_fixture_is_refused() -> None:
    fixture = asyncio.run(prompts.wave_prompts(words, profile().waves[0]))
    prompts.unseal(fixture, "x.json")
    fixture["prefix"][0] += 1
    with pytest.raises(GateError, match="do not match their hash"):
        prompts.unseal(fixture, "x.json")


def test_a_retrieval_document_holds_one_right_answer() -> None:
    text, answer = prompts.needle_document("s", 40, 0.5)
    assert text.count(answer) == 1
    assert text.count("Registry entry:") == 10
    place = text.index(answer) / len(text)
    assert 0.4 < place < 0.6


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("12345", True),
        ("The code is 12345.", True),
        ("<think>54321 or 12345?</think>\nIt is 12345.", True),
        ("12345 or 54321", False),
        ("<think>12345</think> It is 54321.", False),
        ("It is 123456.", False),
        ("", False),
    ],
)
def test_an_answer_is_the_one_code_after_any_reasoning(text: str, right: bool) -> None:
    assert prompts.answered(text, "12345") is right


def test_arrivals_come_from_the_seed_and_rates_change_only_the_pace() -> None:
    spec = RollingSpec(
        rates_per_s=[1.0, 4.0],
        requests=400,
        input_tokens=[64, 128],
        output_tokens=[8, 16],
        ttft_limit_s=1,
        tpot_limit_s=1,
    )
    slow, fast = rolling.arrivals(spec, 1.0), rolling.arrivals(spec, 4.0)
    assert rolling.arrivals(spec, 1.0) == slow
    assert [r["input_tokens"] for r in slow] == [r["input_tokens"] for r in fast]
    assert 400 / slow[-1]["at"] == pytest.approx(1.0, rel=0.15)
    assert 400 / fast[-1]["at"] == pytest.approx(4.0, rel=0.15)
    assert all(b["at"] >= a["at"] for a, b in pairwise(slow))
