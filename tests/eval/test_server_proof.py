"""The server proof's verdicts on hand-made results, and what it stages from a release."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
from server_proof import judge, run, verify
from server_proof.engine import prompt_of, repetitive_prompt, turn
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
    for kind in FULL_LAYERS.keys() - {"dense"}:
        layers = CONFIGS[kind]()["text_config"]["layer_types"]
        assert layers.count("full_attention") == FULL_LAYERS[kind]


def rank_results(part: str) -> dict:
    """Results that satisfy every claim of a part with several ranks."""
    ranks = {"tp2": 2, "tp4": 4}[part]
    results = {}
    for scenario in PARTS[part]():
        off = scenario["label"].endswith("nolong")
        route = "target/paged/ordinary" if off else "target/long/bounded"
        c1 = wave([copy.deepcopy(ONE)], margins(ONE, ONE, 1.0))
        c1["counted"] = {
            f"vllm:attention_route_launches {route}": 64,
            "vllm:spec_decode_num_drafts": 32,
        }
        c1["routes_by_rank"] = [{route: 64} for _ in range(ranks)]
        graphs = {"FULL": 16} | ({} if off else {"FULL bounded 262144": 16})
        results[scenario["label"]] = {
            "scenario": scenario,
            "facts": {"graphs_by_rank": [dict(graphs) for _ in range(ranks)]},
            "worker_routes": [{route: 128, "draft/paged/eager": 9} for _ in range(ranks)],
            "tasks": {"c1": c1, "c4": wave([ONE], margins(ONE, ONE, 1.0))},
        }
    return results


def refuted(part: str, results: dict) -> list[str]:
    return [c["claim"] for c in judge.JUDGES[part](results) if not c["holds"]]


SEVERAL_RANKS = pytest.mark.parametrize("part", ["tp2", "tp4"])
CAPTURED, TAKEN = "Every rank captured", "Every rank took them"
STEPPED, SAME = "C1: long launches of every rank", "C1: same tokens"


@SEVERAL_RANKS
def test_ranks_of_which_all_holds(part: str) -> None:
    assert refuted(part, rank_results(part)) == []


def _lose_a_rank(on: dict, off: dict) -> None:
    for ranks in (on["facts"]["graphs_by_rank"], on["worker_routes"]):
        ranks.pop()
    on["tasks"]["c1"]["routes_by_rank"].pop()


def _capture_less(on: dict, off: dict) -> None:
    on["facts"]["graphs_by_rank"][-1]["FULL bounded 262144"] = 15


def _capture_where_the_route_is_off(on: dict, off: dict) -> None:
    off["facts"]["graphs_by_rank"][-1]["FULL bounded 262144"] = 16


def _take_them_less_often(on: dict, off: dict) -> None:
    on["worker_routes"][-1]["target/long/bounded"] = 126


def _take_another_route_too(on: dict, off: dict) -> None:
    on["worker_routes"][-1]["target/paged/eager"] = 2


def _never_take_them(on: dict, off: dict) -> None:
    for rank in on["worker_routes"]:
        del rank["target/long/bounded"]


def _count_half_a_step(on: dict, off: dict) -> None:
    on["tasks"]["c1"]["routes_by_rank"][-1]["target/long/bounded"] = 65


def _miss_a_step(on: dict, off: dict) -> None:
    on["tasks"]["c1"]["routes_by_rank"][-1]["target/long/bounded"] = 62


def _answer_otherwise(on: dict, off: dict) -> None:
    off["tasks"]["c1"]["rounds"][0]["tokens"][1][0] = 9


@SEVERAL_RANKS
@pytest.mark.parametrize(
    ("spoil", "claims"),
    [
        (_lose_a_rank, [CAPTURED, TAKEN, STEPPED]),
        (_capture_less, [CAPTURED]),
        (_capture_where_the_route_is_off, [CAPTURED]),
        (_take_them_less_often, [TAKEN]),
        (_take_another_route_too, [TAKEN]),
        (_never_take_them, [TAKEN]),
        (_count_half_a_step, [STEPPED]),
        (_miss_a_step, [STEPPED]),
        (_answer_otherwise, [SAME]),
    ],
)
def test_a_rank_that_is_amiss_fails_its_claim(part: str, spoil, claims: list[str]) -> None:
    results = rank_results(part)
    spoil(*results.values())
    failed = refuted(part, results)
    assert len(failed) == len(claims)
    assert all(f.startswith(c) for f, c in zip(failed, claims, strict=True))


@SEVERAL_RANKS
def test_each_rank_has_the_shapes_of_a_tp4_rank(part: str) -> None:
    alone = CONFIGS["hybrid"]()["text_config"]
    for scenario in PARTS[part]():
        ranks = scenario["options"]["tensor_parallel_size"]
        shared = CONFIGS[scenario["kind"]]()["text_config"]
        for name in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads",
                     "linear_num_value_heads", "intermediate_size"):  # fmt: skip
            assert shared[name] == ranks * alone[name]
        assert part == f"tp{ranks}"
        assert scenario["environment"]["NCCL_NVLS_ENABLE"] == "0"


def test_an_engine_that_did_not_do_all_its_tasks_has_failed() -> None:
    scenarios = [{"label": x} for x in ("done", "silent", "wrong", "ended")]
    results = {
        "done": {"failed": [], "worker_routes": [{}]},
        "wrong": {"failed": [{"task": "c1", "error": "E"}], "worker_routes": [{}]},
        "ended": {"failed": [], "tasks": {"c1": {}}},
    }
    found = run.unfinished(scenarios, results)
    assert set(found) == {"silent", "wrong", "ended"} and "--limit" in found["ended"]


def test_engines_that_take_turns_exclude_each_other(tmp_path: Path) -> None:
    with turn(tmp_path, True), open(tmp_path / "turns.lock") as other:
        with turn(tmp_path, False):
            pass  # whoever takes no turns does not wait
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "turns.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_an_engine_leaves_behind_ends_with_it(tmp_path: Path, monkeypatch) -> None:
    """A rank outlives its engine: it holds the write end of a pipe until it is ended."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    code = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60'], stdout=open(sys.argv[1], 'w'))"
    )
    monkeypatch.setattr(run, "engine_command", lambda *_: [sys.executable, "-c", code, str(fifo)])
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run.run_engines([{"label": "x"}], tmp_path, 60, 1) == {}
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""  # the end of file: nobody holds the other end
    finally:
        os.close(reader)


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
