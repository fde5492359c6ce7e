"""What a gate does when a service, a node or a disk misbehaves: it says so and keeps what it has.

Each test runs the real client against a real stand-in server process with one fault.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import EVAL, arms, profile, run
from v100_gate import evidence, services, store, verdict
from v100_gate.client import Client
from v100_gate.errors import RefusedError, ServiceError, StorageError
from v100_gate.runner import Run, judge_wave
from v100_gate.schema import Arms, Limits, ProcessArm, Profile, Sampling
from v100_gate.store import Store
from v100_gate.traces import RequestTrace, WaveRecord

ONE_WAVE = [
    {
        "name": "C4",
        "concurrency": 4,
        "input_tokens": 64,
        "output_tokens": 32,
        "shared_prefix_tokens": 32,
        "warmups": 0,
        "repeats": 1,
    }
]


def short(**changes: object):
    """A profile with one wave of four requests and no second try."""
    fields = {"waves": ONE_WAVE} | changes
    plan = profile(**fields)
    plan.limits.max_extra_repeats = 0
    return plan


def records(folder: Path) -> list[WaveRecord]:
    """All wave records of a run, by time."""
    found = [
        WaveRecord.model_validate_json(path.read_text())
        for path in (folder / "run").glob("arms/*/start-*/waves/*.json")
    ]
    return sorted(found, key=lambda record: record.wall_started)


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ({"refuse": {"2": 429}}, "refused", "HTTP 429"),
        ({"refuse": {"1": 500}}, "refused", "HTTP 500"),
        ({"close_early_at": 1}, "truncated", "without [DONE]"),
        ({"short_at": 3}, "short", "29 token IDs came back, 32 were forced"),
        ({"error_in_stream_at": 0}, "error", "engine failed"),
        ({"stall_at": 2}, "stalled", "no byte for"),
    ],
    ids=["429", "500", "early close", "too few tokens", "error in stream", "stall"],
)
def test_a_broken_request_spoils_its_wave_and_nothing_else(
    tmp_path: Path, fault: dict, status: str, words: str
) -> None:
    plan = short()
    plan.limits.stall_s = 0.6
    found = run(tmp_path, plan, arms(tmp_path, candidate=fault))
    (record,) = records(tmp_path)
    bad = [trace for trace in record.requests if trace.status != "ok"]
    assert [trace.status for trace in bad] == [status]
    assert words in bad[0].error
    assert bad[0].request_id in record.invalid[0]
    good = [trace for trace in record.requests if trace.status == "ok"]
    assert [len(trace.token_ids) for trace in good] == [32, 32, 32]
    judged = verdict.judge(found, {})
    assert judged["verdict"] == "fail"
    assert words in judged["checks"][0]["summary"]


def test_a_spoiled_wave_is_repeated_not_averaged_in(tmp_path: Path) -> None:
    plan = profile(waves=ONE_WAVE)
    found = run(tmp_path, plan, arms(tmp_path, candidate={"refuse": {"2": 429}}))
    assert [bool(record.invalid) for record in records(tmp_path)] == [True, False]
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_a_death_mid_wave_names_the_requests_in_flight_and_keeps_what_came(tmp_path: Path) -> None:
    plan = profile(waves=[ONE_WAVE[0] | {"name": "first"}, ONE_WAVE[0] | {"name": "second"}])
    site = arms(tmp_path, candidate={"die_at": 5})
    with pytest.raises(ServiceError) as caught:
        run(tmp_path, plan, site)
    text = str(caught.value)
    assert "died during second-measured-1" in text
    assert "candidate1-second-measured-1-1 (" in text
    assert "SIGKILL" in text
    first, second = records(tmp_path)
    assert not first.invalid
    broken = [trace for trace in second.requests if trace.status == "disconnected"]
    assert broken and all(trace.chunks for trace in broken)
    ended = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"][-1]
    assert ended["end"] == "failed"
    # The stored part can be judged: it fails, and says why.
    judged = verdict.judge(evidence.load(tmp_path / "run"), {})
    assert judged["verdict"] == "fail"
    assert "disconnected" in judged["checks"][0]["summary"]


def test_the_command_exits_non_zero_after_a_death(tmp_path: Path) -> None:
    plan = profile(waves=ONE_WAVE)
    site = arms(tmp_path, candidate={"die_at": 1})
    done = cli_run(tmp_path, plan, site)
    assert done.returncode == 4, done.stdout
    assert "in flight" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["verdict"] == "fail"


def gate_command(folder: Path) -> list[str]:
    """The gate's `run` command for the files in a folder."""
    return [
        sys.executable,
        "-m",
        "v100_gate",
        "run",
        str(folder / "profile.yaml"),
        "--arms",
        str(folder / "arms.yaml"),
        "--results",
        str(folder / "run"),
    ]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder short enough for sockets: a gate that is killed leaves its folder."""
    with tempfile.TemporaryDirectory(prefix="v100-") as folder:
        yield Path(folder)


def cli_run(tmp_path: Path, plan, site: Arms, *more: str) -> subprocess.CompletedProcess:
    """The gate's `run` command as a process."""
    (tmp_path / "profile.yaml").write_text(plan.model_dump_json(by_alias=True))
    (tmp_path / "arms.yaml").write_text(site.model_dump_json(by_alias=True))
    return subprocess.run(
        [*gate_command(tmp_path), *more],
        env=os.environ | {"PYTHONPATH": str(EVAL), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_requests_admitted_late_spoil_the_wave(tmp_path: Path, monkeypatch) -> None:
    opened = Client.__aenter__

    async def late(self):
        client = await opened(self)

        async def before_send(index: int) -> None:
            if index in (1, 2):
                await asyncio.sleep(0.4)

        client.before_send = before_send
        return client

    monkeypatch.setattr(Client, "__aenter__", late)
    plan = short()
    plan.limits.admission_skew_s = 0.2
    run(tmp_path, plan, arms(tmp_path, candidate={}))
    (record,) = records(tmp_path)
    assert record.invalid[0].startswith("admitted over 0.")


def test_a_jump_of_the_wall_clock_is_noted_and_touches_no_figure(tmp_path: Path) -> None:
    class Jumpy:
        """A wall clock that goes back an hour with every reading."""

        def __init__(self) -> None:
            self.now = time.time()

        def __call__(self) -> float:
            self.now -= 3600
            return self.now

    site = arms(tmp_path, candidate={})
    asyncio.run(Run(tmp_path / "run", short(), site, wall=Jumpy()).execute())
    (record,) = records(tmp_path)
    assert not record.invalid
    assert "wall clock jumped by -3600" in record.notes[0]
    assert 0 < record.monotonic_seconds < 60


def test_missing_counters_are_not_run_not_zero(tmp_path: Path) -> None:
    lacking = {
        "omit_counters": [
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "prefix_cache_hits",
            "num_preemptions",
        ]
    }
    plan = short(
        checks={
            name: {"required": True, "margin_points": 1.0}
            for name in ("acceptance", "acceptance-counters", "prefix-hits", "preemptions")
        }
    )
    found = run(tmp_path, plan, arms(tmp_path, control={}, candidate=lacking))
    judged = verdict.judge(found, {})
    assert {row["check"]: row["status"] for row in judged["checks"]} == {
        "acceptance": "not-run",
        "acceptance-counters": "not-run",
        "prefix-hits": "not-run",
        "preemptions": "not-run",
    }
    assert judged["verdict"] == "fail"


def test_routes_do_not_depend_on_the_totals_of_the_exit(tmp_path: Path) -> None:
    """This server has to be killed, so the totals that it would log when asked to end are lost."""
    plan = short(checks={"routes": {}}, routes=["long/bounded"])
    plan.limits.stop_timeout_s = 0.5
    found = run(tmp_path, plan, arms(tmp_path, candidate={"ignore_sigterm": True}))
    (log,) = (tmp_path / "run").glob("arms/candidate/start-1/service-1.log")
    assert "First target launch" in log.read_text()
    assert "launches of this rank" not in log.read_text()
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_counters_that_go_back_spoil_the_wave(tmp_path: Path) -> None:
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 2}])
    run(tmp_path, plan, arms(tmp_path, candidate={"reset_counters_at": 6}))
    first, second = records(tmp_path)
    assert not first.invalid
    assert "counters went backwards: vllm:" in second.invalid[0]


