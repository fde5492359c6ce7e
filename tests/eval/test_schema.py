"""Profiles, arms and waivers: errors name the file and the field."""

from __future__ import annotations

import copy
import datetime as dt
from pathlib import Path

import pytest
import yaml
from support import EVAL, profile
from v100_gate import checks, kv, waivers
from v100_gate.errors import ProfileError, RefusedError
from v100_gate.schema import Arms, Profile, read_yaml

SHIPPED = sorted((EVAL / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profiles_are_valid_and_possible(path: Path) -> None:
    plan = read_yaml(path, Profile)
    assert plan.name == path.stem
    kv.refuse_impossible(plan, plan.service.kv_budget_tokens, "kv_budget_tokens")


def test_reference_profile_is_the_references_gate() -> None:
    plan = read_yaml(EVAL / "profiles" / "reference-32k.yaml", Profile)
    assert [(w.concurrency, w.lengths[0], w.output_tokens) for w in plan.waves] == [
        (1, 32768, 256),
        (4, 32768, 256),
        (8, 32768, 256),
    ]
    assert all((w.warmups, w.repeats) == (1, 3) for w in plan.waves)
    assert (plan.sampling.temperature, plan.sampling.top_p, plan.sampling.top_k) == (0.7, 0.8, 20)
    assert (plan.service.tensor_parallel, plan.service.max_model_len) == (4, 262144)
    assert {"no-spec", "shallow"} <= set(plan.schedule.controls)


def damaged(change) -> dict:
    fields = yaml.safe_load((EVAL / "profiles" / "reference-32k.yaml").read_text())
    fields = copy.deepcopy(fields)
    change(fields)
    return fields


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda p: p["waves"][1].update(repeats=0), "waves.1.repeats", "greater than 0"),
        (lambda p: p["waves"][0].update(repeat=3), "waves.0.repeat", "Extra inputs"),
        (lambda p: p.pop("service"), "service", "required"),
        (lambda p: p["checks"].update(speeed={}), "checks", "unknown check 'speeed'"),
        (
            lambda p: p["checks"]["ttft"].update(margin=1.5),
            "checks.ttft.margin",
            "less than 1",
        ),
        (lambda p: p["sampling"].update(temperature=-1), "sampling.temperature", "greater than"),
        (
            lambda p: p["waves"][1].update(input_tokens=[1, 2]),
            "waves.1",
            "lists 2 lengths for concurrency 4",
        ),
        (
            lambda p: p["waves"][0].update(input_tokens=262_100, shared_prefix_tokens=0),
            "(top level)",
            "262100 + 256 = 262356 tokens",
        ),
        (lambda p: p["waves"][1].update(name="C1"), "(top level)", "same name"),
        (
            lambda p: p["waves"][0].update(shared_prefix_tokens=40_000),
            "waves.0",
            "longer than the shortest request",
        ),
        (
            lambda p: [c.update(required=False) for c in p["checks"].values()],
            "checks",
            "could not fail",
        ),
    ],
)
def test_a_wrong_profile_names_its_field(tmp_path: Path, change, field: str, words: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(damaged(change)))
    with pytest.raises(ProfileError) as caught:
        read_yaml(path, Profile)
    assert str(path) in str(caught.value)
    assert f"  {field}: " in str(caught.value)
    assert words in str(caught.value)


def test_broken_yaml_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(ProfileError, match="no such file"):
        read_yaml(path, Profile)
    path.write_text("a: [")
    with pytest.raises(ProfileError, match="not valid YAML"):
        read_yaml(path, Profile)
    path.write_text("checks: {a: {}}\nname: x\nchecks: {}\n")
    with pytest.raises(ProfileError, match="line 3: 'checks' stands here a second time"):
        read_yaml(path, Profile)


def test_what_is_no_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="a folder; name the YAML files in it"):
        read_yaml(tmp_path, Profile)
    path = tmp_path / "x.yaml"
    for content, words in (
        (b"\x7fELF\xff\x00", "byte 4 is not UTF-8"),
        (b"name: \x00", "not valid YAML"),
        (b"date: 2026-13-01", "not valid YAML: month must be in 1..12"),
        (b"text alone", "expected a mapping"),
    ):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=words):
            read_yaml(path, Profile)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_of_the_shipped_profiles_only_the_nodes_fits_a_url(path: Path) -> None:
    """It is the one that a refusal of the others names."""
    lacking = checks.beyond_a_url(read_yaml(path, Profile))
    assert (not lacking) == (path.stem == "node")


def test_routes_of_several_ranks_need_a_log() -> None:
    for ranks, lacking in ((1, {}), (2, {"routes": "the service's log"})):
        service = {"max_model_len": 8192, "tensor_parallel": ranks}
        plan = profile(service=service, routes=["long"], checks={"routes": {}})
        assert checks.beyond_a_url(plan) == lacking


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://host", "http://", "//host:1", "http://h:99999", "http://h/v1/", ""]
)
def test_an_arm_needs_an_address(url: str) -> None:
    arm = {"kind": "url", "url": url, "model": "m"}
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Arms.model_validate({"schema": 1, "arms": {"candidate": arm}})


