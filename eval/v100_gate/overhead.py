"""What the client itself adds to inter-chunk times.

The stand-in server stamps each chunk with the monotonic clock just before it writes it; on one
machine the client reads the same clock. The difference of the two inter-chunk times is what the
client, the loopback, the kernel and whatever else the machine runs added together: an upper
bound for the client. The client's processor time per chunk does not depend on other load.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from itertools import pairwise
from math import isfinite
from pathlib import Path

from v100_gate.client import Client, Request, split_events
from v100_gate.errors import GateError
from v100_gate.evidence import percentile
from v100_gate.schema import Limits, ProcessArm, Sampling
from v100_gate.services import ProcessService

LIMITS = {"lost_tokens": 0, "added_ms.p99": 1.0}
"""The largest figures with which the client counts as out of the way."""


def missed(found: dict) -> list[str]:
    """The figures of `measure` that exceed their limits, in words."""
    lost, added = found["lost_tokens"], found["added_ms"]["p99"]
    wrong = []
    if lost > LIMITS["lost_tokens"]:
        wrong.append(f"lost_tokens is {lost}, the limit is {LIMITS['lost_tokens']}")
    if added > LIMITS["added_ms.p99"]:
        wrong.append(
            f"added_ms.p99 is {added:.2f} ms, the limit is {LIMITS['added_ms.p99']} ms: on this "
            "machine, with what else it runs now, inter-chunk times are no finer than that"
        )
    return wrong


def measure(streams: int, tokens_per_s: float, seconds: float) -> dict:
    """Run the stand-in and the client; times in milliseconds.

    Returns lost tokens, and percentiles of |client gap - server gap| and of the delay from the
    server's write to the client's stamp.

    Raises: GateError for arguments that are not positive and finite, or when a stream broke.
    """
    for name, value in (("streams", streams), ("tokens-per-s", tokens_per_s), ("seconds", seconds)):
        if not (value > 0 and isfinite(value)):
            raise GateError(f"--{name} {value:g}: must be a number above 0")
    per_stream = max(2, round(tokens_per_s * seconds / streams))
    config = {
        "draft_tokens": 0,
        "round_s": streams / tokens_per_s,
        "prefill_s": 0.2,
        "stamp": True,
    }
    return asyncio.run(_measure(config, streams, per_stream))


async def _measure(config: dict, streams: int, per_stream: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="v100-gate-") as folder:
        path = Path(folder) / "mock.json"
        path.write_text(json.dumps(config))
        # The stand-in is this package's own module, wherever the package was imported from.
        root = str(Path(__file__).resolve().parent.parent)
        arm = ProcessArm(
            kind="process",
            model="mock",
            command=[
                sys.executable,
                "-m",
                "v100_gate.mockserver",
                "--port",
                "{port}",
                "--config",
                str(path),
            ],
            env={"PYTHONPATH": root},
        )
        limits = Limits()
        service = ProcessService("overhead", arm, limits, Path(folder) / "mock.log")
        await service.start()
        try:
            async with Client(service.url, "mock", Sampling(), limits) as client:
                await service.wait_ready(client)
                requests = [Request([20] * 64, per_stream, seed) for seed in range(streams)]
                cpu = time.process_time()
                traces = await client.send(requests, "overhead")
                cpu = time.process_time() - cpu
                broken = [trace for trace in traces if trace.status != "ok"]
                if broken and broken[0].status != "short":
                    raise GateError(f"overhead: {broken[0].request_id}: {broken[0].error}")
                added, delays = [], []
                for live in client.live:
                    pairs = []
                    for stamp, data in split_events(live.reads):
                        if data != b"[DONE]":
                            sent = json.loads(data).get("sent_at")
                            if sent is not None:
                                pairs.append((stamp + client._origin, sent))
                    delays += [(got - sent) * 1000 for got, sent in pairs]
                    added += [abs((b[0] - a[0]) - (b[1] - a[1])) * 1000 for a, b in pairwise(pairs)]
        finally:
            await service.stop()
    got = sum(len(trace.token_ids) for trace in traces)
    window = max(trace.ended_at for trace in traces) - 0.2

    def shares(values: list[float]) -> dict:
        return {
            "p50": percentile(values, 0.50),
            "p99": percentile(values, 0.99),
            "max": max(values),
        }

    return {
        "streams": streams,
        "tokens": got,
        "lost_tokens": streams * per_stream - got,
        "tokens_per_s": got / window,
        "client_cpu_us_per_chunk": cpu / max(1, len(delays)) * 1e6,
        "added_ms": shares(added),
        "delay_ms": shares(delays),
        "limits": LIMITS,
    }
