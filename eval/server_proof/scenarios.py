"""The engines of each part, as data. The dense model has 4 full-attention layers, the hybrid 2."""

from __future__ import annotations

from functools import partial
from typing import Any

RAGGED = [17, 33, 64, 100, 129, 255, 256, 300, 512, 777, 1000, 1500, 2047, 3000, 4000, 6000]
SHORT = [200, 1000, 4000]
LONG_LIMIT = 262144
VERIFY = 8
FULL_LAYERS = {"dense": 4, "hybrid": 2, "hybrid-shallow": 1, "hybrid-tp2": 2, "hybrid-tp4": 2}
RANKS = {"tp2": 2, "tp4": 4}
"""The parts that need several GPUs: ranks of each."""

MTP = {"method": "mtp", "num_speculative_tokens": VERIFY - 1}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": VERIFY - 1,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}

UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["none"]}
"""The FULL graphs of a service, and no torch.compile: an engine starts a minute sooner."""

WITHOUT_LONG = {"VLLM_SM70_LONG_ATTENTION": "0"}

SEVERAL_GPUS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as a service runs: engine core and ranks apart
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # No NVLink multicast: on hosts with NVSwitch it takes hold of the fabric that other tenants
    # share, and a program that dies with it can leave their GPUs out of service. A V100 has none.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def _dense(label: str, backend: str, kv: str, tasks: list[dict], **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "kind": "dense",
        "backend": backend,
        "kv": kv,
        "kv_gib": 2,
        "max_model_len": 8192,
        "tasks": tasks,
    } | more


def _hybrid(label: str, backend: str, kv: str, tasks: list[dict], **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "kind": "hybrid",
        "backend": backend,
        "kv": kv,
        "kv_gib": 8,
        "max_model_len": LONG_LIMIT,
        "tasks": tasks,
    } | more


def _teacher(*references: str) -> dict[str, Any]:
    return {"task": "teacher", "lengths": [700, 3000], "references": list(references)}


def _greedy(name: str, lengths: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"task": "greedy", "name": name, "lengths": lengths, "max_tokens": max_tokens} | more


RAGGED_TASK = _greedy("ragged16", RAGGED, 64)
SHUFFLED = _greedy("shuffled", SHORT, 16, shuffle=True)
GROWING = _greedy("growing16", [512] * 16, 512)
PLAIN = _greedy("plain", SHORT, 16)


def dense() -> list[dict[str, Any]]:
    """FP16 KV against two stock backends and FP32; FP8 KV against FP32 with such a cache."""
    return [
        _dense(
            "dense-sm70-fp16",
            "SM70_ATTN",
            "auto",
            [
                _teacher("fp32"),
                RAGGED_TASK,
                GROWING,
                PLAIN,
                SHUFFLED,
                _greedy("again", [4001, 2500], 32, repeat=2),
            ],
        ),
        _dense("dense-flash-fp16", "FLASH_ATTN", "auto", [_teacher("fp32"), RAGGED_TASK, PLAIN]),
        _dense("dense-triton-fp16", "TRITON_ATTN", "auto", [_teacher("fp32"), RAGGED_TASK]),
        _dense(
            "dense-sm70-e4m3",
            "SM70_ATTN",
            "fp8_e4m3",
            [_teacher("fp32", "fp8_e4m3"), RAGGED_TASK],
        ),
        _dense(
            "dense-sm70-e5m2",
            "SM70_ATTN",
            "fp8_e5m2",
            [_teacher("fp32", "fp8_e5m2"), PLAIN],
        ),
        _dense("dense-triton-e4m3", "TRITON_ATTN", "fp8_e4m3", [_teacher("fp32", "fp8_e4m3")]),
        # A cache of 10,240 tokens admits 16 prompts of 512 and not their growth to 1,024 each:
        # requests are preempted and resumed.
        _dense(
            "dense-sm70-preempted",
            "SM70_ATTN",
            "auto",
            [GROWING],
            kv_gib=10240 * 4096 / 2**30,
        ),
    ]


