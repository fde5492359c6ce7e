"""The torch stand-ins of vllm/cpu_kernels against the Triton kernels that they stand in for.

The real kernels run in Triton's interpreter, on the same inputs. Inputs cover padding, rejected
rows, requests without drafts and lengths around the block sizes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import interpreted  # noqa: F401  (before vLLM's kernels are defined)
from vllm.cpu_kernels import drafting, gdn, rejection, state_copy
from vllm.model_executor.layers.fla import ops as fla
from vllm.model_executor.layers.fla.ops.chunk import chunk_gated_delta_rule_fwd
from vllm.model_executor.layers.fla.ops.l2norm import l2norm_fwd
from vllm.model_executor.layers.mamba import gdn_linear_attn
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode import utils as spec_utils
from vllm.v1.worker import mamba_utils

VOCABULARY = 37
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def both(kernel, stand_in, grid, outputs, *arguments, **options) -> None:
    """Launches the kernel and calls the stand-in on copies, then compares `outputs`.

    `outputs` are the indices of the arguments that are written.
    """

    def copies():
        return [a.clone() if torch.is_tensor(a) else a for a in arguments]

    real, ours = copies(), copies()
    kernel[grid](*real, **options)
    stand_in(*ours, **options)
    for index in outputs:
        torch.testing.assert_close(ours[index], real[index], rtol=0, atol=0)
        assert not torch.equal(ours[index], arguments[index]), "nothing was written"


# --- rejection sampler ---

DRAFTS = [3, 0, 7, 1, 7]
CUMULATED = torch.tensor(DRAFTS).cumsum(0).to(torch.int32)
TOTAL, LONGEST = sum(DRAFTS), max(DRAFTS)


def draft_batch(generator):
    target = torch.randint(VOCABULARY, (TOTAL,), generator=generator)
    drafts = target.to(torch.int32).clone()
    drafts[[1, 8]] = (drafts[[1, 8]] + 1) % VOCABULARY  # request 0 and 2 are rejected midway
    bonus = torch.randint(VOCABULARY, (len(DRAFTS), 1), generator=generator, dtype=torch.int32)
    output = torch.full((len(DRAFTS), LONGEST + 1), -1, dtype=torch.int32)
    return output, drafts, target, bonus


@pytest.mark.parametrize("greedy", [None, [True] * 5, [True, False, True, False, False]])
def test_greedy_rejection(generator, greedy) -> None:
    output, drafts, target, bonus = draft_batch(generator)
    both(
        rejection_sampler.rejection_greedy_sample_kernel,
        rejection.rejection_greedy_sample,
        (len(DRAFTS),),
        [0],
        output,
        CUMULATED,
        drafts,
        target,
        bonus,
        None if greedy is None else torch.tensor(greedy),
        LONGEST,
    )


@pytest.mark.parametrize("with_draft_probs", [False, True])
def test_random_rejection(generator, with_draft_probs: bool) -> None:
    output, drafts, _, bonus = draft_batch(generator)
    probs = torch.rand(2, TOTAL, VOCABULARY, generator=generator).softmax(-1)
    probs[1, 2, drafts[2]] = 0.0
    both(
        rejection_sampler.rejection_random_sample_kernel,
        rejection.rejection_random_sample,
        (len(DRAFTS),),
        [0],
        output,
        CUMULATED,
        drafts,
        probs[1].contiguous() if with_draft_probs else None,
        probs[0].contiguous(),
        bonus,
        torch.randint(VOCABULARY, (TOTAL,), generator=generator, dtype=torch.int32),
        torch.rand(TOTAL, generator=generator, dtype=torch.float64) * 0.05,
        torch.tensor([False, False, False, True, False]),
        LONGEST,
        VOCABULARY,
        NO_DRAFT_PROBS=not with_draft_probs,
    )


@pytest.mark.parametrize("with_draft_probs", [False, True])
def test_recovered_tokens(generator, with_draft_probs: bool) -> None:
    _, drafts, _, _ = draft_batch(generator)
    probs = torch.rand(2, TOTAL, VOCABULARY, generator=generator).softmax(-1)
    both(
        rejection_sampler.sample_recovered_tokens_kernel,
        rejection.sample_recovered_tokens,
        (len(DRAFTS), LONGEST),
        [0],
        torch.full((TOTAL,), -1, dtype=torch.int32),
        CUMULATED,
        drafts,
        probs[1].contiguous() if with_draft_probs else None,
        probs[0].contiguous(),
        torch.rand(len(DRAFTS), VOCABULARY, generator=generator).reciprocal(),
        VOCABULARY,
        16,
        NO_DRAFT_PROBS=not with_draft_probs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_expand(dtype) -> None:
    both(
        rejection_sampler.expand_kernel,
        rejection.expand,
        (len(DRAFTS),),
        [0],
        torch.full((TOTAL,), -5, dtype=dtype),
        torch.tensor([0, 1, 2, 0, 4]).to(dtype),
        CUMULATED,
        0,
        1,
        MAX_NUM_TOKENS=128,
    )


# --- drafting ---


def test_step_of_the_drafter(generator) -> None:
    requests, rows, blocks, block_size, longest = 4, 6, 5, 16, 75
    table = torch.randperm(100, generator=generator)[: requests * blocks].view(requests, blocks)
    both(
        spec_utils.eagle_step_slot_mapping_metadata_kernel,
        drafting.eagle_step_slot_mapping_metadata,
        (rows,),
        [3, 4, 5],
        torch.tensor([0, 15, 73, 74]),  # the last one reaches the longest length
        table.to(torch.int32),
        blocks,
        torch.tensor([1, 16, 74, 75], dtype=torch.int32),
        torch.full((requests,), -9),
        torch.full((rows,), -9),
        block_size=block_size,
        max_model_len=longest,
        n_blocks_per_req=blocks,
        PAD_ID=-1,
        batch_size=requests,
    )


def test_inputs_of_the_drafter() -> None:
    both(
        spec_utils.eagle_prepare_inputs_padded_kernel,
        drafting.eagle_prepare_inputs_padded,
        (5,),
        [3, 4],
        CUMULATED,
        torch.tensor([2, 1, 8, 1, 4], dtype=torch.int32),
        torch.tensor([0, 4, 9, 17, 19, 27], dtype=torch.int32),
        torch.full((5,), -9, dtype=torch.int32),
        torch.full((5,), -9, dtype=torch.int32),
        5,
    )


def test_next_token_of_the_drafter() -> None:
    sampled = torch.tensor(
        [[5, 6, -1, -1], [-1, -1, -1, -1], [7, VOCABULARY + 3, -1, -1], [1, 2, 3, 4], [9, 8, 7, 6]],
        dtype=torch.int32,
    )
    both(
        spec_utils.eagle_prepare_next_token_padded_kernel,
        drafting.eagle_prepare_next_token_padded,
        (5,),
        [3, 4],
        sampled,
        torch.tensor([False, False, False, False, True]),
        torch.arange(100, 105, dtype=torch.int32),
        torch.full((5,), -9, dtype=torch.int32),
        torch.full((5,), -9, dtype=torch.int32),
        VOCABULARY,
        4,
        5,
        4,
        BLOCK_SIZE_TOKENS=4,
    )


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("slots", [1, 4])
def test_layout_of_the_drafters_inputs(generator, shift: bool, slots: int) -> None:
    starts = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    last = torch.tensor([4, 5, 9], dtype=torch.int32)  # the third request lost four tokens
    tokens, requests = 14, 3
    total = tokens + requests * (slots - int(shift))
    mapping = torch.full((tokens,), -9, dtype=torch.int32)
    outputs = [3, 4, 5, 6, 7] + ([8] if shift else [])
    both(
        spec_utils.copy_and_expand_eagle_inputs_kernel,
        drafting.copy_and_expand_eagle_inputs,
        (requests, 2),
        outputs,
        torch.randint(100, (tokens,), generator=generator, dtype=torch.int32),
        torch.tensor([*range(20, 25), 3, *range(50, 58)]),
        torch.tensor([201, 202, 203], dtype=torch.int32),
        torch.full((total,), -9, dtype=torch.int32),
        torch.full((total,), -9),
        torch.ones(total, dtype=torch.bool),
        torch.ones(total, dtype=torch.bool),
        torch.full((slots * requests,), -9, dtype=torch.int32),
        mapping,
        starts,
        last,
        300,
        301,
        tokens,
        slots,
        int(shift),  # the interpreter has no boolean scalars
        BLOCK_SIZE_TOKENS=8,
    )


def test_copies_of_states(generator) -> None:
    source = torch.rand(3, 1000, generator=generator)
    sizes = torch.tensor([4000, 1, 1028], dtype=torch.int32)

    def pointers(tensor):
        return torch.tensor([row.data_ptr() for row in tensor])

    real, ours = torch.zeros_like(source), torch.zeros_like(source)
    mamba_utils.batch_memcpy_kernel[(3,)](pointers(source), pointers(real), sizes, BLOCK_SIZE=1024)
    state_copy.batch_memcpy(pointers(source), pointers(ours), sizes, BLOCK_SIZE=1024)
    assert torch.equal(ours.view(torch.uint8), real.view(torch.uint8))
    assert torch.equal(ours[0], source[0])


# --- gated delta net ---

CHANNELS, WIDTH, SLOTS = 24, 4, 12
KEY_HEADS, VALUE_HEADS, DIM = 1, 2, 32


def compare(ours, real) -> None:
    for mine, theirs in zip(ours, real, strict=True):
        torch.testing.assert_close(mine, theirs, **TOLERANCE)


def conv_states(generator, extra: int = 0) -> torch.Tensor:
    """[slots, channels, width - 1 + extra], channels last as in the cache."""
    state = torch.rand(SLOTS, WIDTH - 1 + extra, CHANNELS, generator=generator)
    return state.transpose(-1, -2)


@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_of_prompts(generator, with_bias: bool) -> None:
    ends = torch.tensor([0, 1, 3, 20, 31], dtype=torch.int32)
    x = torch.rand(31, CHANNELS, generator=generator).t()
    weight = torch.rand(CHANNELS, WIDTH, generator=generator)
    bias = torch.rand(CHANNELS, generator=generator) if with_bias else None
    programs, batch, at = compute_causal_conv1d_metadata(ends, device=torch.device("cpu"))
    metadata = SimpleNamespace(nums_dict=programs, batch_ptr=batch, token_chunk_offset_ptr=at)
    results = []
    for function in (gdn.causal_conv1d_fn, causal_conv1d.causal_conv1d_fn):
        states = conv_states(torch.Generator().manual_seed(2), extra=3)
        out = function(
            x.clone(memory_format=torch.preserve_format),
            weight,
            bias,
            states,
            ends,
            cache_indices=torch.tensor([4, 0, 7, 2], dtype=torch.int32),
            has_initial_state=torch.tensor([True, False, True, False]),
            activation="silu",
            metadata=metadata,
        )
        results.append((out, states))
    compare(*results)


def test_convolution_of_single_tokens(generator) -> None:
    x = torch.rand(4, CHANNELS, generator=generator)
    weight = torch.rand(CHANNELS, WIDTH, generator=generator)
    results = []
    for function in (gdn.causal_conv1d_update, causal_conv1d.causal_conv1d_update):
        states = conv_states(torch.Generator().manual_seed(2))
        out = function(
            x.clone(),
            states,
            weight,
            None,
            "silu",
            conv_state_indices=torch.tensor([4, 0, -1, 2], dtype=torch.int32),
        )
        results.append((out[[0, 1, 3]], states))
    compare(*results)


def test_convolution_of_verify_rows(generator) -> None:
    ends = torch.tensor([0, 8, 9, 9, 14], dtype=torch.int32)
    x = torch.rand(14, CHANNELS, generator=generator)
    weight = torch.rand(CHANNELS, WIDTH, generator=generator)
    results = []
    for function in (gdn.causal_conv1d_update, causal_conv1d.causal_conv1d_update):
        states = conv_states(torch.Generator().manual_seed(2), extra=7)
        out = function(
            x.clone(),
            states,
            weight,
            None,
            "silu",
            conv_state_indices=torch.tensor([4, 0, 3, 2], dtype=torch.int32),
            num_accepted_tokens=torch.tensor([8, 3, 1, 1], dtype=torch.int32),
            query_start_loc=ends,
            max_query_len=8,
        )
        results.append((out, states))
    compare(*results)


def test_gates(generator) -> None:
    a, b = 30 * torch.rand(2, 9, VALUE_HEADS, generator=generator)
    heads = torch.rand(2, VALUE_HEADS, generator=generator)
    arguments = (heads[0], a, b, heads[1])
    compare(gdn.fused_gdn_gating(*arguments), gdn_linear_attn.fused_gdn_gating(*arguments))


def delta_inputs(generator, tokens: int) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(1, tokens, KEY_HEADS, DIM, generator=generator),
        "k": torch.randn(1, tokens, KEY_HEADS, DIM, generator=generator),
        "v": torch.randn(1, tokens, VALUE_HEADS, DIM, generator=generator),
    }


def ssm_states() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(32, VALUE_HEADS, DIM, DIM, generator=generator)


def test_delta_rule_of_verify_rows(generator) -> None:
    inputs = delta_inputs(generator, 14)
    a, b = torch.randn(2, 14, VALUE_HEADS, generator=generator)
    heads = torch.rand(2, VALUE_HEADS, generator=generator)
    slots = torch.arange(32, dtype=torch.int32).view(4, 8)
    slots[3, 6:] = -1
    results = []
    for function in (
        gdn.fused_sigmoid_gating_delta_rule_update,
        fla.fused_sigmoid_gating_delta_rule_update,
    ):
        out, state = function(
            A_log=heads[0],
            a=a,
            b=b,
            dt_bias=heads[1],
            **inputs,
            initial_state=ssm_states(),
            cu_seqlens=torch.tensor([0, 8, 9, 9, 14], dtype=torch.int32),
            ssm_state_indices=slots,
            num_accepted_tokens=torch.tensor([8, 3, 1, 2], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
        )
        results.append((out, state))
    compare(*results)


def test_delta_rule_of_single_tokens(generator) -> None:
    width = (2 * KEY_HEADS + VALUE_HEADS) * DIM
    qkv = torch.randn(3, width, generator=generator)
    a, b = torch.randn(2, 3, VALUE_HEADS, generator=generator)
    heads = torch.rand(2, VALUE_HEADS, generator=generator)
    results = []
    for function in (
        gdn.fused_recurrent_gated_delta_rule_packed_decode,
        fla.fused_recurrent_gated_delta_rule_packed_decode,
    ):
        out, state = torch.ones(3, 1, VALUE_HEADS, DIM), ssm_states()
        function(
            mixed_qkv=qkv,
            a=a,
            b=b,
            A_log=heads[0],
            dt_bias=heads[1],
            scale=DIM**-0.5,
            initial_state=state,
            out=out,
            ssm_state_indices=torch.tensor([5, -1, 9], dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
        )
        results.append((out, state))
    compare(*results)


@pytest.mark.parametrize("lengths", [[5], [64, 1], [130, 63, 65]])
def test_delta_rule_of_prompts(generator, lengths: list[int]) -> None:
    """Chunk by chunk on both sides; and token by token, which needs no kernel to be right."""
    tokens = sum(lengths)
    inputs = delta_inputs(generator, tokens)
    g = -torch.rand(1, tokens, VALUE_HEADS, generator=generator)
    beta = torch.rand(1, tokens, VALUE_HEADS, generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    arguments = {
        **inputs,
        "g": g,
        "beta": beta,
        "initial_state": ssm_states()[: len(lengths)],
        "output_final_state": True,
        "cu_seqlens": ends,
        "use_qk_l2norm_in_kernel": True,
    }
    ours = gdn.chunk_gated_delta_rule(**arguments)
    # Past the entry function, which refuses float32 for the sake of speed.
    real = chunk_gated_delta_rule_fwd(
        l2norm_fwd(inputs["q"]),
        l2norm_fwd(inputs["k"]),
        inputs["v"],
        g,
        beta,
        DIM**-0.5,
        arguments["initial_state"],
        True,
        ends,
    )
    compare(ours, (real[1], real[3]))
    compare(ours, token_by_token(arguments, ends.tolist()))


def token_by_token(arguments, ends) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule as it is defined, in float64."""
    q, k, v = (arguments[name][0].double() for name in "qkv")
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    q, k = (t.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for t in (q, k))
    decay, beta = arguments["g"][0].double().exp(), arguments["beta"][0].double()
    out, states = torch.zeros_like(v), arguments["initial_state"].double()
    for request in range(len(ends) - 1):
        for head in range(VALUE_HEADS):
            state = states[request, head]
            for t in range(ends[request], ends[request + 1]):
                state = state * decay[t, head]
                wrong = v[t, head] - state @ k[t, head]
                state = state + beta[t, head] * torch.outer(wrong, k[t, head])
                out[t, head] = state @ q[t, head] * DIM**-0.5
            states[request, head] = state
    return out.float().unsqueeze(0), states.float()
