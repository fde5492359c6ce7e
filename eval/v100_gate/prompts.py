"""Prompts as token IDs, from text this project wrote.

A prompt is a made-up maintenance report of a GPU cluster: sentences from the lists below with
numbers drawn from a seed. It is long, in plain technical English, in no training set, and every
gate can make it again. The service's own tokenizer turns it into IDs once; the IDs are stored with
their hash and sent to every arm.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from v100_gate.client import Client, Request
from v100_gate.errors import GateError, ServiceError
from v100_gate.schema import LogitsSpec, Profile, RetrievalSpec, WaveSpec

Tokenise = Callable[[str], Awaitable[list[int]]]

SUBJECTS = (
    "The cooling loop of rack {n}",
    "The power shelf in row {n}",
    "The switch that joins hosts {n} and {m}",
    "The scratch volume of node {n}",
    "The fan controller behind chassis {n}",
    "The scheduler partition for group {n}",
    "The link between cards {n} and {m}",
    "The batch queue of project {n}",
    "The firmware image on board {n}",
    "The monitoring agent of node {n}",
)
VERBS = (
    "was inspected and found within its limits",
    "reported a reading of {m} against a nominal {n}",
    "was replaced after {n} hours of service",
    "showed a drift of {n} parts in ten thousand",
    "recovered without help after {m} seconds",
    "kept its setting through {n} restarts",
    "was moved to the spare circuit for {m} minutes",
    "lost {n} of {m} packets during the stress run",
)
TAILS = (
    "and no further step is planned before the next inspection.",
    "so the work order stays open until the reading settles.",
    "which agrees with the figures of the previous quarter.",
    "and the operator on duty noted it in the log of shift {n}.",
    "although the sensor itself is due for calibration in week {m}.",
    "because the ambient temperature rose by {n} tenths of a degree.",
    "and a second measurement with other equipment gave {m}.",
)
UNITS = ("CEDAR", "MAPLE", "ROWAN", "ALDER", "HAZEL", "LARCH", "ASPEN", "BIRCH", "YARROW", "SORREL")


def paragraph(rng: random.Random, number: int) -> str:
    """One numbered paragraph of the report, five sentences."""
    sentences = []
    for _ in range(5):
        words = " ".join((rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(TAILS)))
        sentences.append(words.format(n=rng.randrange(2, 997), m=rng.randrange(2, 997)))
    return f"{number}. " + " ".join(sentences)


def report_text(seed: int | str, characters: int) -> str:
    """At least `characters` characters of report for a seed."""
    rng = random.Random(f"report-{seed}")
    parts: list[str] = []
    length = 0
    while length < characters:
        parts.append(paragraph(rng, len(parts) + 1))
        length += len(parts[-1]) + 2
    return "\n\n".join(parts)


def as_token_ids(value: Any) -> list[int]:
    """Plain token IDs from whatever a tokenizer returns.

    Takes a list or tuple, a tensor or array (anything with `tolist`), a `tokenizers.Encoding`
    (`.ids`), a BatchEncoding or another mapping with `input_ids` or `tokens`, and a batch of one
    of any of these.

    Raises: GateError for a batch of several, or for something that is not token IDs.
    """
    if isinstance(value, Mapping) or hasattr(value, "input_ids"):
        for key in ("input_ids", "tokens"):
            if isinstance(value, Mapping) and key in value:
                return as_token_ids(value[key])
        if hasattr(value, "input_ids"):
            return as_token_ids(value.input_ids)
        raise GateError(f"the tokenizer returned a mapping without input_ids: {list(value)[:8]}")
    if hasattr(value, "ids"):
        return as_token_ids(value.ids)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise GateError(f"the tokenizer returned {type(value).__name__}, not token IDs")
    if value and not isinstance(value[0], int):
        if len(value) != 1:
            raise GateError(f"the tokenizer returned a batch of {len(value)}, one was expected")
        return as_token_ids(value[0])
    if any(not isinstance(token, int) or isinstance(token, bool) for token in value):
        raise GateError("the tokenizer returned something that is not a list of integers")
    return list(value)


def service_tokeniser(client: Client) -> Tokenise:
    """Tokenise with the service's own tokenizer (POST /tokenize)."""

    async def tokenise(text: str) -> list[int]:
        reply = await client.post(
            "/tokenize",
            {"model": client.model, "prompt": text, "add_special_tokens": False},
        )
        return as_token_ids(reply)

    return tokenise


async def chat_tokens(client: Client, question: str) -> list[int]:
    """Token IDs of one user message through the service's chat template.

    A model without a chat template gets the plain text.
    """
    try:
        reply = await client.post(
            "/tokenize",
            {
                "model": client.model,
                "messages": [{"role": "user", "content": question}],
                "add_generation_prompt": True,
            },
        )
    except ServiceError as error:
        if "chat template" not in str(error):
            raise
        return await service_tokeniser(client)(question)
    return as_token_ids(reply)


async def exact_tokens(tokenise: Tokenise, seed: int | str, count: int) -> list[int]:
    """Exactly `count` token IDs of report text."""
    characters = count * 5 + 64
    for _ in range(6):
        tokens = await tokenise(report_text(seed, characters))
        if len(tokens) >= count:
            return tokens[:count]
        characters = int(characters * max(1.3, 1.1 * count / max(1, len(tokens))))
    raise GateError(f"the tokenizer made only {len(tokens)} tokens of {characters} characters")