def hybrid() -> list[dict[str, Any]]:
    """The GQA-6 hybrid with 7 drafts: bounded graphs, counters, the route on and off."""
    waves = [
        _greedy("c1", [9000], 48),
        _greedy("c4", [5000] * 4, 32),
        _greedy("ragged16", RAGGED, 32),
        _greedy("again", [6600, 5000], 24, repeat=2),
    ]
    timing = [
        {"task": "barrier", "name": "timing", "parties": 6, "seconds": 100},
        {"task": "timing", "length": 16384, "requests": 4, "max_tokens": 33},
    ]
    return [
        _hybrid(
            "hybrid-sm70-fp16",
            "SM70_ATTN",
            "auto",
            [_greedy("ragged16", RAGGED, 32), PLAIN, SHUFFLED, *timing[:1]],
        ),
        _hybrid(
            "hybrid-flash-fp16",
            "FLASH_ATTN",
            "auto",
            [_greedy("ragged16", RAGGED, 32), PLAIN, *timing[:1]],
        ),
        _hybrid("hybrid-sm70-e4m3-mtp", "SM70_ATTN", "fp8_e4m3", waves + timing, speculative=MTP),
        _hybrid(
            "hybrid-sm70-e4m3-mtp-nolong",
            "SM70_ATTN",
            "fp8_e4m3",
            waves[:3] + timing,
            speculative=MTP,
            environment=WITHOUT_LONG,
        ),
        _hybrid(
            "hybrid-triton-e4m3-mtp",
            "TRITON_ATTN",
            "fp8_e4m3",
            waves[:2] + timing,
            speculative=MTP,
        ),
        _hybrid(
            "hybrid-sm70-e4m3-ngram",
            "SM70_ATTN",
            "fp8_e4m3",
            [_greedy("repetitive", [6000] * 4, 48, repetitive=True), *timing[:1]],
            speculative=NGRAM,
            seeded=False,  # its drafts are repetitions: they need a model that repeats
        ),
    ]


def long() -> list[dict[str, Any]]:
    """Contexts up to the service limit, the last steps before it included.

    Prompts are long here and their kernel is made for a V100: its instructions are slow on other
    GPUs. So the model has one full-attention layer, and only one engine goes to the limit.
    """
    tasks = [
        _greedy("c1-65536", [65536], 24),
        _greedy("ragged", [40000, 3297, 20000, 9000], 24),
    ]
    limit = _greedy("limit", [LONG_LIMIT - 24], 24)
    shape = {"kind": "hybrid-shallow", "speculative": MTP, "kv_gib": 12}
    return [
        _hybrid("long-sm70-e4m3-mtp", "SM70_ATTN", "fp8_e4m3", [*tasks, limit], **shape),
        _hybrid(
            "long-sm70-e4m3-mtp-nolong",
            "SM70_ATTN",
            "fp8_e4m3",
            tasks,
            environment=WITHOUT_LONG,
            **shape,
        ),
    ]


def tensor_parallel(part: str) -> list[dict[str, Any]]:
    """A GPU for each rank, each with the shapes of a TP4 rank: what every rank selects.

    Both engines are on the same GPUs. Their tasks take turns: two kernels that wait for the other
    ranks would hold up each other.
    """
    shape = {
        "kind": f"hybrid-{part}",
        "speculative": MTP,
        "turns": True,
        "options": {
            "tensor_parallel_size": RANKS[part],
            "compilation_config": UNCOMPILED,
        },
    }
    tasks = [_greedy("c1", [9000], 32), _greedy("c4", [5000] * 4, 32)]
    return [
        _hybrid(
            f"{part}-sm70-e4m3-mtp{name}",
            "SM70_ATTN",
            "fp8_e4m3",
            tasks,
            environment=SEVERAL_GPUS | switch,
            **shape,
        )
        for name, switch in (("", {}), ("-nolong", WITHOUT_LONG))
    ]


PARTS = {"dense": dense, "hybrid": hybrid, "long": long}
PARTS |= {part: partial(tensor_parallel, part) for part in RANKS}
