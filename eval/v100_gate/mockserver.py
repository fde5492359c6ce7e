"""A stand-in for a vLLM server, for testing the gate: it speaks the endpoints, serves no model.

It answers /health, /version, /metrics, /tokenize and streaming /v1/completions as vLLM 0.19.1
does, writes vLLM's log lines, paces its tokens by absolute deadlines, and misbehaves on demand.
Tests start it as an ordinary process (`python -m v100_gate.mockserver --port P --config FILE`),
so that arms, signals, logs and deaths are the real thing.

A prompt's tokens are its UTF-8 bytes plus 16, so the server can read a retrieval question and
answer it. A generated token depends on the prompt, the seed and its index alone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel, ConfigDict

BYTE_BASE = 16
BLOCK = 16


class MockConfig(BaseModel):
    """Behaviour of the server. Fault fields count requests from 0 over the server's life."""

    model_config = ConfigDict(extra="forbid")

    model: str = "mock"
    round_s: float = 0.004
    """Time of one decode round."""
    round_s_per_live: float = 0.0
    """Added per request that is live, as a real batch slows down."""
    prefill_s: float = 0.005
    draft_tokens: int = 7
    accepted: list[int] = [4, 2, 7, 0, 5, 3]
    """Drafts accepted in successive rounds, repeated."""
    salt: str = ""
    """Changes the generated tokens."""
    start_salt_batches: bool = False
    """Makes tokens of concurrent requests differ from start to start, as reordering does."""
    retrieval_wrong: int = 0
    """Retrieval questions answered wrongly."""
    retrieval_ramble: bool = False
    """Never end an answer: finish_reason length."""
    logit_shift: float = 0.0
    ranks: int = 1
    backend: str = "SM70_ATTN"
    routes: list[str] = ["paged", "long", "prefill"]
    kv_tokens: int = 1_000_000
    kv_gib: float = 11.45
    graph_pool_gib: float = 0.88
    library_sha256: str | None = None
    source_sha256: str | None = None
    startup_s: float = 0.0
    fail_start: str | None = None
    """Write this to the log and exit 1 instead of starting."""
    no_prefix_hits: bool = False
    preemptions_per_request: int = 0
    log_error: str | None = None
    """Written to the log with the first request."""
    omit_counters: list[str] = []
    reset_counters_at: int | None = None
    compile_at: int | None = None
    refuse: dict[int, int] = {}
    """Request number -> HTTP status."""
    die_at: int | None = None
    """Request number during which the process kills itself."""
    stall_at: int | None = None
    close_early_at: int | None = None
    short_at: int | None = None
    error_in_stream_at: int | None = None
    fault_after_chunks: int = 2
    stamp: bool = False
    """Put the send time (monotonic clock) in every chunk, to measure a client's own delay."""
    ignore_sigterm: bool = False
    api_key: str | None = None
    """When set, /v1 and /tokenize answer 401 without it."""