def test_a_wave_in_which_something_was_compiled_is_repeated(tmp_path: Path) -> None:
    plan = profile(waves=ONE_WAVE, checks={"compile-events": {}, "complete": {}})
    found = run(tmp_path, plan, arms(tmp_path, candidate={"compile_at": 1}))
    first, second = records(tmp_path)
    assert "compiled something" in first.invalid[0]
    assert second.compile_events == []
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_other_traffic_spoils_the_wave() -> None:
    record = WaveRecord(
        arm="candidate",
        start=1,
        service_start_id="x",
        wave="C1",
        kind="measured",
        repeat=1,
        concurrency=1,
        wall_started=0,
        wall_seconds=1,
        monotonic_seconds=1,
        requests=[
            RequestTrace(
                index=0,
                request_id="r",
                prompt_tokens=1,
                prompt_sha256="",
                max_tokens=1,
                forced=True,
                seed=0,
                status="ok",
            )
        ],
    )
    record.counters.finished_requests = 3
    judge_wave(record, Limits())
    assert "the service finished 3 requests, the gate sent 1" in record.invalid[0]


def test_an_api_key_is_sent_and_never_stored(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k3y-0123456789abcdef\n")
    site = arms(tmp_path, candidate={"api_key": "k3y-0123456789abcdef"})
    with pytest.raises(ServiceError, match="HTTP 401"):
        run(tmp_path, short(), site)
    site.arms["candidate"].api_key_file = key
    run(tmp_path, short(), site, resume=True)
    assert not records(tmp_path)[-1].invalid
    stored = b"".join(p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert b"k3y-0123456789abcdef" not in stored


# --------------------------------------------------------------------------- the node


def fake_program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


GPU_ROW = "0, Tesla V100-SXM2-32GB, {used}, 32768, 1530, 877, 45.0, 300.00, 40, 0x0000000000000001"


def test_a_foreign_process_on_the_gpu_is_refused(tmp_path: Path, monkeypatch) -> None:
    fake_program(
        tmp_path,
        "nvidia-smi",
        f'case "$1" in --query-compute-apps*) echo "{os.getpid()}, python3, 2048";; '
        f'*) echo "{GPU_ROW.format(used=2048)}";; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = arms(tmp_path, candidate={})
    site.hygiene.gpu = True
    with pytest.raises(RefusedError) as caught:
        run(tmp_path, short(), site)
    assert "belongs to no arm uses a GPU" in str(caught.value)
    assert f"pid {os.getpid()}" in str(caught.value)
    assert not list((tmp_path / "run").glob("arms/*/start-*/waves/*"))


def test_an_active_foreign_unit_is_refused(tmp_path: Path, monkeypatch) -> None:
    fake_program(tmp_path, "systemctl", "echo active; echo inactive")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = arms(tmp_path, candidate={})
    site.hygiene.stopped_units = ["public-api.service", "gateway.service"]
    with pytest.raises(RefusedError, match=r"unit public-api\.service is active"):
        run(tmp_path, short(), site)


def switched_gpu(folder: Path, monkeypatch) -> Path:
    """A fake nvidia-smi that shows this test as a user of the GPU while the returned file is
    there."""
    flag = folder / "foreign"
    fake_program(
        folder,
        "nvidia-smi",
        f'case "$1" in --query-compute-apps*) [ ! -e {flag} ] || echo "{os.getpid()}, x, 2048";; '
        f'*) echo "{GPU_ROW.format(used=900)}";; esac',
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return flag


def test_a_wave_beside_a_foreign_process_is_repeated(tmp_path: Path, monkeypatch) -> None:
    """It came after the service was loaded and went before the run was over."""
    flag = switched_gpu(tmp_path, monkeypatch)
    send = Client.send

    async def send_beside(self, *arguments):
        first = not list((tmp_path / "run").glob("arms/*/start-*/waves/*.json"))
        if first:
            flag.touch()
        else:
            flag.unlink(missing_ok=True)
        return await send(self, *arguments)

    monkeypatch.setattr(Client, "send", send_beside)
    plan = profile(waves=ONE_WAVE, checks={"complete": {}, "hygiene": {}})
    site = arms(tmp_path, candidate={})
    site.hygiene.gpu = True
    found = run(tmp_path, plan, site)
    first, second = records(tmp_path)
    assert "somebody else was on the node: a process that belongs to no arm" in first.invalid[0]
    assert not second.invalid
    assert [seen.foreign for seen in second.looks] == [[]] * len(second.looks)
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_a_foreign_process_that_was_refused_is_not_forgotten(tmp_path: Path, monkeypatch) -> None:
    """It is found at the end, when all waves are there: continuing must not make that good."""
    flag = switched_gpu(tmp_path, monkeypatch)
    measure = Run._measure

    async def then_it_comes(self, *arguments):
        await measure(self, *arguments)
        flag.touch()

    monkeypatch.setattr(Run, "_measure", then_it_comes)
    plan = short(checks={"complete": {}, "hygiene": {}})
    site = arms(tmp_path, candidate={})
    site.hygiene.gpu = True
    with pytest.raises(RefusedError, match="belongs to no arm uses a GPU"):
        run(tmp_path, plan, site)
    flag.unlink()
    found = run(tmp_path, plan, site, resume=True)
    rows = {row["check"]: row for row in verdict.judge(found, {})["checks"]}
    assert rows["complete"]["status"] == "pass"
    assert rows["hygiene"]["status"] == "fail"
    assert "candidate start 1, after: a process that belongs" in rows["hygiene"]["summary"]


def test_gpu_snapshots_and_throttling_are_recorded(tmp_path: Path, monkeypatch) -> None:
    hot = GPU_ROW.format(used=900).replace("0x0000000000000001", "0x0000000000000060")
    fake_program(
        tmp_path,
        "nvidia-smi",
        f'case "$1" in --query-compute-apps*) ;; *) echo "{hot}";; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plan = short(
        checks={"gpu-state": {}, "hygiene": {}},
        waves=[ONE_WAVE[0] | {"output_tokens": 1024}],
    )
    site = arms(tmp_path, candidate={"round_s": 0.01})
    site.hygiene.gpu = True
    found = run(tmp_path, plan, site)
    rows = {row["check"]: row for row in verdict.judge(found, {})["checks"]}
    assert rows["hygiene"]["status"] == "pass"
    assert rows["gpu-state"]["status"] == "fail"
    assert "throttled" in rows["gpu-state"]["summary"]
    csv = (tmp_path / "run" / "arms/candidate/start-1/gpu-loaded.csv").read_text()
    assert csv.splitlines()[1].startswith("0,Tesla V100-SXM2-32GB,900,")


def test_a_systemd_unit_is_started_measured_and_stopped(tmp_path: Path, monkeypatch) -> None:
    """systemctl and journalctl are stand-ins; the server behind the unit is a real process."""
    port = services.free_port()
    state, log = tmp_path / "state", tmp_path / "journal"
    state.write_text("inactive")
    fake_program(
        tmp_path,
        "systemctl",
        f'case "$1" in\n'
        f"is-active) cat {state};;\n"
        f"start) PYTHONPATH={EVAL} setsid {sys.executable} -m v100_gate.mockserver --port {port} "
        f">{log} 2>&1 </dev/null & echo $! >{tmp_path}/pid; echo active >{state};;\n"
        f"stop) kill $(cat {tmp_path}/pid); echo inactive >{state};;\nesac",
    )
    fake_program(tmp_path, "journalctl", f"cat {log}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = Arms.model_validate(
        {
            "schema": 1,
            "arms": {
                "candidate": {
                    "kind": "systemd",
                    "unit": "vllm.service",
                    "url": f"http://127.0.0.1:{port}",
                    "model": "mock",
                }
            },
            "hygiene": {"gpu": False},
        }
    )
    plan = short(checks={"complete": {}, "fresh-starts": {}, "compile-events": {}})
    found = run(tmp_path, plan, site)
    assert verdict.judge(found, {})["verdict"] == "pass"
    assert found.candidate.starts[0].facts["kv_tokens"] == 1_000_000
    assert state.read_text().strip() == "inactive"


def test_a_unit_that_already_runs_is_no_fresh_start(tmp_path: Path, monkeypatch) -> None:
    fake_program(tmp_path, "systemctl", "echo active")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    unit = {"kind": "systemd", "unit": "v.service", "url": "http://127.0.0.1:1", "model": "m"}
    site = Arms.model_validate(
        {"schema": 1, "arms": {"candidate": unit}, "hygiene": {"gpu": False}}
    )
    with pytest.raises(RefusedError, match="already active"):
        run(tmp_path, short(), site)


def test_a_url_arm_has_no_fresh_start(tmp_path: Path) -> None:
    """A service that somebody else runs is measured, and the missing start is not-run."""

    async def measure() -> None:
        arm = arms(tmp_path, candidate={}).arms["candidate"]
        server = services.ProcessService("outside", arm, Limits(), tmp_path / "outside.log")
        await server.start()
        try:
            async with Client(server.url, "mock", Sampling(), Limits()) as client:
                await server.wait_ready(client)
            site = Arms.model_validate(
                {
                    "schema": 1,
                    "arms": {"candidate": {"kind": "url", "url": server.url, "model": "mock"}},
                    "hygiene": {"gpu": False},
                }
            )
            plan = short(checks={"complete": {}, "fresh-starts": {}, "compile-events": {}})
            await Run(tmp_path / "run", plan, site).execute()
            assert server.dead() is None
        finally:
            await server.stop()

    asyncio.run(measure())
    rows = verdict.judge(evidence.load(tmp_path / "run"), {})["checks"]
    assert {row["check"]: row["status"] for row in rows} == {
        "complete": "pass",
        "fresh-starts": "not-run",
        "compile-events": "not-run",
    }


def started_gate(folder: Path, plan: Profile, site: Arms, tmp: Path) -> subprocess.Popen:
    """The gate's `run` command, begun and left to the test; `tmp` takes its sockets."""
    (folder / "profile.yaml").write_text(plan.model_dump_json(by_alias=True))
    (folder / "arms.yaml").write_text(site.model_dump_json(by_alias=True))
    return subprocess.Popen(
        gate_command(folder),
        env=os.environ | {"PYTHONPATH": str(EVAL), "TMPDIR": str(tmp)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def url_command(folder: Path, profile: Path, url: str, *more: str) -> subprocess.CompletedProcess:
    """The gate's `run` command for a service that is up."""
    command = [*gate_command(folder)[:4], str(profile), "--results", str(folder / "run")]
    return subprocess.run(
        [*command, "--url", url, "--model", "mock", *more],
        env=os.environ | {"PYTHONPATH": str(EVAL), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_a_url_is_refused_a_profile_that_it_can_never_pass(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{services.free_port()}"
    done = url_command(tmp_path, EVAL / "profiles" / "quality.yaml", nobody)
    assert done.returncode == 3, done.stdout
    for words in (
        "fresh-starts (a service that the gate starts), identity (a manifest), service-errors (the "
        "service's log), c1-exact (a control arm), logits (a control arm)",
        "eval/profiles/node.yaml",
        "--arms",
    ):
        assert words in done.stdout
    assert "retrieval" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_waived_checks_do_not_keep_a_url_from_being_measured(tmp_path: Path) -> None:
    plan = short(checks={"complete": {}, "service-errors": {}})
    plan.limits.ready_timeout_s = 0.5
    path = tmp_path / "profile.yaml"
    path.write_text(plan.model_dump_json(by_alias=True))
    today = dt.date.today()
    entry = {
        "profile": "test",
        "check": "service-errors",
        "reason": "the log of this service is elsewhere",
        "owner": "release owner",
        "date": str(today),
        "expires": str(today + dt.timedelta(days=1)),
    }
    waivers = tmp_path / "waivers.yaml"
    waivers.write_text(json.dumps({"schema": 1, "waivers": [entry]}))
    nobody = f"http://127.0.0.1:{services.free_port()}"
    assert url_command(tmp_path, path, nobody).returncode == 3
    done = url_command(tmp_path, path, nobody, "--waivers", str(waivers))
    assert done.returncode == 4, done.stdout


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_is_said_while_waiting_and_at_the_end(
    tmp_path: Path, host: str
) -> None:
    plan = short()
    plan.limits.ready_timeout_s = 0.5
    path = tmp_path / "profile.yaml"
    path.write_text(plan.model_dump_json(by_alias=True))
    done = url_command(tmp_path, path, f"http://{host}:{services.free_port()}")
    assert done.returncode == 4, done.stdout
    waiting, ended = done.stdout.split("stopped\n")
    assert "connection refused (nothing listens there); trying again for up to" in waiting
    assert "was not ready after 0.5 s" in ended and "connection refused" in ended
    assert ".log" not in done.stdout


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "http://HOST:PORT"),
        ("127.0.0.1:8000", "http://HOST:PORT"),
        ("http://127.0.0.1:eighty", "http://HOST:PORT"),
        ("http://127.0.0.1:8000/v1", "without /v1"),
    ],
)
def test_an_address_that_cannot_work_is_refused(tmp_path: Path, url: str, words: str) -> None:
    done = url_command(tmp_path, EVAL / "profiles" / "node.yaml", url)
    assert done.returncode == 2, done.stdout
    assert words in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_page_that_is_no_service_is_said_with_its_status(tmp_path: Path) -> None:
    """A service that is up and not ready, or another program on its port."""

    async def ask() -> tuple[str | None, str | None]:
        arm = arms(tmp_path, candidate={}).arms["candidate"]
        server = services.ProcessService("outside", arm, Limits(), tmp_path / "outside.log")
        await server.start()
        try:
            async with Client(server.url, "mock", Sampling(), Limits()) as client:
                await server.wait_ready(client)
                well = await client.trouble()
                client.url += "/elsewhere"
                return well, await client.trouble()
        finally:
            await server.stop()

    well, elsewhere = asyncio.run(ask())
    assert well is None
    assert elsewhere.endswith("/elsewhere/health: HTTP 404")


def test_a_failed_start_keeps_its_log_and_names_the_cause(tmp_path: Path) -> None:
    words = "RuntimeError: Ninja is required to load C++ extensions"
    site = arms(tmp_path, candidate={"fail_start": words})
    with pytest.raises(ServiceError) as caught:
        run(tmp_path, short(), site)
    assert "ninja is not on the service's PATH" in str(caught.value)
    log = tmp_path / "run" / "arms/candidate/start-1/service-1.log"
    assert words in log.read_text()


def test_kv_that_the_service_does_not_have_is_refused(tmp_path: Path) -> None:
    site = arms(tmp_path, candidate={"kv_tokens": 100})
    with pytest.raises(RefusedError, match=r"the KV cache holds 100 \(the service's log\)"):
        run(tmp_path, short(), site)


# --------------------------------------------------------------------------- interruption, disk


def test_an_interrupted_run_is_continued_with_the_waves_it_has(tmp_path: Path) -> None:
    plan = profile(schedule={"starts_per_arm": 1})
    site = arms(tmp_path, control={}, candidate={"die_at": 9})
    with pytest.raises(ServiceError):
        run(tmp_path, plan, site)
    before = {r.service_start_id for r in records(tmp_path)}
    kept = [r for r in records(tmp_path) if not r.invalid]
    # The same arms, repaired.
    healed = arms(tmp_path, control={}, candidate={})
    with pytest.raises(RefusedError, match="--resume"):
        run(tmp_path, plan, healed)
    found = run(tmp_path, plan, healed, resume=True)
    after = [r for r in records(tmp_path) if not r.invalid]
    assert {(r.service_start_id, r.wall_started) for r in kept} <= {
        (r.service_start_id, r.wall_started) for r in after
    }
    assert len({r.service_start_id for r in after} - before) == 1  # the control was not restarted
    judged = verdict.judge(found, {})
    assert judged["verdict"] == "pass"
    assert [a["resumed"] for a in found.run["attempts"]] == [False, True]
    assert len(found.candidate.starts[0].processes) == 2


def test_a_logged_error_is_not_forgotten_when_the_run_is_continued(
    tmp_path: Path, monkeypatch
) -> None:
    """The first process logs an error and is stopped by a full disk, not by a death."""
    monkeypatch.setattr(store, "_write_bytes", FullDisk(tmp_path / "run", after=1))
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 3}], checks={"service-errors": {}})
    with pytest.raises(StorageError):
        run(tmp_path, plan, arms(tmp_path, candidate={"log_error": "ERROR [engine] recovered"}))
    monkeypatch.undo()
    found = run(tmp_path, plan, arms(tmp_path, candidate={}), resume=True)
    (row,) = verdict.judge(found, {})["checks"]
    assert row["status"] == "fail"
    assert "process 1: ERROR [engine] recovered" in row["summary"]


def test_a_killed_gate_does_not_hide_what_its_service_logged(
    tmp_path: Path, short_tmp: Path
) -> None:
    plan = short(
        waves=[ONE_WAVE[0] | {"output_tokens": 1000, "repeats": 2}],
        checks={"complete": {}, "service-errors": {}, "fresh-starts": {}},
    )
    site = arms(tmp_path, candidate={"log_error": "ERROR [engine] recovered", "round_s": 0.01})
    process = started_gate(tmp_path, plan, site, short_tmp)
    wait_for(lambda: list((tmp_path / "run").glob("arms/*/start-1/waves/*.json")))
    process.kill()
    process.wait()
    wait_for(lambda: not servers(tmp_path))
    found = run(tmp_path, plan, arms(tmp_path, candidate={}), resume=True)
    rows = {row["check"]: row for row in verdict.judge(found, {})["checks"]}
    assert rows["complete"]["status"] == "pass"
    assert rows["service-errors"]["status"] == "fail"
    assert "process 1: ERROR [engine] recovered" in rows["service-errors"]["summary"]
    logs = sorted((tmp_path / "run").glob("arms/candidate/start-1/service-*.log"))
    assert len(logs) == 2


def test_needles_are_a_part_of_their_own(tmp_path: Path) -> None:
    """The service dies after the retrieval and before the needles are through."""
    quality = {
        "requests": 2,
        "input_tokens": 1500,
        "max_output_tokens": 48,
        "needle_lengths": [1500],
        "needle_depths": [0.5],
    }
    plan = profile(waves=[], retrieval=quality, checks={"complete": {}, "needle": {}})
    with pytest.raises(ServiceError, match="died during needle"):
        run(tmp_path, plan, arms(tmp_path, candidate={"die_at": 2}))
    found = run(tmp_path, plan, arms(tmp_path, candidate={}), resume=True)
    assert verdict.judge(found, {})["verdict"] == "pass"
    assert found.candidate.starts[0].processes[-1]["todo"] == ["needle"]


def test_an_arm_is_not_continued_with_another_tree(tmp_path: Path) -> None:
    tree = tmp_path / "vllm"
    tree.mkdir()
    (tree / "a.py").write_text("1")
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 2}])
    site = arms(tmp_path, candidate={"die_at": 5})
    site.arms["candidate"].tree = tree
    with pytest.raises(ServiceError):
        run(tmp_path, plan, site)
    healed = arms(tmp_path, candidate={})
    healed.arms["candidate"].tree = tree
    (tree / "a.py").write_text("2")
    with pytest.raises(RefusedError, match="earlier starts of this run had tree_sha256"):
        run(tmp_path, plan, healed, resume=True)


