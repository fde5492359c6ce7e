"""One vLLM engine in one process: ``python -m server_proof.engine SCENARIO.json RESULT.json``.

A scenario names the model, backend, cache and speculation, and the tasks to do in order. The engine
core runs in this process, so that weights can be filled in and counters read where they are kept.
Whatever a task raises is recorded as its result, and the next task is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from server_proof.models import VOCAB, seed_weights, write_model
from server_proof.reference import dense_logprobs

SEED = 20
TOP = 8
"""Best tokens kept of each position, so that the margin at a difference is known in both runs."""
T0 = time.time()


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of random tokens, the same in every engine."""
    dice = random.Random(1000003 * seed + length)
    return [dice.randrange(2, VOCAB - 16) for _ in range(length)]


def repetitive_prompt(length: int, seed: int) -> list[int]:
    """A prompt that repeats a phrase, so that n-gram drafts are found."""
    phrase = prompt_of(24, seed)
    return (phrase * (length // len(phrase) + 1))[:length]


class Engine:
    """The engine of a scenario, and its tasks."""

    def __init__(self, scenario: dict[str, Any], scratch: Path) -> None:
        from vllm import LLM

        self.scenario, self.scratch = scenario, scratch
        options: dict[str, Any] = dict(scenario.get("options", {}))
        if scenario["kind"].startswith("hybrid"):
            options = {
                "language_model_only": True,
                "mamba_ssm_cache_dtype": "float32",
                "additional_config": {"gdn_prefill_backend": "triton"},
            } | options
        if scenario.get("backend"):
            options["attention_config"] = {"backend": scenario["backend"]}
        if scenario.get("speculative"):
            # A copy: vLLM writes its own objects into what it is given.
            options["speculative_config"] = dict(scenario["speculative"])
        if not options.get("enforce_eager"):
            options.setdefault("compilation_config", {"cudagraph_mode": "FULL_AND_PIECEWISE"})
        if scenario.get("kv_gib"):
            options["kv_cache_memory_bytes"] = int(scenario["kv_gib"] * 2**30)
            # The cache has its size; the share is only what has to be free at the start, where
            # other engines of the part have theirs already.
            options.setdefault("gpu_memory_utilization", 0.3)
        model = scratch / "models" / scenario["kind"]
        if not (model / "tokenizer_config.json").exists():
            write_model(model.parent, scenario["kind"])
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            dtype="float16",
            kv_cache_dtype=scenario["kv"],
            max_model_len=scenario["max_model_len"],
            enable_prefix_caching=True,
            max_num_seqs=16,
            max_num_batched_tokens=8192,
            seed=0,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options,
        )
        self.weights: Any = "vLLM's dummy weights, which repeat one token"
        if scenario.get("seeded", True):
            self.weights = self.llm.collective_rpc(seed_weights, args=(SEED,))

    def facts(self) -> dict[str, Any]:
        """What the engine is: backend, page sizes, graph keys."""

        def ask(worker: Any) -> dict[str, Any]:
            runner = worker.model_runner
            keys = runner.cudagraph_dispatcher.cudagraph_keys
            graphs: dict[str, int] = {}
            for mode, descriptors in keys.items():
                for d in descriptors:
                    bound = getattr(d, "max_context_bound", None)
                    name = f"{mode.name}{'' if bound is None else f' bounded {bound}'}"
                    graphs[name] = graphs.get(name, 0) + 1
            groups = [
                {
                    "backend": group.backend.get_name(),
                    "layers": len(group.layer_names),
                    "block_tokens": group.kv_cache_spec.block_size,
                    "kernel_block_tokens": group.get_metadata_builder().kv_cache_spec.block_size,
                }
                for groups in runner.attn_groups
                for group in groups
            ]
            import torch
            from vllm.distributed import get_tp_group

            on_gpu = torch.cuda.is_available()
            # Communicators of one rank, or of a CPU, have no custom all-reduce.
            own = getattr(get_tp_group().device_communicator, "ca_comm", None)
            return {
                "device": torch.cuda.current_device() if on_gpu else None,
                "custom_all_reduce": own is not None and not own.disabled,
                "graphs": graphs,
                "groups": groups,
                "blocks": runner.kv_cache_config.num_blocks,
                "gpu": torch.cuda.get_device_name() if on_gpu else "none",
                "torch": torch.__version__,
                # Of this process alone, unlike free memory: what graphs add is in "reserved".
                "cuda_bytes": {
                    "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
                    "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
                },
            }

        ranks = self.llm.collective_rpc(ask)
        return ranks[0] | {
            "ranks": len(ranks),
            "graphs_by_rank": [rank["graphs"] for rank in ranks],
            "devices_by_rank": [rank["device"] for rank in ranks],
            "weights": self.weights,
            "init_s": round(time.time() - T0, 1),
        }

    def counters(self) -> dict[str, float]:
        """Counters that matter here: routes, speculation, preemption, prefix cache."""
        wanted = ("attention_route", "spec_decode_num", "preemptions", "prefix_cache")
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if not any(part in metric.name for part in wanted) or not hasattr(metric, "value"):
                continue
            labels = "/".join(
                metric.labels[k] for k in ("model", "route", "graph") if k in metric.labels
            )
            found[metric.name + (f" {labels}" if labels else "")] = metric.value
        return found

    def worker_routes(self) -> list[dict[str, int]]:
        """The route totals that each rank itself kept (what its log lines say)."""

        def ask(worker: Any) -> dict[str, int]:
            try:
                from vllm.v1.attention.route_stats import route_stats
            except ImportError:
                return {}
            return {"/".join(key): n for key, n in sorted(route_stats.totals().items())}

        return self.llm.collective_rpc(ask)

    def generate(self, prompts: list[list[int]], max_tokens: int, logprobs: int | None) -> Any:
        from vllm import SamplingParams

        return self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
            ),
            use_tqdm=False,
        )

    def task_greedy(
        self,
        lengths: list[int],
        max_tokens: int,
        logprobs: int | None = TOP,
        repeat: int = 1,
        repetitive: bool = False,
        shuffle: bool = False,
    ) -> dict[str, Any]:
        """Greedy tokens with the margin of the winner at each; `repeat` > 1 shows cache hits."""
        make = repetitive_prompt if repetitive else prompt_of
        prompts = [make(n, i) for i, n in enumerate(lengths)]
        if shuffle:
            for i, prompt in enumerate(prompts):
                half = prompt[: len(prompt) // 2]
                random.Random(i).shuffle(half)
                prompt[: len(half)] = half
        rounds = []
        for _ in range(repeat):
            started = time.time()
            outputs = self.generate(prompts, max_tokens, logprobs)
            rounds.append(
                {
                    "seconds": round(time.time() - started, 3),
                    "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                    "cached": [o.num_cached_tokens or 0 for o in outputs],
                    "top": [_top(o.outputs[0].logprobs) for o in outputs] if logprobs else None,
                }
            )
        return {"lengths": lengths, "rounds": rounds}

    def task_teacher(self, lengths: list[int], references: list[str]) -> dict[str, Any]:
        """Log-probability of each prompt token, by the engine and by the FP32 reference."""
        from vllm import SamplingParams

        results = []
        for i, length in enumerate(lengths):
            tokens = prompt_of(length, 50 + i)
            (output,) = self.llm.generate(
                [{"prompt_token_ids": tokens}],
                SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
                use_tqdm=False,
            )
            mine = [
                entry[token].logprob
                for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
            ]
            row: dict[str, Any] = {"length": length, "engine": mine}
            for kv in references:
                (row[kv],) = self.llm.collective_rpc(dense_logprobs, args=(tokens, kv))
            results.append(row)
        return {"sequences": results}

    def task_timing(self, length: int, requests: int, max_tokens: int) -> dict[str, Any]:
        """Seconds of a prefill, and of decoding after cached prompts; one engine at a time."""
        with open(self.scratch / "timing.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            prefill, decode = [], []
            for attempt in range(3):
                prompts = [prompt_of(length, 900 + 50 * attempt + i) for i in range(requests)]
                started = time.time()
                self.generate(prompts, 1, None)
                prefill.append(round(time.time() - started, 4))
                started = time.time()
                self.generate(prompts, max_tokens, None)
                decode.append(round(time.time() - started, 4))
        return {
            "length": length,
            "requests": requests,
            "max_tokens": max_tokens,
            "prefill_s": prefill,
            "decode_s": decode,
        }

    def task_barrier(self, parties: int, seconds: float) -> dict[str, Any]:
        """Waits until `parties` engines are here, or `seconds` have passed."""
        folder = self.scratch / "barrier"
        folder.mkdir(exist_ok=True)
        (folder / self.scenario["label"]).touch()
        until = time.time() + seconds
        while len(list(folder.iterdir())) < parties and time.time() < until:
            time.sleep(0.2)
        return {"arrived": len(list(folder.iterdir())), "parties": parties}


@contextlib.contextmanager
def turn(folder: Path, wanted: bool) -> Iterator[None]:
    """Where `wanted`, no other engine of `folder` is in its turn meanwhile."""
    with open(folder / "turns.lock", "w") as lock:
        if wanted:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters have gained."""
    return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k)}


def _top(logprobs: Any) -> list[list[tuple[int, float]]]:
    """The best tokens of each position, best first."""
    return [
        sorted(((t, round(x.logprob, 5)) for t, x in entry.items()), key=lambda p: -p[1])[:TOP]
        for entry in logprobs
    ]


def main() -> int:
    """Runs the scenario; exit status 1 if the engine did not start or a task failed."""
    scenario = json.loads(Path(sys.argv[1]).read_text())
    target = Path(sys.argv[2])
    os.environ.update(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    )
    os.environ.update(scenario.get("environment", {}))
    result: dict[str, Any] = {"scenario": scenario, "tasks": {}, "failed": []}

    def save() -> None:
        target.write_text(json.dumps(result))

    try:
        engine = Engine(scenario, target.parent)
        result["facts"] = engine.facts()
    except BaseException:
        result["failed"].append({"task": "start", "error": traceback.format_exc()[-4000:]})
        save()
        raise
    for task in scenario["tasks"]:
        arguments = {k: v for k, v in task.items() if k not in ("task", "name")}
        name = task.get("name", task["task"])
        with turn(target.parent, scenario.get("turns", False)):
            before, started = engine.counters(), time.time()
            try:
                by_rank = engine.worker_routes()
                done = getattr(engine, f"task_{task['task']}")(**arguments)
                done["routes_by_rank"] = list(map(grown, by_rank, engine.worker_routes()))
            except Exception:
                result["failed"].append({"task": name, "error": traceback.format_exc()[-4000:]})
                done = {}
            done["counted"] = grown(before, engine.counters())
            done["task_s"] = round(time.time() - started, 2)
        result["tasks"][name] = done
        print(f"T {name} {done['task_s']} s", flush=True)
        save()
    result["worker_routes"] = engine.worker_routes()
    save()
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
