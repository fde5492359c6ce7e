"""Hazards on shared memory that no barrier orders are found in whatever order warps run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from sm70sim import Cubin, Device, Module, SimError
from sm70sim.model.nvrtc import compile_cubin

THREADS = 96
# In each kernel i = 1 has the barriers that it needs, and i = 0 lacks one of them.
KERNELS = r"""
extern "C" __global__ void read_after_write(int *a, int i) {
  __shared__ int s[96];
  s[threadIdx.x] = threadIdx.x;
  if (i) __syncthreads();
  a[threadIdx.x] = s[95 - threadIdx.x];
}
extern "C" __global__ void write_after_read(int *a, int i) {
  __shared__ int s[96];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  int v = s[95 - threadIdx.x];
  if (i) __syncthreads();
  s[threadIdx.x] = v;
  __syncthreads();
  a[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void write_after_write(int *a, int i) {
  __shared__ int s[32];
  for (int w = 0; w < 3; w++) {
    if (threadIdx.x / 32 == w) s[threadIdx.x % 32] = w;
    if (i) __syncthreads();
  }
  __syncthreads();
  a[threadIdx.x] = s[threadIdx.x % 32];
}
// Warp 0 fills a buffer twice, warps 1 and 2 read it: "full" barriers 1 and 2, "empty" 3.
extern "C" __global__ void producer_and_consumers(int *a, int i) {
  __shared__ int s[32];
  int lane = threadIdx.x % 32;
  for (int turn = 0; turn < 2; turn++) {
    if (threadIdx.x < 32) {
      if (turn && i) asm volatile("bar.sync 3, 96;" ::: "memory");
      s[lane] = turn * 100 + lane;
      asm volatile("bar.arrive %0, 96;" ::"r"(turn + 1) : "memory");
    } else {
      asm volatile("bar.sync %0, 96;" ::"r"(turn + 1) : "memory");
      a[threadIdx.x] = s[lane];
      if (!turn && i) asm volatile("bar.arrive 3, 96;" ::: "memory");
    }
  }
}
extern "C" __global__ void counted(int *a, int i) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  if (i) atomicAdd(&s, 1); else ((volatile int *)&s)[0] = 96;
  __syncthreads();
  a[threadIdx.x] = s;
}
extern "C" __global__ void bytes_of_one_word(int *a, int i) {
  __shared__ char s[96];
  s[i ? threadIdx.x / 32 + threadIdx.x % 32 * 3 : threadIdx.x % 32] = 1;
  __syncthreads();
  a[threadIdx.x] = s[threadIdx.x % 32];
}
"""
# Kernel: the two instructions; which of them comes first depends on the order of warps.
CASES = {
    "read_after_write": {"LDS", "STS"},
    "write_after_read": {"LDS", "STS"},
    "write_after_write": {"STS"},
    "producer_and_consumers": {"LDS", "STS"},
    "counted": {"STS"},
    "bytes_of_one_word": {"STS"},
}


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    return Cubin(compile_cubin(KERNELS))


def run(cubin: Cubin, kernel: str, i: int, **how: bool) -> list[int]:
    dev = Device(1 << 20)
    a = dev.zeros(THREADS, np.int32)
    Module(cubin, dev).launch(kernel, 1, THREADS, [a, np.int32(i)], races=True, **how)
    return a.np.tolist()


@pytest.mark.parametrize("reverse", [False, True], ids=["first to last", "last to first"])
@pytest.mark.parametrize("kernel", CASES)
def test_a_missing_barrier_names_both_instructions(cubin, kernel, reverse):
    with pytest.raises(SimError, match=r"no barrier after warp \d (read|wrote) .*shared") as error:
        run(cubin, kernel, 0, reverse=reverse)
    found = re.findall(r'at 0x\w+: "(?:@!?P\d )?(LDS|STS)', str(error.value))
    assert len(found) == 2 and set(found) == CASES[kernel]


@pytest.mark.parametrize("reverse", [False, True], ids=["first to last", "last to first"])
@pytest.mark.parametrize("kernel", CASES)
def test_what_barriers_order_is_no_hazard(cubin, kernel, reverse):
    got = run(cubin, kernel, 1, reverse=reverse)
    lanes = [t % 32 for t in range(THREADS)]
    wanted = {
        "read_after_write": list(range(THREADS))[::-1],
        "write_after_read": list(range(THREADS))[::-1],
        "write_after_write": [2] * THREADS,
        "producer_and_consumers": [0] * 32 + [100 + n for n in lanes[32:]],
        "counted": [THREADS] * THREADS,
        "bytes_of_one_word": [1] * THREADS,
    }
    assert got == wanted[kernel]


MISCOUNTED = r"""
extern "C" __global__ void arrives_twice(int *a, int i) {
  if (threadIdx.x < 32) {
    asm volatile("bar.arrive 1, 96;" ::: "memory");
    if (!i) asm volatile("bar.arrive 1, 96;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 96;" ::: "memory");
  }
  a[threadIdx.x] = i;
}
extern "C" __global__ void arrives_for_nobody(int *a, int i) {
  if (threadIdx.x < 32 || i) asm volatile("bar.arrive 1, 96;" ::: "memory");
  a[threadIdx.x] = i;
}
"""


@pytest.mark.parametrize(
    "kernel, words",
    [
        ("arrives_twice", "warp 0 arrives again at barrier 1"),
        ("arrives_for_nobody", "ends, and barrier 1 of 96 threads"),
    ],
)
def test_arrivals_that_do_not_add_up_are_named(kernel: str, words: str) -> None:
    cubin = Cubin(compile_cubin(MISCOUNTED))
    with pytest.raises(SimError, match=words):
        run(cubin, kernel, 0)
    assert run(cubin, kernel, 1) == [1] * THREADS


CONTROL = Path(__file__).resolve().parents[2] / "eval/v100_operator/sanitizer_control.cu"


def test_the_controls_that_compute_sanitizer_is_tried_on_are_told_apart() -> None:
    """Warps that hand a double buffer over: right, and given back before it is read."""
    dev = Device(1 << 20)
    module = Module(compile_cubin(CONTROL.read_text()), dev)
    sums = dev.zeros(128, np.int32)
    module.launch("handed", (1,), (256,), [sums], races=True)
    assert sums.np.sum() == sum(range(16 * 128))
    with pytest.raises(SimError, match="no barrier after"):
        module.launch("raced", (1,), (256,), [sums], races=True)