def test_a_client_that_falls_behind_the_trace_spoils_the_wave() -> None:
    trace = RequestTrace(
        index=0,
        request_id="r",
        prompt_tokens=1,
        prompt_sha256="",
        max_tokens=1,
        forced=True,
        seed=0,
        status="ok",
        due_at=1.0,
        sent_at=1.8,
    )
    record = WaveRecord(
        arm="candidate",
        start=1,
        service_start_id="x",
        wave="rate-1",
        kind="rolling",
        repeat=1,
        concurrency=1,
        wall_started=0,
        wall_seconds=1,
        monotonic_seconds=1,
        requests=[trace],
    )
    judge_wave(record, Limits())
    assert record.invalid[0].startswith("1 requests were sent late, by up to 0.800 s")


def test_a_run_is_not_continued_with_another_profile(tmp_path: Path) -> None:
    site = arms(tmp_path, candidate={})
    run(tmp_path, short(), site)
    other = short(sampling={"temperature": 0.5})
    with pytest.raises(RefusedError, match="changed: sampling"):
        run(tmp_path, other, site, resume=True)


def test_a_refused_run_touches_nothing_of_the_run_that_is_there(tmp_path: Path) -> None:
    """Another run's verdict must stay as it is, and must not be the last word about this one."""
    site = arms(tmp_path, candidate={})
    assert cli_run(tmp_path, short(), site).returncode == 0

    def state() -> dict[Path, int]:
        folder = tmp_path / "run"
        return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}

    before = state()
    other = short(sampling={"temperature": 0.5})
    foreign = arms(tmp_path, candidate={}, control={})
    for plan, arms_file, more, words in (
        (short(), site, (), "holds a run already"),
        (other, site, ("--resume",), "changed: sampling"),
        (short(), foreign, ("--resume",), "changed: control: added"),
    ):
        done = cli_run(tmp_path, plan, arms_file, *more)
        assert done.returncode == 3, done.stdout
        assert words in done.stdout
        assert "verdict" not in done.stdout
        assert state() == before


