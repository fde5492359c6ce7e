"""Which CUDA graph a batch gets under speculation: a chunk of a prompt is not a verify row.

Asks the runner's own method with vLLM's own dispatcher, holding the graphs of a service with 16
sequences and 7 drafts. Tests called test_fault_... fail on the tree without the series.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SEQS, DRAFTS = 16, 7
ROW = 1 + DRAFTS
PROMPT = -1


def make_runner(drafts: int) -> GPUModelRunner:
    row = 1 + drafts
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=list(range(row, 2 * row * SEQS + 1, row)),
        max_cudagraph_capture_size=2 * row * SEQS,
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=speculative,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=SEQS),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
    )
    runner = object.__new__(GPUModelRunner)
    runner.vllm_config = config
    runner.speculative_config = speculative
    runner.compilation_config = SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False))
    runner.parallel_config = config.parallel_config
    runner.observability_config = config.observability_config
    runner.model_config = SimpleNamespace(is_encoder_decoder=False)
    runner.input_batch = SimpleNamespace(
        lora_id_to_lora_request={},
        num_computed_tokens_cpu=np.full(SEQS, 100, dtype=np.int32),
        num_prompt_tokens=np.full(SEQS, 100, dtype=np.int32),
    )
    runner.uniform_decode_query_len = row
    runner.num_decode_draft_tokens = SimpleNamespace(np=np.full(SEQS, DRAFTS, dtype=np.int32))
    runner.cudagraph_dispatcher = CudagraphDispatcher(config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, row)
    return runner


def graph(lens: list[int], drafts: list[int], speculation: int = DRAFTS) -> tuple[str, int]:
    """(mode, padded tokens) for rows of these lengths; drafts[i] is PROMPT or the drafts of row i.

    Asks as `execute_model` of the tree does.
    """
    runner = make_runner(speculation)
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={i: [0] * n for i, n in enumerate(drafts) if n > 0}
    )
    if step.scheduled_spec_decode_tokens:
        # `_prepare_inputs` leaves the buffer alone in a step that verifies nothing.
        runner.num_decode_draft_tokens.np[: len(drafts)] = drafts
    for row, count in enumerate(drafts):
        runner.input_batch.num_computed_tokens_cpu[row] = 0 if count == PROMPT else 100
    options = {}
    if hasattr(runner, "_decode_draft_lens"):
        options["decode_draft_lens"] = runner._decode_draft_lens(step, len(lens))
    mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=sum(lens),
        num_reqs=len(lens),
        num_scheduled_tokens_np=np.array(lens, dtype=np.int32),
        max_num_scheduled_tokens=max(lens),
        use_cascade_attn=False,
        **options,
    )
    return mode.name, descriptor.num_tokens


@pytest.mark.parametrize("batch", [1, 4, 8, SEQS])
def test_verify_rows_get_the_full_graph(batch: int) -> None:
    assert graph([ROW] * batch, [DRAFTS] * batch) == ("FULL", ROW * batch)


def test_fault_a_prompt_of_eight_tokens_is_no_verify_batch() -> None:
    assert graph([ROW], [PROMPT]) == ("PIECEWISE", ROW)


def test_fault_a_chunk_of_eight_tokens_beside_verify_rows() -> None:
    assert graph([ROW] * 4, [DRAFTS, DRAFTS, PROMPT, DRAFTS]) == ("PIECEWISE", 4 * ROW)


@pytest.mark.parametrize(
    ("lens", "drafts"),
    [
        ([ROW, 5], [DRAFTS, 4]),
        ([ROW, 1], [DRAFTS, 0]),
        ([ROW, 100], [DRAFTS, PROMPT]),
        ([1, 1, 1], [0, 0, 0]),
        ([4, 4], [3, 3]),
    ],
)
def test_other_shapes_get_no_full_graph(lens: list[int], drafts: list[int]) -> None:
    assert graph(lens, drafts)[0] == "PIECEWISE"


def test_decodes_without_speculation() -> None:
    assert graph([1, 1, 1], [0, 0, 0], speculation=0) == ("FULL", 3)
    assert graph([1, 2, 1], [0, PROMPT, 0], speculation=0) == ("PIECEWISE", 4)


def test_fault_a_prompt_of_one_token_without_speculation() -> None:
    assert graph([1, 1], [0, PROMPT], speculation=0) == ("PIECEWISE", 2)


def test_capture_asks_by_force() -> None:
    runner = make_runner(DRAFTS)
    for force in (True, False):
        mode, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=ROW,
            num_reqs=1,
            num_scheduled_tokens_np=np.array([ROW], dtype=np.int32),
            max_num_scheduled_tokens=ROW,
            use_cascade_attn=False,
            force_uniform_decode=force,
        )
        assert mode.name == ("FULL" if force else "PIECEWISE")