@pytest.mark.parametrize("url", ["http://host:8000", "https://host/prefix", "http://[::1]:8000/"])
def test_a_good_address_is_kept_as_it_is(url: str) -> None:
    arm = {"kind": "url", "url": url, "model": "m"}
    site = Arms.model_validate({"schema": 1, "arms": {"candidate": arm}})
    assert site.arms["candidate"].url == url


def test_an_impossible_kv_demand_is_refused_with_the_arithmetic() -> None:
    plan = profile(
        service={"max_model_len": 262144, "page_size": 3296, "draft_tokens": 7},
        waves=[{"name": "C16", "concurrency": 16, "input_tokens": 250_000, "output_tokens": 256}],
    )
    # ceil((250000 + 256 + 7) / 3296) = 76 pages; 16 x 76 x 3296 = 4007936
    with pytest.raises(RefusedError) as caught:
        kv.refuse_impossible(plan, 1_009_312, "the service's log")
    for words in ("16 x 76 pages of 3296", "= 4007936 tokens", "holds 1009312", "service's log"):
        assert words in str(caught.value)


def test_a_wave_that_the_scheduler_cannot_run_at_once_is_refused_with_the_arithmetic() -> None:
    """Whatever the KV cache holds: the rest of the wave would queue."""
    plan = profile(service={"max_model_len": 8192, "max_num_seqs": 4})
    kv.refuse_impossible(plan, None, "nobody")
    plan = profile(service={"max_model_len": 8192, "max_num_seqs": 3})
    with pytest.raises(RefusedError) as caught:
        kv.refuse_impossible(plan, None, "nobody")
    for words in ("wave C4", "sends 4 requests, the service runs 3", "so 1 would queue"):
        assert words in str(caught.value)


def test_a_shared_prefix_is_counted_once() -> None:
    plan = profile()
    spec = plan.waves[1]
    # 128 shared; each of 4 has ceil((256 - 128 + 32 + 7) / 16) = 11 pages of 16.
    assert kv.demand_tokens(spec, plan.service) == 128 + 4 * 11 * 16
    alone = plan.service.model_copy(update={"prefix_caching": False})
    assert kv.demand_tokens(spec, alone) == 4 * 19 * 16


def test_arms_need_a_candidate() -> None:
    with pytest.raises(ValueError, match="candidate"):
        Arms.model_validate(
            {"schema": 1, "arms": {"control": {"kind": "url", "url": "http://x", "model": "m"}}}
        )


TODAY = dt.date(2026, 11, 30)
WAIVER = {
    "profile": "test",
    "check": "complete",
    "reason": "the second start is missing on this node",
    "owner": "release owner",
    "date": dt.date(2026, 11, 1),
    "expires": dt.date(2026, 12, 31),
}


def waiver_file(tmp_path: Path, *changes: dict) -> Path:
    path = tmp_path / "waivers.yaml"
    path.write_text(
        yaml.safe_dump({"schema": 1, "waivers": [WAIVER | change for change in changes]})
    )
    return path


def test_a_good_waiver_is_read(tmp_path: Path) -> None:
    found = waivers.load(waiver_file(tmp_path, {}, {"profile": "other"}), profile(), TODAY)
    assert list(found) == ["complete"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expires": dt.date(2026, 11, 29)}, "expired on 2026-11-29"),
        ({"check": "no-such-check"}, "which no profile checks"),
        ({"check": "ttft"}, "which profile test does not check"),
        ({"date": dt.date(2026, 12, 5)}, "is dated 2026-12-05"),
        ({"expires": dt.date(2026, 10, 1)}, "is not after date"),
        ({"expires": dt.date(2027, 11, 1)}, "longer than 180 days"),
        ({"reason": "because"}, "waivers.0.reason"),
    ],
)
def test_a_wrong_waiver_is_an_error(tmp_path: Path, change: dict, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        waivers.load(waiver_file(tmp_path, change), profile(), TODAY)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"expires": dt.date(2026, 11, 29)}], "of profile other expired on 2026-11-29"),
        ([{"date": dt.date(2026, 12, 5)}], "of profile other is dated 2026-12-05"),
        ([{}, {}], "two waivers for complete of other"),
    ],
    ids=["expired", "dated in the future", "doubled"],
)
def test_a_wrong_waiver_of_another_profile_is_an_error_too(
    tmp_path: Path, entries: list[dict], words: str
) -> None:
    path = waiver_file(tmp_path, *({"profile": "other"} | entry for entry in entries))
    with pytest.raises(ProfileError, match=words):
        waivers.load(path, profile(), TODAY)


def test_a_waiver_for_a_misspelt_profile_is_an_error(tmp_path: Path) -> None:
    path = waiver_file(tmp_path, {"profile": "refrence-32k"})
    with pytest.raises(ProfileError, match="of profile refrence-32k: there is no such profile"):
        waivers.load(path, profile(), TODAY, waivers.shipped_profiles())
    named = waiver_file(tmp_path, {"profile": "reference-32k"}, {})
    assert list(waivers.load(named, profile(), TODAY, waivers.shipped_profiles())) == ["complete"]


def test_two_waivers_for_a_check_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="two waivers"):
        waivers.load(waiver_file(tmp_path, {}, {}), profile(), TODAY)