def test_a_service_that_fails_in_a_continued_run_is_judged(tmp_path: Path) -> None:
    """It measured nothing, and the verdict of the first attempt no longer stands."""
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 2}], checks={"service-errors": {}})
    assert cli_run(tmp_path, plan, arms(tmp_path, candidate={"refuse": {"1": 500}})).returncode == 0
    done = cli_run(tmp_path, plan, arms(tmp_path, candidate={"fail_start": "no"}), "--resume")
    assert done.returncode == 4, done.stdout
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["verdict"] == "fail"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", ["/bin/true"]),
        ("env", {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}),
        ("model", "other"),
        ("draft_tokens", 3),
        ("url", "http://127.0.0.1:1"),
        ("tree", EVAL),
    ],
)
def test_a_run_is_not_continued_with_another_arm(tmp_path: Path, field: str, value: object) -> None:
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 2}])
    with pytest.raises(ServiceError):
        run(tmp_path, plan, arms(tmp_path, candidate={"die_at": 5}))
    other = arms(tmp_path, candidate={})
    setattr(other.arms["candidate"], field, value)
    with pytest.raises(RefusedError, match=rf"begun with other arms \(changed: candidate: {field}"):
        run(tmp_path, plan, other, resume=True)


def test_a_run_is_not_continued_with_other_hygiene_or_an_arm_less(tmp_path: Path) -> None:
    run(tmp_path, short(), arms(tmp_path, control={}, candidate={}))
    other = arms(tmp_path, candidate={})
    other.hygiene.stopped_units = ["a.service"]
    with pytest.raises(RefusedError, match=r"changed: control: missing; hygiene"):
        run(tmp_path, short(), other, resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_leaves_no_process_and_keeps_what_came(tmp_path: Path, number: int) -> None:
    plan = short(waves=[ONE_WAVE[0] | {"output_tokens": 4000}])
    site = arms(tmp_path, candidate={"round_s": 0.05, "ignore_sigterm": True})
    plan.limits.stop_timeout_s = 1.0
    (tmp_path / "profile.yaml").write_text(plan.model_dump_json(by_alias=True))
    (tmp_path / "arms.yaml").write_text(site.model_dump_json(by_alias=True))
    process = subprocess.Popen(
        gate_command(tmp_path),
        env=os.environ | {"PYTHONPATH": str(EVAL)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    children = wait_for(lambda: servers(tmp_path))
    given = Path(f"/proc/{children[0]}/environ").read_text().split("\0")
    (sockets,) = (Path(line.partition("=")[2]) for line in given if line.startswith("VLLM_RPC_"))
    assert sockets.is_dir()
    wait_for(lambda: (tmp_path / "run" / "fixtures" / "wave-C4.json").exists())
    time.sleep(1.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not servers(tmp_path)
    assert all(not Path(f"/proc/{pid}").exists() for pid in children)
    assert not sockets.exists()
    (record,) = records(tmp_path)
    assert "the gate was interrupted" in record.invalid
    assert all(trace.status == "cancelled" and trace.chunks for trace in record.requests)


def test_a_killed_gate_takes_its_service_along(tmp_path: Path, short_tmp: Path) -> None:
    plan = short(waves=[ONE_WAVE[0] | {"output_tokens": 4000}])
    site = arms(tmp_path, candidate={"round_s": 0.05})
    process = started_gate(tmp_path, plan, site, short_tmp)
    wait_for(lambda: servers(tmp_path))
    wait_for(lambda: (tmp_path / "run" / "fixtures" / "wave-C4.json").exists())
    process.kill()
    process.wait()
    wait_for(lambda: not servers(tmp_path))


def servers(folder: Path) -> list[int]:
    """Stand-in servers that were started from this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"v100_gate.mockserver" in line and str(folder).encode() in line:
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds: float = 30.0):
    """Poll until `condition` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited too long")


def test_grandchildren_of_a_service_are_ended_too(tmp_path: Path) -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    arm = ProcessArm(kind="process", model="m", command=[sys.executable, "-c", script])

    async def life() -> int:
        service = services.ProcessService("x", arm, Limits(stop_timeout_s=3), tmp_path / "log")
        await service.start()
        session = service.process.pid
        for _ in range(100):
            if len(services.session_members(session)) == 2:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the grandchild did not appear")
        await service.stop()
        return session

    assert services.session_members(asyncio.run(life())) == []


SOCKETS = """
import os, signal, socket, sys, time, uuid
path = os.path.join(os.environ["VLLM_RPC_BASE_PATH"], str(uuid.uuid4()))
socket.socket(socket.AF_UNIX).bind(path)
print(path, flush=True)
time.sleep(300)
"""
"""A server that leaves a unix socket behind, as vLLM does."""


@pytest.mark.parametrize("room", ["short", "too long for a socket " + "x" * 80])
def test_the_sockets_of_a_service_go_with_it(tmp_path: Path, monkeypatch, room: str) -> None:
    place = tmp_path / room
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    arm = ProcessArm(kind="process", model="m", command=[sys.executable, "-c", SOCKETS])
    log = tmp_path / "log"

    async def life() -> Path:
        service = services.ProcessService("x", arm, Limits(stop_timeout_s=3), log)
        await service.start()
        try:
            while not log.read_text() and service.dead() is None:
                await asyncio.sleep(0.05)
            path = Path(log.read_text().strip())
            assert path.is_socket()
            assert path.parent.stat().st_mode & 0o077 == 0
        finally:
            await service.stop()
        return path

    path = asyncio.run(life())
    assert not path.parent.exists()
    assert not list(place.iterdir())


def test_an_arm_may_choose_the_folder_of_its_sockets(tmp_path: Path) -> None:
    env = {"VLLM_RPC_BASE_PATH": "/chosen"}
    show = [sys.executable, "-c", "import os; print(os.environ['VLLM_RPC_BASE_PATH'])"]
    arm = ProcessArm(kind="process", model="m", command=show, env=env)

    async def life() -> None:
        service = services.ProcessService("x", arm, Limits(stop_timeout_s=3), tmp_path / "log")
        await service.start()
        service.process.wait()
        await service.stop()

    asyncio.run(life())
    assert (tmp_path / "log").read_text() == "/chosen\n"


class FullDisk:
    """Writes fail with ENOSPC while the ballast is there, from the given call on."""

    def __init__(self, root: Path, after: int, always: bool = False) -> None:
        self.root, self.left, self.always, self.real = root, after, always, store._write_bytes

    def __call__(self, path: Path, data: bytes) -> None:
        if "/waves/" in path.as_posix():
            self.left -= 1
            if self.left < 0 and (self.always or (self.root / ".ballast").exists()):
                path.write_bytes(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(path, data)


def test_a_full_disk_loses_no_wave(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "_write_bytes", FullDisk(tmp_path / "run", after=1))
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 3}])
    site = arms(tmp_path, candidate={})
    with pytest.raises(StorageError, match=r"C4-measured-2\.json and everything before it are"):
        run(tmp_path, plan, site)
    assert [len(record.requests) for record in records(tmp_path)] == [4, 4]
    assert not list((tmp_path / "run").rglob("*.partial"))
    monkeypatch.undo()
    found = run(tmp_path, plan, site, resume=True)
    assert verdict.judge(found, {})["verdict"] == "pass"


def test_a_disk_without_reserve_keeps_the_earlier_waves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "_write_bytes", FullDisk(tmp_path / "run", after=1, always=True))
    plan = short(waves=[ONE_WAVE[0] | {"repeats": 3}])
    with pytest.raises(StorageError, match="earlier records are complete"):
        run(tmp_path, plan, arms(tmp_path, candidate={}))
    assert len(records(tmp_path)) == 1
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_too_little_space_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="MiB free, the profile asks for"):
        Store(tmp_path / "run").open(free_mib=1 << 40)
