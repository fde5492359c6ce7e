"""The load client: streaming completions over HTTP, admitted together or on a trace.

What keeps the client out of its own figures:
- request bodies are encoded and connections opened before the gate opens;
- while tokens flow, a read is stamped with the monotonic clock and put in a list, nothing more;
  server-sent events and JSON are parsed after the last request of the wave has ended;
- one watchdog looks for stalls, instead of a timer per read.
`python -m v100_gate overhead` measures what remains.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from v100_gate import counters
from v100_gate.errors import ServiceError
from v100_gate.schema import Limits, Sampling
from v100_gate.traces import Chunk, RequestTrace

READ_BYTES = 1 << 20
HEALTH_S = 5.0
"""How long /health may take."""


def prompt_hash(token_ids: Sequence[int]) -> str:
    """SHA-256 of a prompt: its token IDs in decimal, joined by commas."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    """One completion to ask for. `forced` sets ignore_eos, so exactly max_tokens come back."""

    prompt: Sequence[int]
    max_tokens: int
    seed: int
    forced: bool = True
    due_at: float = 0.0
    logprobs: int | None = None

    def body(self, model: str, sampling: Sampling) -> bytes:
        """The JSON body. Every sampling field is explicit; min_p stays out (vLLM refuses it
        together with speculation unless it is 0, which is its default)."""
        fields = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": self.forced,
            "seed": self.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.logprobs is not None:
            fields |= {"logprobs": self.logprobs, "return_tokens_as_token_ids": True}
        return json.dumps(fields).encode()


@dataclass
class _Live:
    """What the hot path writes for one request."""

    trace: RequestTrace
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    last_read: float = 0.0
    events: int = 0
    task: asyncio.Task | None = None
    stop_status: str | None = None
    stop_error: str | None = None


def split_events(reads: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Server-sent events from stamped reads: (time of the read that completed it, data).

    Handles events split across reads, several events in one read, CRLF, comments and data
    fields on several lines. Bytes after the last complete event are left out.
    """
    events: list[tuple[float, bytes]] = []
    pending = b""
    data: list[bytes] = []
    for stamp, block in reads:
        pending += block
        *lines, pending = pending.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                events.append((stamp, b"\n".join(data)))
                data = []
    return events


def digest(live: _Live) -> RequestTrace:
    """Fill a trace from the raw reads of its stream and settle its status."""
    trace = live.trace
    done = False
    for stamp, data in split_events(live.reads):
        if data == b"[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            trace.status, trace.error = "error", f"chunk is not JSON: {data[:200]!r}"
            return trace
        if "error" in event:
            detail = event["error"]
            message = detail.get("message") if isinstance(detail, dict) else detail
            trace.status, trace.error = "error", f"error inside the stream: {message}"
            return trace
        if event.get("usage"):
            trace.usage = event["usage"]
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or []
            if ids or choice.get("text"):
                trace.chunks.append(Chunk(t=stamp, token_ids=ids, text=choice.get("text") or ""))
            if choice.get("logprobs"):
                trace.logprobs.append(choice["logprobs"])
            if choice.get("finish_reason"):
                trace.finish_reason = choice["finish_reason"]
    if live.stop_status is not None:
        trace.status, trace.error = live.stop_status, live.stop_error
    elif trace.status == "in-flight":
        returned = len(trace.token_ids)
        if not done:
            trace.status = "truncated"
            trace.error = f"the stream closed after {returned} tokens without [DONE]"
        elif trace.forced and returned != trace.max_tokens:
            trace.status = "short"
            trace.error = f"{returned} token IDs came back, {trace.max_tokens} were forced"
        elif trace.usage and trace.usage.get("completion_tokens") not in (None, returned):
            trace.status = "error"
            trace.error = (
                f"{returned} token IDs came back, usage says {trace.usage['completion_tokens']}"
            )
        else:
            trace.status = "ok"
    return trace


