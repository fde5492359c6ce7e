"""Runs scenarios on vLLM's engine on CPU and writes down what it did. Not a test: a subprocess of
test_cpu_serving.py, because it runs in the environment that holds vLLM's requirements.

    python engine_probe.py MODEL REQUEST.json RESULT.json

A request maps names to {"engine": LLM options, "rounds": [{"prompts": lengths, "max_tokens": n,
"temperature": t}, ...]}: one engine each, and rounds one after the other. A result holds per round
the tokens, their log probabilities, the counters and, per step, the CUDA graph that the runner's
own dispatch would have taken on a GPU: the CPU runner has no graphs, so the probe asks with a
dispatcher that has the graphs of a GPU service, and then lets the step run as it is. Prompts
depend on their place and length only. A round that raises ends its engine: {"error": text}.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from types import SimpleNamespace

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

ORDINARY_TOKENS = range(10, 2000)


def gpu_dispatcher(drafts: int, seqs: int) -> CudagraphDispatcher:
    """The dispatcher of a service with FULL graphs for decodes and PIECEWISE for the rest."""
    row = 1 + drafts
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=list(range(row, 2 * row * seqs + 1, row)),
        max_cudagraph_capture_size=2 * row * seqs,
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    config = SimpleNamespace(
        compilation_config=compilation,
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, row)
    return dispatcher


def record_dispatch(steps: list[dict]) -> None:
    """Makes the runner append to `steps`, per step, its rows and the graph that it chooses."""
    decide = CPUModelRunner._determine_batch_execution_and_padding

    def recorded(self, *args, **kwargs):
        lens = kwargs["num_scheduled_tokens_np"]
        if kwargs.get("force_uniform_decode") is None:
            own = self.cudagraph_dispatcher
            self.cudagraph_dispatcher = gpu_dispatcher(self.num_spec_tokens, self.max_num_reqs)
            mode = decide(self, *args, **kwargs)[0]
            self.cudagraph_dispatcher = own
            batch, rows = self.input_batch, len(lens)
            prefill = batch.num_computed_tokens_cpu[:rows] < batch.num_prompt_tokens[:rows]
            steps.append({"lens": lens.tolist(), "prefill": prefill.tolist(), "graph": mode.name})
        return decide(self, *args, **kwargs)

    CPUModelRunner._determine_batch_execution_and_padding = recorded


def run(model: str, scenario: dict, steps: list[dict]) -> list[dict]:
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        block_size=256,
        enforce_eager=True,
        disable_log_stats=False,
        language_model_only=True,
        skip_tokenizer_init=True,
        seed=0,
        **scenario["engine"],
    )
    results = []
    for request in scenario["rounds"]:
        steps.clear()
        try:
            results.append(run_round(llm, request) | {"steps": list(steps)})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
            break
    return results


def run_round(llm: LLM, request: dict) -> dict:
    temperature = request.get("temperature", 0.0)
    prompts, parameters = [], []
    for index, length in enumerate(request["prompts"]):
        draw = random.Random(1000 + index)
        prompts.append({"prompt_token_ids": [draw.choice(ORDINARY_TOKENS) for _ in range(length)]})
        parameters.append(
            SamplingParams(
                temperature=temperature,
                seed=index if temperature else None,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
        )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    counters = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(("vllm:spec_decode_num", "vllm:prefix_cache"))
        and hasattr(metric, "value")
    }
    completions = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(one.token_ids) for one in completions],
        "logprobs": [
            [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
            for one in completions
        ],
        "counters": counters,
    }


def main() -> None:
    model, request, result = sys.argv[1:]
    steps: list[dict] = []
    record_dispatch(steps)
    results = {}
    with open(request) as stream:
        scenarios = json.load(stream)
    for name, scenario in scenarios.items():
        results[name] = run(model, scenario, steps)
        gc.collect()
        with open(result, "w") as stream:
            json.dump(results, stream)


if __name__ == "__main__":
    main()
