"""Shape of the files a person writes: profiles, arms and waivers (pydantic models).

An unknown or wrong field is an error that names the file and the field: a misspelt
`requierd: true` that silently fell back to a default would make a gate pass by accident.
Units are in the names: `_s` seconds, `_tokens` tokens, `_gib` GiB, `_points` percentage points.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from v100_gate.errors import ProfileError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
Model = TypeVar("Model", bound=BaseModel)
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(gt=0)]


def _web_address(text: str) -> str:
    """`http://HOST:PORT`, the part before /v1; `{port}` may stand for a free port."""
    fault = "write the service's address as http://HOST:PORT"
    try:
        parts = urlsplit(text.replace("{port}", "8000"))
        parts.port  # noqa: B018 - raises for a port that is none
    except ValueError as error:
        raise ValueError(f"{fault} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(fault)
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{fault}, without /v1 and what comes after it")
    return text


Url = Annotated[str, AfterValidator(_web_address)]

PAIR = ("control", "candidate")
"""The two arms that are compared; every other arm is a further control."""


class Strict(BaseModel):
    """Base of all models: unknown fields are errors, NaN and infinity too."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ServiceContract(Strict):
    """What the service under test must be configured as; used for arithmetic, not to start it.

    `kv_budget_tokens` is the KV capacity a profile's author counts on. At run time the capacity
    that the service reports replaces it.
    """

    max_model_len: Positive
    max_num_seqs: Positive = 16
    max_num_batched_tokens: Positive = 8192
    tensor_parallel: Positive = 1
    page_size: Positive = 16
    draft_tokens: Annotated[int, Field(ge=0)] = 0
    prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_budget_tokens: Positive | None = None


