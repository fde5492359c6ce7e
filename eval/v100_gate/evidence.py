"""A stored run, read back: what `verdict`, `compare` and `report` stand on. Starts nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from v100_gate import RESULT_SCHEMA, metrics
from v100_gate.errors import GateError, ProfileError
from v100_gate.schema import PAIR, Arms, Profile, changed_arms
from v100_gate.traces import WaveRecord


@dataclass
class Start:
    """One session of an arm: its waves, and the processes that served it."""

    number: int
    folder: Path
    waves: list[WaveRecord]
    processes: list[dict]

    def measured(self, wave: str, kind: str = "measured") -> list[WaveRecord]:
        """Valid records of a wave in the order they were taken."""
        return [
            record
            for record in self.waves
            if record.wave == wave and record.kind == kind and not record.invalid
        ]

    @property
    def serving(self) -> list[dict]:
        """The processes that gave counted records."""
        gave = {record.service_start_id for record in self.waves if not record.invalid}
        return [process for process in self.processes if process.get("service_start_id") in gave]

    @property
    def facts(self) -> dict | None:
        """Log facts of the last process with a log: memory, routes and backend of the instance
        that served. What must hold of every process is asked of `processes`."""
        for process in reversed(self.processes):
            if process.get("facts") is not None:
                return process["facts"]
        return None

    @property
    def identity(self) -> dict | None:
        """Hashes of what the last process served; the check `identity` asks all of them."""
        return self.processes[-1].get("identity") if self.processes else None


@dataclass
class ArmEvidence:
    """All starts of an arm."""

    name: str
    title: str
    starts: list[Start]
    drafting: bool
    config: dict = field(default_factory=dict)

    def groups(self, wave: str, figure: str) -> list[list[float]]:
        """Values of a figure of a wave: one list per start, one value per valid repeat that has
        one. `unmeasured` says how many have none."""
        return [
            [value for value in values if value is not None] for values in self._all(wave, figure)
        ]

    def unmeasured(self, wave: str, figure: str) -> int:
        """Number of valid repeats of a wave that lack a figure."""
        return sum(values.count(None) for values in self._all(wave, figure))

    def _all(self, wave: str, figure: str) -> list[list[float | None]]:
        return [
            [wave_figures(record, self.drafting)[figure] for record in start.measured(wave)]
            for start in self.starts
        ]

    def records(self, wave: str, kind: str = "measured") -> list[WaveRecord]:
        """Valid records of a wave over all starts."""
        return [record for start in self.starts for record in start.measured(wave, kind)]


@dataclass
class Evidence:
    """A run (or two arms of two runs put side by side)."""

    root: Path
    profile: Profile
    arms: dict[str, ArmEvidence]
    site: Arms
    run: dict
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def control(self) -> ArmEvidence | None:
        """The control arm, if the run has one."""
        return self.arms.get("control")

    @property
    def candidate(self) -> ArmEvidence:
        """The arm under test."""
        return self.arms["candidate"]


def median(values: list[float]) -> float | None:
    """Median of a list; None when empty."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile; None when empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


FIGURES = {
    "decode_tokens_per_s": "decode throughput, tok/s",
    "ttft_s": "TTFT (median of requests), s",
    "tpot_s": "TPOT (median of requests), s",
    "step_s": "time per decode round, s",
    "acceptance": "accepted / drafted",
    "emitted_per_round": "tokens per round",
    "prefix_hit_rate": "prefix hits / queries",
    "inter_chunk_p50_s": "inter-chunk time p50, s",
    "inter_chunk_p99_s": "inter-chunk time p99, s",
    "tokens_per_chunk": "tokens per chunk (mean)",
    "queue_s": "queue time, s",
}


def wave_figures(record: WaveRecord, drafting: bool) -> dict[str, float | None]:
    """Every figure of one wave; None where it was not measured."""
    traces, counters = record.requests, record.counters
    window = metrics.all_live(traces)
    gaps = [gap for trace in traces for gap in metrics.inter_chunk(trace)]
    sizes = [size for trace in traces for size in metrics.tokens_per_chunk(trace)]
    firsts = [value for value in map(metrics.ttft, traces) if value is not None]
    per_token = [value for value in map(metrics.tpot, traces) if value is not None]
    return {
        "decode_tokens_per_s": window.tokens_per_s if window else None,
        "ttft_s": median(firsts),
        "tpot_s": median(per_token),
        "step_s": metrics.step_time(traces, counters, drafting),
        "acceptance": metrics.acceptance(counters),
        "emitted_per_round": metrics.emitted_per_round(counters),
        "prefix_hit_rate": metrics.prefix_hit_rate(counters),
        "inter_chunk_p50_s": percentile(gaps, 0.5),
        "inter_chunk_p99_s": percentile(gaps, 0.99),
        "tokens_per_chunk": sum(sizes) / len(sizes) if sizes else None,
        "queue_s": counters.queue_seconds,
    }


