"""Serving profiles: schema, the page that vLLM 0.19.1 chooses, refusals with their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from v100_serving import (
    CARDS_GIB,
    ImpossibleProfile,
    Profile,
    ProfileError,
    kv_pages,
    load_profile,
    plan_memory,
)
from v100_serving.__main__ import main
from v100_serving.launch import LaunchError, launch_plan

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"
CAPACITY = Path(__file__).parents[2] / "docs" / "capacity.md"
REFERENCE = PROFILES / "qwen3.8-27b-tp4.yaml"


def changed(path: Path, **changes: object) -> Profile:
    """The profile in `path` with dotted fields (`engine__dtype`) replaced; None removes one."""
    data = yaml.safe_load(path.read_text())
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        where = data
        for parent in parents:
            where = where[parent]
        if value is None:
            where.pop(last)
        else:
            where[last] = value
    return Profile.model_validate(data)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_profile_fits_its_smallest_card(path: Path) -> None:
    plan = plan_memory(load_profile(path))
    assert plan.full_contexts >= 1
    assert all(needed <= plan.blocks for _, _, needed in plan.demands)


# Pages that vLLM's own functions gave for the 27B geometry: TP, drafts, KV dtype, state dtype.
@pytest.mark.parametrize(
    ("tp", "drafts", "kv", "state", "state_bytes", "block", "page"),
    [
        (4, 7, "fp8_e4m3", "float32", 837632, 1648, 843776),
        (4, 7, "auto", "float32", 837632, 832, 851968),
        (4, 0, "fp8_e4m3", "float32", 801792, 1568, 802816),
        (4, 15, "fp8_e4m3", "float32", 878592, 1728, 884736),
        (4, 7, "fp8_e4m3", "half", 444416, 880, 450560),
        (8, 7, "fp8_e4m3", "float32", 418816, 832, 425984),
    ],
)
def test_page_is_the_one_vllm_chooses(
    tp: int, drafts: int, kv: str, state: str, state_bytes: int, block: int, page: int
) -> None:
    speculative = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    pages = kv_pages(
        changed(
            REFERENCE,
            engine__tensor_parallel=tp,
            engine__kv_cache_dtype=kv,
            engine__speculative=speculative,
            model__geometry__gdn__state_dtype=state,
        )
    )
    assert (pages.state_bytes, pages.block_tokens, pages.page_bytes) == (state_bytes, block, page)


def test_tp1_and_tp2_have_the_page_of_tp4() -> None:
    for tp in (1, 2):
        assert kv_pages(changed(REFERENCE, engine__tensor_parallel=tp)).block_tokens == 1648


def test_groups_of_the_reference_model() -> None:
    pages = kv_pages(load_profile(REFERENCE))
    assert (pages.layers_per_group, pages.attention_groups, pages.state_groups) == (17, 1, 3)
    assert pages.state_blocks_per_request == 9  # running and last state, and seven drafts
    assert pages.blocks(262144) == 160 + 3 * 9


def page_rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table in that section of docs/capacity.md."""
    section = CAPACITY.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_capacity_page_says_what_the_command_computes() -> None:
    rows = page_rows("What fits")
    shipped = {path.stem for path in PROFILES.glob("*.yaml")} - {"tiny-cpu"}
    assert {name.strip("`") for name, *_ in rows} == shipped
    for name, card, *cells in rows:
        profile = load_profile(PROFILES / f"{name.strip('`')}.yaml")
        gib = CARDS_GIB[card.strip("`")]
        try:
            plan = plan_memory(profile, gib)
        except ImpossibleProfile as error:
            weights = profile.model.weights.total_gib / profile.ranks
            limit = gib * profile.engine.gpu_memory_utilization
            said = f"impossible: weights alone are {weights:.2f} GiB of {limit:.2f}"
            assert cells == [said, "-", "-"]
            assert f"= {limit:.2f} GiB, minus weights" in str(error)
            assert weights > limit
            continue
        requests = min(plan.blocks // plan.pages.blocks(33024), profile.engine.max_num_seqs)
        assert cells == [
            f"{plan.kv_gib:.2f} GiB, {plan.blocks} blocks",
            f"{plan.full_contexts:.2f} of {profile.engine.max_model_len:,}",
            str(requests),
        ]


def test_capacity_page_has_the_reference_models_pages() -> None:
    variants = [
        {},
        {"engine__speculative": None},
        {"engine__kv_cache_dtype": "auto"},
        {"engine__tensor_parallel": 8},
    ]
    pages = [kv_pages(changed(REFERENCE, **changes)) for changes in variants]
    assert [row[1:] for row in page_rows("KV pages of a hybrid model")] == [
        [str(page.block_tokens), f"{page.page_bytes:,}"] for page in pages
    ]
    reference, full = pages[0], 16 * pages[0].blocks(262144)
    state = reference.state_groups * reference.state_blocks_per_request
    text = CAPACITY.read_text()
    for said in (
        f"state {reference.state_bytes:,} bytes",
        f"{reference.bytes_per_token} bytes per token",
        f"**{reference.block_tokens:,} tokens** = {reference.page_bytes:,} bytes",
        f"= {reference.block_bytes:,} bytes",
        f"= ceil(n / {reference.block_tokens}) + {state} blocks",
        f"the {state} blocks of state ({state * reference.block_bytes / 2**20:.0f} MiB a rank)",
        f"need {full:,} blocks, {full * reference.block_bytes / 2**30:.0f} GiB a rank",
    ):
        assert said in text


def test_block_size_can_only_enlarge_the_page() -> None:
    assert kv_pages(changed(REFERENCE, engine__block_size=3296)).page_bytes == 2 * 843776
    assert kv_pages(changed(REFERENCE, engine__block_size=16)).block_tokens == 1648


def test_small_card_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ImpossibleProfile) as refused:
        plan_memory(load_profile(REFERENCE), CARDS_GIB["v100-16gb"])
    text = str(refused.value)
    assert "15.77 x 0.8 = 12.62 GiB" in text
    assert "minus weights 52.00 over 4 ranks = 13.00" in text
    assert "187 blocks of 14344192 bytes = 2.50 GiB" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine__tensor_parallel": 5}, "24 query heads do not divide among 5 ranks"),
        ({"engine__max_model_len": 300000}, "exceeds the model's 262144 positions"),
        ({"engine__dtype": "bfloat16"}, "compute capability 7.0 serves half only"),
        ({"engine__gpu_memory_utilization": None}, "must state gpu_memory_utilization"),
        ({"engine__gpu_memory_utilization": 0.97}, "outside the limit"),
        ({"engine__max_num_batched_tokens": 1024}, "larger than max_num_batched_tokens"),
        ({"engine__block_size": 1000}, "is no multiple of 16"),
        ({"demand": [{"requests": 16, "tokens": 262144}]}, "16 x 262144 tokens need 16 x 187"),
        ({"demand": [{"requests": 17, "tokens": 100}]}, "exceeds max_num_seqs 16"),
        (
            {"engine__speculative": {"method": "ngram", "num_speculative_tokens": 7}},
            "ngram drafts corrupt GDN state",
        ),
    ],
)
def test_impossible_combination_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossibleProfile, match=reason):
        plan_memory(changed(REFERENCE, **changes))


