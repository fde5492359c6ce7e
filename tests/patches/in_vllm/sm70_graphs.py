"""Context-bounded graphs: which keys exist, which one a batch gets, what is captured with it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOUND = 262144


def dispatcher(bounds=None, drafts: int = 7, seqs: int = 16) -> CudagraphDispatcher:
    """vLLM's own dispatcher with the sizes that a service of `seqs` sequences captures."""
    step = 1 + drafts
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=list(range(step, 2 * step * seqs + 1, step)),
        max_cudagraph_capture_size=2 * step * seqs,
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
    )
    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, step, bounds)
    return made


def long_bounds(num_reqs: int, query_len: int) -> tuple[int, ...]:
    return (BOUND,) if query_len == 8 and num_reqs <= 16 else ()


def runner(bounds=long_bounds, lengths=(1000,) * 4, drafts=(7,) * 4) -> GPUModelRunner:
    """A runner with the state that selection reads, after `_prepare_inputs`."""
    made = object.__new__(GPUModelRunner)
    made.cudagraph_dispatcher = dispatcher(bounds)
    made.vllm_config = made.cudagraph_dispatcher.vllm_config
    made.compilation_config = SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False))
    made.parallel_config = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1)
    made.model_config = SimpleNamespace(is_encoder_decoder=False)
    made.speculative_config = SimpleNamespace(num_speculative_tokens=7)
    made.uniform_decode_query_len = 8
    made.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    made.optimistic_seq_lens_cpu = torch.zeros(16, dtype=torch.int32)
    made.optimistic_seq_lens_cpu[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
    made.num_decode_draft_tokens = SimpleNamespace(np=np.full(16, -1, dtype=np.int32))
    made.num_decode_draft_tokens.np[: len(drafts)] = drafts
    return made


def selected(made: GPUModelRunner, lens: list[int], spec: bool = True):
    """The (mode, descriptor) that a step with these query lengths gets."""
    step = SimpleNamespace(scheduled_spec_decode_tokens={"r": [1]} if spec else {})
    mode, descriptor, *_ = made._determine_batch_execution_and_padding(
        num_tokens=sum(lens),
        num_reqs=len(lens),
        num_scheduled_tokens_np=np.array(lens, dtype=np.int32),
        max_num_scheduled_tokens=max(lens),
        use_cascade_attn=False,
        decode_draft_lens=made._decode_draft_lens(step, len(lens)),
        max_context_hint=made._max_context_hint(step, len(lens)),
    )
    return mode, descriptor


def test_no_bounds_wanted_leaves_the_key_sets_as_they_were() -> None:
    keys = dispatcher().cudagraph_keys
    assert keys == dispatcher(lambda num_reqs, query_len: ()).cudagraph_keys
    assert keys[PIECEWISE] == {BatchDescriptor(n) for n in range(8, 257, 8)}
    assert keys[FULL] == {BatchDescriptor(8 * n, n, True) for n in range(1, 17)}


def test_bounds_add_one_key_per_verify_batch_and_change_none() -> None:
    before, after = dispatcher().cudagraph_keys, dispatcher(long_bounds).cudagraph_keys
    assert after[PIECEWISE] == before[PIECEWISE]
    added = after[FULL] - before[FULL]
    assert before[FULL] < after[FULL]
    assert added == {replace(key, max_context_bound=BOUND) for key in before[FULL]}


def test_without_drafts_or_above_capacity_no_key_is_added() -> None:
    assert dispatcher(long_bounds, drafts=0).cudagraph_keys == dispatcher(drafts=0).cudagraph_keys
    keys = dispatcher(long_bounds, seqs=32).cudagraph_keys[FULL]
    assert max(key.num_reqs for key in keys if key.max_context_bound) == 16


@pytest.mark.parametrize(
    ("hint", "bound"),
    [(1, 32768), (32768, 32768), (32769, BOUND), (BOUND, BOUND), (BOUND + 1, None), (None, None)],
)
def test_the_tightest_bound_that_holds_the_hint(hint: int | None, bound: int | None) -> None:
    made = dispatcher(lambda num_reqs, query_len: (32768, BOUND))
    mode, key = made.dispatch(32, uniform_decode=True, max_context_hint=hint)
    assert (mode, key.num_reqs, key.max_context_bound) == (FULL, 4, bound)


def test_only_uniform_batches_are_bounded() -> None:
    made = dispatcher(long_bounds)
    mode, key = made.dispatch(32, uniform_decode=False, max_context_hint=5)
    assert (mode, key) == (PIECEWISE, BatchDescriptor(32))
    mode, key = made.dispatch(32, uniform_decode=True, valid_modes={NONE}, max_context_hint=5)
    assert (mode, key) == (NONE, BatchDescriptor(32))


def test_capture_takes_ordinary_graphs_first_and_each_kind_from_the_largest() -> None:
    (_, piecewise), (mode, full) = dispatcher(long_bounds).get_capture_descs()
    assert mode is FULL and piecewise[0].num_tokens == 256
    kinds = [(key.max_context_bound, key.num_reqs) for key in full]
    sizes = range(16, 0, -1)
    assert kinds == [(None, n) for n in sizes] + [(BOUND, n) for n in sizes]


def test_verify_rows_that_fit_get_the_bounded_graph() -> None:
    mode, key = selected(runner(lengths=(1000, BOUND, 8, 500)), [8] * 4)
    assert (mode, key) == (FULL, BatchDescriptor(32, 4, True, max_context_bound=BOUND))


def test_the_table_of_graph_metrics_names_the_bound() -> None:
    made = runner()
    made.vllm_config.observability_config.cudagraph_metrics = True
    seen = []
    for hint in (5, None):
        *_, stat = made._determine_batch_execution_and_padding(
            num_tokens=32,
            num_reqs=4,
            num_scheduled_tokens_np=np.full(4, 8, dtype=np.int32),
            max_num_scheduled_tokens=8,
            use_cascade_attn=False,
            max_context_hint=hint,
        )
        seen.append(stat.runtime_mode)
    assert seen == ["FULL, to 262144", "FULL"]


def test_one_oversized_peer_sends_the_batch_to_the_ordinary_graph() -> None:
    mode, key = selected(runner(lengths=(1000, BOUND + 1, 8, 500)), [8] * 4)
    assert (mode, key) == (FULL, BatchDescriptor(32, 4, True))


@pytest.mark.parametrize("drafts", [(7, 7, -1, 7), (7, 7, 6, 7), (-1,) * 4])
def test_a_row_that_is_no_full_verify_row_gets_no_full_graph(drafts: tuple[int, ...]) -> None:
    mode, key = selected(runner(drafts=drafts), [8] * 4)
    assert (mode, key) == (PIECEWISE, BatchDescriptor(32))


def test_stale_draft_counts_of_an_earlier_step_do_not_count() -> None:
    made = runner()
    assert made._max_context_hint(SimpleNamespace(scheduled_spec_decode_tokens={}), 4) is None
    mode, _ = selected(made, [8] * 4, spec=False)
    assert mode is PIECEWISE


def test_without_bounded_graphs_there_is_no_hint() -> None:
    made = runner(bounds=None)
    step = SimpleNamespace(scheduled_spec_decode_tokens={"r": [1]})
    assert made._max_context_hint(step, 4) is None


def test_a_finished_request_behind_the_live_ones_does_not_count() -> None:
    made = runner(lengths=(1000, 1000, BOUND + 5, 0), drafts=(7, 7, 7, -1))
    mode, key = selected(made, [8, 8])
    assert (mode, key.max_context_bound, key.num_reqs) == (FULL, BOUND, 2)


@pytest.mark.parametrize("bound", [None, BOUND])
def test_warm_up_and_capture_run_the_same_graph(bound: int | None) -> None:
    made = runner()
    made.compilation_config.cudagraph_num_of_warmups = 2
    runs: list[dict] = []
    made._dummy_run = lambda tokens, **options: runs.append({"tokens": tokens, **options})
    key = BatchDescriptor(32, 4, True, max_context_bound=bound)
    made._warmup_and_capture(key, FULL)
    *warm, capture = runs
    assert [run["cudagraph_runtime_mode"] for run in runs] == [NONE, NONE, FULL]
    assert {run["max_context_bound"] for run in runs} == {bound}
    assert all(run["warms_full_graph"] and run["force_attention"] for run in warm)
    assert capture["is_graph_capturing"] and not capture.get("warms_full_graph")


def test_warming_up_a_piecewise_graph_warms_no_full_one() -> None:
    made = runner()
    made.compilation_config.cudagraph_num_of_warmups = 1
    runs: list[dict] = []
    made._dummy_run = lambda tokens, **options: runs.append(options)
    made._warmup_and_capture(BatchDescriptor(32), PIECEWISE)
    assert not any(run.get("warms_full_graph") for run in runs)


@pytest.mark.parametrize("bound", [None, BOUND])
def test_the_dummy_run_re_derives_the_descriptor_that_is_captured(bound: int | None) -> None:
    made = runner()
    mode, key, *_ = made._determine_batch_execution_and_padding(
        num_tokens=32,
        num_reqs=4,
        num_scheduled_tokens_np=np.full(4, 8, dtype=np.int32),
        max_num_scheduled_tokens=8,
        use_cascade_attn=False,
        force_uniform_decode=True,
        force_has_lora=False,
        force_num_active_loras=0,
        max_context_hint=bound,
    )
    assert (mode, key) == (FULL, BatchDescriptor(32, 4, True, max_context_bound=bound))
