"""A run: what is measured, in what order, and what is kept when something breaks.

A *session* is one fresh start of one arm: start, readiness, waves, quality, logits, rolling
arrivals, stop. The schedule is a list of sessions (ABBA, then the further controls). Every wave
is on disk before the next begins, so a run can be continued after any interruption: sessions
and waves that are complete are not measured again, and the record says which process gave which
wave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from v100_gate import (
    RESULT_SCHEMA,
    counters,
    gpu,
    hygiene,
    identity,
    kv,
    metrics,
    prompts,
    rolling,
    servicelog,
    services,
)
from v100_gate.client import Client, Request
from v100_gate.errors import GateError, RefusedError, ServiceError
from v100_gate.progress import Reporter
from v100_gate.schema import PAIR, Arms, Limits, Profile, Sampling, WaveSpec, changed_arms
from v100_gate.store import Store
from v100_gate.traces import WaveRecord


def schedule(profile: Profile, arms: Arms) -> list[tuple[str, int]]:
    """The sessions of a run in order: (arm, number of its start, from 1).

    Raises: RefusedError when the profile asks for a control the arms file does not have.
    """
    missing = [name for name in profile.schedule.controls if name not in arms.arms]
    if missing:
        raise RefusedError(
            f"profile {profile.name} asks for the control {missing[0]!r}, the arms file has "
            f"{', '.join(sorted(arms.arms))}; add the arm or take it out of schedule.controls"
        )
    starts = profile.schedule.starts_per_arm
    order: list[tuple[str, int]] = []
    if "control" not in arms.arms:
        order = [("candidate", number) for number in range(1, starts + 1)]
    else:
        for number in range(1, starts + 1):
            pair = ["control", "candidate"]
            if profile.schedule.order == "ABBA" and number % 2 == 0:
                pair.reverse()
            order += [(name, number) for name in pair]
    return order + [(name, 1) for name in profile.schedule.controls]


def refuse_taken(root: Path) -> None:
    """Raises: RefusedError when a folder holds a run."""
    if (root / "run.json").exists():
        raise RefusedError(
            f"{root} holds a run already; continue it with --resume, or name another folder"
        )


def quality_parts(profile: Profile) -> dict[str, str]:
    """The quality waves of a profile: name of the wave -> its list in the retrieval fixture."""
    if profile.retrieval is None:
        return {}
    parts = {"retrieval": "documents"}
    return parts | {"needle": "needles"} if profile.retrieval.needle_lengths else parts


class Run:
    """Carries out a schedule below one results folder."""

    def __init__(
        self,
        root: Path,
        profile: Profile,
        arms: Arms,
        reporter: Reporter | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store = Store(root)
        self.profile = profile
        self.arms = arms
        self.reporter = reporter or Reporter(quiet=True)
        self.wall = wall
        self.monotonic = monotonic
        self.service: services.Service | None = None
        self.recorded = 0
        """Waves that this process has put on record."""

    # ---------------------------------------------------------------- whole run

    async def execute(self, resume: bool = False) -> None:
        """Measure everything that is not there yet.

        Raises: GateError (and subclasses) when the run cannot go on. What was measured is on
        disk, and run.json says how the run ended; a run that is refused beforehand leaves no
        trace.
        """
        kv.refuse_impossible(
            self.profile, self.profile.service.kv_budget_tokens, "the profile's kv_budget_tokens"
        )
        sessions = schedule(self.profile, self.arms)
        if not resume:
            refuse_taken(self.store.root)
        existing = self.store.read_json("run.json")
        if existing:
            self._check_same(existing)
        # A foreign tree in the last arm must not cost the hours before it.
        for name in dict.fromkeys(arm for arm, _ in sessions):
            self._refuse_identity(name, identity.identify(self.arms.arms[name]))
        self.store.open(self.profile.limits.free_disk_mib)
        record = existing or {
            "schema": RESULT_SCHEMA,
            "profile": self.profile.model_dump(mode="json", by_alias=True),
            "environment": identity.environment(),
            "schedule": sessions,
            "attempts": [],
        }
        # What may change between two attempts counts as it stands now (see `changed_arms`).
        record["arms"] = self.arms.model_dump(mode="json", by_alias=True)
        attempt = {"began": self.wall(), "resumed": bool(existing), "end": "running"}
        record["attempts"].append(attempt)
        self._write_run(record)
        self.reporter.begin(self._steps(sessions), f"gate {self.profile.name}")
        if existing:
            kept = len(list(self.store.root.glob("arms/*/start-*/waves/*.json")))
            self.reporter.note(f"continuing an interrupted run: {kept} wave records are kept")
        attempt["end"] = "interrupted"
        try:
            for arm, number in sessions:
                await self._session(arm, number)
            attempt["end"] = "complete"
        except GateError as error:
            attempt["end"] = "failed"
            attempt["error"] = str(error)
            raise
        finally:
            attempt["ended"] = self.wall()
            self.reporter.end()
            self.store.close()
            self._write_run(record)

    def _write_run(self, record: dict) -> None:
        self.store.write_json("run.json", record)
        text = yaml.safe_dump(record["profile"], sort_keys=False, allow_unicode=True)
        self.store.write("profile.yaml", text.encode())

    def _check_same(self, existing: dict) -> None:
        if existing.get("schema") != RESULT_SCHEMA:
            raise RefusedError(f"{self.store.root}: written by another version of the gate")
        ours = self.profile.model_dump(mode="json", by_alias=True)
        if existing["profile"] != ours:
            changed = sorted(key for key in ours if existing["profile"].get(key) != ours[key])
            raise RefusedError(
                f"{self.store.root}: the run was begun with another profile (changed: "
                f"{', '.join(changed)}); measure it anew in another folder"
            )
        arms = changed_arms(Arms.model_validate(existing["arms"]), self.arms)
        if arms:
            raise RefusedError(
                f"{self.store.root}: the run was begun with other arms (changed: "
                f"{'; '.join(arms)}); one run must not mix them: measure it anew in another folder"
            )

    def _steps(self, sessions: Sequence[tuple[str, int]]) -> int:
        total = 0
        for arm, _ in sessions:
            total += 2 + sum(sum(self.profile.counts(spec, arm)) for spec in self.profile.waves)
            if arm in PAIR:
                total += len(quality_parts(self.profile)) + bool(self.profile.logits)
                total += len(self.profile.rolling.rates_per_s) if self.profile.rolling else 0
        return total

    # ---------------------------------------------------------------- one session

    def _todo(self, arm: str, number: int) -> list[str]:
        """Parts of a session that are not on disk yet."""
        base = f"arms/{arm}/start-{number}"
        todo = [
            spec.name
            for spec in self.profile.waves
            if len(self._valid(base, spec.name)) < self.profile.counts(spec, arm)[1]
        ]
        if arm in PAIR:
            todo += [wave for wave in quality_parts(self.profile) if not self._valid(base, wave)]
            if self.profile.logits and not self._valid(base, "logits"):
                todo.append("logits")
            if self.profile.rolling:
                todo += [
                    f"rate-{rate:g}"
                    for rate in self.profile.rolling.rates_per_s
                    if not self._valid(base, f"rate-{rate:g}")
                ]
        return todo

    def _valid(self, base: str, wave: str) -> list[str]:
        """Record files of a wave that count."""
        names = []
        for path in sorted((self.store.root / base / "waves").glob(f"{wave}-*.json")):
            record = self.store.read_json(str(path.relative_to(self.store.root)))
            if record["wave"] == wave and record["kind"] != "warmup" and not record["invalid"]:
                names.append(path.name)
        return names

    async def _session(self, arm: str, number: int) -> None:
        title = f"{arm} start {number}"
        todo = self._todo(arm, number)
        base = f"arms/{arm}/start-{number}"
        begun = self._begun(base)
        if not todo:
            self.reporter.done(f"{title}: already measured")
            return
        limits, spec = self.profile.limits, self.arms.arms[arm]
        log = self.store.root / base / f"service-{len(begun['processes']) + 1}.log"
        service = services.make(arm, spec, limits, log)
        self.service = service
        entry: dict = {
            "service_start_id": service.start_id,
            "log": log.name,
            "fresh": service.fresh,
            "began": self.wall(),
            "todo": todo,
            "end": "running",
        }
        begun["processes"].append(entry)
        who = identity.identify(spec)
        self._refuse_identity(arm, who)
        self._refuse_other_release(arm, who)
        self._moment(base, entry, "before", service)
        # On disk before the service is: a gate that is killed must not hide what its service did.
        entry["identity"] = who.model_dump(mode="json")
        self.store.write_json(f"{base}/start.json", begun)
        self.reporter.step(f"{title}: starting the service")
        began = self.monotonic()
        try:
            await service.start()
            async with Client(
                service.url,
                spec.model,
                self.profile.sampling,
                limits,
                self.monotonic,
                services.api_key(spec),
            ) as client:
                await service.wait_ready(client, self.reporter.note)
                entry["ready_s"] = self.monotonic() - began
                entry["url"] = service.url
                self.reporter.done(f"{title}: ready after {entry['ready_s']:.1f} s")
                await self._describe(client, service, entry, who)
                self._moment(base, entry, "loaded", service)
                self._refuse_identity(arm, who)
                await self._measure(arm, number, base, service, client, todo)
                self._moment(base, entry, "after", service)
            entry["end"] = "complete"
        except GateError as error:
            entry["end"], entry["error"] = "failed", str(error)
            entry["failure"] = type(error).__name__
            raise
        except BaseException:
            entry["end"] = "interrupted"
            raise
        finally:
            text = service.log_text()
            await asyncio.shield(service.stop())
            # A stopped service may have written more (its last counts, an error): read it again.
            text = service.log_text() or text
            if text is not None:
                found = servicelog.facts(text)
                entry["facts"] = found.model_dump(mode="json")
                who = identity.from_log(who, found)
            entry["identity"] = who.model_dump(mode="json")
            entry["ended"] = self.wall()
            self.store.write_json(f"{base}/start.json", begun)
            self.service = None
            self.reporter.done(f"{title}: stopped")
        self._refuse_identity(arm, who)

    def _begun(self, base: str) -> dict:
        """The processes that served a start so far, with the facts of one whose gate was killed."""
        begun = self.store.read_json(f"{base}/start.json") or {"processes": []}
        for entry in begun["processes"]:
            if entry["end"] != "running":
                continue
            entry["end"] = "killed"
            log = self.store.root / base / entry["log"]
            if log.exists():
                found = servicelog.facts(log.read_text(errors="replace"))
                entry["facts"] = found.model_dump(mode="json")
            self.store.write_json(f"{base}/start.json", begun)
        return begun

    def _refuse_identity(self, arm: str, who: identity.Identity) -> None:
        if who.problems:
            raise RefusedError(
                f"arm {arm}: what is served is not the release of its manifest:\n  "
                + "\n  ".join(who.problems)
            )

    def _refuse_other_release(self, arm: str, who: identity.Identity) -> None:
        """An arm is one release: a rebuild between two starts must not mix two of them."""
        for path in sorted((self.store.root / "arms" / arm).glob("start-*/start.json")):
            record = self.store.read_json(path.relative_to(self.store.root).as_posix())
            for process in record["processes"]:
                before = process.get("identity") or {}
                for name in ("manifest_sha256", "tree_sha256"):
                    old, new = before.get(name), getattr(who, name)
                    if old and new and old != new:
                        raise RefusedError(
                            f"arm {arm}: earlier starts of this run had {name} {old[:12]}, now it "
                            f"is {new[:12]}; measure the new release in a new run"
                        )

    def _moment(self, base: str, entry: dict, moment: str, service: services.Service) -> None:
        """Snapshot of the GPUs, and a look at who else is there, kept in the start's record.

        Raises: RefusedError when somebody is.
        """
        rows = gpu.sample()
        if rows is not None:
            self.store.write(f"{base}/gpu-{moment}.csv", gpu.as_csv(rows).encode())
            entry.setdefault("gpu", {})[moment] = rows
        seen = hygiene.look(self.arms.hygiene, service)
        entry.setdefault("hygiene", {})[moment] = seen.model_dump(mode="json")
        if seen.others:
            stop = f" (systemctl stop {' '.join(seen.active_units)})" if seen.active_units else ""
            raise RefusedError(
                f"{'; '.join(seen.others)}: a gate needs the node to itself, from before the first "
                f"wave until after the last{stop}"
            )

    async def _describe(
        self, client: Client, service: services.Service, entry: dict, who: identity.Identity
    ) -> None:
        """Version, configuration and KV capacity as the ready service states them."""
        status, text = await client.get("/version")
        entry["version"] = text if status == 200 else None
        if status == 200:
            identity.from_version(who, text)
        snapshot = await client.snapshot()
        entry["cache_config"] = snapshot.info if snapshot else {}
        log = service.log_text()
        found = servicelog.facts(log) if log is not None else None
        if found is not None:
            identity.from_log(who, found)
        capacity, source = None, ""
        if found and found.kv_tokens:
            capacity, source = found.kv_tokens, "the service's log"
            if found.max_concurrency:
                # The concurrency line is right for hybrids, where the token line understates.
                limit = self.profile.service.max_model_len
                capacity = max(capacity, int(found.max_concurrency * limit))
        elif {"num_gpu_blocks", "block_size"} <= entry["cache_config"].keys():
            info = entry["cache_config"]
            try:
                capacity = int(info["num_gpu_blocks"]) * int(info["block_size"])
                source = "vllm:cache_config_info"
            except ValueError:
                capacity = None
        entry["kv_capacity_tokens"] = capacity
        kv.refuse_impossible(self.profile, capacity, source)

    # ---------------------------------------------------------------- measurements

    async def _measure(
        self,
        arm: str,
        number: int,
        base: str,
        service: services.Service,
        client: Client,
        todo: list[str],
    ) -> None:
        tokenise = prompts.service_tokeniser(client)
        for spec in self.profile.waves:
            warmups, repeats = self.profile.counts(spec, arm)
            if spec.name not in todo:
                self.reporter.done(steps=warmups + repeats)
                continue
            fixture = await self._fixture(
                f"wave-{spec.name}", lambda spec=spec: prompts.wave_prompts(tokenise, spec)
            )
            requests = prompts.wave_requests(fixture, spec, self.profile)
            sent = (arm, number, base, service, client, spec, requests, fixture["sha256"])
            for _ in range(warmups):
                await self._wave(*sent, "warmup")
            have = len(self._valid(base, spec.name))
            extras = self.profile.limits.max_extra_repeats
            while have < repeats:
                record = await self._wave(*sent, "measured")
                if not record.invalid:
                    have += 1
                elif extras == 0:
                    self.reporter.note(
                        f"{arm} start {number}: {spec.name} has {have} of {repeats} valid "
                        "repeats; giving up on it"
                    )
                    break
                else:
                    extras -= 1
        if arm not in PAIR:
            return
        for part, key in quality_parts(self.profile).items():
            if part in todo:
                await self._quality(arm, number, base, service, client, part, key)
        if "logits" in todo:
            await self._logits(arm, number, base, service, client)
        if self.profile.rolling:
            fixture = await self._fixture(
                "rolling", lambda: rolling.fixture(tokenise, self.profile.rolling)
            )
            for rate in fixture["traces"]:
                if f"rate-{rate}" in todo:
                    requests = rolling.requests(fixture, rate, self.profile)
                    await self._record(
                        arm,
                        number,
                        base,
                        service,
                        client,
                        f"rate-{rate}",
                        "rolling",
                        requests,
                        fixture["sha256"],
                    )

    async def _fixture(self, name: str, make: Callable) -> dict:
        """A stored fixture, or a new one made with this service's tokenizer."""
        relative = f"fixtures/{name}.json"
        stored = self.store.read_json(relative)
        if stored is not None:
            return prompts.unseal(stored, str(self.store.root / relative))
        made = await make()
        self.store.write_json(relative, made)
        return made

    async def _wave(
        self,
        arm: str,
        number: int,
        base: str,
        service: services.Service,
        client: Client,
        spec: WaveSpec,
        requests: Sequence[Request],
        fixture: str,
        kind: str,
    ) -> WaveRecord:
        return await self._record(
            arm, number, base, service, client, spec.name, kind, requests, fixture
        )

    async def _record(
        self,
        arm: str,
        number: int,
        base: str,
        service: services.Service,
        client: Client,
        wave: str,
        kind: str,
        requests: Sequence[Request],
        fixture: str | None,
    ) -> WaveRecord:
        """Send one set of requests and write its record, whatever happens."""
        repeat = 1 + len(list((self.store.root / base / "waves").glob(f"{wave}-{kind}-*.json")))
        name = f"{wave}-{kind}-{repeat}"
        expected = sum(request.max_tokens for request in requests)
        self.reporter.step(f"{arm} start {number}: {wave} {kind} {repeat}", expected)
        before = await client.snapshot()
        log_from = service.log_size()
        record = WaveRecord(
            arm=arm,
            start=number,
            service_start_id=service.start_id,
            wave=wave,
            kind=kind,
            repeat=repeat,
            concurrency=len(requests),
            wall_started=self.wall(),
            wall_seconds=0.0,
            monotonic_seconds=0.0,
            requests=[],
            fixture_sha256=fixture,
        )
        began = self.monotonic()
        watch = asyncio.create_task(self._sample(client, service, record))
        interrupted: BaseException | None = None
        try:
            record.requests = await client.send(
                requests, f"{arm}{number}-{name}", self.reporter.count
            )
        except asyncio.CancelledError as error:
            record.requests = client.rescue()
            record.invalid.append("the gate was interrupted")
            interrupted = error
        finally:
            watch.cancel()
        record.monotonic_seconds = self.monotonic() - began
        record.wall_seconds = self.wall() - record.wall_started
        if interrupted is None:
            await self._look(service, record)
            ok = sum(trace.status == "ok" for trace in record.requests)
            after = await client.settle(before, ok) if before else None
            if before and after:
                record.counters = counters.delta(before, after)
                self.store.write_gzip(f"{base}/metrics/{name}-before.prom.gz", before.raw)
                self.store.write_gzip(f"{base}/metrics/{name}-after.prom.gz", after.raw)
        text = service.log_text()
        if text is not None and log_from is not None:
            record.log_range = (log_from, len(text))
            record.compile_events = servicelog.compile_lines(text[log_from:].splitlines())
        judge_wave(record, self.profile.limits)
        self.recorded += 1
        self.store.write_json(f"{base}/waves/{name}.json", record)
        self.reporter.done(f"{arm} start {number}: {describe(record)}")
        if interrupted is not None:
            raise interrupted
        await self._raise_if_dead(arm, service, client, record, base, name)
        return record

    async def _look(self, service: services.Service, record: WaveRecord) -> None:
        """Who else is there, into the wave's record; nothing where the arms file asks for none."""
        if hygiene.asked(self.arms.hygiene):
            seen = await asyncio.to_thread(hygiene.look, self.arms.hygiene, service)
            record.looks.append(seen)

    async def _sample(self, client: Client, service: services.Service, record: WaveRecord) -> None:
        """Gauges, clocks and foreign users while the wave runs, once a second."""
        while True:
            await asyncio.sleep(1.0)
            snapshot = await client.snapshot()
            if snapshot is not None:
                for gauge, name in (
                    ("vllm:kv_cache_usage_perc", "kv_usage_peak"),
                    ("vllm:num_requests_running", "running_peak"),
                ):
                    value = snapshot.gauges.get(gauge)
                    if value is not None:
                        setattr(record, name, max(getattr(record, name) or 0.0, value))
            rows = await asyncio.to_thread(gpu.sample)
            if rows:
                record.gpu += rows
            await self._look(service, record)

    async def _raise_if_dead(
        self,
        arm: str,
        service: services.Service,
        client: Client,
        record: WaveRecord,
        base: str,
        name: str,
    ) -> None:
        broken = [trace for trace in record.requests if trace.status == "disconnected"]
        if not broken:
            return
        for _ in range(10):
            if service.dead() or not await client.healthy():
                break
            await asyncio.sleep(0.1)
        else:
            return
        flights = ", ".join(
            f"{trace.request_id} ({len(trace.token_ids)} of {trace.max_tokens} tokens)"
            for trace in broken
        )
        raise ServiceError(
            f"arm {arm}: the service died during {name} ({service.dead() or 'it does not answer'})."
            f"\n  in flight: {flights}\n  what was received is in {base}/waves/{name}.json"
            + service.hints()
        )

    # ---------------------------------------------------------------- quality and logits

    async def _quality(
        self,
        arm: str,
        number: int,
        base: str,
        service: services.Service,
        client: Client,
        part: str,
        key: str,
    ) -> None:
        spec = self.profile.retrieval
        self.reporter.step(f"building {part} prompts")
        fixture = await self._fixture("retrieval", lambda: prompts.retrieval_fixture(client, spec))
        greedy = self.profile.sampling.model_copy(update={"temperature": 0.0})
        requests = [
            Request(item["prompt"], spec.max_output_tokens, spec.seed + index, forced=False)
            for index, item in enumerate(fixture[key])
        ]
        await self._with_sampling(
            client,
            greedy,
            self._record(
                arm,
                number,
                base,
                service,
                client,
                part,
                "quality",
                requests,
                fixture["sha256"],
            ),
        )

    async def _logits(
        self, arm: str, number: int, base: str, service: services.Service, client: Client
    ) -> None:
        spec = self.profile.logits
        tokenise = prompts.service_tokeniser(client)
        fixture = await self._fixture("logits", lambda: prompts.logits_fixture(tokenise, spec))
        greedy = self.profile.sampling.model_copy(update={"temperature": 0.0})
        requests = [
            Request(fixture["tokens"][:cut], spec.steps, 1, logprobs=spec.top)
            for cut in fixture["cuts"]
        ]
        await self._with_sampling(
            client,
            greedy,
            self._record(
                arm,
                number,
                base,
                service,
                client,
                "logits",
                "logits",
                requests,
                fixture["sha256"],
            ),
        )

    @staticmethod
    async def _with_sampling(client: Client, sampling: Sampling, work) -> None:
        kept, client.sampling = client.sampling, sampling
        try:
            await work
        finally:
            client.sampling = kept


