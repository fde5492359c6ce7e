"""From a profile to the command line and environment of one service instance."""

from __future__ import annotations

import json
from typing import Any

from v100_serving.memory import plan_memory
from v100_serving.profiles import Profile


class LaunchError(ValueError):
    """A GPU set or an address that does not fit the profile."""


def serve_arguments(profile: Profile, host: str, port: int) -> list[str]:
    """Arguments of ``vllm serve`` for `profile`; no credential is ever among them."""
    engine = profile.engine
    arguments = [
        profile.model.path,
        "--served-model-name",
        profile.model.served_name,
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        engine.dtype,
        "--kv-cache-dtype",
        engine.kv_cache_dtype,
        "--max-model-len",
        str(engine.max_model_len),
        "--max-num-batched-tokens",
        str(engine.max_num_batched_tokens),
        "--max-num-seqs",
        str(engine.max_num_seqs),
        "--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching",
        "--shutdown-timeout",
        str(profile.service.drain_timeout_s),
        "--disable-uvicorn-access-log",  # the public API logs requests; /health alone fills a log
    ]
    if profile.ranks > 1:
        arguments += [
            "--tensor-parallel-size",
            str(engine.tensor_parallel),
            "--pipeline-parallel-size",
            str(engine.pipeline_parallel),
            "--distributed-executor-backend",
            engine.distributed_executor,
        ]
    if engine.gpu_memory_utilization is not None:
        arguments += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    if engine.block_size:
        arguments += ["--block-size", str(engine.block_size)]
    if engine.prefix_caching and profile.model.geometry.gdn:
        arguments += ["--mamba-cache-mode", "align"]
    if engine.speculative:
        config = engine.speculative.model_dump(exclude_none=True)
        arguments += ["--speculative-config", json.dumps(config, sort_keys=True)]
    return arguments + list(engine.extra_args)


def launch_plan(
    profile: Profile, gpus: list[int], port: int, host: str = "127.0.0.1"
) -> dict[str, Any]:
    """What the node's programs read (``launch.json``): arguments, environment, limits, warm-up.

    Args:
        gpus: indices of this node's GPU set; empty for a cpu profile.
        port: port of the engine. It listens on `host` only; the public API is its own service.

    Raises:
        LaunchError: the GPU set does not have the number of ranks, or names a GPU twice.
        ImpossibleProfile: the profile cannot work on its smallest card.
    """
    plan = plan_memory(profile)
    engine, on_gpu = profile.engine, profile.hardware.accelerator == "v100"
    local = engine.tensor_parallel if engine.distributed_executor == "ray" else profile.ranks
    wanted = local if on_gpu else 0
    if len(set(gpus)) != len(gpus):
        raise LaunchError(f"GPU set {gpus} names a GPU twice")
    if len(gpus) != wanted:
        raise LaunchError(
            f"profile {profile.name} needs {wanted} GPUs on a node, the set is {gpus}"
        )
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(profile.service.start_timeout_s),
        **engine.environment,
    }
    if on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if engine.cpu_kv_cache_gib:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(engine.cpu_kv_cache_gib)
    hardware = profile.hardware
    return {
        "schema": 1,
        "profile": profile.name,
        "served_name": profile.model.served_name,
        "model_path": profile.model.path,
        "url": f"http://{host}:{port}",
        "arguments": serve_arguments(profile, host, port),
        "environment": dict(sorted(environment.items())),
        "gpus": gpus,
        "compute_capability": hardware.compute_capability,
        "min_driver": hardware.min_driver,
        "min_card_mib": round(hardware.min_card_gib * 1024),
        "tools": ["ninja", "nvcc", "ptxas", "c++"] if on_gpu else ["ninja", "c++"],
        "cache_space_gib": profile.service.cache_space_gib,
        "start_timeout_s": profile.service.start_timeout_s,
        "drain_timeout_s": profile.service.drain_timeout_s,
        "warm_up": [w.model_dump() for w in profile.service.warm_up],
        "kv": plan.as_dict(),
    }