class Sampling(Strict):
    """Every sampling field is sent, so a model's generation_config cannot change a gate."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    top_k: int = 20
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 20260927
    """Request i of a wave is sent `seed + i`: the same in every repeat, start and arm."""


class WaveSpec(Strict):
    """One cell: `concurrency` requests admitted together, none later.

    `input_tokens` is one length for all or one per request (a ragged wave). Every request shares
    the first `shared_prefix_tokens` and has a suffix of its own.
    """

    name: Name
    concurrency: Positive
    input_tokens: Positive | list[Positive]
    output_tokens: Positive
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    warmups: Annotated[int, Field(ge=0)] = 1
    repeats: Positive = 3

    @property
    def lengths(self) -> list[int]:
        """Input length of each request, in request order, tokens."""
        if isinstance(self.input_tokens, list):
            return self.input_tokens
        return [self.input_tokens] * self.concurrency

    @model_validator(mode="after")
    def _lengths_fit(self) -> WaveSpec:
        if isinstance(self.input_tokens, list) and len(self.input_tokens) != self.concurrency:
            raise ValueError(
                f"wave {self.name}: input_tokens lists {len(self.input_tokens)} lengths for "
                f"concurrency {self.concurrency}; give one per request"
            )
        if self.shared_prefix_tokens > min(self.lengths):
            raise ValueError(
                f"wave {self.name}: shared_prefix_tokens {self.shared_prefix_tokens} is longer "
                f"than the shortest request, {min(self.lengths)}"
            )
        return self


class RetrievalSpec(Strict):
    """Long-document question answering with natural end of text."""

    requests: Positive = 8
    input_tokens: Positive = 31_692
    max_output_tokens: Positive = 256
    needle_lengths: list[Positive] = []
    needle_depths: Annotated[list[Annotated[float, Field(ge=0.0, le=1.0)]], Field(min_length=1)] = [
        0.1,
        0.5,
        0.9,
    ]
    seed: int = 7


class LogitsSpec(Strict):
    """Teacher-forced positions: the same context in both arms, top log-probabilities compared."""

    input_tokens: Positive = 32_768
    positions: Positive = 8
    steps: Positive = 8
    top: Annotated[int, Field(gt=0, le=20)] = 20
    max_abs: Annotated[float, Field(gt=0.0)] = 0.05
    kl: Annotated[float, Field(gt=0.0)] = 0.001


class RollingSpec(Strict):
    """Poisson arrivals with mixed lengths; goodput counts requests inside both limits."""

    rates_per_s: Annotated[list[Annotated[float, Field(gt=0.0)]], Field(min_length=1)]
    requests: Positive
    input_tokens: Annotated[list[Positive], Field(min_length=1)]
    output_tokens: Annotated[list[Positive], Field(min_length=1)]
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    ttft_limit_s: Annotated[float, Field(gt=0.0)]
    tpot_limit_s: Annotated[float, Field(gt=0.0)]
    seed: int = 11


class Schedule(Strict):
    """Order of service starts. ABBA: control, candidate, candidate, control."""

    order: Literal["ABBA", "interleaved"] = "ABBA"
    starts_per_arm: Positive = 2
    controls: list[Name] = []
    """Further arms measured once each, after the pair: `no-spec`, `shallow`, ..."""
    control_repeats: Positive | None = None
    """Measured repeats of each wave in those arms; None: as many as in the pair."""
    control_warmups: Annotated[int, Field(ge=0)] | None = None


class Limits(Strict):
    """When a measurement stops being one."""

    admission_skew_s: Annotated[float, Field(gt=0.0)] = 0.25
    late_s: Annotated[float, Field(gt=0.0)] = 0.5
    """Rolling arrivals: how much later than due a request may be sent."""
    stall_s: Annotated[float, Field(gt=0.0)] = 120.0
    request_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    ready_timeout_s: Annotated[float, Field(gt=0.0)] = 1200.0
    stop_timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    clock_jump_s: Annotated[float, Field(gt=0.0)] = 1.0
    max_extra_repeats: Annotated[int, Field(ge=0)] = 3
    free_disk_mib: Positive = 512


class CheckPolicy(Strict):
    """How one check counts. `required: false` is shown and never decides."""

    required: bool = True
    margin: Fraction | None = None
    """Largest relative loss that still passes (throughput 0.03 = 3 % slower)."""
    margin_points: Annotated[float, Field(ge=0.0)] | None = None
    """Largest loss in percentage points (acceptance)."""
    margin_gib: Annotated[float, Field(ge=0.0)] | None = None
    note: str | None = None


class Profile(Strict):
    """One gate: what is sent, how often, and what must hold."""

    schema_version: Literal[1] = Field(alias="schema")
    name: Name
    description: str
    service: ServiceContract
    sampling: Sampling = Sampling()
    schedule: Schedule = Schedule()
    limits: Limits = Limits()
    waves: list[WaveSpec] = []
    retrieval: RetrievalSpec | None = None
    logits: LogitsSpec | None = None
    rolling: RollingSpec | None = None
    routes: list[str] = []
    """Routes that every rank of the candidate must have launched: "long", or "long/bounded" for
    launches from a context-bounded graph."""
    checks: dict[str, CheckPolicy]

    @field_validator("checks")
    @classmethod
    def _known_checks(cls, checks: dict[str, CheckPolicy]) -> dict[str, CheckPolicy]:
        from v100_gate.checks import CHECKS

        unknown = sorted(set(checks) - set(CHECKS))
        if unknown:
            raise ValueError(f"unknown check {unknown[0]!r}; known: {', '.join(sorted(CHECKS))}")
        if not any(policy.required for policy in checks.values()):
            raise ValueError("no check is required: such a gate could not fail")
        return checks

    def counts(self, spec: WaveSpec, arm: str) -> tuple[int, int]:
        """(warm-ups, measured repeats) of a wave in one start of an arm."""
        warmups, repeats = spec.warmups, spec.repeats
        if arm not in PAIR:
            if self.schedule.control_warmups is not None:
                warmups = self.schedule.control_warmups
            if self.schedule.control_repeats is not None:
                repeats = self.schedule.control_repeats
        return warmups, repeats

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        names = [wave.name for wave in self.waves]
        if len(set(names)) != len(names):
            raise ValueError("waves: two waves have the same name")
        for wave in self.waves:
            longest = max(wave.lengths) + wave.output_tokens
            if longest > self.service.max_model_len:
                raise ValueError(
                    f"waves: {wave.name} asks for {max(wave.lengths)} + {wave.output_tokens} = "
                    f"{longest} tokens, service.max_model_len is {self.service.max_model_len}"
                )
        return self


class ProcessArm(Strict):
    """A service the gate starts itself. `{port}` in `command` and `url` is a free port."""

    kind: Literal["process"]
    command: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}
    """Added to PATH, HOME, LANG and TMPDIR of the gate; nothing else is inherited."""
    url: Url = "http://127.0.0.1:{port}"
    model: str
    title: str = ""
    manifest: Path | None = None
    tree: Path | None = None
    """Folder of the served `vllm` package; its files are hashed against the manifest."""
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    api_key_file: Path | None = None
    """File that holds the service's API key; the key itself is never stored."""


class SystemdArm(Strict):
    """A unit on this node; started, stopped and read (journal) through systemctl."""

    kind: Literal["systemd"]
    unit: str
    url: Url
    model: str
    title: str = ""
    manifest: Path | None = None
    tree: Path | None = None
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    api_key_file: Path | None = None