class Client:
    """Talks to one service. Use as `async with Client(...) as client`."""

    def __init__(
        self,
        url: str,
        model: str,
        sampling: Sampling,
        limits: Limits,
        clock: Callable[[], float] = time.perf_counter,
        api_key: str | None = None,
    ) -> None:
        self.api_key = api_key
        self.url = url.rstrip("/")
        self.model = model
        self.sampling = sampling
        self.limits = limits
        self.clock = clock
        self.live: list[_Live] = []
        self.before_send: Callable[[int], Awaitable[None]] | None = None
        """Test hook, awaited before request i is sent."""

    async def __aenter__(self) -> Client:
        trace_config = aiohttp.TraceConfig()

        async def sent(_session, context, _params) -> None:
            live = context.trace_request_ctx
            if live is not None:
                live.trace.sent_at = self.clock() - self._origin

        trace_config.on_request_chunk_sent.append(sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            read_bufsize=READ_BYTES,
            trace_configs=[trace_config],
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else None,
            trust_env=False,
        )
        self._origin = self.clock()
        return self

    async def __aexit__(self, *_exc) -> None:
        await self._session.close()

    async def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """GET a small page: (HTTP status, text)."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(self.url + path, timeout=timeout) as response:
            return response.status, await response.text()

    async def post(self, path: str, body: dict, timeout_s: float = 120.0) -> dict:
        """POST JSON and read JSON; raises ServiceError with the server's words."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    raise ServiceError(f"POST {path}: HTTP {response.status}: {text[:500]}")
                return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServiceError(f"POST {path} to {self.url}: {error!r}") from None

    async def trouble(self) -> str | None:
        """Why /health does not answer 200, in words; None when it does."""
        where = f"{self.url}/health"
        try:
            status, _ = await self.get("/health", HEALTH_S)
        except TimeoutError:
            return f"{where}: no answer within {HEALTH_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            number = getattr(error, "errno", None)
            if number == errno.ECONNREFUSED:
                return f"{where}: connection refused (nothing listens there)"
            return f"{where}: {error or type(error).__name__}"
        return None if status == 200 else f"{where}: HTTP {status}"

    async def healthy(self) -> bool:
        """True when /health answers 200."""
        return await self.trouble() is None

    async def snapshot(self) -> counters.Snapshot | None:
        """Scrape /metrics; None when the page does not answer."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            status, text = await self.get("/metrics")
            if status == 200:
                return counters.parse(text)
        return None

    async def settle(self, before: counters.Snapshot, finished: int) -> counters.Snapshot | None:
        """Scrape until the service has counted `finished` more requests, at most 5 s.

        vLLM updates its counters after the last token has left, so the first scrape after a wave
        can be a step behind.
        """
        target = before.totals.get("finished_requests")
        deadline = time.monotonic() + 5.0
        while True:
            after = await self.snapshot()
            if after is None or target is None or time.monotonic() > deadline:
                return after
            if after.totals.get("finished_requests", 0.0) - target >= finished:
                return after
            await asyncio.sleep(0.05)

    async def open_connections(self, count: int) -> None:
        """Put `count` open connections in the pool, so that no handshake is in a measurement."""
        await asyncio.gather(*(self.healthy() for _ in range(count)))

    async def send(
        self,
        requests: Sequence[Request],
        name: str,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[RequestTrace]:
        """Send requests, each at its `due_at` (0: all together), and wait for all of them.

        Never raises for what a server does: a failure is in the trace's status, and the traces
        of the other requests are complete. Cancelling this coroutine leaves what was received in
        `self.live`; `rescue()` turns that into traces.
        """
        self.live = [
            _Live(
                RequestTrace(
                    index=index,
                    request_id=f"{name}-{index}",
                    prompt_tokens=len(request.prompt),
                    prompt_sha256=prompt_hash(request.prompt),
                    max_tokens=request.max_tokens,
                    forced=request.forced,
                    seed=request.seed,
                    due_at=request.due_at,
                )
            )
            for index, request in enumerate(requests)
        ]
        bodies = [request.body(self.model, self.sampling) for request in requests]
        await self.open_connections(min(len(requests), 64))
        gate = asyncio.Event()
        for live, body in zip(self.live, bodies, strict=True):
            live.task = asyncio.create_task(self._one(live, body, gate))
        await asyncio.sleep(0)
        self._origin = self.clock()
        gate.set()
        watchdog = asyncio.create_task(self._watch(on_progress))
        try:
            await asyncio.gather(*(live.task for live in self.live), return_exceptions=True)
        finally:
            watchdog.cancel()
            for live in self.live:
                live.task.cancel()
            await asyncio.gather(*(live.task for live in self.live), return_exceptions=True)
        return [digest(live) for live in self.live]

    def rescue(self) -> list[RequestTrace]:
        """Traces of an interrupted `send`, with what had arrived."""
        traces = []
        for live in self.live:
            if not live.trace.chunks:
                if live.trace.ended_at is None and live.stop_status is None:
                    live.stop_status, live.stop_error = "cancelled", "the gate was interrupted"
                digest(live)
            traces.append(live.trace)
        return traces

    async def _one(self, live: _Live, body: bytes, gate: asyncio.Event) -> None:
        trace, clock = live.trace, self.clock
        await gate.wait()
        if trace.due_at > 0:
            await asyncio.sleep(max(0.0, trace.due_at - (clock() - self._origin)))
        if self.before_send is not None:
            await self.before_send(trace.index)
        live.last_read = clock()
        try:
            async with self._session.post(
                self.url + "/v1/completions",
                data=body,
                headers={"Content-Type": "application/json", "X-Request-Id": trace.request_id},
                trace_request_ctx=live,
            ) as response:
                trace.headers_at = clock() - self._origin
                trace.http_status = response.status
                live.last_read = clock()
                if response.status != 200:
                    text = (await response.text())[:500]
                    live.stop_status = "refused"
                    live.stop_error = f"HTTP {response.status}: {text}"
                    return
                origin, reads, content = self._origin, live.reads, response.content
                while True:
                    block = await content.readany()
                    if not block:
                        break
                    now = clock()
                    reads.append((now - origin, block))
                    live.last_read = now
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            if live.stop_status is None:
                live.stop_status = "disconnected"
                live.stop_error = f"connection lost: {error!r}"
        except asyncio.CancelledError:
            if live.stop_status is None:
                live.stop_status, live.stop_error = "cancelled", "the gate was interrupted"
            raise
        finally:
            trace.ended_at = clock() - self._origin

    async def _watch(self, on_progress: Callable[[int], None] | None) -> None:
        period = min(0.25, self.limits.stall_s / 4)
        seen = [0] * len(self.live)
        total = 0
        while True:
            await asyncio.sleep(period)
            now = self.clock()
            for position, live in enumerate(self.live):
                fresh = live.reads[seen[position] :]
                seen[position] += len(fresh)
                total += sum(block.count(b"data:") for _, block in fresh)
                if live.task.done() or live.last_read == 0.0:
                    continue
                quiet = now - live.last_read
                if quiet > self.limits.stall_s:
                    live.stop_status = "stalled"
                    live.stop_error = f"no byte for {quiet:.1f} s (limit {self.limits.stall_s} s)"
                    live.task.cancel()
                elif now - self._origin - live.trace.due_at > self.limits.request_timeout_s:
                    live.stop_status = "timeout"
                    live.stop_error = f"longer than {self.limits.request_timeout_s} s"
                    live.task.cancel()
            if on_progress is not None:
                on_progress(total)
