"""The cycle model: parameters, published figures, barriers, L2 between launches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sm70sim import Device, L2State, Module, SimError, cases, measure, report
from sm70sim.model import benchmark, parameters, validation
from sm70sim.model.nvrtc import compile_cubin

QUICK = ("HMMA, dependent", "HMMA, 1 warp", "LDS.32, 4 ways", "FFMA, latency", "MUFU")


def _within_ten_percent(check: validation.Check) -> None:
    outcome = validation.Outcome(check, check.model())
    assert abs(outcome.deviation) <= 0.10, (
        f"{check.name}: modelled {outcome.modelled:.4g}, published {check.published:.4g}"
    )


@pytest.mark.parametrize(
    "check", [c for c in validation.CHECKS if c.name.startswith(QUICK)], ids=lambda c: c.name
)
def test_micro_kernel_is_within_ten_percent(check):
    _within_ten_percent(check)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [c for c in validation.CHECKS if not c.name.startswith(QUICK)], ids=lambda c: c.name
)
def test_every_micro_kernel_is_within_ten_percent(check):
    _within_ten_percent(check)


def test_every_parameter_has_a_source_and_ordered_ends():
    table = parameters.table()
    for p in table.values():
        assert p.source and p.unit, p.name
    assert table["l2.latency"].low < table["l2.latency"].value < table["l2.latency"].high
    assert set(parameters.pipe_of().values()) <= set(parameters.PIPES)


def test_unknown_parameters_are_refused():
    with pytest.raises(SimError, match="no parameter l3_latency"):
        parameters.values(l3_latency=1)
    assert parameters.values("low")["dram.efficiency"] == 0.985
    assert parameters.values(core=1380)["machine.core_mhz"] == 1380


SOURCE = r"""
extern "C" __global__ void stream(const float4 *a, float4 *b, int n) {
  int first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = first; i < n; i += gridDim.x * blockDim.x) b[i] = a[i];
}
extern "C" __global__ void pairs(const int *ids, int *out, int n) {
  int t = threadIdx.x, id = ids[t / 64], v = 0;
  for (int i = 0; i < n; i++) {
    if (t < 64) for (int j = 0; j < 20; j++) v = v * 3 + t;
    asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
  }
  out[t] = v;
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(compile_cubin(SOURCE), Device(64 << 20))


def test_bytes_and_second_launch_out_of_l2(module):
    n = 1 << 16
    a, b = module.dev.zeros(n * 4, np.float32), module.dev.zeros(n * 4, np.float32)
    args = [a, b, np.int32(n)]
    l2 = L2State()
    first = measure(module, "stream", 80, 256, args, l2=l2)
    again = measure(module, "stream", 80, 256, args, l2=l2)
    cold = measure(module, "stream", 80, 256, args)
    assert first.dram_read == n * 16 and again.dram_read == 0
    assert first.cycles == cold.cycles > again.cycles
    assert "bound" in report(first, 3)
    warm = measure(module, "stream", 80, 256, args, warm=[a])
    assert warm.dram_read == 0


def test_low_and_high_parameters_enclose(module):
    n = 1 << 15
    args = [module.dev.zeros(n * 4, np.float32), module.dev.zeros(n * 4, np.float32), np.int32(n)]
    t = measure(module, "stream", 80, 256, args, range=True)
    assert t.low < t.us < t.high


def test_barrier_numbers_come_from_registers(module):
    # With one number for both pairs of warps, the fast pair would wait for the slow one.
    out = module.dev.zeros(128, np.int32)

    def run(ids) -> float:
        args = [module.dev.put(np.array(ids, np.int32)), out, np.int32(50)]
        return measure(module, "pairs", 1, 128, args).stall.get("barrier", 0)

    assert run([3, 5]) == run([7, 2])


class _Adapter:
    """A case as kernel owners write it."""

    NAME, LAYERS = "copy", 2

    @staticmethod
    def prepare(shape: cases.Shape) -> cases.Work:
        mod = Module(compile_cubin(SOURCE), Device(32 << 20))
        n = shape.cache_bytes // 16
        a, b = mod.dev.put(np.arange(n * 4, dtype=np.float32)), mod.dev.zeros(n * 4, np.float32)
        launch = cases.Launch("stream", (80,), (256,), [a, b, np.int32(n)])
        return cases.Work(mod, [launch], lambda: float(np.abs(a.np - b.np).max()))


def test_benchmark_row_json_and_plot(tmp_path):
    shape = cases.Shape.uniform(1024, 2)
    row = benchmark.measure_shape(_Adapter, shape, tmp_path)
    assert row.error == 0.0 and row.low <= row.us <= row.high
    assert shape.cache_bytes == 2 * 1024 * 512 and shape.fma == 2 * 1024 * 24576
    assert row.hbm_floor == pytest.approx(2 * 1024 * 512 / 879e3)
    assert benchmark.markdown_row(row).count("|") == benchmark.HEADER.count("|")
    benchmark.write_json([row], tmp_path / "m.json")
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["rows"][0]["launches"][0]["dram_read_bytes"] >= shape.cache_bytes
    benchmark.plot([row], tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"
