"""The server proof's verdicts on hand-made results, and what it stages from a release."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest
from server_proof import judge, verify
from server_proof.engine import prompt_of, repetitive_prompt
from server_proof.models import CONFIGS
from server_proof.scenarios import FULL_LAYERS, PARTS
from server_proof.stage import StageError, stage


def wave(tokens, top=None, lengths=(5, 9), cached=None, counted=None):
    rounds = [{"tokens": t, "top": top, "cached": cached or [0] * len(t)} for t in tokens]
    return {"lengths": list(lengths), "rounds": rounds, "counted": counted or {}}


def margins(tokens, others, gap: float):
    """Top-two lists where the own token leads the other run's by `gap`."""
    return [
        [[[x, -1.0], [y if y != x else x + 1000, -1.0 - gap]] for x, y in zip(a, b, strict=True)]
        for a, b in zip(tokens, others, strict=True)
    ]


ONE, OTHER = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]]


@pytest.mark.parametrize(("gap", "tie"), [(0.01, True), (0.1, True), (0.5, False)])
def test_a_difference_counts_unless_it_is_at_a_tie(gap: float, tie: bool) -> None:
    a = wave([ONE], margins(ONE, OTHER, gap))
    b = wave([OTHER], margins(OTHER, ONE, gap))
    same, different = judge.compare_tokens(a, b)
    assert same == {"length": 5, "same": 3, "of": 3}
    assert (different["same"], different["margins"]) == (1, [gap, gap])
    assert judge.until_ties([same, different]) is tie


def test_a_difference_without_margins_is_no_tie() -> None:
    rows = judge.compare_tokens(wave([ONE]), wave([OTHER]))
    assert rows[1]["margins"] == [None, None] and not judge.until_ties(rows)
    far = [[[[x, -1.0], [999, -2.0]] for x in row] for row in ONE]
    rows = judge.compare_tokens(wave([ONE], far), wave([OTHER], far))
    assert not judge.until_ties(rows)


def test_errors_are_mean_and_largest_distance() -> None:
    task = {"sequences": [{"engine": [-1.0, -2.0], "fp32": [-1.5, -2.0], "kv": [-1.0, -3.0]}]}
    assert judge.errors(task, "fp32") == {"mean": 0.25, "max": 0.5}
    assert judge.between(task, "fp32", "kv") == {"mean": 0.75, "max": 1.0}


def counted(long: float, drafts: float) -> dict[str, float]:
    return {
        "vllm:attention_route_launches target/long/bounded": long,
        "vllm:attention_route_launches draft/paged/eager": 5,
        "vllm:spec_decode_num_drafts": drafts,
    }


STEPS = [
    (96, 48, True),
    (98, 48, True),  # one step of a finished request, dropped
    (94, 48, False),
    (97, 48, False),
    (0, 0, False),
    (110, 48, False),
]


@pytest.mark.parametrize(("launches", "steps", "holds"), STEPS)
def test_route_counters_against_verify_steps(launches, steps, holds) -> None:
    results = {
        "x": {
            "scenario": {"kind": "hybrid"},
            "tasks": {"c1": wave([ONE], counted=counted(launches, steps))},
        }
    }
    assert judge._counted(results, "x", "c1", "bounded", "long")["holds"] is holds


def test_timings_are_medians_by_engine() -> None:
    done = {"prefill_s": [2.0, 1.0, 9.0], "decode_s": [0.5, 0.4, 0.6], "requests": 4}
    done |= {"length": 100, "max_tokens": 10}
    table = judge.timings({"a": {"tasks": {"timing": done}}, "b": {"tasks": {}}})
    assert list(table) == ["a"]
    assert table["a"]["prefill_tokens_per_s"] == 200
    assert table["a"]["decode_tokens_per_s"] == 80.0


def hybrid_results() -> dict:
    """Results that satisfy every claim of the part `hybrid`."""
    tokens = [[1, 2], [3, 4]]
    ok = wave([tokens], margins(tokens, tokens, 1.0))
    again = wave([tokens, tokens], margins(tokens, tokens, 1.0), cached=[3296, 1648])
    other = wave([[[9, 9], [8, 8]]], margins(tokens, tokens, 1.0))
    results = {}
    for scenario in PARTS["hybrid"]():
        on = "e4m3" in scenario["label"] and "sm70" in scenario["label"]
        off = scenario["label"].endswith("nolong")
        kind = "paged/ordinary" if off else "long/bounded"
        tasks = {t.get("name", t["task"]): copy.deepcopy(ok) for t in scenario["tasks"]}
        if "again" in tasks:
            tasks["again"] = again
        if "shuffled" in tasks:
            tasks["shuffled"] = other
        for name in ("c1", "repetitive"):
            if name in tasks:
                tasks[name]["counted"] = {
                    f"vllm:attention_route_launches target/{kind}": 96,
                    "vllm:spec_decode_num_drafts": 48,
                    "vllm:spec_decode_num_accepted_tokens": 7,
                }
        graphs = {"FULL": 16, "PIECEWISE": 32}
        if on and not off:
            graphs["FULL bounded 262144"] = 16
        group = {"backend": "SM70_ATTN", "block_tokens": 1648, "kernel_block_tokens": 1648}
        results[scenario["label"]] = {
            "scenario": scenario,
            "tasks": tasks,
            "facts": {"graphs": graphs, "groups": [group]},
        }
    return results