def judge_wave(record: WaveRecord, limits: Limits) -> None:
    """List why a wave may not be averaged in; note what a reader should know."""
    bad = [trace for trace in record.requests if trace.status != "ok"]
    for trace in bad:
        record.invalid.append(f"{trace.request_id}: {trace.status}: {trace.error}")
    skew = metrics.admission_skew(record.requests)
    together = record.kind in ("warmup", "measured")
    if together and skew is not None and skew > limits.admission_skew_s:
        record.invalid.append(
            f"admitted over {skew:.3f} s, the limit is {limits.admission_skew_s} s"
        )
    if record.counters.reset:
        record.invalid.append(f"counters went backwards: {', '.join(record.counters.reset)}")
    late = [t for t in record.requests if t.sent_at and t.sent_at - t.due_at > limits.late_s]
    if record.kind == "rolling" and late:
        behind = max(trace.sent_at - trace.due_at for trace in late)
        record.invalid.append(
            f"{len(late)} requests were sent late, by up to {behind:.3f} s (limit "
            f"{limits.late_s} s): the client could not keep up with the trace"
        )
    finished = record.counters.finished_requests
    if finished is not None and finished > len(record.requests):
        record.invalid.append(
            f"the service finished {finished:.0f} requests, the gate sent {len(record.requests)}: "
            "somebody else uses it"
        )
    others = next((seen.others for seen in record.looks if seen.others), None)
    if others:
        record.invalid.append(f"somebody else was on the node: {'; '.join(others)}")
    if record.kind == "measured" and record.compile_events:
        record.invalid.append(f"the service compiled something: {record.compile_events[0]}")
    drift = record.wall_seconds - record.monotonic_seconds
    if abs(drift) > limits.clock_jump_s:
        record.notes.append(
            f"the wall clock jumped by {drift:+.1f} s during the wave; durations come from the "
            "monotonic clock and are not touched"
        )


def describe(record: WaveRecord) -> str:
    """One line about a finished wave, for the progress display."""
    name = f"{record.wave} {record.kind} {record.repeat}"
    if record.invalid:
        return f"{name}: NOT COUNTED: {record.invalid[0]}"
    parts = [name + ":"]
    window = metrics.all_live(record.requests)
    if window is not None and record.kind in ("warmup", "measured"):
        parts.append(f"{window.tokens_per_s:.1f} tok/s")
    first = sorted(filter(None, (metrics.ttft(trace) for trace in record.requests)))
    if first:
        parts.append(f"TTFT {first[len(first) // 2]:.3f} s")
    accepted = metrics.acceptance(record.counters)
    if accepted is not None:
        parts.append(f"acceptance {accepted:.1%}")
    return " ".join([*parts, *record.notes])