async def wave_prompts(tokenise: Tokenise, spec: WaveSpec) -> dict:
    """Prompts of a wave: one shared prefix and a suffix per request.

    Returns {"prefix": [...], "suffixes": [[...], ...], "sha256": hash over the prompts' hashes}.
    """
    prefix = await exact_tokens(tokenise, "shared", spec.shared_prefix_tokens)
    suffixes = [
        await exact_tokens(tokenise, f"{spec.name}-{index}", length - len(prefix))
        for index, length in enumerate(spec.lengths)
    ]
    return seal({"prefix": prefix, "suffixes": suffixes})


def seal(fixture: dict) -> dict:
    """Add the hash of a fixture: SHA-256 over its JSON without the hash itself."""
    body = {key: value for key, value in fixture.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return body | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def unseal(fixture: dict, where: str) -> dict:
    """Check the hash of a stored fixture.

    Raises: GateError when the file was changed after it was written.
    """
    if seal(fixture)["sha256"] != fixture.get("sha256"):
        raise GateError(f"{where}: the stored prompts do not match their hash; delete the run")
    return fixture


def wave_requests(fixture: dict, spec: WaveSpec, profile: Profile) -> list[Request]:
    """The requests of a wave: the same prompts and seeds in every repeat."""
    return [
        Request(fixture["prefix"] + suffix, spec.output_tokens, profile.sampling.seed + index)
        for index, suffix in enumerate(fixture["suffixes"])
    ]


def needle_document(seed: str, paragraphs: int, depth: float) -> tuple[str, str]:
    """A report with ten registry entries, one of them asked for.

    Args: seed: names the document; paragraphs: its length; depth: where the entry asked for
        stands, 0 (start) .. 1 (end).
    Returns: (document with the question, the right answer).
    """
    rng = random.Random(f"needle-{seed}")
    units = [f"{name}-{rng.randrange(100, 999)}" for name in rng.sample(UNITS, len(UNITS))]
    codes = [str(number) for number in rng.sample(range(10_000, 99_999), len(units))]
    body = [paragraph(rng, number + 1) for number in range(paragraphs)]
    wanted = units[0]
    places = {round(depth * len(body)): [0]}
    for entry in range(1, len(units)):
        places.setdefault(rng.randrange(len(body) + 1), []).append(entry)
    text: list[str] = []
    for position in range(len(body) + 1):
        for entry in places.get(position, ()):
            text.append(
                f"Registry entry: the release code of unit {units[entry]} is {codes[entry]}."
            )
        if position < len(body):
            text.append(body[position])
    question = (
        f"\n\nThe text above is a maintenance report. What is the release code of unit {wanted}? "
        "Answer with the number only."
    )
    return "\n\n".join(text) + question, codes[0]


async def retrieval_prompt(client: Client, seed: str, tokens: int, depth: float) -> dict:
    """A retrieval request of at most `tokens` tokens (and at least 97 % of that, if long)."""
    paragraphs = max(1, tokens // 150)
    best: dict | None = None
    low, high = 0, None
    for _ in range(12):
        text, answer = needle_document(seed, paragraphs, depth)
        ids = await chat_tokens(client, text)
        if len(ids) <= tokens:
            low = paragraphs
            best = {"prompt": ids, "answer": answer, "seed": seed, "depth": depth}
            if len(ids) >= 0.97 * tokens:
                break
        else:
            high = paragraphs
        if high is not None and high - low <= 1:
            break
        if high is None:
            paragraphs = max(low + 1, int(paragraphs * 1.02 * tokens / len(ids)))
        elif best is None:
            paragraphs = max(1, min(high - 1, int(paragraphs * 0.97 * tokens / len(ids))))
        else:
            guess = int(paragraphs * 0.985 * tokens / len(ids))
            paragraphs = min(high - 1, max(low + 1, guess))
    if best is None:
        raise GateError(f"a retrieval prompt of {tokens} tokens is too short to hold the question")
    return best


async def retrieval_fixture(client: Client, spec: RetrievalSpec) -> dict:
    """The eight-request retrieval and the needles, as token IDs with the right answers."""
    documents = []
    for index in range(spec.requests):
        depth = (index + 0.5) / spec.requests
        item = await retrieval_prompt(client, f"{spec.seed}-{index}", spec.input_tokens, depth)
        documents.append(item)
    needles = []
    for length in spec.needle_lengths:
        for depth in spec.needle_depths:
            item = await retrieval_prompt(client, f"{spec.seed}-{length}-{depth}", length, depth)
            needles.append(item | {"length": length})
    return seal({"documents": documents, "needles": needles})


def answered(text: str, answer: str) -> bool:
    """True when the text after any reasoning names the right code and no other five-digit one."""
    final = text.rpartition("</think>")[2]
    digits = "".join(c if c.isdigit() else " " for c in final).split()
    return [word for word in digits if len(word) == 5] == [answer]


async def logits_fixture(tokenise: Tokenise, spec: LogitsSpec) -> dict:
    """Prompts that end at several positions of one long report, evenly spread."""
    tokens = await exact_tokens(tokenise, "logits", spec.input_tokens)
    cuts = [
        max(1, round(spec.input_tokens * (index + 1) / spec.positions))
        for index in range(spec.positions)
    ]
    return seal({"tokens": tokens, "cuts": cuts})
