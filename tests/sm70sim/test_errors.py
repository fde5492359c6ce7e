"""What a V100 would do wrongly, or the emulator does not know, names kernel and instruction."""

from __future__ import annotations

import numpy as np
import pytest
from sm70sim import Cubin, Device, Module, SimError, UnknownInstruction
from sm70sim.disassembly import _instr as instruction
from sm70sim.model.nvrtc import compile_cubin
from sm70sim.translate import translate

FAULTS = r"""
extern "C" __global__ void global_store(int *a, int i) { a[i] = 1; }
extern "C" __global__ void global_load(int *a, int i) { a[0] = a[i]; }
extern "C" __global__ void misaligned(char *a, int i) { *(int2 *)(a + i) = make_int2(1, 2); }
extern "C" __global__ void shared_range(int *a, int i) {
  __shared__ int s[8];
  s[threadIdx.x] = i;
  a[threadIdx.x] = s[i];
}
extern "C" __global__ void shared_unwritten(int *a, int i) {
  __shared__ int s[64];
  if (threadIdx.x > 0) s[threadIdx.x] = i;
  __syncthreads();
  a[threadIdx.x] = s[threadIdx.x ^ 1];
}
extern "C" __global__ void trap(int *a, int i) { if (i == 3) __trap(); a[0] = i; }
extern "C" __global__ void spin(volatile int *a, int i) { while (a[0] != i) {} }
extern "C" __global__ void deadlock(int *a, int i) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
  a[threadIdx.x] = i;
}
extern "C" __global__ void race(int *a, int i) {
  __shared__ int s[128];
  s[threadIdx.x] = threadIdx.x;
  if (i) __syncthreads();
  a[threadIdx.x] = s[127 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    return Cubin(compile_cubin(FAULTS))


def run(cubin: Cubin, kernel: str, i: int, threads: int = 1, unwritten: bool = False, **more):
    dev = Device(1 << 20, track_init=True)
    a = dev.empty(256, np.int32)
    if not unwritten:
        a.np[...] = 0
        a.mark_initialised()
    Module(cubin, dev).launch(kernel, 1, threads, [a, np.int32(i)], **more)
    return a.np.copy()


@pytest.mark.parametrize(
    ("kernel", "i", "threads", "what", "instruction_name"),
    [
        ("global_store", 1 << 28, 1, "global address out of range", "STG"),
        ("global_load", -(1 << 28), 1, "global address out of range", "LDG"),
        ("misaligned", 4, 1, "misaligned global address", "STG.E.64"),
        ("shared_range", 100, 8, "shared address out of range", "LDS"),
        ("shared_unwritten", 1, 32, "uninitialised read of shared address", "LDS"),
        ("trap", 3, 1, "trap", "BPT"),
    ],
)
def test_fault_names_kernel_address_and_text(cubin, kernel, i, threads, what, instruction_name):
    with pytest.raises(SimError) as error:
        run(cubin, kernel, i, threads)
    message = str(error.value)
    assert message.startswith(f"{kernel}: {what}")
    assert instruction_name in message and " at 0x" in message and "lane" in message


def test_uninitialised_global_read_is_an_error_only_where_it_happens(cubin):
    with pytest.raises(SimError, match=r"uninitialised read of address .*LDG"):
        run(cubin, "global_load", 5, unwritten=True)
    run(cubin, "global_store", 5, unwritten=True)


def test_an_endless_kernel_ends_at_the_limit(cubin):
    with pytest.raises(SimError, match="more than 100000 warp instructions"):
        run(cubin, "spin", 1, max_insts=100_000)


def test_deadlock_says_where_the_warps_wait(cubin):
    with pytest.raises(SimError, match=r"deadlock in block 0.*barrier 1 before 0x"):
        run(cubin, "deadlock", 1, threads=32)


def test_warp_order_shows_a_race(cubin):
    def both(i: int):
        return [run(cubin, "race", i, 128, reverse=r).tolist() for r in (False, True)]

    first, second = both(1)
    assert first == second
    with pytest.raises(SimError, match="uninitialised read of shared"):
        both(0)


def translate_line(line: str):
    kernel = Cubin(compile_cubin(FAULTS)).kernels["global_store"]
    kernel.instrs[2] = instruction("20", line, "0", 2)
    return translate(kernel, {0: 0x200})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("FROB R1, R2", "instruction FROB"),
        ("IADD3.WEIRD R1, R2, R3, R4", "modifier .WEIRD"),
        ("LDG.E.HALFWAY R1, [R2]", "modifier .HALFWAY"),
        ("MOV R1, UR4", "operand UR4"),
        ("MOV R1, c[0x0][0x900]", "outside bank 0"),
        ("FADD R1, R2, 1.5", "does not agree with the encoding"),
        ("S2R R1, SR_NOSUCH", "special register SR_NOSUCH"),
        ("BRA `(.L_nowhere)", "branch target"),
        ("IADD3 R1", "unexpected form"),
    ],
)
def test_unknown_forms_name_kernel_address_and_text(line, why):
    with pytest.raises(UnknownInstruction) as error:
        translate_line(line)
    message = str(error.value)
    assert message.startswith(f'global_store at 0x20: "{line}"') and why in message


def test_arguments_and_sizes_are_checked(cubin):
    dev = Device(1 << 20)
    mod = Module(cubin, dev)
    a = dev.zeros(8, np.int32)
    for args, grid, block, smem, why in (
        ([a], 1, 1, 0, "takes 2 arguments"),
        ([a, np.int64(1)], 1, 1, 0, "argument 1 has 8 bytes, 4 expected"),
        ([a, np.int32(1)], 1, 2048, 0, "2048 threads"),
        ([a, np.int32(1)], 1, 1, 100_000, "shared memory exceed"),
    ):
        with pytest.raises(SimError, match=why):
            mod.launch("global_store", grid, block, args, smem)
    with pytest.raises(SimError, match="no kernel nothing"):
        mod.launch("nothing", 1, 1, [])
    with pytest.raises(SimError, match="out of simulated memory"):
        dev.zeros(1 << 21, np.uint8)


def test_only_sm_70_cubins_are_read(tmp_path):
    with pytest.raises(SimError, match="not an ELF file"):
        Cubin(b"no cubin at all")
    data = bytearray(compile_cubin(FAULTS))
    data[0x30] = 80
    with pytest.raises(SimError, match="it is for sm_80"):
        Cubin(bytes(data))
