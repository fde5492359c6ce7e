"""GDN layers under speculation: every token gets the gates, the history and the state of its own.

Drives vLLM's metadata builder and layer code through the steps of a service, with random inputs.
The oracle is the same layer without speculation: a request alone, all its tokens as one prompt.
Tests called test_fault_... fail on the tree without the series.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.cpu_kernels import gdn
from vllm.model_executor.layers.mamba import gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNetAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

DRAFTS = 7
KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 1, 2, 16, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
SLOTS = 64
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}

gdn.install()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Request:
    """A request: the layer's inputs for its true tokens, and where its states are."""

    seed: int
    slots: list[int]
    computed: int = 0
    accepted: int = 1
    outputs: list[torch.Tensor] = field(default_factory=list)

    def inputs(self, start: int, count: int) -> list[torch.Tensor]:
        """qkv [count, CHANNELS], b and a [count, VALUE_HEADS] of the true tokens from `start`."""
        widths = (CHANNELS, VALUE_HEADS, VALUE_HEADS)
        return [
            random(200, width, seed=10 * self.seed + part)[start : start + count]
            for part, width in enumerate(widths)
        ]


@dataclass
class Row:
    """What one step computes for a request: `correct` true tokens, then wrong drafts.

    `drafts` None: tokens of the prompt. Otherwise 1 + drafts tokens are verified, of which
    `correct` (at least one) are right.
    """

    request: Request
    correct: int
    drafts: int | None = None


