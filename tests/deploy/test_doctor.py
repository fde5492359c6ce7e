"""The doctor on hand-written config.json files: routes, pages, budgets, and what it refuses."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest
from v100_serving.__main__ import main
from v100_serving.doctor import (
    ConfigError,
    diagnose,
    load_wrapper,
    read_config,
    read_library,
    release_library,
)
from v100_serving.profiles import Profile, load_profile

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"
REFERENCE = load_profile(PROFILES / "qwen3.8-27b-tp4.yaml")
A3B = load_profile(PROFILES / "qwen3.5-35b-a3b-tp4.yaml")

QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
    },
}
QWEN35_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **QWEN35_27B["text_config"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
    },
}
QWEN3_DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
}
NVFP4 = {
    **QWEN35_27B,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}},
    },
}
GEMMA3 = {
    **QWEN3_DENSE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_attention_heads": 16,
    "head_dim": 256,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 1024,
}


def dense_profile(**engine: object) -> Profile:
    """A profile for a dense model on four cards, without drafts."""
    data = REFERENCE.model_dump(by_alias=True)
    data["engine"] |= {"speculative": None, "max_model_len": 32768, "kv_cache_dtype": "auto"}
    data["engine"] |= engine
    data["demand"] = [{"requests": 1, "tokens": 32768}]
    return Profile.model_validate(data)


def examined(tmp_path: Path, config: dict, profile: Profile, **options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return diagnose(read_config(path), profile, **options)


def fake_library(folder: Path, over: dict) -> Path:
    """A library without kernels that reports to be this tree's release, but for `over`."""
    checks = importlib.import_module(f"{load_wrapper().__name__}.library")
    rules = release_library()
    info = {
        "abi": rules.abi,
        "source_sha256": checks.expected_source_hash(),
        "archs": sorted(rules.archs),
        "long_batch_capacity": rules.long_batch_capacity,
        "kernels": sorted(rules.kernels),
    }
    text = json.dumps(json.dumps(info | over))
    (folder / "fake.c").write_text(f"const char* vllm_sm70_info(void) {{ return {text}; }}")
    command = ["cc", "-shared", "-fPIC", str(folder / "fake.c"), "-o", str(folder / "fake.so")]
    subprocess.run(command, check=True)
    return folder / "fake.so"


def routes(found, name: str) -> str:
    (layer,) = [x for x in found.layers if x.name.startswith(name)]
    return "\n".join(layer.routes)


def test_qwen35_27b_takes_the_long_route_on_1648_token_pages(tmp_path: Path) -> None:
    found = examined(tmp_path, QWEN35_27B, REFERENCE)
    assert not found.problems
    assert found.page["block_tokens"] == 1648
    assert found.page["page_bytes"] == 843776
    assert found.page["state_bytes"] == 837632
    full = routes(found, "full attention")
    assert "decode: paged" in full
    for batch in (1, 4, 16):
        assert f"verify 8 tokens, batch {batch}: long" in full
    assert "prompt chunks: prefill" in full
    assert "16 verify batches (1 to 16) bounded at 262144" in found.graphs
    assert [(x.name.split(" (")[0], x.count) for x in found.layers] == [
        ("full attention", 16),
        ("MTP draft layer", 1),
        ("gated delta net", 48),
    ]
    assert "8-token draft steps: long" in routes(found, "MTP draft layer")
    assert "does not fit" in found.cards["v100-16gb"]
    assert "contexts of 262144" in found.cards["v100-32gb"]
    assert any("cast to float16" in note for note in found.notes)
    assert found.as_dict()["works"]


def test_35b_a3b_keeps_the_ordinary_route(tmp_path: Path) -> None:
    found = examined(tmp_path, QWEN35_A3B, A3B)
    assert not found.problems
    full = routes(found, "full attention (4 query / 1 KV heads x 256, fp16 KV)")
    assert "long" not in full
    assert "no context-bounded graph" in found.graphs
    assert "fused_moe" in "".join(found.compiled)


def test_long_route_disabled_by_the_profile(tmp_path: Path) -> None:
    data = REFERENCE.model_dump(by_alias=True)
    data["engine"]["environment"] = {"VLLM_SM70_LONG_ATTENTION": "0"}
    found = examined(tmp_path, QWEN35_27B, Profile.model_validate(data))
    assert "verify 8 tokens, batch 4: paged" in routes(found, "full attention")
    assert "VLLM_SM70_LONG_ATTENTION=0" in routes(found, "full attention")
    assert "no context-bounded graph" in found.graphs


