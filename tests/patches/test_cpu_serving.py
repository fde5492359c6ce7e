"""A tiny hybrid model on vLLM's real engine, on CPU: what the series mends, before and after.

One process per tree runs a handful of engines; every test reads what they did.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("engine_probe.py")
CHUNK = 512
MIXED = {"prompts": [300, 8, 40, 300, 8, 129, 200, 77], "max_tokens": 40}
# Prompts of as many tokens as a verify row has.
EIGHTS = {"prompts": [8, 8], "max_tokens": 24}
# Longer than two blocks of 256, of which MTP keeps one when it finds them cached.
CACHED = {"prompts": [CHUNK + 8], "max_tokens": 24}
SEEDED = {"prompts": [300, 200], "max_tokens": 20, "temperature": 0.8}
MTP = {"method": "mtp", "num_speculative_tokens": 7}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
ENGINES = {
    "plain": {
        "engine": {"max_num_batched_tokens": CHUNK},
        "rounds": [MIXED, EIGHTS, CACHED, SEEDED],
    },
    "mtp": {
        "engine": {
            "max_num_batched_tokens": CHUNK,
            "speculative_config": MTP,
            "enable_prefix_caching": True,
            "mamba_cache_mode": "align",
        },
        "rounds": [MIXED, EIGHTS, CACHED, CACHED],
    },
    "ngram": {
        "engine": {"max_num_batched_tokens": CHUNK, "speculative_config": NGRAM},
        "rounds": [MIXED],
    },
    # The same prompts as SEEDED above, in chunks. Last: without its patch the engine dies.
    "chunks": {"engine": {"max_num_batched_tokens": 128}, "rounds": [SEEDED]},
}

pytestmark = [pytest.mark.serve, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory, stock_tree, run_vllm) -> Path:
    out = tmp_path_factory.mktemp("model")
    script = REPOSITORY / "eval" / "demo" / "tiny_model.py"
    done = run_vllm(stock_tree, script, "--corpus", REPOSITORY / "docs" / "patches.md", out)
    assert done.returncode == 0, done.stdout
    return out


@pytest.mark.parametrize(
    ("version", "platform"),
    [("0.19.1+v100.1.cpu", "CpuPlatform"), ("0.19.1+v100.1", "UnspecifiedPlatform")],
)
def test_version_selects_the_platform(
    patched_tree, run_vllm, tmp_path, version: str, platform: str
) -> None:
    """The wheels are called vllm; only the CPU one may run without a GPU."""
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    code = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
    done = run_vllm(patched_tree, "-c", code, path=(tmp_path,))
    assert done.stdout.splitlines()[-1] == platform, done.stdout


def probe(tree: Path, model: Path, scratch: Path, run_vllm) -> dict[str, list[dict]]:
    request, result = scratch / "request.json", scratch / "result.json"
    request.write_text(json.dumps(ENGINES))
    started = time.monotonic()
    done = run_vllm(tree, PROBE, model, request, result, timeout=1800)
    print(f"engines on {tree.name}: {time.monotonic() - started:.0f} s")
    # The last engine may die, which the result tells; anything earlier is a fault of the test.
    assert result.is_file(), done.stdout[-4000:]
    results = json.loads(result.read_text())
    assert list(results) == list(ENGINES), done.stdout[-4000:]
    return results


@pytest.fixture(scope="module")
def stock(stock_tree, model, tmp_path_factory, run_vllm) -> dict[str, list[dict]]:
    return probe(stock_tree, model, tmp_path_factory.mktemp("stock"), run_vllm)


@pytest.fixture(scope="module")
def patched(patched_tree, model, tmp_path_factory, run_vllm) -> dict[str, list[dict]]:
    return probe(patched_tree, model, tmp_path_factory.mktemp("patched"), run_vllm)


def largest_shift(one: dict, other: dict) -> float:
    """The largest difference of log probabilities where both continue the same text."""
    shift = 0.0
    for index, tokens in enumerate(one["tokens"]):
        for place, token in enumerate(tokens):
            if token != other["tokens"][index][place]:
                break
            pair = one["logprobs"][index][place], other["logprobs"][index][place]
            shift = max(shift, abs(pair[0] - pair[1]))
    return shift


def misdispatched(round_: dict) -> list[dict]:
    """Steps that hold tokens of a prompt and would still replay a FULL graph of decodes."""
    return [step for step in round_["steps"] if step["graph"] == "FULL" and any(step["prefill"])]


def test_mtp_gives_the_tokens_of_no_speculation(patched) -> None:
    plain, mtp = patched["plain"], patched["mtp"]
    for index in (0, 1, 2):
        assert mtp[index]["tokens"] == plain[index]["tokens"]
        assert largest_shift(mtp[index], plain[index]) < 1e-4
    counters = mtp[0]["counters"]
    assert counters["spec_decode_num_draft_tokens"] == 7 * counters["spec_decode_num_drafts"]
    # Accepting nothing would make the comparison above say nothing about verification.
    accepted = counters["spec_decode_num_accepted_tokens"]
    assert accepted > 0.3 * counters["spec_decode_num_draft_tokens"]


def test_prefix_caching_in_align_mode_gives_the_same_tokens(patched) -> None:
    *_, first, again = patched["mtp"]
    hits = again["counters"]["prefix_cache_hits"] - first["counters"]["prefix_cache_hits"]
    assert hits >= 256
    assert again["tokens"] == first["tokens"]
    assert largest_shift(again, first) < 1e-4


def test_stock_replays_a_decode_graph_for_a_chunk_of_eight_tokens(stock) -> None:
    wrong = misdispatched(stock["mtp"][1])
    assert [step["lens"] for step in wrong] == [[8, 8]]
    assert wrong[0]["prefill"] == [True, True]


def test_no_prompt_token_meets_a_decode_graph(patched) -> None:
    for rounds in patched.values():
        for round_ in rounds:
            assert not misdispatched(round_)
    eights = patched["mtp"][1]["steps"]
    (chunk,) = [step for step in eights if step["lens"] == [8, 8] and all(step["prefill"])]
    assert chunk["graph"] == "PIECEWISE"


def test_real_verify_batches_keep_their_full_graph(stock, patched) -> None:
    for tree in (stock, patched):
        verify = [
            step
            for round_ in tree["mtp"]
            for step in round_["steps"]
            if set(step["lens"]) == {8} and not any(step["prefill"])
        ]
        assert len(verify) > 5
        assert {step["graph"] for step in verify} == {"FULL"}


def test_stock_loses_gdn_states_with_ngram_drafts(stock) -> None:
    assert stock["ngram"][0]["tokens"] != stock["plain"][0]["tokens"]
    assert largest_shift(stock["ngram"][0], stock["plain"][0]) > 0.01


def test_ngram_gives_the_tokens_of_no_speculation(patched) -> None:
    ngram, plain = patched["ngram"][0], patched["plain"][0]
    assert ngram["counters"]["spec_decode_num_accepted_tokens"] > 0
    # Steps without drafts behind steps with drafts, and both in one batch: what went wrong.
    decodes = [step["lens"] for step in ngram["steps"] if not any(step["prefill"])]
    assert any(set(lens) == {1} for lens in decodes)
    assert any(1 in lens and max(lens) > 1 for lens in decodes)
    assert ngram["tokens"] == plain["tokens"]
    assert largest_shift(ngram, plain) < 1e-4


def test_without_its_patch_a_seeded_chunked_prompt_ends_the_engine(stock) -> None:
    assert "CPU Generator does not use offset" in stock["chunks"][0]["error"]


def test_seeded_output_does_not_depend_on_chunks(patched) -> None:
    whole, chunks = patched["plain"][3], patched["chunks"][0]
    assert max(max(step["lens"]) for step in chunks["steps"]) <= 128
    assert chunks["tokens"] == whole["tokens"]
    greedy = patched["plain"][0]["tokens"][0][:20]
    assert whole["tokens"][0] != greedy