class MockServer:
    """State and handlers."""

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self.requests = 0
        self.live = 0
        self.questions = 0
        self.start_salt = os.urandom(4).hex() if config.start_salt_batches else ""
        self.seen: set[bytes] = set()
        self.zero()

    def zero(self) -> None:
        """All counters back to zero, as after a restart."""
        self.counters = {
            "prefix_cache_queries": 0,
            "prefix_cache_hits": 0,
            "num_preemptions": 0,
            "generation_tokens": 0,
            "prompt_tokens": 0,
        }
        self.finished = 0
        self.drafts = 0
        self.accepted_by_position = [0] * self.config.draft_tokens

    @web.middleware
    async def authenticate(self, request: web.Request, handler) -> web.StreamResponse:
        """Refuse the API without the key, as vLLM does; /health and /metrics stay open."""
        key = self.config.api_key
        guarded = request.path.startswith(("/v1", "/tokenize"))
        if key and guarded and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # ------------------------------------------------------------------ pages

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.19.1"})

    async def metrics(self, _request: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.config.model}"'
        values = dict(self.counters)
        if self.config.draft_tokens:
            values |= {
                "spec_decode_num_drafts": self.drafts,
                "spec_decode_num_draft_tokens": self.drafts * self.config.draft_tokens,
                "spec_decode_num_accepted_tokens": sum(self.accepted_by_position),
            }
        lines = []
        for name, value in values.items():
            if name in self.config.omit_counters:
                continue
            lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}}} {value}.0"]
        if self.config.draft_tokens and "per_pos" not in self.config.omit_counters:
            lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
            lines += [
                f"vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{{labels},position="{position}"}} {value}.0'
                for position, value in enumerate(self.accepted_by_position)
            ]
        lines.append("# TYPE vllm:attention_route_launches counter")
        lines += [
            f"vllm:attention_route_launches_total"
            f'{{{labels},model="target",route="{route}",graph="bounded"}} {self.drafts}.0'
            for route in self.config.routes
        ]
        lines += [
            "# TYPE vllm:request_success counter",
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {self.finished}.0',
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 0.0',
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {self.live}.0",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{{{labels}}} {min(1.0, self.live * 0.01)}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("prompt")
        if text is None:
            text = body["messages"][-1]["content"] + "\nassistant:"
        tokens = [byte + BYTE_BASE for byte in text.encode()]
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    # ------------------------------------------------------------------ completions

    def answer(self, prompt: list[int]) -> bytes | None:
        """The right answer to a retrieval question in the prompt, if it holds one."""
        text = bytes(t - BYTE_BASE for t in prompt if 0 <= t - BYTE_BASE < 256).decode(
            "utf8", "ignore"
        )
        asked = re.search(r"What is the release code of unit ([A-Z]+-\d+)\?", text)
        if asked is None:
            return None
        found = re.search(rf"release code of unit {asked[1]} is (\d+)", text)
        code = found[1] if found else "00000"
        self.questions += 1
        if self.questions <= self.config.retrieval_wrong:
            code = str((int(code) + 1) % 100_000).zfill(5)
        return f"The code is {code}.".encode()

    def count_prefix(self, prompt: list[int]) -> None:
        """Count queries and hits in whole blocks, and remember this prompt."""
        self.counters["prefix_cache_queries"] += len(prompt)
        self.counters["prompt_tokens"] += len(prompt)
        digest, hits, unbroken = hashlib.sha256(), 0, True
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            digest.update(str(prompt[start : start + BLOCK]).encode())
            key = digest.digest()
            if unbroken and key in self.seen:
                hits += BLOCK
            else:
                unbroken = False
                self.seen.add(key)
        self.counters["prefix_cache_hits"] += 0 if self.config.no_prefix_hits else hits

    def token(self, key: str, index: int) -> int:
        digest = hashlib.blake2b(f"{key}-{index}".encode(), digest_size=4).digest()
        return 300 + int.from_bytes(digest, "little") % 1000

    async def completions(self, request: web.Request) -> web.StreamResponse:
        config = self.config
        number = self.requests
        self.requests += 1
        body = await request.json()
        prompt, wanted = body["prompt"], body["max_tokens"]
        if number in config.refuse:
            status = config.refuse[number]
            words = {429: "too many requests", 500: "internal error"}.get(status, "refused")
            return web.json_response({"error": {"message": words, "code": status}}, status=status)
        if number == config.reset_counters_at:
            self.zero()
        if number == config.compile_at:
            print("INFO [backends.py:1] Compiling a graph for shape (8,) takes 1.00 s", flush=True)
        if number == 0 and config.log_error:
            print(config.log_error, flush=True)
        self.counters["num_preemptions"] += config.preemptions_per_request
        self.count_prefix(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.live += 1
        try:
            await self.generate(response, body, prompt, wanted, number)
        finally:
            self.live -= 1
        return response

    async def generate(
        self, response: web.StreamResponse, body: dict, prompt: list[int], wanted: int, number: int
    ) -> None:
        config = self.config
        forced = body.get("ignore_eos", False)
        text = None if forced else self.answer(prompt)
        finish = "length"
        if text is not None and not config.retrieval_ramble:
            tokens, finish = [byte + BYTE_BASE for byte in text], "stop"
        else:
            key = f"{hashlib.sha256(str(prompt).encode()).hexdigest()}-{body['seed']}-{config.salt}"
            if self.live > 1 and self.start_salt:
                key += self.start_salt
            tokens = [self.token(key, index) for index in range(wanted)]
        if number == config.short_at:
            tokens = tokens[:-3]
        await asyncio.sleep(config.prefill_s)
        began, sent, round_number, rounds = time.perf_counter(), 0, 0, 0.0
        while sent < len(tokens):
            size = 1
            if sent and config.draft_tokens:
                accepted = min(
                    config.accepted[(round_number - 1) % len(config.accepted)], config.draft_tokens
                )
                self.drafts += 1
                for position in range(accepted):
                    self.accepted_by_position[position] += 1
                size = 1 + accepted
            part = tokens[sent : sent + size]
            if sent:
                rounds += config.round_s + config.round_s_per_live * self.live
                await asyncio.sleep(max(0.0, began + rounds - time.perf_counter()))
            if round_number >= config.fault_after_chunks:
                if number == config.die_at:
                    print("ERROR CUDA error: an illegal memory access (Xid 31)", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == config.stall_at:
                    await asyncio.sleep(3600)
                if number == config.close_early_at:
                    response.force_close()
                    return
                if number == config.error_in_stream_at:
                    await self.event(response, {"error": {"message": "engine failed", "code": 500}})
                    return
            sent += len(part)
            self.counters["generation_tokens"] += len(part)
            choice = {
                "index": 0,
                "text": "".join(chr(t - BYTE_BASE) if t < 272 else f" w{t}" for t in part),
                "logprobs": self.logprobs(part, sent - len(part)) if body.get("logprobs") else None,
                "finish_reason": finish if sent >= len(tokens) else None,
                "token_ids": part,
                "prompt_token_ids": prompt if round_number == 0 else None,
            }
            event: dict = {"id": "cmpl", "object": "text_completion", "choices": [choice]}
            if config.stamp:
                event["sent_at"] = time.perf_counter()
            await self.event(response, event)
            round_number += 1
        self.finished += 1
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        }
        await self.event(response, {"id": "cmpl", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def logprobs(self, part: list[int], first: int) -> dict:
        """A logprobs object: two candidates per token."""
        rows = []
        for offset, token in enumerate(part):
            best = -0.2 - 0.01 * ((first + offset) % 7) - self.config.logit_shift
            rows.append({f"token_id:{token}": best, f"token_id:{token + 1}": best - 1.7})
        return {
            "tokens": [f"token_id:{token}" for token in part],
            "token_logprobs": [row[f"token_id:{t}"] for row, t in zip(rows, part, strict=True)],
            "top_logprobs": rows,
            "text_offset": list(range(first, first + len(part))),
        }

    @staticmethod
    async def event(response: web.StreamResponse, value: dict) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    # ------------------------------------------------------------------ log

    def banner(self) -> None:
        """The lines vLLM and the attention package write at start."""
        config = self.config
        print("INFO [api_server.py:1] vLLM API server version 0.19.1 (stand-in)")
        for rank in range(config.ranks):
            who = f"(Worker_TP{rank} pid=1)"
            print(f"{who} INFO [cuda.py:274] Using {config.backend} backend.")
            print(
                f"{who} INFO SM70_ATTN serves 6 query / 1 KV heads x 256 over a fp8_e4m3 cache; "
                f"long route {'on' if 'long' in config.routes else 'off: disabled'}"
            )
            for route in config.routes:
                print(f"{who} INFO First target launch of attention route {route} (bounded)")
            if config.library_sha256:
                print(
                    f"{who} INFO sm70_attention: library sha256={config.library_sha256} "
                    f"source sha256={config.source_sha256}"
                )
            print(f"{who} INFO [gpu_worker.py:437] Available KV cache memory: {config.kv_gib} GiB")
            print(
                f"{who} INFO [gpu_worker.py:598] CUDA graph pool memory: "
                f"{config.graph_pool_gib} GiB (actual), 0.90 GiB (estimated)"
            )
        print(f"INFO [kv_cache_utils.py:1319] GPU KV cache size: {config.kv_tokens:,} tokens")
        sys.stdout.flush()

    def counts(self) -> None:
        """Launches by route, as every rank logs them."""
        launches = ", ".join(
            f"target/{route}/bounded {max(1, self.drafts)}" for route in self.config.routes
        )
        for rank in range(self.config.ranks):
            print(f"(Worker_TP{rank} pid=1) INFO Attention route launches of this rank: {launches}")
        sys.stdout.flush()


async def serve(config: MockConfig, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.fail_start is not None:
        print(config.fail_start, flush=True)
        raise SystemExit(1)
    await asyncio.sleep(config.startup_s)
    server = MockServer(config)
    server.banner()
    app = web.Application(client_max_size=1 << 30, middlewares=[server.authenticate])
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/version", server.version),
            web.get("/metrics", server.metrics),
            web.post("/tokenize", server.tokenize),
            web.post("/v1/completions", server.completions),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, (lambda: None) if config.ignore_sigterm else stop.set)
    await stop.wait()
    server.counts()
    await runner.cleanup()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", type=Path, help="JSON file with fields of MockConfig")
    arguments = parser.parse_args()
    text = arguments.config.read_text() if arguments.config else "{}"
    asyncio.run(serve(MockConfig.model_validate_json(text), arguments.port))


if __name__ == "__main__":
    main()
