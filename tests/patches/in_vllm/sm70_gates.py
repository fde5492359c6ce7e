"""Every gate that a V100 meets in vLLM 0.19.1, with only the reported capability faked.

The rows follow the table in docs/sm70-gates.md: patched, or shown harmless.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "eval"))  # server_proof.models

for extension in ("vllm._C", "vllm._C_stable_libtorch"):  # CPU builds of them may not fit
    sys.modules.setdefault(extension, types.ModuleType(extension))

from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends import sm70_attn, triton_attn  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.vllm_flash_attn.sm70_attention import LibraryError, dispatch  # noqa: E402

KERNELS = frozenset(
    f"{route}_d{dim}_{kv}"
    for route in ("paged", "prefill")
    for dim in (64, 128, 256)
    for kv in ("fp16", "e4m3", "e5m2")
)
SM70 = AttentionBackendEnum.SM70_ATTN


def library(*archs: int) -> dispatch.Library:
    return dispatch.Library(dispatch.ABI, frozenset(archs), KERNELS, long_batch_capacity=16)


def platform(major: int, minor: int):
    """vLLM's CUDA platform on a GPU of this capability."""

    class Faked(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0):
            return DeviceCapability(major, minor)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"GPU {major}.{minor}"

    return Faked


def wanted(head=256, kv="auto", dtype=torch.float16, block=None, **more):
    return AttentionSelectorConfig(head, dtype, kv, block, **more)


@pytest.fixture(autouse=True)
def volta_library(monkeypatch):
    monkeypatch.setattr(sm70_attn, "library", lambda: library(70))


# Selection.


@pytest.mark.parametrize("kv", ["auto", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head", [64, 128, 256])
def test_volta_selects_the_sm70_backend_by_itself(head: int, kv: str) -> None:
    chosen = platform(7, 0).get_attn_backend_cls(None, wanted(head, kv))
    assert chosen == SM70.get_path()
    assert SM70.get_class() is sm70_attn.SM70AttentionBackend


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": 80}, "head dimension 80 has no SM70 kernel"),
        ({"kv": "bfloat16"}, "--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"),
        ({"kv": "fp8_ds_mla"}, "--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"),
        ({"dtype": torch.bfloat16}, "--dtype half"),
        ({"dtype": torch.float32}, "cannot run here"),
        ({"block": 24}, "not a multiple of 16"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "TRITON_ATTN runs the rest"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "ENCODER_DECODER not supported"),
        ({"use_mm_prefix": True}, "partial multimodal"),
    ],
)
def test_volta_refuses_with_the_remedy_and_falls_back_to_nothing(change, words) -> None:
    with pytest.raises(ValueError, match=words):
        platform(7, 0).get_attn_backend_cls(None, wanted(**change))


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (
            LibraryError("there is no SM70 attention library: install the wheel"),
            "install the wheel",
        ),
        (dispatch.Library(dispatch.ABI + 1, frozenset({70}), KERNELS, 16), "different releases"),
        (dispatch.Library(dispatch.ABI, frozenset({80}), KERNELS, 16), "holds code for sm_80"),
        (dispatch.Library(dispatch.ABI, frozenset({70}), frozenset(), 16), "has no prefill kernel"),
    ],
)
def test_a_library_that_does_not_fit_is_refused_at_start(loaded, words, monkeypatch) -> None:
    def load():
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    monkeypatch.setattr(sm70_attn, "library", load)
    with pytest.raises(ValueError, match=words):
        platform(7, 0).get_attn_backend_cls(None, wanted())


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_other_gpus_keep_their_own_backends(capability) -> None:
    faked = platform(*capability)
    names = cuda._get_backend_priorities(False, faked.get_device_capability(), 8, "auto")
    assert SM70 not in names and len(names) == 4


def test_any_gpu_with_code_in_the_library_takes_it_by_name(monkeypatch) -> None:
    with pytest.raises(ValueError, match="holds code for sm_70 and the device is sm_90"):
        platform(9, 0).get_attn_backend_cls(SM70, wanted())
    monkeypatch.setattr(sm70_attn, "library", lambda: library(70, 90))
    assert platform(9, 0).get_attn_backend_cls(SM70, wanted()) == SM70.get_path()
    assert platform(7, 0).get_attn_backend_cls(SM70, wanted()) == SM70.get_path()


