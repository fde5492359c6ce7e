"""Every op's check on this machine's GPU, with a library built here from this tree.

PyTorch is not among the project's own requirements, because nothing else needs it; the checks run
in an interpreter that has it with CUDA: $V100_TORCH_PYTHON (a node's release environment will do),
or the python3 on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import evidence

VARIABLE = "V100_TORCH_PYTHON"
_HAS_GPU = "import torch; raise SystemExit(not torch.cuda.is_available())"


def interpreter() -> Path | None:
    """An interpreter whose PyTorch sees a GPU; None where there is none."""
    python = shutil.which(os.environ.get(VARIABLE, "python3"))
    if python is None:
        return None
    found = subprocess.run([python, "-c", _HAS_GPU], capture_output=True)
    return Path(python) if found.returncode == 0 else None


def missing() -> str | None:
    """Why the checks cannot run here; None where they can."""
    if shutil.which("nvidia-smi") is None:
        return "no GPU here (nvidia-smi is not on PATH)"
    if interpreter() is None:
        return f"no interpreter here whose PyTorch sees the GPU: name one in {VARIABLE}"
    return None


def check_all(out: Path) -> int:
    """Builds the validation library and checks every built op; one JSON file an op in `out`.

    Returns the number of programs that failed.
    """
    why = missing()
    if why is not None:
        raise SystemExit(f"error: {why}")
    from v100_build import library, release

    folder = release.build(validation=True, say=print)
    python, failed = interpreter(), 0
    paths = [str(evidence.REPO / part) for part in ("eval", "kernel/python")]
    for op in sorted(evidence.built_ops()):
        print(f"{op}:", flush=True)
        command = [str(python), "-m", "v100_operator", "check", "--op", op]
        command += ["--library", str(folder / library.LIBRARY_NAME)]
        command += ["--out", str(out / f"{op}.json")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        failed += subprocess.run(command, env=environment).returncode != 0
    if failed:
        print(f"{failed} ops failed", file=sys.stderr)
    return failed
