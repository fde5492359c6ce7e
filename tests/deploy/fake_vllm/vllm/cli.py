"""Fake `vllm serve` for the deployment tests: like vLLM 0.19.1 where a deployment can tell.

It binds its port before it loads but listens only after; opens its GPUs; needs ninja; compiles into
its cache; has a worker process per rank; answers completions of token IDs, streamed or not; on
SIGTERM refuses new requests and lets running ones end up to --shutdown-timeout; ends with status 0
when a worker dies. behaviour.json in this package chooses what goes wrong.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vllm import envs

BEHAVIOUR = json.loads((Path(__file__).parent / "behaviour.json").read_text())
MODE = BEHAVIOUR["mode"]
WORKER = "import time; time.sleep(1e6)  # fake vllm worker"


class State:
    """What the handlers share."""

    def __init__(self, served: str) -> None:
        self.served, self.key = served, envs.VLLM_API_KEY
        self.running, self.total, self.stopping, self.dead = 0, itertools.count(), False, False
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """The endpoints that deployment uses."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: object) -> None:
        """No access log."""

    def answer(self, code: int, body: object, kind: str = "application/json") -> None:
        """One whole answer."""
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def authorized(self) -> bool:
        """Is the key right (or none needed)?"""
        right = self.headers.get("Authorization") == f"Bearer {self.state.key}"
        return right or MODE == "open"

    def do_GET(self) -> None:
        """Health, metrics, version, models."""
        state = self.state
        if self.path == "/health":
            self.answer(503 if MODE == "unhealthy" or state.dead else 200, "")
        elif self.path == "/metrics":
            self.answer(200, f"vllm:num_requests_running {state.running}\n", "text/plain")
        elif self.path == "/version":
            self.answer(200, {"version": BEHAVIOUR["version"]})
        elif not self.authorized():
            self.answer(401, {"error": "Unauthorized"})
        else:
            self.answer(200, {"data": [{"id": state.served}]})

    def do_POST(self) -> None:
        """Completions: `seconds` (ours) stretches one over that time."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        if not self.authorized():
            self.answer(401, {"error": "Unauthorized"})
            return
        if state.stopping or MODE == "mute":
            self.answer(503, {"error": "shutting down"})
            return
        if MODE == "lazy" and body.get("stream"):
            Path(os.environ["TRITON_CACHE_DIR"], "late.cubin").touch()
        with state.lock:
            state.running += 1
        try:
            self.complete(body)
        finally:
            with state.lock:
                state.running -= 1

    def complete(self, body: dict) -> None:
        """Tokens that depend on the prompt only, unless this release is nondeterministic."""
        count, pause = body.get("max_tokens", 16), float(body.get("seconds", 0))
        salt = next(self.state.total) if MODE == "nondeterministic" else 0
        tokens = [(len(body["prompt"]) * 31 + i * 7 + salt) % 2048 for i in range(count)]
        if not body.get("stream"):
            time.sleep(pause)
            choice = {"text": "fake", "token_ids": tokens, "finish_reason": "length"}
            self.answer(200, {"choices": [choice], "usage": {"completion_tokens": count}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for token in tokens:
            time.sleep(pause / count)
            self.event(json.dumps({"choices": [{"text": "x", "token_ids": [token]}]}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, text: str) -> None:
        """One server-sent event as one chunk."""
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def parse() -> argparse.Namespace:
    """The arguments that matter here; the others are vLLM's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    parser.add_argument("--served-model-name")
    return parser.parse_known_args()[0]


def load(options: argparse.Namespace) -> list[subprocess.Popen]:
    """Devices, JIT, workers, loading time; returns the workers."""
    print("non-default args:", vars(options), flush=True)
    cards = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(cards) == options.tensor_parallel_size
    for card in cards:
        os.close(os.open(f"/dev/nvidia{card}", os.O_RDWR))
    if not shutil.which("ninja"):
        sys.exit("RuntimeError: Ninja is required to load C++ extensions")
    compiled = Path(os.environ["TRITON_CACHE_DIR"], "kernel.cubin")
    if not compiled.is_file():
        print("fake JIT: compiling", flush=True)
        compiled.write_text(f"cubin of {BEHAVIOUR['version']}")
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER])
        for _ in range(options.tensor_parallel_size)
    ]
    end = time.monotonic() + BEHAVIOUR["load_s"]
    while time.monotonic() < end:
        time.sleep(0.05)
    if MODE == "crash":
        for worker in workers:
            worker.kill()
        sys.exit("torch.OutOfMemoryError: CUDA out of memory (fake)")
    return workers


def main() -> None:
    """`vllm --version` or `vllm serve`."""
    if sys.argv[1:2] == ["--version"]:
        print(BEHAVIOUR["version"])
        return
    options = parse()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))

    def early(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, early)
    workers = load(options)
    state = State(options.served_model_name or options.model)
    Handler.state = state
    listener.listen(128)
    server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads = listener, True

    def finish() -> None:
        end = time.monotonic() + options.shutdown_timeout
        while state.running and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.1)
        for worker in workers:
            worker.kill()
        server.shutdown()

    def terminate(*_: object) -> None:
        state.stopping = True
        threading.Thread(target=finish, daemon=True).start()

    signal.signal(signal.SIGTERM, terminate)

    def watch() -> None:
        while not state.stopping:
            if any(worker.poll() is not None for worker in workers):
                state.dead = True
                for worker in workers:
                    worker.kill()
                server.shutdown()
                return
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()
    print("Application startup complete.", flush=True)
    server.serve_forever(0.1)
    for worker in workers:
        worker.wait()