class UrlArm(Strict):
    """A service that is already up. It cannot be started afresh, and its log may be missing."""

    kind: Literal["url"]
    url: Url
    model: str
    title: str = ""
    log: Path | None = None
    manifest: Path | None = None
    tree: Path | None = None
    draft_tokens: Annotated[int, Field(ge=0)] | None = None
    api_key_file: Path | None = None


Arm = Annotated[ProcessArm | SystemdArm | UrlArm, Field(discriminator="kind")]


class Hygiene(Strict):
    """What must be quiet before, during and after a gate."""

    stopped_units: list[str] = []
    gpu: bool = True
    """Refuse when a process outside the arms uses a GPU. False, or a node without nvidia-smi:
    nobody looks, and the check `hygiene` is not-run."""


MemoryCheck = Literal["kv-budget", "graph-pool", "idle-memory"]


class Attribution(Strict):
    """A memory difference explained by a person: what allocated it, and how much per GPU."""

    what: str
    gib: Annotated[float, Field(gt=0.0)]
    checks: Annotated[list[MemoryCheck], Field(min_length=1)] = [
        "kv-budget",
        "graph-pool",
        "idle-memory",
    ]
    """Where it shows: memory taken before the cache is sized is missing from the KV budget, a
    captured graph's is in the graph pool, and all of it is in use on an idle service."""


class Arms(Strict):
    """Site file: how each arm of a profile is reached here."""

    schema_version: Literal[1] = Field(alias="schema")
    arms: dict[Name, Arm]
    hygiene: Hygiene = Hygiene()
    memory_attribution: list[Attribution] = []

    @field_validator("arms")
    @classmethod
    def _has_candidate(cls, arms: dict[str, Arm]) -> dict[str, Arm]:
        if "candidate" not in arms:
            raise ValueError("there must be an arm named 'candidate'")
        return arms


MAY_CHANGE = {"title", "api_key_file"}
"""Fields of an arm that say nothing about what is served."""


def changed_arms(old: Arms, new: Arms) -> list[str]:
    """What differs in two arms files although a run must not mix it, e.g. "candidate: env".

    A title, the file of an API key and a memory attribution may change: a person adds the last
    when the gate has found a difference.
    """
    changes = sorted(f"{name}: added" for name in new.arms.keys() - old.arms.keys())
    for name, arm in old.arms.items():
        if name not in new.arms:
            changes.append(f"{name}: missing")
            continue
        one = arm.model_dump(mode="json", exclude=MAY_CHANGE)
        other = new.arms[name].model_dump(mode="json", exclude=MAY_CHANGE)
        fields = [key for key in one | other if one.get(key) != other.get(key)]
        if fields:
            changes.append(f"{name}: {', '.join(fields)}")
    if old.hygiene != new.hygiene:
        changes.append("hygiene")
    return changes


class Waiver(Strict):
    """One failed or missing check that a person accepts, for a time."""

    profile: Name
    check: Name
    reason: Annotated[str, Field(min_length=10)]
    owner: Annotated[str, Field(min_length=3)]
    """A role (for example "release owner"), not a person's name."""
    date: dt.date
    expires: dt.date
    statuses: list[Literal["fail", "inconclusive", "not-run"]] = ["fail", "inconclusive", "not-run"]

    @model_validator(mode="after")
    def _dates(self) -> Waiver:
        if self.expires <= self.date:
            raise ValueError(f"waiver for {self.check}: expires {self.expires} is not after date")
        if (self.expires - self.date).days > 180:
            raise ValueError(f"waiver for {self.check}: longer than 180 days; renew it instead")
        return self


class WaiverFile(Strict):
    """The reviewed list of waivers."""

    schema_version: Literal[1] = Field(alias="schema")
    waivers: list[Waiver] = []


def explain(error: ValidationError) -> str:
    """One line per fault, each with the field's path in the file, e.g. `waves.1.repeats`."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "(top level)"
        got = item.get("input")
        shown = "" if isinstance(got, dict | list) or got is None else f" (got {got!r})"
        lines.append(f"  {where}: {item['msg']}{shown}")
    return "\n".join(lines)


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key may stand only once: the second would silently win."""


def _mapping(loader: UniqueKeys, node: yaml.MappingNode, deep: bool = False) -> dict:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            mark = node.value[place][0].start_mark
            raise yaml.YAMLError(f"line {mark.line + 1}: {key!r} stands here a second time")
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read a YAML file into `model`.

    Raises: ProfileError naming the file and every wrong field.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ProfileError(f"{path}: a folder; name the YAML files in it") from None
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{path}: not a text file (byte {error.start} is not UTF-8); name a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # a date like 2026-13-01 is a ValueError
        raise ProfileError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: expected a mapping at the top level")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{path}: {model.__name__} is wrong:\n{explain(error)}") from None