def test_mla_models_meet_no_sm70_backend() -> None:
    names = cuda._get_backend_priorities(True, DeviceCapability(7, 0), 8, "auto")
    assert SM70 not in names


# Stock backends on a V100, by name.


@pytest.mark.parametrize("kv", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_triton_refuses_an_fp8_cache_below_89(kv: str, monkeypatch) -> None:
    monkeypatch.setattr(triton_attn.current_platform, "is_cuda", lambda: True, raising=False)
    triton = AttentionBackendEnum.TRITON_ATTN
    for capability in ((7, 0), (8, 0), (8, 6)):
        with pytest.raises(ValueError, match="Triton cannot compile an fp8 KV cache"):
            platform(*capability).get_attn_backend_cls(triton, wanted(kv=kv))
    for capability in ((8, 9), (9, 0)):
        assert platform(*capability).get_attn_backend_cls(triton, wanted(kv=kv))
    assert platform(7, 0).get_attn_backend_cls(triton, wanted(kv="auto"))


def test_the_extension_of_this_release_is_not_flash_attention_2() -> None:
    from vllm import vllm_flash_attn
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    # The package imports with the SM70 kernels' package alone, whatever the extension is.
    assert vllm_flash_attn._SM70_AVAILABLE
    assert not interface.FA2_AVAILABLE
    assert not interface.is_fa_version_supported(2)


def test_an_extension_with_other_ops_does_not_count_as_flash_attention_2(monkeypatch) -> None:
    import importlib

    from vllm import vllm_flash_attn
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    ours = types.ModuleType("vllm.vllm_flash_attn._vllm_fa2_C")
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    monkeypatch.setattr(vllm_flash_attn, "_vllm_fa2_C", ours, raising=False)
    try:
        again = importlib.reload(interface)
        assert not again.FA2_AVAILABLE
        assert "holds SM70 kernels" in again.FA2_UNAVAILABLE_REASON
    finally:
        monkeypatch.undo()
        importlib.reload(interface)


def test_the_vision_tower_attends_through_torch() -> None:
    chosen = platform(7, 0).get_vit_attn_backend(80, torch.float16)
    assert chosen is AttentionBackendEnum.TORCH_SDPA


# Dtypes.


def test_auto_dtype_casts_bfloat16_to_float16_and_an_explicit_one_is_refused(monkeypatch) -> None:
    from vllm.config import model

    volta = platform(7, 0)
    monkeypatch.setattr(model, "current_platform", volta())
    auto = model._resolve_auto_dtype("qwen3", torch.bfloat16, is_pooling_model=False)
    assert auto is torch.float16
    with pytest.raises(ValueError, match="--dtype=half"):
        volta.check_if_supports_dtype(torch.bfloat16)


def test_a_model_that_cannot_run_in_float16_is_told_so(monkeypatch) -> None:
    from vllm.config import model

    monkeypatch.setattr(model, "current_platform", platform(7, 0)())
    auto = model._resolve_auto_dtype("gemma3_text", torch.bfloat16, is_pooling_model=False)
    with pytest.raises(ValueError, match="Gemma 2 and 3, cannot run here"):
        platform(7, 0).get_attn_backend_cls(None, wanted(dtype=auto))


# Weight formats.


@pytest.mark.parametrize(
    "method", ["modelopt_fp4", "modelopt", "fp8", "awq", "mxfp4", "experts_int8"]
)
def test_weight_formats_without_a_kernel_say_what_runs_instead(method, monkeypatch) -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader import weight_utils

    minimum = get_quantization_config(method).get_min_capability()
    assert minimum > 70
    fake = SimpleNamespace(get_min_capability=lambda: minimum)
    monkeypatch.setattr(weight_utils, "get_quant_config", lambda model, load: fake)
    monkeypatch.setattr("vllm.platforms._current_platform", platform(7, 0)(), raising=False)
    model = SimpleNamespace(quantization=method, dtype=torch.float16, model="m")
    with pytest.raises(ValueError, match="not supported for the current GPU") as refused:
        VllmConfig._get_quantization_config(model, SimpleNamespace())
    assert "GPTQ, GGUF and bitsandbytes" in str(refused.value)


@pytest.mark.parametrize("method", ["gptq", "gguf", "bitsandbytes", "moe_wna16"])
def test_weight_formats_that_run_meet_no_gate(method) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    assert get_quantization_config(method).get_min_capability() <= 70


def test_a_compressed_tensors_scheme_is_refused_in_a_sentence(monkeypatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors as ct,
    )

    monkeypatch.setattr(ct, "current_platform", platform(7, 0)())
    with pytest.raises(RuntimeError, match=r"Min capability: 75\. Current capability: 70\.") as no:
        ct.CompressedTensorsConfig._check_scheme_supported(75)
    assert "NVFP4" in str(no.value)
    monkeypatch.setattr(ct, "current_platform", platform(8, 0)())
    with pytest.raises(RuntimeError) as no:
        ct.CompressedTensorsConfig._check_scheme_supported(90)
    assert "NVFP4" not in str(no.value)


# KV scales of a checkpoint.


@pytest.mark.parametrize(
    ("k", "v"), [(0.0, 0.0), (float("nan"), 1.0), (1.0, float("nan")), (1.0, 0.0), (-1.0, 1.0)]
)
def test_damaged_kv_scales_are_refused_with_the_layers_name(k: float, v: float) -> None:
    with pytest.raises(ValueError, match=r"KV cache scales of model\.3"):
        loaded_scales(k, v)


@pytest.mark.parametrize(
    ("k", "v", "result"),
    [(0.5, 0.25, (0.5, 0.25)), (-1.0, -1.0, (1.0, 1.0)), (0.5, -1.0, (0.5, 0.5))],
)
def test_sound_kv_scales_load_as_before(k, v, result) -> None:
    layer = loaded_scales(k, v)
    assert (layer._k_scale_float, layer._v_scale_float) == result


def loaded_scales(k: float, v: float):
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    layer = torch.nn.Module()
    layer.layer_name, layer.kv_cache_dtype, layer.calculate_kv_scales = "model.3", "fp8_e4m3", False
    for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
        layer.register_buffer(name, torch.tensor(1.0))
    method = BaseKVCacheMethod(SimpleNamespace())
    method.create_weights(layer)
    layer.k_scale.data.fill_(k)
    layer.v_scale.data.fill_(v)
    method.process_weights_after_loading(layer)
    return layer


# Gates that need no patch.


def test_the_cache_write_is_the_stock_kernel_and_not_tritons() -> None:
    from vllm._custom_ops import reshape_and_cache_flash

    assert sm70_attn.reshape_and_cache_flash is reshape_and_cache_flash


def test_gdn_prefill_stays_with_triton() -> None:
    from vllm.platforms import cuda as platform_module

    assert not platform(7, 0).is_device_capability(90)
    assert platform_module.CudaPlatformBase.supports_fp8.__func__(platform(7, 0)) is False


def test_the_sampler_is_vllms_own_unless_flashinfer_is_asked_for(monkeypatch) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    monkeypatch.setattr(sampler, "current_platform", platform(7, 0)())
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    made = sampler.TopKTopPSampler()
    assert made.forward == made.forward_native
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    flashinfer = types.ModuleType("vllm.v1.attention.backends.flashinfer")
    flashinfer.FlashInferBackend = SimpleNamespace(
        supports_compute_capability=lambda capability: capability >= DeviceCapability(7, 5)
    )
    monkeypatch.setitem(sys.modules, flashinfer.__name__, flashinfer)
    with pytest.raises(RuntimeError, match=r"does not support compute capability 7\.0"):
        sampler.TopKTopPSampler()


@pytest.fixture
def group(monkeypatch):
    """What stands for four ranks of one node where a communicator asks."""
    from vllm.distributed.device_communicators import custom_all_reduce, symm_mem

    for module in (custom_all_reduce, symm_mem):
        monkeypatch.setattr(module.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(custom_all_reduce.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(custom_all_reduce.dist, "get_rank", lambda group: 0)

    def all_gather(out, tensor, group) -> None:
        for rank, place in enumerate(out):
            place.fill_(rank)

    monkeypatch.setattr(custom_all_reduce.dist, "all_gather", all_gather)
    monkeypatch.setattr(custom_all_reduce, "in_the_same_node_as", lambda g, source_rank: [True] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return object()


@pytest.mark.parametrize("nvlink", [False, True], ids=["PCIe", "NVLink between all four"])
def test_custom_all_reduce_asks_for_links_and_not_for_a_capability(
    nvlink: bool, group, monkeypatch
) -> None:
    from vllm.distributed.device_communicators import custom_all_reduce as module

    volta = platform(7, 0)
    asked: list[list[int]] = []

    def is_fully_connected(devices: list[int]) -> bool:
        asked.append(devices)
        return nvlink

    class Reached(Exception):
        """The point where it starts to allocate."""

    def create_shared_buffer(*_args, **_more):
        raise Reached

    volta.is_fully_connected = staticmethod(is_fully_connected)
    monkeypatch.setattr(module, "current_platform", volta())
    monkeypatch.setattr(module, "custom_ar", True)
    monkeypatch.setattr(module, "_can_p2p", lambda rank, world: True)
    monkeypatch.setattr(module.ops, "meta_size", lambda: 0, raising=False)
    monkeypatch.setattr(module.CustomAllreduce, "create_shared_buffer", create_shared_buffer)
    if nvlink:
        with pytest.raises(Reached):
            module.CustomAllreduce(group, 0, symm_mem_enabled=True)
    else:
        assert module.CustomAllreduce(group, 0, symm_mem_enabled=True).disabled
    assert asked == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("capability", "goes_on"), [((7, 0), False), ((9, 0), True)])
def test_symmetric_memory_is_off_below_90(capability, goes_on: bool, group, monkeypatch) -> None:
    from vllm.distributed.device_communicators import symm_mem as module

    asked: list[int] = []

    def empty(*_args, **_more):
        asked.append(1)
        raise RuntimeError("no symmetric memory on this machine")

    monkeypatch.setattr(module, "current_platform", platform(*capability)())
    monkeypatch.setattr(module, "symm_mem_available", True)
    monkeypatch.setattr(module.torch.accelerator, "set_device_index", lambda device: None)
    fake = SimpleNamespace(empty=empty)
    monkeypatch.setattr(module, "torch_symm_mem", fake, raising=False)
    assert module.SymmMemCommunicator(group, 0).disabled
    assert bool(asked) == goes_on


def test_fused_all_reduce_and_deep_gemm_are_off_on_volta(monkeypatch) -> None:
    from vllm.config.compilation import PassConfig

    # The pass's own module needs compiled ops to be imported: its table is read from its source.
    name = "vllm.compilation.passes.fusion.allreduce_rms_fusion"
    tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text())
    (table,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "FI_ALLREDUCE_FUSION_MAX_SIZE_MB"
    )
    stands_for = types.ModuleType(name)
    stands_for.FI_ALLREDUCE_FUSION_MAX_SIZE_MB = ast.literal_eval(table)
    monkeypatch.setitem(sys.modules, name, stands_for)
    assert not platform(7, 0).support_deep_gemm()
    assert platform(9, 0).support_deep_gemm()
    for capability, sizes in (((7, 0), False), ((9, 0), True)):
        # The function imports the platform when it is called.
        fake = platform(*capability)()
        monkeypatch.setattr("vllm.platforms._current_platform", fake, raising=False)
        monkeypatch.setattr("vllm.platforms.current_platform", fake, raising=False)
        found = PassConfig.default_fi_allreduce_fusion_max_size_mb()
        assert bool(found) == sizes


def test_inductor_compiles_for_70_and_not_for_less(monkeypatch) -> None:
    from torch._dynamo.device_interface import CudaInterface

    for major, capable in ((7, True), (6, False)):
        properties = SimpleNamespace(major=major, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert CudaInterface.is_triton_capable() is capable


def test_seven_mtp_drafts_with_align_caching_are_configured_without_asking_the_device(
    tmp_path, monkeypatch
) -> None:
    """The whole engine configuration of a hybrid, on a platform that fails when it is asked."""
    from server_proof.models import hybrid_config
    from vllm.engine.arg_utils import EngineArgs

    asked: list[str] = []
    current = sys.modules["vllm.platforms"].current_platform
    for name in ("get_device_capability", "has_device_capability", "is_device_capability"):
        monkeypatch.setattr(
            type(current), name, classmethod(lambda cls, *a, n=name, **k: asked.append(n))
        )
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config(4)))
    config = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, dtype="float16", max_model_len=4096,
        enable_prefix_caching=True, enable_chunked_prefill=True, language_model_only=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 7},
    ).create_engine_config()  # fmt: skip
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.cache_config.mamba_cache_mode == "align"
    assert asked == []
