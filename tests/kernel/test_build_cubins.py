"""Compiling kernels: the table's errors, the resource check, and the missing tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from v100_build import cubins, toolchain
from v100_build.errors import BuildError

SPILLS = """
extern "C" __global__ void spill(float* out, int n) {
  float local[64];
  for (int i = 0; i < 64; ++i) local[i] = out[i];
  for (int i = 0; i < n; ++i) local[(i * n) & 63] += 1.0f;
  for (int i = 0; i < 64; ++i) out[i] = local[(i + n) & 63];
}
"""
CLEAN = """
extern "C" __global__ void twice(float* out) {
  __shared__ float s[32];
  s[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = SCALE * s[31 - threadIdx.x];
}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder with one source and an empty table; its cubins are not cached for others."""
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(cubins, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path


def _table(tree: Path, source: str, text: str) -> list[cubins.CubinSpec]:
    (tree / "src" / "k.cu").write_text(source)
    (tree / "kernels.toml").write_text(text)
    return cubins.load_specs(tree / "kernels.toml")


def test_compiles_and_reads_resources(tree: Path) -> None:
    [spec] = _table(
        tree, CLEAN,
        '[[cubin]]\nname="k"\nsource="src/k.cu"\ndefines={SCALE="2.0f"}\nentries=["twice"]\n',
    )  # fmt: skip
    built = cubins.compile_cubin(spec, cubins.SM70, tree)
    assert built.path.read_bytes()[:4] == b"\x7fELF"
    assert built.resources["twice"].shared == 128
    assert built.resources["twice"].clean


def test_spill_fails_the_build_and_names_the_kernel(tree: Path) -> None:
    specs = _table(tree, SPILLS, '[[cubin]]\nname="k"\nsource="src/k.cu"\nentries=["spill"]\n')
    with pytest.raises(BuildError, match=r"k/spill: \d+ bytes of stack"):
        cubins.compile_all([cubins.SM70], specs=specs, root=tree, workers=1)


def test_compiler_error_holds_the_compilers_words(tree: Path) -> None:
    [spec] = _table(tree, "oops", '[[cubin]]\nname="k"\nsource="src/k.cu"\nentries=["e"]\n')
    with pytest.raises(BuildError, match=r"k\.cu does not compile:(.|\n)*error"):
        cubins.compile_cubin(spec, cubins.SM70, tree)


def test_an_error_survives_the_way_out_of_a_worker_process(tree: Path) -> None:
    specs = _table(tree, "oops", '[[cubin]]\nname="k"\nsource="src/k.cu"\nentries=["e"]\n')
    with pytest.raises(BuildError, match=r"k\.cu does not compile"):
        cubins.compile_all([cubins.SM70], specs=specs, root=tree, workers=1)


def test_missing_entry_is_named(tree: Path) -> None:
    [spec] = _table(
        tree, CLEAN,
        '[[cubin]]\nname="k"\nsource="src/k.cu"\ndefines={SCALE=2}\nentries=["thrice"]\n',
    )  # fmt: skip
    with pytest.raises(BuildError, match=r"no entry point \['thrice'\].*twice"):
        cubins.compile_cubin(spec, cubins.SM70, tree)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('name="k"\nsource="src/k.cu"\nentries=["e"]\nspeed=9', "unknown keys"),
        ('name="k"\nsource="src/k.cu"', "has no entries"),
        ('name="k"\nsource="src/nowhere.cu"\nentries=["e"]', "does not exist"),
        (
            'name="k"\nsource="src/k.cu"\nentries=["e"]\n'
            '[[cubin]]\nname="k"\nsource="src/k.cu"\nentries=["e"]',
            "listed twice",
        ),
    ],
)
def test_bad_rows_are_refused(tree: Path, row: str, complaint: str) -> None:
    with pytest.raises(BuildError, match=complaint):
        _table(tree, CLEAN, f"[[cubin]]\n{row}\n")


def test_a_changed_header_recompiles_what_includes_it_and_nothing_else(tree: Path) -> None:
    (tree / "src" / "deep").mkdir()
    (tree / "src" / "deep" / "scale.cuh").write_text("#define SCALE 2.0f\n")
    (tree / "src" / "outer.cuh").write_text('#include "deep/scale.cuh"\n')
    (tree / "src" / "other.cu").write_text('extern "C" __global__ void other() {}\n')
    table = (
        '[[cubin]]\nname="k"\nsource="src/k.cu"\nentries=["twice"]\n'
        '[[cubin]]\nname="o"\nsource="src/other.cu"\nentries=["other"]\n'
    )
    k, other = _table(tree, f'#include "outer.cuh"\n{CLEAN}', table)
    before = [cubins.compile_cubin(spec, cubins.SM70, tree).path for spec in (k, other)]
    (tree / "src" / "deep" / "scale.cuh").write_text("#define SCALE 3.0f\n")
    after = [cubins.compile_cubin(spec, cubins.SM70, tree).path for spec in (k, other)]
    assert before[0] != after[0] and before[0].read_bytes() != after[0].read_bytes()
    assert before[1] == after[1]


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    toolchain.cxx.cache_clear()
    with pytest.raises(BuildError) as caught:
        toolchain.cxx()
    assert "apt-get install g++" in caught.value.remedy


def test_every_shipped_kernel_stays_in_registers_on_sm70() -> None:
    """The release's own table compiles and is clean; the message of a failure names the kernel."""
    built = cubins.compile_all([cubins.SM70])
    assert {c.spec.name for c in built} == {s.name for s in cubins.load_specs()}
