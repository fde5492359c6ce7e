"""Start, watch and stop the service of an arm: a local process, a systemd unit or a URL.

A local process gets a session of its own, is asked to end by SIGTERM and then killed with all
its descendants, and is told by the kernel to end when the gate itself dies: Ctrl-C, a crash or
SIGKILL of the gate leave no server behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from v100_gate import servicelog
from v100_gate.client import Client
from v100_gate.errors import ProfileError, RefusedError, ServiceError
from v100_gate.schema import Arm, Limits, ProcessArm, SystemdArm

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "LD_LIBRARY_PATH")
PR_SET_PDEATHSIG = 1
RPC_FOLDER = "VLLM_RPC_BASE_PATH"
"""Where vLLM puts its unix sockets, which it leaves behind when it ends."""
SOCKET_PATH_BYTES = 107
SOCKET_NAME_BYTES = len(f"/{uuid.UUID(int=0)}")


def free_port() -> int:
    """A TCP port that is free now on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def socket_folder() -> Path:
    """A new private folder whose path is short enough for vLLM's sockets.

    It lies in the temporary folder, or in /tmp where the path of that one is too long.
    """
    for place in (None, "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="v100-gate-", dir=place))
        if len(os.fsencode(folder)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES:
            break
        folder.rmdir()
    return folder


def session_members(session: int) -> list[int]:
    """Process IDs in a session that are still running (zombies left out)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


class Service:
    """Common part: identity of a start, its URL and its log."""

    def __init__(self, name: str, arm: Arm, limits: Limits, log_path: Path) -> None:
        self.name = name
        self.arm = arm
        self.limits = limits
        self.log_path = log_path
        self.url = arm.url
        self.start_id = uuid.uuid4().hex
        self.ready_seconds: float | None = None
        self.fresh = True

    @property
    def sessions(self) -> set[int]:
        """Sessions of processes this arm started."""
        return set()

    @property
    def units(self) -> set[str]:
        """systemd units of this arm."""
        return set()

    async def start(self) -> None:
        """Start it; does not wait for readiness."""

    async def stop(self) -> None:
        """Stop it and wait until it is gone."""

    def dead(self) -> str | None:
        """Why the service is known to be gone; None while it lives, or when nobody can tell."""
        return None

    def log_text(self) -> str | None:
        """The log of this start; None when there is none to read."""
        if not self.log_path.exists():
            return None
        return self.log_path.read_text(errors="replace")

    def log_size(self) -> int | None:
        """Bytes of log so far, for cutting out a wave's part."""
        text = self.log_text()
        return None if text is None else len(text)

    async def wait_ready(self, client: Client, say: Callable[[str], None] | None = None) -> None:
        """Wait for /health.

        Args: say: told what is in the way of a service that was up already by its owner's word.
            One that is only starting may refuse connections for minutes.
        Raises: ServiceError with what was in the way last and, where there is a log, its last
            lines and the likely cause.
        """
        began = time.monotonic()
        said = trouble = None
        while time.monotonic() - began < self.limits.ready_timeout_s:
            reason = self.dead()
            if reason is not None:
                raise ServiceError(self._failure(f"ended before it was ready: {reason}"))
            trouble = await client.trouble()
            if trouble is None:
                self.ready_seconds = time.monotonic() - began
                return
            if say and not self.fresh and trouble != said:
                limit = f"{self.limits.ready_timeout_s:g} s"
                say(f"arm {self.name}: {trouble}; trying again for up to {limit}")
                said = trouble
            await asyncio.sleep(0.2)
        what = f"was not ready after {self.limits.ready_timeout_s:g} s: {trouble}"
        raise ServiceError(self._failure(what))

    def _failure(self, what: str) -> str:
        return f"arm {self.name}: the service {what}." + self.hints()

    def hints(self) -> str:
        """Lines with the likely cause, the log's place and its end; empty without a log."""
        text = self.log_text()
        if text is None:
            return ""
        cause = servicelog.cause_of_failure(text)
        tail = "".join(f"\n    {line}" for line in text.splitlines()[-12:])
        return (
            f"\n  likely cause: {cause or 'not known; read the log'}\n  log: {self.log_path}{tail}"
        )


class ProcessService(Service):
    """A server started by the gate itself."""

    arm: ProcessArm

    def __init__(self, name: str, arm: ProcessArm, limits: Limits, log_path: Path) -> None:
        super().__init__(name, arm, limits, log_path)
        self.process: subprocess.Popen | None = None
        self.sockets: Path | None = None

    @property
    def sessions(self) -> set[int]:
        return {self.process.pid} if self.process else set()

    async def start(self) -> None:
        port = free_port()
        self.url = self.arm.url.replace("{port}", str(port))
        command = [part.replace("{port}", str(port)) for part in self.arm.command]
        env = {key: os.environ[key] for key in INHERITED if key in os.environ} | self.arm.env
        program = shutil.which(command[0], path=env.get("PATH"))
        if program is None:
            raise ServiceError(f"arm {self.name}: {command[0]} is not an executable on its PATH")
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getpid()

        def tie_to_gate() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if RPC_FOLDER not in self.arm.env:
            self.sockets = socket_folder()
            env[RPC_FOLDER] = str(self.sockets)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [program, *command[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tie_to_gate,
            )

    def dead(self) -> str | None:
        if self.process is None:
            return "it was never started"
        code = self.process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"process {self.process.pid} ended with {how}"

    async def stop(self) -> None:
        try:
            await self._end()
        finally:
            if self.sockets is not None:
                shutil.rmtree(self.sockets, ignore_errors=True)

    async def _end(self) -> None:
        if self.process is None:
            return
        session = self.process.pid
        deadline = time.monotonic() + self.limits.stop_timeout_s
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        while time.monotonic() < deadline:
            if self.process.poll() is not None and not session_members(session):
                return
            if self.process.poll() is not None:
                for pid in session_members(session):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """SIGKILL everything in the service's session and reap the server."""
        if self.process is None:
            return
        for pid in session_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)


class SystemdService(Service):
    """A unit on this node. Its log is the journal from the moment of the start."""

    arm: SystemdArm

    def __init__(self, name: str, arm: SystemdArm, limits: Limits, log_path: Path) -> None:
        super().__init__(name, arm, limits, log_path)
        self.since: str | None = None

    @property
    def units(self) -> set[str]:
        return {self.arm.unit}

    def _systemctl(self, *arguments: str) -> subprocess.CompletedProcess:
        program = shutil.which("systemctl")
        if program is None:
            raise RefusedError(f"arm {self.name}: systemctl is not on PATH; use kind: url instead")
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=600, check=False
        )

    async def start(self) -> None:
        state = self._systemctl("is-active", self.arm.unit).stdout.strip()
        if state in ("active", "activating"):
            raise RefusedError(
                f"arm {self.name}: unit {self.arm.unit} is already {state}; a gate needs a fresh "
                f"start: stop it first (systemctl stop {self.arm.unit}) or use kind: url"
            )
        self.since = f"@{time.time():.6f}"
        # A unit with a readiness probe blocks here for minutes: keep the loop free.
        done = await asyncio.to_thread(self._systemctl, "start", self.arm.unit)
        if done.returncode != 0:
            raise ServiceError(self._failure(f"did not start: {done.stderr.strip()}"))

    def dead(self) -> str | None:
        state = self._systemctl("is-active", self.arm.unit).stdout.strip()
        if state in ("failed", "inactive"):
            return f"unit {self.arm.unit} is {state}"
        return None

    def log_text(self) -> str | None:
        program = shutil.which("journalctl")
        if program is None or self.since is None:
            return None
        done = subprocess.run(
            [
                program,
                f"--unit={self.arm.unit}",
                f"--since={self.since}",
                "--output=cat",
                "--no-pager",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout if done.returncode == 0 else None

    async def stop(self) -> None:
        done = await asyncio.to_thread(self._systemctl, "stop", self.arm.unit)
        text = self.log_text()
        if text is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.log_path.write_text(text)
        if done.returncode != 0:
            raise ServiceError(f"arm {self.name}: systemctl stop: {done.stderr.strip()}")


class UrlService(Service):
    """A service somebody else runs: measured as it is, never started or stopped."""

    def __init__(self, name: str, arm: Arm, limits: Limits, log_path: Path) -> None:
        super().__init__(name, arm, limits, log_path)
        self.fresh = False

    def log_text(self) -> str | None:
        log = self.arm.log
        if log is None or not log.exists():
            return None
        return log.read_text(errors="replace")

    async def stop(self) -> None:
        text = self.log_text()
        if text is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.log_path.write_text(text)


def api_key(arm: Arm) -> str | None:
    """The key in an arm's `api_key_file`; None when the arm needs none.

    Raises: ProfileError when the file cannot be read or is empty.
    """
    if arm.api_key_file is None:
        return None
    try:
        key = arm.api_key_file.read_text().strip()
    except OSError as error:
        raise ProfileError(f"arms: api_key_file {arm.api_key_file}: {error.strerror}") from None
    if not key:
        raise ProfileError(f"arms: api_key_file {arm.api_key_file} is empty")
    return key


def make(name: str, arm: Arm, limits: Limits, log_path: Path) -> Service:
    """The service object of an arm."""
    if isinstance(arm, ProcessArm):
        return ProcessService(name, arm, limits, log_path)
    if isinstance(arm, SystemdArm):
        return SystemdService(name, arm, limits, log_path)
    return UrlService(name, arm, limits, log_path)