def test_a_hybrid_run_in_which_all_holds() -> None:
    claims = judge.judge_hybrid(hybrid_results())
    assert [c["claim"] for c in claims if not c["holds"]] == []
    assert len(claims) >= 10


def test_a_bounded_graph_where_none_belongs_fails_its_claim() -> None:
    results = hybrid_results()
    results["hybrid-sm70-fp16"]["facts"]["graphs"]["FULL bounded 262144"] = 16
    failed = [c["claim"] for c in judge.judge_hybrid(results) if not c["holds"]]
    assert len(failed) == 1 and "Bounded graphs" in failed[0]


def test_a_route_that_is_silently_off_fails_its_claim() -> None:
    results = hybrid_results()
    wave_one = results["hybrid-sm70-e4m3-mtp"]["tasks"]["c1"]
    wave_one["counted"] = {"vllm:spec_decode_num_drafts": 48}
    failed = [c["claim"] for c in judge.judge_hybrid(results) if not c["holds"]]
    assert failed == ["hybrid-sm70-e4m3-mtp, c1: long launches = 2 layers x verify steps"]


def test_parts_are_well_formed() -> None:
    for part, scenarios in PARTS.items():
        labels = [s["label"] for s in scenarios()]
        assert len(set(labels)) == len(labels) and part in judge.JUDGES
        assert all(s["kind"] in CONFIGS for s in scenarios())
        # A barrier that waits for engines which never come would cost its whole time.
        for task in (t for s in scenarios() for t in s["tasks"] if t["task"] == "barrier"):
            arriving = sum(any(t["task"] == "barrier" for t in s["tasks"]) for s in scenarios())
            assert task["parties"] == arriving
    assert FULL_LAYERS["dense"] == CONFIGS["dense"]()["num_hidden_layers"]
    for kind in ("hybrid", "hybrid-shallow", "hybrid-tp2"):
        layers = CONFIGS[kind]()["text_config"]["layer_types"]
        assert layers.count("full_attention") == FULL_LAYERS[kind]


def test_ranks_that_differ_fail_their_claim() -> None:
    facts = {"graphs_by_rank": [{"FULL bounded 262144": 16}] * 2}
    routes = {"target/long/bounded": 128}
    result = {
        "scenario": {"kind": "hybrid-tp2"},
        "facts": facts,
        "worker_routes": [routes, dict(routes)],
        "tasks": {"c1": wave([ONE], counted=counted(64, 32))},
    }
    assert all(c["holds"] for c in judge.judge_tp2({"tp2-sm70-e4m3-mtp": result}))
    result["worker_routes"][1]["target/long/bounded"] = 126
    failed = [c["claim"] for c in judge.judge_tp2({"tp2-sm70-e4m3-mtp": result}) if not c["holds"]]
    assert failed == ["Every rank took them, and each as often as the others"]


def test_prompts_are_the_same_in_every_engine() -> None:
    assert prompt_of(50, 3) == prompt_of(50, 3) != prompt_of(50, 4)
    text = repetitive_prompt(100, 1)
    assert len(text) == 100 and text[:24] == text[24:48]


def test_staging_takes_what_differs_and_names_its_hashes(tmp_path: Path) -> None:
    release, stock = tmp_path / "release", tmp_path / "stock.whl"
    release.mkdir()
    extension = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"

    def wheel(path: Path, files: dict[str, str]) -> None:
        with zipfile.ZipFile(path, "w") as z:
            for name, text in files.items():
                z.writestr(name, text)

    wheel(stock, {"vllm/a.py": "same", "vllm/b.py": "old", extension: "stock", "x/M": "1"})
    ours = {
        "vllm/a.py": "same",
        "vllm/b.py": "new",
        "vllm/vllm_flash_attn/sm70_attention/release.json": '{"source_sha256": "ab"}',
        extension: "sm70",
        "x/M": "2",
    }
    wheel(release / "vllm-0.19.1+v100.1-cp38-abi3-x.whl", ours)
    (release / "vllm_cpu-0.19.1+v100.1-x.whl").touch()
    manifest = {"inputs": {"patches": {"0001-x.patch": {"sha256": "cd"}}, "kernel_sources": {}}}
    (release / "manifest.json").write_text(json.dumps(manifest))
    hashes = stage(release, stock, tmp_path / "out")
    staged = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    assert "vllm/b.py" in staged and "vllm/a.py" not in staged
    assert hashes["patches"] == {"0001-x.patch": "cd"}
    assert hashes["release"] == {"source_sha256": "ab"}
    assert json.loads((tmp_path / "out" / "hashes.json").read_text()) == hashes

    wheel(release / "vllm-0.19.1+v100.1-cp38-abi3-x.whl", ours | {extension: "stock"})
    with pytest.raises(StageError, match="holds no"):
        stage(release, stock, tmp_path / "out")


