"""The SM70 backend inside the patched vLLM: its plans, launches, graphs, counts and workspaces.

The kernels are replaced by a PyTorch attention over the paged cache, so that what is tested is
what the backend hands them: which rows, with which lengths, tables, bounds and descales.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

for extension in ("vllm._C", "vllm._C_stable_libtorch"):  # CPU builds of them may not fit
    sys.modules.setdefault(extension, types.ModuleType(extension))

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata, FullGraphUse  # noqa: E402
from vllm.v1.attention.backends import sm70_attn as backend  # noqa: E402
from vllm.v1.attention.route_stats import RouteStats  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.vllm_flash_attn.sm70_attention import dispatch  # noqa: E402
from vllm.vllm_flash_attn.sm70_attention.dispatch import Route  # noqa: E402

KERNELS = frozenset(
    f"{route}_d{dim}_{kv}"
    for route in ("paged", "prefill")
    for dim in (64, 128, 256)
    for kv in ("fp16", "e4m3", "e5m2")
)
LIBRARY = dispatch.Library(dispatch.ABI, frozenset({70}), KERNELS, long_batch_capacity=16)
PAGE, MAX_LEN = 16, 512


class Layer(AttentionLayerBase):
    """What the backend reads of an attention layer."""

    def __init__(self, impl, name: str = "layers.0", k: float = 1.0, v: float = 1.0) -> None:
        self.impl, self.layer_name = impl, name
        self._k_scale_float, self._v_scale_float = k, v
        self.calculate_kv_scales = False

    def get_attn_backend(self):
        return backend.SM70AttentionBackend

    def get_kv_cache_spec(self, vllm_config):
        raise AssertionError("not asked for here")


def impl_of(heads=6, kv_heads=1, dim=256, kv="fp8_e4m3", **more):
    return backend.SM70AttentionImpl(heads, dim, dim**-0.5, kv_heads, kv_cache_dtype=kv, **more)


def config_of(layers, max_model_len: int = MAX_LEN, seqs: int = 16):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, num_ubatches=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=7, parallel_drafting=False),
    )


def builder_of(impl, layers=("layers.0",), **config):
    """A builder, and its layers; workspaces are reserved as before the profile run."""
    context = {name: Layer(impl, name) for name in layers}
    backend.SM70AttentionBackend.reserve_workspaces(
        config_of(context, **config), context, torch.device("cpu")
    )
    spec = FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=torch.uint8,
    )
    made = backend.SM70AttentionMetadataBuilder(
        spec, list(layers), config_of(context, **config), torch.device("cpu")
    )
    return made, context


def batch(query_lens, seq_lens, **more) -> CommonAttentionMetadata:
    """Metadata of requests with these lengths; request r has pages r * 32 + 1 and on."""
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pages = MAX_LEN // PAGE
    table = torch.arange(len(query_lens) * pages, dtype=torch.int32).view(-1, pages) + 1
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        **more,
    )


STORED = {"fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def attend(
    q,
    k_cache,
    v_cache,
    table,
    seq_lens,
    starts,
    *,
    max_seq_len,
    softmax_scale,
    k_scale,
    v_scale,
    out,
    kv_dtype="fp8_e4m3",
    max_query_len=8,
    workspace=None,
):
    """The ops' contract in PyTorch."""
    for r in range(len(seq_lens)):
        first, last, length = int(starts[r]), int(starts[r + 1]), int(seq_lens[r])
        n = last - first
        if n == 0 or length == 0 or length > max_seq_len or n > max_query_len:
            continue
        pages = table[r, : -(-length // PAGE)].long()
        k, v = (
            c[pages].flatten(0, 1)[:length].view(STORED[kv_dtype]).float() * s
            for c, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * softmax_scale
        seen = torch.arange(length) <= length - n + torch.arange(n)[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).half()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """A V100 that reports a complete library, recorded calls, and counters of this test alone."""
    calls = []

    def record(route):
        def op(*tensors, **options):
            calls.append((route, tensors, options))
            attend(*tensors, **options)

        return op

    monkeypatch.setattr(backend, "library", lambda: LIBRARY)
    monkeypatch.setattr(
        backend.current_platform, "get_device_capability", lambda: DeviceCapability(7, 0),
        raising=False,
    )  # fmt: skip
    monkeypatch.setattr(backend.long, "long_attention", record(Route.LONG))
    monkeypatch.setattr(backend.paged, "paged_attention", record(Route.PAGED))
    monkeypatch.setattr(backend.prefill, "prefill_attention", record(Route.PREFILL))
    monkeypatch.setattr(backend, "_workspaces", backend._Workspaces())
    stats = RouteStats()
    monkeypatch.setattr(backend, "route_stats", stats)
    backend._log_routes.cache_clear()
    return SimpleNamespace(calls=calls, stats=stats)


def cache_of(impl, requests: int):
    """A random paged cache for `batch`, and K and V per request as FP32."""
    torch.manual_seed(7)
    pages = requests * (MAX_LEN // PAGE) + 1
    shape = backend.SM70AttentionBackend.get_kv_cache_shape(
        pages, PAGE, impl.num_kv_heads, impl.head_size
    )
    values = torch.randn(shape)
    if impl.geometry.kv_dtype == "fp16":
        return values.half()
    kind = torch.float8_e4m3fn if "e4m3" in impl.geometry.kv_dtype else torch.float8_e5m2
    return values.to(kind).view(torch.uint8)


def run(impl, metadata, tokens: int, cache, layer=None):
    q = torch.randn(tokens, impl.num_heads, impl.head_size).half()
    out = torch.full_like(q, 77.0)
    impl.forward(layer or Layer(impl), q, None, None, cache, metadata, output=out)
    return q, out


def routes(metadata) -> list[tuple[str, int, int]]:
    (calls,) = metadata.calls.values()
    return [(c.route.value, c.seq_lens.shape[0], c.max_query_len) for c in calls]


@pytest.mark.parametrize("kv", ["auto", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_mixed_batch_is_attention_over_the_whole_past(kv: str, surroundings) -> None:
    impl = impl_of(heads=8, kv_heads=2, dim=64, kv=kv)
    query_lens, seq_lens = [1, 8, 3, 40, 100], [200, 8, 77, 300, 100]
    builder, _ = builder_of(impl)
    metadata = builder.build(0, batch(query_lens, seq_lens))
    assert routes(metadata) == [("paged", 3, 8), ("prefill", 2, 100)]
    cache = cache_of(impl, 5)
    layer = Layer(impl, k=0.5, v=1.5)
    q, out = run(impl, metadata, sum(query_lens), cache, layer)
    m = batch(query_lens, seq_lens)
    wanted = torch.full_like(q, 77.0)
    attend(
        q, *cache.unbind(0), m.block_table_tensor, m.seq_lens, m.query_start_loc,
        max_seq_len=MAX_LEN, softmax_scale=impl.scale, k_scale=0.5, v_scale=1.5, out=wanted,
        kv_dtype=impl.geometry.kv_dtype, max_query_len=1000,
    )  # fmt: skip
    assert torch.equal(out, wanted) and not (out == 77.0).all(-1).any()
    assert {o["kv_dtype"] for _, _, o in surroundings.calls} == {impl.geometry.kv_dtype}
    # A constant contract: a request's bits must not depend on its neighbours.
    assert {o["max_seq_len"] for _, _, o in surroundings.calls} == {MAX_LEN}


def test_verify_rows_take_the_long_route_and_prompt_rows_do_not(surroundings) -> None:
    impl = impl_of()
    builder, _ = builder_of(impl)
    metadata = builder.build(0, batch([8, 8, 200], [50, 300, 400]))
    assert routes(metadata) == [("long", 2, 8), ("prefill", 1, 200)]
    run(impl, metadata, 216, cache_of(impl, 3))
    (_, _, options), _ = surroundings.calls
    assert options["max_seq_len"] == MAX_LEN
    assert surroundings.stats.totals() == {
        ("target", "long", "eager"): 1,
        ("target", "prefill", "eager"): 1,
    }


def test_padding_rows_of_an_eager_batch_are_not_touched(surroundings) -> None:
    impl = impl_of()
    builder, _ = builder_of(impl)
    metadata = builder.build(0, batch([1, 1], [9, 30]))
    _, out = run(impl, metadata, 8, cache_of(impl, 2))
    assert (out[2:] == 77.0).all() and not (out[:2] == 77.0).any()


def test_the_last_step_before_the_limit_keeps_a_decode_kernel() -> None:
    builder, _ = builder_of(impl_of())
    for drafts in range(1, 9):
        metadata = builder.build(0, batch([drafts, 8], [MAX_LEN, 100]))
        assert routes(metadata) == [("long" if drafts == 8 else "paged", 2, 8)]


@pytest.mark.parametrize("bound", [None, MAX_LEN])
def test_a_graph_is_counted_by_what_its_capture_launched(bound, surroundings) -> None:
    impl = impl_of()
    names = tuple(f"layers.{i}" for i in range(4))
    builder, layers = builder_of(impl, names)
    cache = cache_of(impl, 4)
    route, kind = ("paged", "ordinary") if bound is None else ("long", "bounded")

    def graph(use, query_lens, seq_lens):
        return batch(query_lens, seq_lens, full_graph=use, max_context_bound=bound)

    warm = builder.build(0, graph(FullGraphUse.WARMUP, [8] * 4, [8] * 4))
    run(impl, warm, 32, cache)
    captured = builder.build_for_cudagraph_capture(graph(FullGraphUse.CAPTURE, [8] * 4, [8] * 4))
    assert routes(warm) == routes(captured) == [(route, 4, 8)]
    for name in names[:3]:  # the fourth is the drafter's: not part of this graph
        run(impl, captured, 32, cache, layers[name])
    assert surroundings.stats.totals() == {}
    # A replay with one request of padding: the same kernels, nothing launched from Python.
    before = len(surroundings.calls)
    replay = builder.build(0, graph(FullGraphUse.REPLAY, [8, 8, 8, 0], [50, 60, 70, 0]))
    assert routes(replay) == [(route, 4, 8)]
    assert len(surroundings.calls) == before
    assert surroundings.stats.totals() == {("target", route, kind): 3}
    # Graphs of other sizes are others.
    builder.build(0, graph(FullGraphUse.REPLAY, [8, 8], [50, 60]))
    assert surroundings.stats.totals() == {("target", route, kind): 3}


def test_replay_reads_the_runners_own_buffers() -> None:
    builder, _ = builder_of(impl_of())
    m = batch([8] * 4, [8] * 4, full_graph=FullGraphUse.CAPTURE)
    (calls,) = builder.build_for_cudagraph_capture(m).calls.values()
    for mine, theirs in (
        (calls[0].seq_lens, m.seq_lens),
        (calls[0].query_start_loc, m.query_start_loc),
        (calls[0].block_table, m.block_table_tensor),
    ):
        assert mine.data_ptr() == theirs.data_ptr()


def test_drafting_ignores_the_graph_that_the_target_was_replayed_from(surroundings) -> None:
    impl = impl_of()
    builder, _ = builder_of(impl)
    m = batch([8] * 2, [50, 60], full_graph=FullGraphUse.REPLAY, max_context_bound=MAX_LEN)
    first = builder.build_for_drafting(m, 0)
    run(impl, first, 16, cache_of(impl, 2))
    later = builder.build_for_drafting(batch([1, 1], [51, 61]), 1)
    run(impl, later, 2, cache_of(impl, 2))
    assert surroundings.stats.totals() == {
        ("draft", "long", "eager"): 1,
        ("draft", "paged", "eager"): 1,
    }


@pytest.mark.parametrize(
    ("geometry", "wanted"),
    [
        ({}, (MAX_LEN,)),
        ({"heads": 24, "kv_heads": 4}, (MAX_LEN,)),
        ({"heads": 4}, ()),  # 35B-A3B at TP4
        ({"kv": "auto"}, ()),
        ({"kv": "fp8_e5m2"}, ()),
        ({"dim": 128}, ()),
    ],
)
def test_only_the_long_geometry_asks_for_bounds(geometry, wanted) -> None:
    builder, layers = builder_of(impl_of(**geometry))
    bounds = backend.SM70AttentionMetadataBuilder.get_context_bounds
    config = builder.vllm_config
    assert bounds(config, list(layers), 4, 8) == wanted
    assert bounds(config, list(layers), 16, 8) == wanted
    assert bounds(config, list(layers), 17, 8) == ()
    assert bounds(config, list(layers), 4, 1) == ()


def test_a_disabled_route_is_out_everywhere(monkeypatch, surroundings) -> None:
    monkeypatch.setenv("VLLM_SM70_LONG_ATTENTION", "0")
    impl = impl_of()
    builder, layers = builder_of(impl)
    assert routes(builder.build(0, batch([8, 8], [50, 60]))) == [("paged", 2, 8)]
    assert builder.get_context_bounds(builder.vllm_config, list(layers), 4, 8) == ()
    monkeypatch.setenv("VLLM_SM70_PREFILL_ATTENTION", "0")
    with pytest.raises(ValueError, match="VLLM_SM70_PREFILL_ATTENTION=0 leaves no kernel"):
        impl_of()


def test_workspaces_are_reserved_for_the_largest_launch(surroundings) -> None:
    impl = impl_of()
    layers = {"layers.0": Layer(impl)}
    config = config_of(layers, max_model_len=262144, seqs=256)
    reserve = backend.SM70AttentionBackend.reserve_workspaces
    cpu = torch.device("cpu")
    held = reserve(config, layers, cpu)
    panel = backend.long.long_workspace_bytes(16, 1, 262144)
    assert panel < held <= backend.PAGED_WORKSPACE_BYTES + panel + 512
    assert reserve(config, layers, cpu) == held
    # 200 decode and short rows: several launches that share it, counted once, covering each once.
    builder, _ = builder_of(impl, max_model_len=262144, seqs=256)
    for query_lens in ([1] * 200, [16] * 200, [8] * 16, [5, *[1] * 30]):
        metadata = builder.build(0, batch(query_lens, [400] * len(query_lens)))
        (calls,) = metadata.calls.values()
        for call in calls:
            workspace = backend._workspaces.of_call(call, impl.geometry, cpu, False)
            rows = call.seq_lens.shape[0]
            assert workspace.numel() >= (
                backend.long.long_workspace_bytes(rows, 1, 262144)
                if call.route is Route.LONG
                else backend._paged_bytes(impl.geometry, rows, call.max_query_len, 262144)
            )
        assert sum(c.seq_lens.shape[0] for c in calls) == len(query_lens)
        assert Counter(c.counts for c in calls)[1] == 1
    assert backend._workspaces.bytes_held() == held


def test_a_small_service_reserves_no_panel_for_sixteen(surroundings) -> None:
    layers = {"layers.0": Layer(impl_of())}
    reserve = backend.SM70AttentionBackend.reserve_workspaces
    reserve(config_of(layers, seqs=4), layers, torch.device("cpu"))
    held = backend._workspaces.long.bytes_held()
    assert held <= backend.long.long_workspace_bytes(4, 1, MAX_LEN) + 512


def test_layers_without_the_long_route_reserve_nothing_for_it(surroundings) -> None:
    layers = {"layers.0": Layer(impl_of(kv="auto"))}
    reserve = backend.SM70AttentionBackend.reserve_workspaces
    assert reserve(config_of(layers), layers, torch.device("cpu")) > 0
    assert backend._workspaces.long.bytes_held() == 0


def test_the_profile_run_writes_zeros_and_checks_the_scales(surroundings) -> None:
    impl = impl_of()
    _, out = run(impl, None, 4, torch.tensor([]))
    assert (out == 0).all() and not surroundings.calls
    for k, v in ((0.0, 1.0), (1.0, float("nan")), (float("inf"), 1.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match=r"model\.7\.[kv]_scale is .*finite and above zero"):
            run(impl, None, 4, torch.tensor([]), Layer(impl, "model.7", k, v))
    dynamic = Layer(impl)
    dynamic.calculate_kv_scales = True
    with pytest.raises(ValueError, match="--calculate-kv-scales"):
        run(impl, None, 4, torch.tensor([]), dynamic)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"logits_soft_cap": 30.0}, "soft cap of 30.0"),
        ({"alibi_slopes": [0.5] * 6}, "ALiBi"),
        ({"sinks": torch.zeros(6)}, "sinks"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_remedy(more, words) -> None:
    with pytest.raises(NotImplementedError, match=words) as refused:
        impl_of(**more)
    assert "--attention-backend TRITON_ATTN" in str(refused.value)


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ({"dim": 80}, "head dimension 80"),
        ({"heads": 34, "kv_heads": 2}, "at most 16"),
    ],
)
def test_geometries_without_a_kernel_are_refused(geometry, words) -> None:
    with pytest.raises(ValueError, match=words):
        impl_of(**geometry)


def test_pages_keep_the_cache_managers_size_and_stay_multiples_of_16() -> None:
    (sizes,) = backend.SM70AttentionBackend.get_supported_kernel_block_sizes()
    assert sizes.base == 16
    shape = backend.SM70AttentionBackend.get_kv_cache_shape(10, 1648, 1, 256)
    assert shape == (2, 10, 1648, 1, 256)
    with pytest.raises(ValueError, match="1650 is not a multiple of 16"):
        backend.SM70AttentionBackend.get_kv_cache_shape(10, 1650, 1, 256)


def test_contexts_beyond_every_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        builder_of(impl_of(), max_model_len=dispatch.MAX_CONTEXT + 1)


def test_queries_stay_fp16_and_there_is_no_cascade() -> None:
    assert not impl_of().supports_quant_query_input
    builder, _ = builder_of(impl_of())
    assert not builder.use_cascade_attention(*[None] * 9)
    assert builder.reorder_batch_threshold == 8