class Layer:
    """The state of one GDN layer and the code under test around it."""

    def __init__(self) -> None:
        self.spec = MambaSpec(
            block_size=256,
            shapes=((WIDTH - 1 + DRAFTS, CHANNELS), (VALUE_HEADS, DIM, DIM)),
            dtypes=(torch.float32, torch.float32),
            num_speculative_blocks=DRAFTS,
        )
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode.NONE, max_cudagraph_capture_size=None
            ),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=DRAFTS, parallel_drafting=False
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            cache_config=SimpleNamespace(mamba_cache_mode="none"),
        )
        self.builder = GDNAttentionMetadataBuilder(
            self.spec, ["layer"], config, torch.device("cpu")
        )
        # States of earlier requests are left in the slots: nothing may depend on them.
        states = [random(SLOTS, *shape, seed=i) for i, shape in enumerate(self.spec.shapes)]
        layer = SimpleNamespace(
            prefix="layer",
            enable_packed_recurrent_decode=True,
            kv_cache=states,
            conv1d=SimpleNamespace(weight=random(CHANNELS, 1, WIDTH, seed=3), bias=None),
            activation="silu",
            A_log=random(VALUE_HEADS, seed=4) * 0.1,
            dt_bias=random(VALUE_HEADS, seed=5),
            key_dim=KEY_HEADS * DIM,
            value_dim=VALUE_HEADS * DIM,
            head_k_dim=DIM,
            head_v_dim=DIM,
            tp_size=1,
            chunk_gated_delta_rule=gdn_linear_attn.fla_chunk_gated_delta_rule,
        )
        for name in ("rearrange_mixed_qkv", "_forward_core_decode_non_spec"):
            setattr(layer, name, partial(getattr(GatedDeltaNetAttention, name), layer))
        self.layer = layer

    def step(self, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
        """Runs one step, as the model runner would put it, and keeps the true tokens' outputs."""
        lens = [row.correct if row.drafts is None else 1 + row.drafts for row in rows]
        ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor(
            [row.request.computed + length for row, length in zip(rows, lens, strict=True)]
        )
        common = CommonAttentionMetadata(
            query_start_loc=ends,
            query_start_loc_cpu=ends,
            seq_lens=seq_lens.to(torch.int32),
            num_reqs=len(rows),
            num_actual_tokens=sum(lens),
            max_query_len=max(lens),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.tensor([row.request.slots for row in rows], dtype=torch.int32),
            slot_mapping=torch.zeros(sum(lens), dtype=torch.int64),
            is_prefilling=torch.tensor([row.drafts is None for row in rows]),
        )
        drafts = [-1 if row.drafts is None else row.drafts for row in rows]
        metadata = self.builder.build(
            0,
            common,
            num_accepted_tokens=torch.tensor(
                [row.request.accepted for row in rows], dtype=torch.int32
            ),
            num_decode_draft_tokens_cpu=torch.tensor(drafts, dtype=torch.int32),
        )
        parts: list[list[torch.Tensor]] = [[], [], []]
        for row, length in zip(rows, lens, strict=True):
            true = row.request.inputs(row.request.computed, row.correct)
            for part, tensor in zip(parts, true, strict=True):
                wrong = random(length - row.correct, tensor.size(1), seed=row.request.computed)
                part += [tensor, wrong]
        qkv, b, a = (torch.cat(part) for part in parts)
        out = torch.full((sum(lens), VALUE_HEADS, DIM), torch.nan)
        context = SimpleNamespace(attn_metadata={"layer": metadata})
        monkeypatch.setattr(gdn_linear_attn, "get_forward_context", lambda: context)
        GatedDeltaNetAttention._forward_core(self.layer, qkv, b, a, out)
        for row, start in zip(rows, ends.tolist()[:-1], strict=True):
            row.request.outputs.append(out[start : start + row.correct].clone())
            row.request.computed += row.correct
            row.request.accepted = 1 if row.drafts is None else row.correct


def requests(count: int) -> list[Request]:
    width = 1 + DRAFTS
    return [Request(n + 1, list(range(n * width, (n + 1) * width))) for n in range(count)]


@pytest.fixture
def run(monkeypatch):
    """Runs steps (lists of rows) on a new layer, then compares every request with the oracle."""

    def steps(*all_rows: list[Row]) -> None:
        layer = Layer()
        for rows in all_rows:
            layer.step(monkeypatch, rows)
        for request in {id(row.request): row.request for rows in all_rows for row in rows}.values():
            alone = Request(request.seed, request.slots)
            Layer().step(monkeypatch, [Row(alone, request.computed)])
            torch.testing.assert_close(
                torch.cat(request.outputs), torch.cat(alone.outputs), **TOLERANCE
            )

    return steps


def test_prompts_in_chunks(run) -> None:
    one, two = requests(2)
    run([Row(one, 70), Row(two, 3)], [Row(one, 30), Row(two, 80)])


def test_fault_first_chunk_of_one_token(run) -> None:
    one, two = requests(2)
    run([Row(one, 1), Row(two, 1)], [Row(one, 4), Row(two, 1)], [Row(one, 1), Row(two, 3)])


def test_first_chunk_of_one_token_beside_a_prompt(run) -> None:
    one, two = requests(2)
    run([Row(one, 1), Row(two, 9)], [Row(one, 4), Row(two, 1)])


@pytest.mark.parametrize("accepted", range(1, 2 + DRAFTS))
def test_verify_rows_continue_from_the_last_accepted_token(run, accepted: int) -> None:
    one, two = requests(2)
    run(
        [Row(one, 20), Row(two, 9)],
        [Row(one, accepted, DRAFTS), Row(two, 1, DRAFTS)],
        [Row(one, 3, DRAFTS), Row(two, accepted, DRAFTS)],
        [Row(one, 1, DRAFTS), Row(two, 2, DRAFTS)],
    )


def test_verify_row_in_front_of_a_prompt(run) -> None:
    one, two = requests(2)
    run([Row(one, 20)], [Row(one, 4, DRAFTS), Row(two, 12)])


def test_fault_gates_of_a_verify_row_behind_a_prompt(run) -> None:
    one, two, three = requests(3)
    run(
        [Row(one, 20), Row(three, 5)],
        [Row(two, 12), Row(one, 4, DRAFTS), Row(three, 8, DRAFTS)],
        [Row(two, 12), Row(one, 1, DRAFTS), Row(three, 2, DRAFTS)],
    )


def test_fault_gates_of_a_verify_row_between_prompts(run) -> None:
    one, two, three = requests(3)
    run([Row(one, 20)], [Row(two, 3), Row(one, 5, DRAFTS), Row(three, 30)])


@pytest.mark.parametrize("accepted", range(2, 2 + DRAFTS))
def test_fault_state_of_a_decode_without_drafts(run, accepted: int) -> None:
    one, two = requests(2)
    run(
        [Row(one, 20), Row(two, 7)],
        [Row(one, accepted, DRAFTS), Row(two, 1, DRAFTS)],
        [Row(one, 1, 0), Row(two, 1, 0)],
        [Row(one, 1, 0), Row(two, 1, 0)],
        [Row(one, 2, DRAFTS), Row(two, 2, DRAFTS)],
    )


def test_decode_without_drafts_beside_verify_rows(run) -> None:
    one, two = requests(2)
    run(
        [Row(one, 20), Row(two, 7)],
        [Row(one, 6, DRAFTS), Row(two, 1, DRAFTS)],
        [Row(one, 1, 0), Row(two, 8, DRAFTS)],
        [Row(one, 3, DRAFTS), Row(two, 1, 0)],
    )


def test_fault_decode_without_drafts_beside_a_prompt(run) -> None:
    one, two = requests(2)
    run(
        [Row(one, 20)],
        [Row(one, 6, DRAFTS)],
        [Row(two, 15), Row(one, 1, 0)],
        [Row(two, 15), Row(one, 2, 3)],
    )


def test_rows_cut_short_by_the_context_limit(run) -> None:
    one, two = requests(2)
    run(
        [Row(one, 20), Row(two, 7)],
        [Row(one, 8, DRAFTS), Row(two, 5, DRAFTS)],
        [Row(one, 2, 2), Row(two, 1, DRAFTS)],
    )
