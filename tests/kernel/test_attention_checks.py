"""Bad arguments of the attention functions: each error names the argument and the expectation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "kernel" / "python"

# Runs where PyTorch is; prints {name of the change: "ErrorType: message" or "ok"}.
PROBE = r"""
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from sm70_attention import checks, paged

def arguments(kv="fp8_e4m3", pages=5, page=1648, heads=1, dim=256, group=6):
    dtype = torch.float16 if kv == "fp16" else torch.uint8
    cache = torch.zeros(2, pages, page, heads, dim, dtype=dtype)
    return {
        "out": torch.zeros(3, group * heads, dim).half(), "q": torch.zeros(3, group * heads, dim).half(),
        "k_cache": cache[0], "v_cache": cache[1],
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "max_query_len": 2, "max_seq_len": 4000,
    }

def wide(t):
    return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2]

CHANGES = {
    "nothing": {},
    "q last dimension": {"q": lambda t: wide(t)},
    "out last dimension": {"out": lambda t: wide(t)},
    "q dtype": {"q": lambda t: t.float()},
    "out shape": {"out": lambda t: t[:2]},
    "q alignment": {"q": lambda t: torch.zeros(t.numel() + 1).half()[1:].view(t.shape)},
    "table too narrow": {"block_table": lambda t: t[:, :2]},
    "table dtype": {"block_table": lambda t: t.long()},
    "table rows": {"block_table": lambda t: t[:1]},
    "seq_lens dtype": {"seq_lens": lambda t: t.long()},
    "query_start_loc length": {"query_start_loc": lambda t: t[:2]},
    "page 20": {"k_cache": lambda t: t[:, :20], "v_cache": lambda t: t[:, :20]},
    "group 17": {"q": lambda t: torch.zeros(3, 17, 256).half(), "out": lambda t: torch.zeros(3, 17, 256).half()},
    "head dimension 80": {
        "q": lambda t: t[..., :80], "out": lambda t: t[..., :80],
        "k_cache": lambda t: t[..., :80], "v_cache": lambda t: t[..., :80],
    },
    "contract": {"max_seq_len": lambda n: (1 << 20) + 1},
}
found = {}
def attempt(name, function):
    try:
        function()
        found[name] = "ok"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

for name, change in CHANGES.items():
    a = arguments()
    for key, f in change.items():
        a[key] = f(a[key])
    attempt(name, lambda: checks.check_batch(**a))
a = arguments()
attempt("cache last dimension", lambda: checks.cache_bytes("k_cache", wide(a["k_cache"]), "fp8_e4m3"))
attempt("cache dtype", lambda: checks.cache_bytes("k_cache", a["k_cache"].half(), "fp8_e4m3"))
attempt("cache name", lambda: checks.cache_bytes("k_cache", a["k_cache"], "fp8"))
attempt("float8 cache", lambda: checks.cache_bytes("k_cache", a["k_cache"].view(torch.float8_e4m3fn), "fp8_e4m3"))
for value in (0.0, -1.0, float("nan"), float("inf")):
    attempt(f"scale {value}", lambda: checks.check_scale("k_scale", value))
attempt("scale tensor", lambda: checks.check_scale("k_scale", torch.ones(1)))
attempt("workspace", lambda: checks.check_workspace(torch.zeros(10, dtype=torch.uint8), 16, a["q"]))
attempt("no library", lambda: paged.paged_attention(
    **{k: v for k, v in a.items()}, softmax_scale=1.0, workspace=torch.zeros(1)))
print(json.dumps(found))
"""  # noqa: E501


@pytest.fixture(scope="module")
def found(requirements_python: Callable[[], Path]) -> dict[str, str]:
    run = subprocess.run(
        [str(requirements_python()), "-c", PROBE, str(PYTHON)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["nothing", "float8 cache"])
def test_good_arguments_pass(found: dict[str, str], name: str) -> None:
    assert found[name] == "ok"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("q last dimension", ("q is (3, 6, 256)", "contiguous last dimension")),
        ("out last dimension", ("out is (3, 6, 256)", "contiguous last dimension")),
        ("q dtype", ("q is", "torch.float32", "expected float16 [tokens, q_heads, head_dim]")),
        ("out shape", ("out is (2, 6, 256)", "expected the shape of q, (3, 6, 256)")),
        ("q alignment", ("q is", "8-byte steps")),
        ("table too narrow", ("block_table is (2, 2)", "hold 3296 tokens", "max_seq_len 4000")),
        ("table dtype", ("block_table is", "torch.int64", "expected int32")),
        ("table rows", ("block_table is (1, 3)", "expected 2 rows")),
        ("seq_lens dtype", ("seq_lens is", "expected int32")),
        ("query_start_loc length", ("query_start_loc is (2,)", "requests + 1 = 3")),
        ("page 20", ("pages of 20 tokens", "multiple of 16")),
        ("group 17", ("q is (3, 17, 256)", "at most 16")),
        ("head dimension 80", ("q is (3, 6, 80)", "64, 128 or 256")),
        ("contract", ("max_seq_len is 1048577", "expected 1 to 1048576")),
        ("cache last dimension", ("k_cache is", "contiguous last dimension")),
        ("cache dtype", ("k_cache is", "torch.float16", "torch.uint8 or torch.float8_e4m3fn")),
        ("cache name", ("kv_dtype is 'fp8'", "fp16, fp8_e4m3, fp8_e5m2")),
        ("scale 0.0", ("k_scale is 0.0", "finite number above 0")),
        ("scale -1.0", ("k_scale is -1.0", "finite number above 0")),
        ("scale nan", ("k_scale is nan", "finite number above 0")),
        ("scale inf", ("k_scale is inf", "finite number above 0")),
        ("scale tensor", ("k_scale is a tensor", "host float")),
        ("workspace", ("workspace is (10,)", "expected 16 contiguous bytes")),
        ("no library", ("LibraryError", "there is no SM70 attention library", "install")),
    ],
)
def test_bad_arguments_are_named(found: dict[str, str], name: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert word in found[name]