def test_an_answer_that_ends_before_the_other_is_a_difference() -> None:
    long, short = [[1, 2, 3, 4]], [[1, 2]]
    (row,) = judge.compare_tokens(wave([long], lengths=(5,)), wave([short], lengths=(5,)))
    assert (row["same"], row["of"], row["margins"]) == (2, 4, [None, None])
    assert not judge.until_ties([row])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree, and server evidence that was made from it."""
    files = {
        "kernel/src/a.cu": "1", "kernel/csrc/b.cpp": "2", "kernel/kernels.toml": "3",
        "kernel/CMakeLists.txt": "4", "kernel/python/sm70_attention/c.py": "5",
        "patches/v0.19.1/0001-x.patch": "6",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest(name: str) -> str:
        return hashlib.sha256(files[name].encode()).hexdigest()

    sources = [n for n in files if n.startswith("kernel/") and "python" not in n]
    evidence = {
        "hashes": {
            "patches": {"0001-x.patch": digest("patches/v0.19.1/0001-x.patch")},
            "kernel_sources": {n.removeprefix("kernel/"): digest(n) for n in sources},
            "staged_files": {
                f"{verify.WRAPPER}c.py": digest("kernel/python/sm70_attention/c.py"),
                f"{verify.WRAPPER}release.json": "0",
                "vllm/envs.py": "1",
            },
        },
        "claims": [{"claim": "it is right", "holds": True}],
        "failures": {},
    }
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "server-x.json").write_text(json.dumps(evidence))
    return tmp_path


def allow(tree: Path, **over: object) -> None:
    entry = {"evidence": ["server-x.json"], "reason": "a comment alone"} | over
    path = tree / "evidence" / verify.ALLOWANCES
    path.write_text(json.dumps({"allowances": [entry]}))  # JSON is YAML


def test_evidence_of_this_very_tree_stands(tree: Path) -> None:
    assert verify.problems(tree / "evidence", tree, ["x"]) == []


@pytest.mark.parametrize(
    "name",
    ["kernel/src/a.cu", "kernel/python/sm70_attention/c.py", "patches/v0.19.1/0001-x.patch"],
)
def test_a_changed_file_needs_a_reason_bound_to_its_content(tree: Path, name: str) -> None:
    (tree / name).write_text("changed")
    (problem,) = verify.problems(tree / "evidence", tree, ["x"])
    assert "server-x.json" in problem and name in problem
    allow(tree, changed={name: hashlib.sha256(b"changed").hexdigest()})
    assert verify.problems(tree / "evidence", tree, ["x"]) == []
    (tree / name).write_text("changed again")
    problems = verify.problems(tree / "evidence", tree, ["x"])
    assert len(problems) == 2 and "run the part again" in problems[0]


def test_new_and_missing_files_are_changes(tree: Path) -> None:
    (tree / "kernel/src/new.cuh").write_text("")
    (tree / "patches/v0.19.1/0001-x.patch").unlink()
    changed = verify.differences(json.loads((tree / "evidence/server-x.json").read_text()), tree)
    assert changed == {
        "kernel/src/new.cuh": hashlib.sha256(b"").hexdigest(),
        "patches/v0.19.1/0001-x.patch": verify.GONE,
    }


def test_a_claim_that_does_not_hold_needs_a_reason(tree: Path) -> None:
    path = tree / "evidence" / "server-x.json"
    evidence = json.loads(path.read_text())
    evidence["claims"][0]["holds"] = False
    path.write_text(json.dumps(evidence))
    assert verify.problems(tree / "evidence", tree, ["x"]) == [
        "server-x.json: does not hold: it is right"
    ]
    allow(tree, claim="it is right")
    assert verify.problems(tree / "evidence", tree, ["x"]) == []


def test_an_allowance_that_nothing_needs_is_an_error(tree: Path) -> None:
    allow(tree, claim="it is right")
    (problem,) = verify.problems(tree / "evidence", tree, ["x"])
    assert "remove it" in problem


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("server-x.json", "{}", "server-x.json is no server evidence"),
        (verify.ALLOWANCES, '{"allowances": [{"evidence": []}]}', "reason"),
        (verify.ALLOWANCES, "{", verify.ALLOWANCES),
    ],
)
def test_unreadable_files_are_named(tree: Path, file: str, text: str, why: str) -> None:
    (tree / "evidence" / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)):
        verify.problems(tree / "evidence", tree, ["x"])


def test_a_part_without_evidence_needs_a_reason(tree: Path) -> None:
    (problem,) = verify.problems(tree / "evidence", tree, ["x", "y"])
    assert problem.startswith("server-y.json is missing")
    allow(tree, evidence=["server-y.json"], missing=True)
    assert verify.problems(tree / "evidence", tree, ["x", "y"]) == []
    (unused,) = verify.problems(tree / "evidence", tree, ["x"])
    assert "remove it" in unused
    assert len(verify.problems(tree / "nowhere", tree)) == len(PARTS)
