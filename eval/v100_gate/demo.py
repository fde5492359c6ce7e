"""The demonstration: a release is built, served on CPU and gated against its control.

Three arms serve the same tiny hybrid model:

candidate  this checkout's CPU wheel, 7 MTP drafts, prefix caching
control    vLLM 0.19.1 with the `cpu` patches alone, same options
no-spec    the control's tree without drafts and without prefix caching: the token oracle

Why the control is not the untouched wheel: stock vLLM 0.19.1 asserts on CPU that there is no
speculation, and its CPU path cannot run Gated DeltaNet or copy GDN state for prefix caching. The
`cpu` group of the series is what lifts that, and it is the part of the series that a V100 wheel
does not carry. So "stock plus cpu" is the nearest thing to stock that can serve this model, and
everything a V100 wheel does carry is on one side only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from v100_build import serve
from v100_build.flavours import FLAVOURS
from v100_build.locks import file_lock
from v100_build.paths import REPO, cache_dir, sha256_file
from v100_patches.apply import anywhere, apply_patch
from v100_patches.series import load as load_series
from v100_patches.trees import Folder, Overlay, encode

from v100_gate.errors import ServiceError
from v100_gate.progress import Reporter
from v100_gate.prompts import report_text
from v100_gate.schema import Arms

PROFILE = REPO / "eval" / "profiles" / "smoke-cpu.yaml"
BUILDER = REPO / "eval" / "demo" / "tiny_model.py"
CORPUS_CHARACTERS = 400_000
DRAFTS = 7


@dataclass(frozen=True)
class Tree:
    """A served vLLM: its interpreter, the folder that holds `vllm/`, and its release if any."""

    title: str
    python: Path
    site: Path
    manifest: Path | None


def control_tree(reporter: Reporter) -> Tree:
    """vLLM 0.19.1 with the `cpu` patch group alone, made in the shared cache when missing.

    The group is written for a tree that has the core patches; here its hunks are placed where
    their lines are, which must be exactly one place each.
    """
    stock = serve.serve_env("stock", reporter.note)
    group = [patch for patch in load_series().patches if patch.group == "cpu"]
    key = hashlib.sha256()
    for value in (stock.wheel_sha256, *(patch.sha256 for patch in group)):
        key.update(value.encode())
    site = cache_dir() / "trees" / f"control-{key.hexdigest()[:16]}"
    with file_lock(site):
        if not site.exists():
            reporter.note(f"making the control's tree: stock with {len(group)} cpu patches")
            overlay = Overlay(Folder(stock.site))
            for patch in group:
                apply_patch(overlay, patch, anywhere)
            partial = site.with_name(site.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(stock.site, partial, copy_function=_copy, symlinks=True)
            for path, text in overlay.changed.items():
                file = partial / path
                file.unlink(missing_ok=True)
                if text is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(encode(text))
            partial.rename(site)
    return Tree(
        f"vLLM 0.19.1 + {len(group)} cpu patches, {DRAFTS} drafts", stock.python, site, None
    )


def _copy(source: str, target: str) -> None:
    """Copy a file; a library is linked, because it is large and nobody changes it."""
    if source.endswith(".so"):
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)


def candidate_tree(reporter: Reporter) -> Tree:
    """This checkout's release, built when it is not up to date."""
    env = serve.serve_env("patched", reporter.note)
    manifest = env.wheel.parent / "manifest.json"
    title = f"vLLM {FLAVOURS['cpu'].version}, {DRAFTS} drafts"
    return Tree(title, env.python, env.site, manifest)


def tiny_model(tree: Tree, reporter: Reporter) -> Path:
    """The tiny hybrid model in the shared cache, made when missing.

    Raises: ServiceError with the builder's last lines.
    """
    text = report_text("tokenizer", CORPUS_CHARACTERS)
    key = hashlib.sha256((sha256_file(BUILDER) + text + str(tree.python)).encode()).hexdigest()
    folder = cache_dir() / "models" / f"tiny-hybrid-{key[:16]}"
    with file_lock(folder):
        if not folder.exists():
            reporter.note("making the tiny hybrid model (random weights, local tokenizer)")
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            corpus = partial / "corpus.txt"
            corpus.write_text(text)
            command = [str(tree.python), str(BUILDER), "--corpus", str(corpus), str(partial)]
            env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            try:
                output, _ = process.communicate()
            except BaseException:
                process.kill()
                process.wait()
                raise
            if process.returncode != 0:
                tail = "\n".join(output.splitlines()[-12:])
                raise ServiceError(f"the tiny model could not be made:\n{tail}")
            partial.rename(folder)
    return folder


def command(tree: Tree, model: Path, drafts: int) -> list[str]:
    """Command line that serves the model; {port} is filled in by the gate."""
    arguments = [
        str(tree.python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model}",
        "--served-model-name=tiny",
        "--host=127.0.0.1",
        "--port={port}",
        # float32: tokens do not depend on the shape of the batch, so they can be compared.
        "--dtype=float32",
        "--max-model-len=4096",
        "--max-num-seqs=8",
        "--language-model-only",
        # A hybrid on CPU needs its block size stated: 0.19.1 resets it after the alignment.
        "--block-size=256",
        "--enforce-eager",
        "--generation-config=vllm",
    ]
    if drafts:
        speculation = {"method": "mtp", "num_speculative_tokens": drafts}
        arguments += [
            "--enable-prefix-caching",
            "--mamba-cache-mode=align",
            f"--speculative-config={json.dumps(speculation)}",
        ]
    else:
        arguments.append("--no-enable-prefix-caching")
    return arguments


def arm(tree: Tree, model: Path, drafts: int, title: str) -> dict:
    """An arm of the site file."""
    return {
        "kind": "process",
        "model": "tiny",
        "title": title,
        "command": command(tree, model, drafts),
        "draft_tokens": drafts,
        "tree": str(tree.site / "vllm"),
        "manifest": str(tree.manifest) if tree.manifest else None,
        "env": {
            "PYTHONPATH": str(tree.site),
            "PATH": f"{tree.python.parent}:{os.environ.get('PATH', os.defpath)}",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONUNBUFFERED": "1",
            # Triton tunes silently otherwise, and `compile-events` reads the log.
            "TRITON_PRINT_AUTOTUNING": "1",
        },
    }


def prepare(reporter: Reporter) -> Arms:
    """Build, fetch and make everything the three arms need."""
    began = time.monotonic()
    candidate = candidate_tree(reporter)
    reporter.note(f"candidate: {candidate.title}")
    control = control_tree(reporter)
    reporter.note(f"control: {control.title}")
    model = tiny_model(candidate, reporter)
    reporter.note(f"prepared in {time.monotonic() - began:.0f} s")
    site = {
        "schema": 1,
        "arms": {
            "control": arm(control, model, DRAFTS, control.title),
            "candidate": arm(candidate, model, DRAFTS, candidate.title),
            "no-spec": arm(control, model, 0, "the control's tree without drafts or caching"),
        },
        "hygiene": {"gpu": False},
    }
    return Arms.model_validate(site)


def write_site(site: Arms, path: Path) -> None:
    """The arms as a file, so that the same gate can be run again by hand."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(site.model_dump(mode="json", by_alias=True), sort_keys=False))