def load_start(folder: Path) -> Start:
    """Read one start of an arm."""
    records = []
    for path in sorted((folder / "waves").glob("*.json")):
        try:
            records.append(WaveRecord.model_validate_json(path.read_text()))
        except ValidationError as error:
            raise GateError(f"{path}: not a wave record: {error.errors()[0]['msg']}") from None
    records.sort(key=lambda record: record.wall_started)
    start = folder / "start.json"
    processes = json.loads(start.read_text())["processes"] if start.exists() else []
    return Start(int(folder.name.removeprefix("start-")), folder, records, processes)


def load_arm(root: Path, name: str, site: Arms, profile: Profile) -> ArmEvidence:
    """Read all starts of an arm."""
    folders = sorted((root / "arms" / name).glob("start-*"), key=lambda path: path.name)
    arm = site.arms.get(name)
    drafts = profile.service.draft_tokens
    title = name
    if arm is not None:
        drafts = arm.draft_tokens if arm.draft_tokens is not None else drafts
        title = arm.title or name
    return ArmEvidence(name, title, [load_start(path) for path in folders], drafts > 0)


def load(root: Path) -> Evidence:
    """Read a run folder.

    Raises: GateError when it is not one, or was written by another version.
    """
    path = root / "run.json"
    if not path.exists():
        raise GateError(f"{root}: no run.json; name a folder that `gate run` wrote")
    run = json.loads(path.read_text())
    if run.get("schema") != RESULT_SCHEMA:
        raise GateError(
            f"{root}: result schema {run.get('schema')}, this gate reads {RESULT_SCHEMA}"
        )
    try:
        profile = Profile.model_validate(run["profile"])
        site = Arms.model_validate(run["arms"])
    except ValidationError as error:
        raise ProfileError(f"{path}: {error.errors()[0]['msg']}") from None
    arms = {name: load_arm(root, name, site, profile) for name in site.arms}
    return Evidence(root, profile, arms, site, run, {name: str(root.name) for name in arms})


def with_attribution(evidence: Evidence, site: Arms) -> Evidence:
    """The evidence with the memory attribution of an arms file that was written since.

    Raises: GateError when the file is about other arms.
    """
    changes = changed_arms(evidence.site, site)
    if changes:
        raise GateError(
            f"{evidence.root}: measured with other arms (changed: {'; '.join(changes)}); only "
            "memory_attribution, titles and key files may differ"
        )
    attribution = {"memory_attribution": site.memory_attribution}
    return replace(evidence, site=evidence.site.model_copy(update=attribution))


def prompts_of(arm: ArmEvidence) -> dict[str, set[str | None]]:
    """Wave -> hashes of the prompts that its counted records were sent."""
    found: dict[str, set[str | None]] = {}
    for start in arm.starts:
        for record in start.waves:
            if not record.invalid:
                found.setdefault(record.wave, set()).add(record.fixture_sha256)
    return found


def side_by_side(control: Evidence, control_arm: str, candidate: Evidence, arm: str) -> Evidence:
    """Two arms of two stored runs as control and candidate.

    The further controls (the token oracle, a smaller depth) come along from the control's run,
    or from the candidate's where that one has none. An arm is not its own further control.

    Raises: GateError when the runs measured different things: other profiles, or the same
        profile with prompts of another text or tokenizer.
    """
    for field_name in ("service", "waves", "sampling", "retrieval", "logits", "rolling"):
        if getattr(control.profile, field_name) != getattr(candidate.profile, field_name):
            raise GateError(
                f"{control.root} and {candidate.root} cannot be compared: their profiles differ "
                f"in `{field_name}`"
            )
    taken = {"control": (control, control_arm), "candidate": (candidate, arm)}
    for run, name in taken.values():
        if name not in run.arms or not run.arms[name].starts:
            raise GateError(
                f"{run.root}: no measurements of arm {name!r}, only of "
                f"{', '.join(other for other, found in run.arms.items() if found.starts)}"
            )
    for run in (control, candidate):
        for name, found in run.arms.items():
            itself = run.root == candidate.root and name == arm
            if name not in PAIR and found.starts and not itself:
                taken.setdefault(name, (run, name))
    # In its new place an arm goes by the name of the place.
    arms = {place: replace(run.arms[name], name=place) for place, (run, name) in taken.items()}
    ours = prompts_of(arms["candidate"])
    for place, (run, _) in taken.items():
        theirs = prompts_of(arms[place])
        for wave in sorted(theirs.keys() & ours.keys()):
            if theirs[wave] != ours[wave]:
                raise GateError(
                    f"{run.root} and {candidate.root} cannot be compared: their prompts of "
                    f"{wave} differ (another tokenizer, or another version of the text); measure "
                    "both arms in one run"
                )
    site = {place: run.site.arms[name] for place, (run, name) in taken.items()}
    return Evidence(
        candidate.root,
        candidate.profile,
        arms,
        candidate.site.model_copy(update={"arms": site}),
        candidate.run,
        {place: f"{run.root.name}:{name}" for place, (run, name) in taken.items()},
    )
