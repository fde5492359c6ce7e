"""Whole CUDA kernels in the emulator against numpy, and the emulator's own bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from sm70sim import Device, Module
from sm70sim.model.nvrtc import compile_cubin


def test_reduction_over_shared_memory_and_blocks(load, rng):
    mod = load(r"""
        extern "C" __global__ void k(const int *a, int *out, int n) {
          __shared__ int s[256];
          int t = threadIdx.x, v = 0;
          for (int i = blockIdx.x * 256 + t; i < n; i += gridDim.x * 256) v += a[i];
          s[t] = v;
          __syncthreads();
          for (int d = 128; d > 0; d >>= 1) { if (t < d) s[t] += s[t + d]; __syncthreads(); }
          if (t == 0) out[blockIdx.x] = s[0];
        }""")
    a = mod.dev.put(rng.integers(-1000, 1000, 54321).astype(np.int32))
    out = mod.dev.zeros(7, np.int32)
    r = mod.launch("k", 7, 256, [a, out, np.int32(54321)])
    assert out.np.sum() == a.np.sum()
    assert r.by_op()["BAR"] == 7 * 8 * 9 and r.warp_insts == sum(r.by_op().values())


def test_three_dimensional_grid_and_struct_arguments(load):
    mod = load(r"""
        struct S { char c[3]; };
        extern "C" __global__ void k(int *out, S s, short h, bool f, double d) {
          int t = threadIdx.x + 2 * threadIdx.y + 6 * threadIdx.z;
          int b = blockIdx.x + 2 * blockIdx.y + 4 * blockIdx.z;
          int sum = s.c[0] + 2 * s.c[1] + 4 * s.c[2] + h + (f ? 1000 : 0) + (int)d;
          out[b * 24 + t] = sum + b * 100 + t;
        }""")
    out = mod.dev.zeros((12, 24), np.int32)
    mod.launch("k", (2, 2, 3), (2, 3, 4), [out, bytes([1, 2, 3]), np.int16(-5), np.uint8(1), 7.5])
    want = 1 + 4 + 12 - 5 + 1000 + 7 + np.arange(12)[:, None] * 100 + np.arange(24)
    np.testing.assert_array_equal(out.np, want)


@pytest.mark.parametrize(("pad", "waves"), [(0, 32), (1, 1)])
def test_shared_wavefronts_are_counted_from_addresses(load, rng, pad, waves):
    mod = load(f"""
        extern "C" __global__ void k(const float *a, float *b) {{
          __shared__ float s[32][32 + {pad}];
          int x = threadIdx.x, y = threadIdx.y;
          for (int j = 0; j < 32; j += 8) s[y + j][x] = a[(y + j) * 32 + x];
          __syncthreads();
          for (int j = 0; j < 32; j += 8) b[(y + j) * 32 + x] = s[x][y + j];
        }}""")
    a, b = mod.dev.put(rng.random((32, 32), dtype=np.float32)), mod.dev.zeros((32, 32), np.float32)
    r = mod.launch("k", 1, (32, 8), [a, b], count_mem=True)
    np.testing.assert_array_equal(b.np, a.np.T)
    table = [row for row in r.mem_table() if row[1].startswith("LDS")]
    assert table and all(s == waves * n for _, _, n, _, s in table)
    assert all(s == 4 * n for _, text, n, _, s in r.mem_table() if text.startswith("LDG"))


def test_blocks_that_wait_for_each_other_run_together(load):
    mod = load(r"""
        extern "C" __global__ void k(unsigned *c, int *out) {
          if (threadIdx.x == 0) { atomicAdd(c, 1); while (*(volatile unsigned *)c < gridDim.x) {} }
          __syncthreads();
          out[blockIdx.x * blockDim.x + threadIdx.x] = *(volatile unsigned *)c;
        }""")
    c, out = mod.dev.zeros(1, np.uint32), mod.dev.zeros(3 * 64, np.int32)
    mod.launch("k", 3, 64, [c, out])
    assert (out.np == 3).all()


def test_integer_and_float_division_and_module_variables(load, rng):
    mod = load(r"""
        __constant__ int table[4] = {3, 1, 4, 1};
        __device__ int counter = 7;
        extern "C" __global__ void k(const int *a, const int *b, int *q, int *r, float *f) {
          int t = threadIdx.x;
          q[t] = a[t] / b[t]; r[t] = a[t] % b[t] + table[t & 3]; f[t] = (float)a[t] / (float)b[t];
          atomicAdd(&counter, 1);
        }""")
    a, b = rng.integers(-(2**31), 2**31, 64), rng.integers(-5000, 5000, 64)
    b[b == 0] = 17
    args = [mod.dev.put(x.astype(np.int32)) for x in (a, b)]
    q, r, f = (mod.dev.zeros(64, t) for t in (np.int32, np.int32, np.float32))
    mod.launch("k", 1, 64, [*args, q, r, f])
    quotient = np.trunc(a / b).astype(np.int64)
    np.testing.assert_array_equal(q.np, quotient)
    np.testing.assert_array_equal(r.np, a - quotient * b + np.array([3, 1, 4, 1] * 16))
    np.testing.assert_array_equal(f.np, a.astype(np.float32) / b.astype(np.float32))
    assert mod.symbol("counter", np.int32, 1)[0] == 7 + 64


def test_tensor_core_sums_truncate_as_measured(load):
    # Fasi et al. 2021: terms are aligned to the largest and lower bits dropped; 1 + 3 * 2^-24
    # stays 1 on the hardware, but not when summed exactly.
    source = r"""
        extern "C" __global__ void k(const unsigned *a, float *out) {
          float c[8] = {1, 1, 1, 1, 1, 1, 1, 1};
          asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"
            "{%8,%8},{%9,%9},{%0,%1,%2,%3,%4,%5,%6,%7};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]),
            "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) : "r"(a[0]), "r"(a[1]));
          out[threadIdx.x] = c[0];
        }"""
    halves = np.array([2.0**-12, 2.0**-12, 3 * 2.0**-14, 3 * 2.0**-14], np.float16)
    values = []
    for exact in (False, True):
        dev = Device(1 << 20)
        mod = Module(compile_cubin(source), dev, hmma_exact=exact)
        a, out = dev.put(halves.view(np.uint32)), dev.zeros(32, np.float32)
        mod.launch("k", 1, 32, [a, out])
        values.append(float(out.np[0]))
    assert values == [1.0, float(np.float32(1 + 3 * 2.0**-24))]