def test_dense_qwen3(tmp_path: Path) -> None:
    found = examined(tmp_path, QWEN3_DENSE, dense_profile())
    assert not found.problems
    assert found.page["block_tokens"] == 16
    assert [x.name for x in found.layers] == [
        "full attention (16 query / 2 KV heads x 128, fp16 KV)"
    ]
    assert any("another model" in note for note in found.notes)
    assert not any("delta net" in what for what in found.compiled)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (NVFP4, {}, "weights in compressed-tensors (nvfp4-pack-quantized) cannot run on SM70"),
        (GEMMA3, {}, "does not run gemma3_text in float16"),
        (GEMMA3, {}, "sliding window of 1024 tokens"),
        (QWEN3_DENSE | {"head_dim": 80}, {}, "head dimension 80 has no SM70 kernel"),
        (QWEN3_DENSE | {"kv_lora_rank": 512}, {}, "MLA"),
        (QWEN3_DENSE, {"block_size": 24}, "multiple of 16"),
        (QWEN3_DENSE, {"tensor_parallel": 3}, "do not divide"),
        (QWEN3_DENSE, {"max_model_len": 65536}, "exceeds the model's 40960"),
        (
            QWEN3_DENSE | {"quantization_config": {"quant_method": "fp8"}},
            {},
            "weights in fp8 cannot run on SM70",
        ),
        (
            QWEN3_DENSE | {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            {},
            "weights in fbgemm_fp8 cannot run on SM70: its kernels start at compute capability 8.0",
        ),
        (
            QWEN3_DENSE | {"quantization_config": {"quant_method": "experts_int8"}},
            {},
            "compute capability 8.0",
        ),
        (QWEN3_DENSE | {"alibi": True}, {}, "ALiBi has no SM70 kernel"),
        (QWEN3_DENSE | {"attention_chunk_size": 8192}, {}, "attention in chunks"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, config: dict, change: dict, words: str) -> None:
    profile = REFERENCE if config is NVFP4 else dense_profile(**change)
    found = examined(tmp_path, config, profile)
    assert any(words in problem for problem in found.problems)
    assert "This cannot work." in found.text()


def test_gptq_runs(tmp_path: Path) -> None:
    config = QWEN3_DENSE | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    found = examined(tmp_path, config, dense_profile())
    assert not found.problems
    assert found.weights == "gptq (4)"


def test_scales_of_the_kv_cache_alone_are_no_weight_format(tmp_path: Path) -> None:
    scales = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}}
    found = examined(tmp_path, QWEN3_DENSE | {"quantization_config": scales}, dense_profile())
    assert not found.problems
    assert "KV cache's scales alone" in found.weights


@pytest.mark.parametrize(
    ("over", "words"),
    [({"abi": 99}, "has ABI 99"), ({"source_sha256": "0" * 64}, "built from kernel sources 0000")],
)
def test_a_library_that_a_service_would_refuse_is_refused(
    tmp_path: Path, over: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_library(fake_library(tmp_path, over))


def test_a_library_of_smaller_capacity_keeps_larger_batches_ordinary(tmp_path: Path) -> None:
    library = read_library(fake_library(tmp_path, {"long_batch_capacity": 2}))
    found = examined(tmp_path, QWEN35_27B, REFERENCE, library=library)
    assert not found.problems
    assert "for 2 verify batches (1 to 2)" in found.graphs
    full = routes(found, "full attention")
    assert "batch 1: long" in full and "batch 16: paged" in full


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN35_27B))
    assert main(["doctor", "--config", str(tmp_path), "--profile", "qwen3.8-27b-tp4"]) == 0
    assert "1648 tokens" in capsys.readouterr().out
    path.write_text(json.dumps(NVFP4))
    arguments = ["doctor", "--config", str(path), "--profile", "qwen3.8-27b-tp4", "--json"]
    assert main([*arguments, "--card", "v100-32gb"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["works"] and "NVFP4" in "".join(answer["problems"])
    path.write_text("[]")
    assert main(arguments) == 1
    assert "not a JSON object" in capsys.readouterr().err


def test_bad_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        examined(tmp_path, {"num_hidden_layers": 2, "architectures": ["X"]}, dense_profile())
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(ConfigError, match="does not load"):
        read_library(tmp_path / "x.so")
