"""The admission matrix: dtype x head geometry x query lengths x batch x library x disabled."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "kernel/python/sm70_attention/dispatch.py"


def _load():
    """dispatch.py alone: it must need neither torch nor the rest of its package."""
    spec = importlib.util.spec_from_file_location("sm70_dispatch_under_test", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


d = _load()
R = d.Route

KERNELS = frozenset(
    f"{route}_d{dim}_{kv}"
    for route in ("paged", "prefill")
    for dim in d.HEAD_DIMS
    for kv in ("fp16", "e4m3", "e5m2")
) | {"long_d256_e4m3"}
FULL = d.Library(abi=d.ABI, archs=frozenset({70}), kernels=KERNELS, long_batch_capacity=16)
B1 = dataclasses.replace(FULL, long_batch_capacity=1)
OLD = dataclasses.replace(FULL, long_batch_capacity=0)

Q27 = d.Geometry(q_heads=6, kv_heads=1, head_dim=256, kv_dtype="fp8_e4m3")  # 27B at TP4
Q27_TP1 = dataclasses.replace(Q27, q_heads=24, kv_heads=4)
Q35_A3B = dataclasses.replace(Q27, q_heads=4)  # 35B-A3B at TP4
FP16 = dataclasses.replace(Q27, kv_dtype="fp16")
E5M2 = dataclasses.replace(Q27, kv_dtype="fp8_e5m2")
D128 = dataclasses.replace(Q27, head_dim=128)
D64 = dataclasses.replace(Q27, head_dim=64)

NONE = frozenset()
NO_LONG = frozenset({R.LONG})
NO_PAGED = frozenset({R.PAGED})

# geometry, query lengths, library, disabled, longest context, route, a word of the reason
MATRIX = [
    # The long route: E4M3, D 256, groups of six, eight tokens each.
    (Q27, [8], FULL, NONE, 262144, R.LONG, "batch 1"),
    (Q27, [8] * 4, FULL, NONE, 131072, R.LONG, "batch 4"),
    (Q27, [8] * 16, FULL, NONE, 262144, R.LONG, "batch 16"),
    (Q27_TP1, [8] * 3, FULL, NONE, 5000, R.LONG, "batch 3"),
    (Q27, [8, 8, 0, 0], FULL, NONE, 32768, R.LONG, "batch 4"),
    # A single request takes it with two to eight tokens; batches do not.
    *[(Q27, [n], FULL, NONE, 9000, R.LONG, f"query length {n}") for n in range(2, 9)],
    (Q27, [1], FULL, NONE, 9000, R.PAGED, "query length 1"),
    (Q27, [9], FULL, NONE, 9000, R.PAGED, "query length 9"),
    (Q27, [16], FULL, NONE, 9000, R.PAGED, "query length 16"),
    *[(Q27, [n, n], FULL, NONE, 9000, R.PAGED, "not all 8") for n in range(1, 8)],
    (Q27, [8, 7], FULL, NONE, 9000, R.PAGED, "not all 8"),
    (Q27, [8, 1, 8], FULL, NONE, 9000, R.PAGED, "not all 8"),
    (Q27, [0, 0], FULL, NONE, 0, R.PAGED, "no live"),
    # Capacity counts padded rows: a panel exists for each.
    (Q27, [8] * 17, FULL, NONE, 9000, R.PAGED, "over the library's 16"),
    (Q27, [8] + [0] * 16, FULL, NONE, 9000, R.PAGED, "over the library's 16"),
    (Q27, [8], B1, NONE, 9000, R.LONG, "batch 1"),
    (Q27, [8, 8], B1, NONE, 9000, R.PAGED, "over the library's 1"),
    (Q27, [8], OLD, NONE, 9000, R.PAGED, "no long kernel"),
    # One oversized peer sends the batch to the ordinary kernel.
    (Q27, [8] * 4, FULL, NONE, 262145, R.PAGED, "over the bound"),
    # Other geometries and dtypes keep the ordinary route.
    (Q35_A3B, [8] * 4, FULL, NONE, 32768, R.PAGED, "groups of 6"),
    (FP16, [8] * 4, FULL, NONE, 32768, R.PAGED, "cache is fp16"),
    (E5M2, [8] * 4, FULL, NONE, 32768, R.PAGED, "cache is fp8_e5m2"),
    (D128, [8] * 4, FULL, NONE, 32768, R.PAGED, "head dimension 128"),
    (D64, [8], FULL, NONE, 32768, R.PAGED, "head dimension 64"),
    # Disabled routes.
    (Q27, [8] * 4, FULL, NO_LONG, 32768, R.PAGED, "VLLM_SM70_LONG_ATTENTION=0"),
    (Q27, [1] * 4, FULL, NO_PAGED, 32768, R.PREFILL, "VLLM_SM70_PAGED_ATTENTION=0"),
    (Q27, [8] * 4, FULL, NO_PAGED, 32768, R.LONG, "batch 4"),
    (Q27, [8] * 4, FULL, NO_PAGED | NO_LONG, 32768, R.PREFILL, "VLLM_SM70_PAGED_ATTENTION=0"),
    # Prompt chunks.
    (Q27, [17], FULL, NONE, 9000, R.PREFILL, "over 16"),
    (FP16, [8192], FULL, NONE, 100_000, R.PREFILL, "over 16"),
    (D64, [4, 3000], FULL, NONE, 9000, R.PREFILL, "over 16"),
]


@pytest.mark.parametrize("row", MATRIX, ids=lambda r: f"{r[5].value}-{r[6]}")
def test_admission_matrix(row):
    geometry, query_lens, library, disabled, context, route, word = row
    got = d.decide(geometry, query_lens, library, disabled, context)
    assert got.route is route
    assert word in got.reason


@pytest.mark.parametrize("q_heads,kv_heads", [(4, 1), (8, 1), (6, 2), (12, 1), (5, 1), (16, 2)])
def test_only_groups_of_six_are_long(q_heads, kv_heads):
    g = dataclasses.replace(Q27, q_heads=q_heads, kv_heads=kv_heads)
    assert d.decide(g, [8], FULL).route is R.PAGED


REFUSALS = [
    (dict(query_dtype="bfloat16"), FULL, 70, NONE, "--dtype half"),
    (dict(kv_dtype="bf16"), FULL, 70, NONE, "--kv-cache-dtype"),
    (dict(head_dim=80), FULL, 70, NONE, "TRITON_ATTN"),
    (dict(q_heads=34, kv_heads=2), FULL, 70, NONE, "at most 16"),
    (dict(q_heads=7, kv_heads=2), FULL, 70, NONE, "whole groups"),
    (dict(page_size=24), FULL, 70, NONE, "multiple of 16"),
    ({}, None, 70, NONE, "did not load"),
    ({}, dataclasses.replace(FULL, abi=d.ABI + 1), 70, NONE, "one release"),
    ({}, FULL, 75, NONE, None),  # Turing runs sm_70 code
    ({}, FULL, 90, NONE, "validation build"),
    ({}, dataclasses.replace(FULL, archs=frozenset({80})), 70, NONE, "sm_80"),
    ({}, dataclasses.replace(FULL, archs=frozenset({70, 90})), 90, NONE, None),
    ({}, dataclasses.replace(FULL, kernels=KERNELS - {"prefill_d256_e4m3"}), 70, NONE, "prefill"),
    ({}, dataclasses.replace(FULL, kernels=KERNELS - {"paged_d256_e4m3"}), 70, NONE, "paged"),
    ({}, FULL, 70, frozenset({R.PREFILL}), "unset it"),
    (dict(page_size=1648), FULL, 70, NONE, None),
    (dict(kv_dtype="fp16", head_dim=64, q_heads=16), FULL, 70, NONE, None),
]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda r: str(r[4]))
def test_refusals_say_the_remedy(row):
    change, library, capability, disabled, words = row
    got = d.refusal(dataclasses.replace(Q27, **change), library, capability, disabled)
    assert (got is None) if words is None else (got is not None and words in got)


def test_bounds_only_for_the_long_geometry():
    def bounds(g, library=FULL, disabled=NONE, limit=262144, batch=4, query=8):
        return d.context_bounds(g, library, disabled, limit, batch, query)

    assert bounds(Q27) == (262144,)
    assert bounds(Q27, limit=32768) == (32768,)
    assert bounds(Q27, limit=1_010_000) == (262144,)
    assert bounds(Q27, batch=16) == (262144,)
    for nothing in (
        bounds(Q35_A3B),
        bounds(FP16),
        bounds(E5M2),
        bounds(D128),
        bounds(Q27, disabled=NO_LONG),
        bounds(Q27, library=OLD),
        bounds(Q27, library=B1),
        bounds(Q27, batch=17),
        bounds(Q27, query=4),
        bounds(Q27, query=1),
    ):
        assert nothing == ()
    assert bounds(Q27, library=B1, batch=1) == (262144,)


@pytest.mark.parametrize(
    "query_lens,expected",
    [
        ([1, 1, 1], [(R.PAGED, 0, 3, 1)]),
        ([8, 8], [(R.LONG, 0, 2, 8)]),
        ([8, 8, 5000], [(R.LONG, 0, 2, 8), (R.PREFILL, 2, 1, 5000)]),
        ([1, 8, 5000, 300], [(R.PAGED, 0, 2, 8), (R.PREFILL, 2, 2, 5000)]),
        ([5000], [(R.PREFILL, 0, 1, 5000)]),
        # Not ordered: right all the same, by the kernel that takes any length.
        ([5000, 1, 8], [(R.PREFILL, 0, 3, 5000)]),
        ([0, 0], []),
        ([], []),
    ],
)
def test_plan_covers_every_request_once(query_lens, expected):
    launches = d.plan(Q27, query_lens, FULL, NONE, 9000)
    assert [(x.route, x.first, x.count, x.max_query_len) for x in launches] == expected
    covered = [i for x in launches for i in range(x.first, x.first + x.count)]
    assert covered == sorted(set(covered))
    assert all(i in covered for i, n in enumerate(query_lens) if n)


def test_an_ordinary_graph_never_holds_the_long_kernel():
    (bounded,) = d.graph_plan(Q27, 4, 8, FULL, NONE, bound=262144)
    (ordinary,) = d.graph_plan(Q27, 4, 8, FULL, NONE)
    (single,) = d.graph_plan(Q27, 4, 1, FULL, NONE)
    (no_paged,) = d.graph_plan(Q27, 4, 8, FULL, NO_PAGED)
    assert (bounded.route, bounded.count, bounded.max_query_len) == (R.LONG, 4, 8)
    assert (ordinary.route, ordinary.reason) == (R.PAGED, "ordinary graph")
    assert single.route is R.PAGED
    assert no_paged.route is R.PREFILL
    # A layer of another geometry in the same bounded graph keeps its ordinary kernel.
    (other,) = d.graph_plan(Q35_A3B, 4, 8, FULL, NONE, bound=262144)
    assert other.route is R.PAGED


def test_library_report_is_read_as_the_extension_writes_it():
    info = {
        "abi": 1,
        "source_sha256": "ab",
        "archs": ["sm_70", "sm_90"],
        "long_batch_capacity": 16,
        "kernels": ["paged_d256_e4m3"],
    }
    library = d.Library.from_info(info)
    assert library.archs == {70, 90}
    assert library.runs_on(70) and library.runs_on(75) and library.runs_on(90)
    assert not library.runs_on(80)
    assert library.has(R.PAGED, Q27) and not library.has(R.PREFILL, Q27)
    with pytest.raises(KeyError, match="archs"):
        d.Library.from_info({"abi": 1})


def test_one_variable_per_route():
    assert d.disabled_routes({}) == NONE
    assert d.disabled_routes({"VLLM_SM70_LONG_ATTENTION": "0"}) == NO_LONG
    assert d.disabled_routes({"VLLM_SM70_LONG_ATTENTION": "1"}) == NONE
    assert set(d.DISABLE_VARIABLES) == set(R)