def test_fp8_cache_on_cpu_is_refused() -> None:
    profile = changed(PROFILES / "tiny-cpu.yaml", engine__kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ImpossibleProfile, match="has none on CPU"):
        plan_memory(profile)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    return path


def test_unknown_key_names_file_and_field(tmp_path: Path) -> None:
    text = REFERENCE.read_text().replace("qwen3.8-27b-tp4", "broken")
    path = write(tmp_path, text.replace("  max_num_seqs: 16", "  max_num_seq: 16"))
    with pytest.raises(ProfileError) as error:
        load_profile(path)
    assert "engine.max_num_seqs: Field required" in str(error.value)
    assert "engine.max_num_seq: Extra inputs are not permitted" in str(error.value)
    assert str(path) in str(error.value)


def test_a_size_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    text = REFERENCE.read_text().replace("qwen3.8-27b-tp4", "broken")
    for value in (".nan", ".inf", "-1"):
        with pytest.raises(ProfileError, match=r"weights\.total_gib"):
            load_profile(write(tmp_path, text.replace("total_gib: 52.0", f"total_gib: {value}")))


def test_duplicate_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="key 'name' appears twice"):
        load_profile(write(tmp_path, "name: a\nname: b\n"))


def test_file_must_be_named_as_its_profile(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="must be the file's name 'broken'"):
        load_profile(write(tmp_path, REFERENCE.read_text()))


def test_credential_in_the_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="use LoadCredential"):
        changed(REFERENCE, engine__environment={"VLLM_API_KEY": "x"})


def test_launch_plan_of_the_reference() -> None:
    plan = launch_plan(load_profile(REFERENCE), [4, 5, 6, 7], 18000)
    arguments = plan["arguments"]
    assert plan["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--shutdown-timeout") + 1] == "120"
    assert json.loads(arguments[arguments.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "num_speculative_tokens": 7,
    }
    assert not any("key" in a for a in arguments)


@pytest.mark.parametrize("gpus", [[], [0, 1, 2], [0, 1, 2, 2]])
def test_wrong_gpu_set_is_refused(gpus: list[int]) -> None:
    with pytest.raises(LaunchError):
        launch_plan(load_profile(REFERENCE), gpus, 18000)


def test_command_line_refuses_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(REFERENCE), "--card", "v100-32gb"]) == 0
    said = capsys.readouterr().out
    assert "page           1648 tokens" in said and "card           31.74 GiB\n" in said
    assert main(["check", str(REFERENCE)]) == 0
    assert "card           31.50 GiB (the profile's min_card_gib" in capsys.readouterr().out
    assert main(["check", str(REFERENCE), "--card", "v100-16gb"]) == 1
    assert "is impossible" in capsys.readouterr().err
