"""The doctor on hand-written config.json files: routes, pages, budgets, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from v100_serving.__main__ import main
from v100_serving.doctor import diagnose, load_wrapper, read_library, release_library
from v100_serving.model_config import ConfigError, read_config
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
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "head_dim": 256,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 1024,
}
GEMMA3_SHIPPED = {  # as checkpoints have it: most of the geometry is the type's default
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {},
}
NEMOTRON_H = QWEN3_DENSE | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128,
}
BERT = QWEN3_DENSE | {"architectures": ["BertModel"], "model_type": "bert"}


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


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NEMOTRON_H, "24 of 52 layers are of type Mamba-2: this release serves full attention"),
        (without(NEMOTRON_H, "hybrid_override_pattern"), "Mamba-2, by its mamba_num_heads"),
        (
            QWEN3_DENSE | {"num_hidden_layers": 2, "layer_types": ["full_attention", "weird"]},
            "1 of 2 layers are of type weird",
        ),
        (
            QWEN3_DENSE | {"num_hidden_layers": 2, "layer_types": ["full_attention", {"a": 1}]},
            "of type {'a': 1}",
        ),
        (QWEN3_DENSE | {"mamba_d_state": 256}, "Mamba, by its mamba_d_state"),
        (without(QWEN3_DENSE, "num_attention_heads") | {"state_size": 16}, "by its state_size"),
        (QWEN3_DENSE | {"model_type": "rwkv"}, "recurrent model"),
        (QWEN3_DENSE | {"linear_attn_config": {}}, "Kimi Delta Attention"),
        (
            QWEN3_DENSE | {"layer_types": ["linear_attention", "full_attention"] * 32},
            "linear attention that is no Gated DeltaNet",
        ),
        (QWEN3_DENSE | {"attn_type_list": [0, 1] * 32}, "32 of 64 layers are of type lightning"),
        (QWEN3_DENSE | {"block_configs": [{}]}, "layers differ from one another"),
        (BERT, "an encoder, or a model with one"),
        (QWEN3_DENSE | {"architectures": ["XForMaskedLM"]}, "an encoder"),
        (QWEN3_DENSE | {"model_type": "electra"}, "an encoder"),
        (QWEN3_DENSE | {"is_encoder_decoder": True}, "an encoder"),
        (QWEN3_DENSE | {"is_causal": False}, "an encoder"),
        (QWEN3_DENSE | {"model_type": "molmo2"}, "molmo2 attends both ways over the tokens of"),
        ({"model_type": "bloom", "n_head": 8}, "ALiBi has no SM70 kernel"),
        ({"kv_lora_rank": 512}, "MLA"),
    ],
)
def test_a_model_of_a_foreign_kind_is_refused_by_name_and_nothing_is_computed(
    tmp_path: Path, config: dict, words: str
) -> None:
    found = examined(tmp_path, config, dense_profile())
    assert any(words in problem for problem in found.problems), found.problems
    assert not any(layer.name.startswith("full attention") for layer in found.layers)
    assert not found.page and not found.cards
    assert found.text().endswith("This cannot work.")


def test_layers_that_are_known_are_counted_by_kind(tmp_path: Path) -> None:
    kinds = ["attention", "mlp", "moe", "attention"]  # no state among them
    config = without(QWEN3_DENSE, "num_hidden_layers") | {"layers_block_type": kinds}
    found = examined(tmp_path, config, dense_profile())
    assert not found.problems
    assert [(x.name.split(" (")[0], x.count) for x in found.layers] == [("full attention", 2)]


def test_a_shipped_gemma_3_is_refused_for_float16_not_for_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    found = examined(tmp_path, GEMMA3_SHIPPED, dense_profile())
    assert "vLLM does not run gemma3_text in float16" in found.problems[0]
    assert "runs in float16" not in found.weights
    windows = "29 layers have a sliding window of 1024 tokens"  # 34, every sixth of them full
    assert any(windows in problem for problem in found.problems)
    (note,) = [note for note in found.notes if "no routes, pages and budgets" in note]
    assert "num_attention_heads" in note


def test_one_kv_head_of_the_first_falcon(tmp_path: Path) -> None:
    config = QWEN3_DENSE | {"num_key_value_heads": None, "multi_query": True}
    profile = dense_profile(tensor_parallel=1)
    found = examined(tmp_path, config, profile)
    assert any("64 query heads over 1 KV heads" in problem for problem in found.problems)
    assert not any(
        "over 1 KV heads" in problem
        for problem in examined(
            tmp_path, config | {"new_decoder_architecture": True, "num_kv_heads": 8}, profile
        ).problems
    )


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


HYBRID = QWEN35_27B["text_config"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 2}, "model.json has no num_attention_heads or n_head: where"),
        ({"text_config": None}, "text_config is None, not a JSON object"),
        ({"llm_config": []}, "llm_config is [], not a JSON object"),
        ({"architectures": "X"}, "architectures is 'X', not a list of names"),
        (QWEN3_DENSE | {"num_hidden_layers": -3}, "num_hidden_layers is -3, not a whole number"),
        (QWEN3_DENSE | {"num_hidden_layers": 10**30}, "not a whole number from 1 to 10000"),
        (QWEN3_DENSE | {"head_dim": 10**30}, "not a whole number from 1 to"),
        (QWEN3_DENSE | {"num_key_value_heads": 0}, "num_key_value_heads is 0, not a whole"),
        (QWEN3_DENSE | {"num_attention_heads": "many"}, "num_attention_heads is 'many', not a"),
        (QWEN3_DENSE | {"num_attention_heads": True}, "num_attention_heads is True, not a"),
        (QWEN3_DENSE | {"hidden_size": 5120.0}, "hidden_size is 5120.0, not a whole"),
        (QWEN3_DENSE | {"head_dim": -128}, "head_dim is -128, not a whole"),
        (QWEN3_DENSE | {"max_position_embeddings": 0}, "max_position_embeddings is 0, not"),
        (QWEN3_DENSE | {"num_attention_heads": 30}, "30 query heads do not divide among 8 KV"),
        (QWEN3_DENSE | {"head_dim": None, "hidden_size": 8}, "hidden_size 8 is less than 64"),
        (QWEN3_DENSE | {"layer_types": 5}, "layer_types is 5, not a list of the layers' kinds"),
        (QWEN3_DENSE | {"layer_types": []}, "layer_types is [], not a list"),
        (QWEN3_DENSE | {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_"),
        (HYBRID | {"full_attention_interval": 0}, "full_attention_interval is 0, not"),
        (HYBRID | {"linear_key_head_dim": None}, "has no linear_key_head_dim"),
        (HYBRID | {"mtp_num_hidden_layers": "x"}, "mtp_num_hidden_layers is 'x', not"),
        (QWEN3_DENSE | {"quantization_config": 4}, "quantization_config is 4, not a JSON object"),
        (
            QWEN3_DENSE | {"quantization_config": {"config_groups": [1]}},
            "config_groups is no object of objects",
        ),
    ],
)
def test_nonsense_in_a_file_is_an_error_with_its_name_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict, words: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    assert main(["doctor", "--config", str(path), "--profile", "qwen3.8-27b-tp4"]) == 1
    said = capsys.readouterr()
    assert words in said.err and str(path) in said.err
    assert not said.out


@pytest.mark.parametrize("card", ["nan", "-5", "0", "inf", "v100-64gb"])
def test_a_card_without_a_size_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], card: str
) -> None:
    for command in (["check", "x.yaml"], ["doctor", "--config", "x", "--profile", "x"]):
        with pytest.raises(SystemExit) as left:
            main([*command, f"--card={card}"])
        assert left.value.code == 2
        assert f"{card!r} is neither a number of GiB above 0" in capsys.readouterr().err


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(ConfigError, match="does not load"):
        read_library(tmp_path / "x.so")


def linked_against_torch(folder: Path) -> Path:
    """A library that needs a libtorch_cpu.so which is nowhere to be found."""
    compile_empty = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,--no-as-needed"]
    for arguments in (["-o", "libtorch_cpu.so"], ["-o", "x.so", "-L.", "-ltorch_cpu"]):
        subprocess.run([*compile_empty, *arguments], check=True, cwd=folder)
    (folder / "libtorch_cpu.so").unlink()
    return folder / "x.so"


def test_a_python_without_torch_is_not_blamed_on_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = linked_against_torch(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        read_library(library)
    said = str(refused.value)
    assert f"this Python ({sys.executable}) has no PyTorch" in said
    assert "/current/venv/bin/python" in said and "which `make demo` makes" in said
    assert "built for another" not in said

    serving = tmp_path / "vllm-v100" / "serve-cpu-311-0"
    serving.mkdir(parents=True)
    (serving / "complete").touch()
    with pytest.raises(ConfigError, match=f"{serving}/bin/python"):
        read_library(library)


def test_a_library_for_another_torch_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="built for another PyTorch"):
        read_library(linked_against_torch(tmp_path))
