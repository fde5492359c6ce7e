"""Every opcode that our kernels use, against numpy.

Straight-line instructions are tested one by one: each case is a few lines of SASS between
loads of its inputs and stores of its outputs, and all cases run as one kernel.  Control flow
is tested by CUDA kernels that contain it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from sm70sim import Cubin, Device, Module, SimError
from sm70sim.cubin import Kernel
from sm70sim.disassembly import _instr as instruction

RNG = np.random.default_rng(7)
LANES = np.arange(32, dtype=np.uint32)
M32 = 0xFFFFFFFF
BASE, ONE, BITS = 242, 239, 241  # registers of the harness: address, 1, predicate bits


@dataclass
class Case:
    """SASS lines with inputs and expected outputs, each 32 words by register number.

    preds: predicate inputs by number; expect_preds: outputs.  imm: the immediate field of the
    encoding, where a line has a float or half immediate.  ulp: tolerance of float outputs.
    """

    op: str
    lines: str | list[str]
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    expect: dict[int, np.ndarray] = field(default_factory=dict)
    preds: dict[int, np.ndarray] = field(default_factory=dict)
    expect_preds: dict[int, np.ndarray] = field(default_factory=dict)
    imm: int = 0
    ulp: int = 0

    def __str__(self) -> str:
        return self.lines if isinstance(self.lines, str) else self.lines[0]


def u32(x) -> np.ndarray:
    x = np.broadcast_to(np.asarray(x), (32,))
    if x.dtype.kind == "f":
        return np.ascontiguousarray(x.astype(np.float32)).view(np.uint32)
    return (x.astype(object) & M32).astype(np.uint32)


def f32(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


def i64(words: np.ndarray) -> np.ndarray:
    return words.astype(np.int64)


def signed(words: np.ndarray) -> np.ndarray:
    return words.view(np.int32).astype(np.int64)


def halves(x: np.ndarray) -> np.ndarray:
    """(32, 2) halves to words."""
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(32)


def double(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = np.ascontiguousarray(x, np.float64).view(np.uint32).reshape(32, 2)
    return words[:, 0].copy(), words[:, 1].copy()


A, B, C = (RNG.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(3))
A[:4], B[:4] = [0, M32, 0x80000000, 5], [1, M32, 0x80000000, 7]
FX = (RNG.standard_normal(32) * 10.0 ** RNG.integers(-3, 4, 32)).astype(np.float32)
FY = (RNG.standard_normal(32) * 10.0 ** RNG.integers(-3, 4, 32)).astype(np.float32)
FZ = RNG.standard_normal(32).astype(np.float32)
FX[:6], FY[:6] = [0.0, -0.0, np.inf, np.nan, 1.5, 2.5], [-0.0, 0.0, 1.0, 2.0, np.nan, 2.5]
FX64, FY64, FZ64 = (x.astype(np.float64) for x in (FX, FY, FZ))
HX, HY, HZ = (RNG.standard_normal((32, 2)).astype(np.float16) for _ in range(3))
HX[0, 0], HY[0, 0] = 6e-8, 0.5  # subnormal
P, Q = RNG.integers(0, 2, 32).astype(bool), RNG.integers(0, 2, 32).astype(bool)
SMALL = RNG.integers(-100, 100, 32)
SHIFT = np.array([*range(0, 40, 2), 31, 32, 33, 63, 64, 1, 3, 5, 7, 9, 11, 255], np.uint32)
BIG = B.astype(object) << 32 | A.astype(object)
with np.errstate(all="ignore"):
    FSUM, FPROD, FFMA = FX + FY, FX * FY, (FX64 * FY64 + FZ64).astype(np.float32)


def _to_float_directed(x: np.ndarray, up: bool) -> np.ndarray:
    f = x.astype(np.float32)
    low, high = f.astype(np.float64) < x, f.astype(np.float64) > x
    return np.where(
        low if up else high, np.nextafter(f, np.float32(np.inf if up else -np.inf)), f
    ).astype(np.float32)


def _prmt(a: int, s: int, c: int) -> int:
    source = [(a | c << 32) >> 8 * k & 255 for k in range(8)]
    out = 0
    for k in range(4):
        n = s >> 4 * k & 15
        byte = source[n & 7]
        out |= (0xFF * (byte >> 7) if n & 8 else byte) << 8 * k
    return out


def _lut(table: int, a, b, c):
    out = np.zeros(32, np.uint32)
    for k in range(8):
        if table >> k & 1:
            x, y, z = (v if k >> s & 1 else ~v for v, s in ((a, 2), (b, 1), (c, 0)))
            out |= x & y & z
    return out


def integer_cases():
    ins = {2: A, 3: B, 4: C}
    total = i64(A) + i64(B) + i64(C)
    carry = total >> 32
    yield Case("MOV", "MOV R5, R2", ins, {5: A})
    yield Case("IADD3", "IADD3 R5, R2, R3, R4", ins, {5: u32(total)})
    yield Case("IADD3", "IADD3 R5, R2, -R3, 0x7", ins, {5: u32(i64(A) - i64(B) + 7)})
    yield Case(
        "IADD3",
        "IADD3 R5, P1, P2, R2, R3, R4",
        ins,
        {5: u32(total)},
        expect_preds={1: carry > 0, 2: carry > 1},
    )
    difference = i64(A) + (~B & M32).astype(np.int64) + 1
    yield Case(
        "IADD3",
        "IADD3 R5, P1, R2, -R3, RZ",
        ins,
        {5: u32(difference)},
        expect_preds={1: difference >> 32 > 0},
    )
    yield Case(
        "IADD3",
        "IADD3.X R5, R2, R3, RZ, P1, !PT",
        ins,
        {5: u32(i64(A) + i64(B) + P)},
        {1: P},
    )
    yield Case(
        "IADD3",
        "IADD3.X R5, R2, ~R3, RZ, P1, !PT",
        ins,
        {5: u32(i64(A) + i64(~B) + P)},
        {1: P},
    )
    low = A.astype(object) * B.astype(object)
    yield Case("IMAD", "IMAD R5, R2, R3, R4", ins, {5: u32(low + C.astype(object))})
    yield Case("IMAD", "IMAD.MOV.U32 R5, RZ, RZ, R2", ins, {5: A})
    yield Case("IMAD", "IMAD.IADD R5, R2, 0x1, R3", ins, {5: u32(i64(A) + i64(B))})
    yield Case("IMAD", "IMAD.SHL.U32 R5, R2, 0x10, RZ", ins, {5: u32(i64(A) << 4)})
    yield Case("IMAD", "IMAD.X R5, R2, 0x1, R3, P1", ins, {5: u32(i64(A) + i64(B) + P)}, {1: P})
    wide = {6: B, 7: A}
    wide64 = A.astype(object) << 32 | B.astype(object)
    for name, product in (
        ("IMAD.WIDE.U32", low),
        ("IMAD.WIDE", signed(A).astype(object) * signed(B).astype(object)),
    ):
        r = product + wide64
        yield Case("IMAD", f"{name} R8, R2, R3, R6", ins | wide, {8: u32(r), 9: u32(r >> 32)})
    yield Case("IMAD", "IMAD.HI.U32 R5, R2, R3, R4", ins, {5: u32((low >> 32) + C.astype(object))})
    yield Case("LEA", "LEA R5, R2, R3, 0x3", ins, {5: u32((i64(A) << 3) + i64(B))})
    s = i64(u32(i64(A) << 3)) + i64(B)
    yield Case("LEA", "LEA R5, P1, R2, R3, 0x3", ins, {5: u32(s)}, expect_preds={1: s >> 32 > 0})
    high = (A.astype(object) | C.astype(object) << 32) << 3 >> 32 & M32
    yield Case("LEA", "LEA.HI R5, R2, R3, R4, 0x3", ins, {5: u32(high + B.astype(object))})
    yield Case(
        "LEA",
        "LEA.HI.X R5, R2, R3, R4, 0x3, P1",
        ins,
        {5: u32(high + B.astype(object) + P)},
        {1: P},
    )
    yield Case("LEA", "LEA.HI.SX32 R5, R2, R3, 0x3", ins, {5: u32((signed(A) >> 29) + i64(B))})
    yield Case(
        "LEA",
        "LEA.HI.X.SX32 R5, R2, R3, 0x1, P1",
        ins,
        {5: u32((signed(A) >> 31) + i64(B) + P)},
        {1: P},
    )
    for table in (0xC0, 0xFC, 0x3C, 0x96, 0xF8, 0x1B, 0xE4, 0x2A):
        yield Case(
            "LOP3",
            f"LOP3.LUT R5, R2, R3, R4, 0x{table:x}, !PT",
            ins,
            {5: _lut(table, A, B, C)},
        )
    nonzero = (A & 1) != 0
    yield Case(
        "LOP3",
        "LOP3.LUT P1, R5, R2, 0x1, RZ, 0xc0, !PT",
        ins,
        {5: A & 1},
        expect_preds={1: nonzero},
    )
    yield Case(
        "PLOP3",
        "PLOP3.LUT P3, PT, P1, P2, PT, 0x80, 0x0",
        preds={1: P, 2: Q},
        expect_preds={3: P & Q},
    )
    yield Case(
        "PLOP3",
        "PLOP3.LUT P3, P4, P1, P2, PT, 0xa8, 0x3c",
        preds={1: P, 2: Q},
        expect_preds={3: P | Q, 4: P ^ Q},
    )
    sh = {2: A, 3: SHIFT, 4: B}
    n = SHIFT.astype(object)
    big = B.astype(object) << 32 | A.astype(object)
    yield Case(
        "SHF",
        "SHF.L.U32 R5, R2, R3, RZ",
        sh,
        {5: u32([x << min(k, 40) for x, k in zip(A.tolist(), n, strict=True)])},
    )
    yield Case(
        "SHF",
        "SHF.R.U32.HI R5, RZ, R3, R2",
        sh,
        {5: u32([x >> min(k, 40) for x, k in zip(A.tolist(), n, strict=True)])},
    )
    yield Case(
        "SHF",
        "SHF.R.S32.HI R5, RZ, R3, R2",
        sh,
        {5: u32([x >> min(k, 40) for x, k in zip(signed(A).tolist(), n, strict=True)])},
    )
    yield Case(
        "SHF",
        "SHF.L.U64.HI R5, R2, R3, R4",
        sh,
        {5: u32([(x << min(k, 64) & (1 << 64) - 1) >> 32 for x, k in zip(big, n, strict=True)])},
    )
    yield Case(
        "SHF",
        "SHF.R.U64 R5, R2, R3, R4",
        sh,
        {5: u32([x >> min(k, 64) for x, k in zip(big, n, strict=True)])},
    )
    yield Case(
        "SHF",
        "SHF.L.W.U32 R5, R2, R3, RZ",
        sh,
        {5: u32([x << (k & 31) for x, k in zip(A.tolist(), n, strict=True)])},
    )
    yield Case(
        "PRMT",
        "PRMT R5, R2, 0x5410, R3",
        ins,
        {5: u32([_prmt(a, 0x5410, b) for a, b in zip(A.tolist(), B.tolist(), strict=True)])},
    )
    yield Case(
        "PRMT",
        "PRMT R5, R2, 0x80b7, R3",
        ins,
        {5: u32([_prmt(a, 0x80B7, b) for a, b in zip(A.tolist(), B.tolist(), strict=True)])},
    )
    yield Case(
        "PRMT",
        "PRMT R5, R2, R4, R3",
        ins,
        {
            5: u32(
                [_prmt(a, c, b) for a, b, c in zip(A.tolist(), B.tolist(), C.tolist(), strict=True)]
            )
        },
    )
    compare = {
        "LT": np.less,
        "LE": np.less_equal,
        "GT": np.greater,
        "GE": np.greater_equal,
        "EQ": np.equal,
        "NE": np.not_equal,
    }
    for name, f in compare.items():
        yield Case(
            "ISETP",
            f"ISETP.{name}.AND P1, P2, R2, R3, P3",
            ins,
            preds={3: P},
            expect_preds={1: f(signed(A), signed(B)) & P, 2: ~f(signed(A), signed(B)) & P},
        )
        yield Case(
            "ISETP",
            f"ISETP.{name}.U32.OR P1, PT, R2, R3, P3",
            ins,
            preds={3: P},
            expect_preds={1: f(A, B) | P},
        )
    two = {2: A, 3: A.copy(), 4: C}
    two[3][::2] = B[::2]
    for name in ("LT", "GE", "EQ", "NE"):
        x, y = signed(two[2]), signed(two[3])
        r = (
            np.where(x == y, P, compare[name](x, y))
            if name in ("LT", "GE")
            else compare[name](x, y) & P
            if name == "EQ"
            else compare[name](x, y) | P
        )
        yield Case(
            "ISETP",
            f"ISETP.{name}.AND.EX P1, PT, R2, R3, PT, P3",
            two,
            preds={3: P},
            expect_preds={1: r},
        )
    yield Case(
        "IMNMX",
        "IMNMX R5, R2, R3, P1",
        ins,
        {5: u32(np.where(P, np.minimum(signed(A), signed(B)), np.maximum(signed(A), signed(B))))},
        {1: P},
    )
    yield Case("IMNMX", "IMNMX.U32 R5, R2, R3, !PT", ins, {5: np.maximum(A, B)})
    yield Case("SEL", "SEL R5, R2, R3, P1", ins, {5: np.where(P, A, B)}, {1: P})
    yield Case("IABS", "IABS R5, R2", ins, {5: u32(np.abs(signed(A)))})
    yield Case("POPC", "POPC R5, R2", ins, {5: u32([x.bit_count() for x in A.tolist()])})
    yield Case("FLO", "FLO.U32 R5, R2", ins, {5: u32([x.bit_length() - 1 for x in A.tolist()])})
    yield Case(
        "FLO",
        "FLO.U32.SH R5, R2",
        ins,
        {5: u32([32 - x.bit_length() if x else -1 for x in A.tolist()])},
    )
    yield Case(
        "BREV", "BREV R5, R2", ins, {5: u32([int(f"{x:032b}"[::-1], 2) for x in A.tolist()])}
    )
    yield Case(
        "SGXT", "SGXT R5, R2, 0x8", ins, {5: u32(A.astype(np.uint8).view(np.int8).astype(np.int64))}
    )
    yield Case(
        "BMSK", "BMSK R5, R2, R3", {2: u32(LANES), 3: u32(5)}, {5: u32(31 << LANES.astype(object))}
    )
    yield Case(
        "VABSDIFF", "VABSDIFF.U32 R5, R2, R3, R4", ins, {5: u32(np.abs(i64(A) - i64(B)) + i64(C))}
    )
    bytes_a, bytes_b = (
        A.view(np.uint8).reshape(32, 4).astype(int),
        B.view(np.uint8).reshape(32, 4).astype(int),
    )
    yield Case(
        "VABSDIFF4",
        "VABSDIFF4.U8.ACC R5, R2, R3, R4",
        ins,
        {5: u32(np.abs(bytes_a - bytes_b).sum(1) + i64(C))},
    )
    sb = A.view(np.int8).reshape(32, 4).astype(int)
    yield Case("IDP", "IDP.4A.S8.U8 R5, R2, R3, R4", ins, {5: u32((sb * bytes_b).sum(1) + i64(C))})
    yield Case(
        "P2R",
        "P2R R5, PR, R2, 0x6",
        ins,
        {5: (A & ~np.uint32(6)) | u32(P * 2 + Q * 4)},
        {1: P, 2: Q},
    )
    yield Case(
        "R2P", "R2P PR, R2, 0x6", ins, expect_preds={1: (A >> 1 & 1) != 0, 2: (A >> 2 & 1) != 0}
    )
    yield Case(
        "VOTE",
        "VOTE.ANY R5, PT, P1",
        expect={5: u32(int(sum(1 << k for k in range(32) if P[k])))},
        preds={1: P},
    )
    yield Case("VOTE", "VOTE.ALL P2, P1", preds={1: P}, expect_preds={2: np.full(32, P.all())})
    same = [int(sum(1 << j for j in range(32) if A[j] % 3 == A[k] % 3)) for k in range(32)]
    yield Case("MATCH", "MATCH.ANY R5, R2", {2: A % 3}, {5: u32(same)})
    yield Case("CS2R", "CS2R R4, SRZ", {4: A, 5: B}, {4: u32(0), 5: u32(0)})
    yield Case("S2R", "S2R R5, SR_LANEID", {5: A}, {5: LANES})
    yield Case("NOP", "NOP", ins, {2: A})
    yield Case("YIELD", ["YIELD", "MOV R5, R2"], ins, {5: A})
    # Constant bank 0 starts with the sizes of block and grid.
    at = np.where(LANES % 2 == 0, 0, 12)
    yield Case("LDC", "LDC R5, c[0x0][R2]", {2: u32(at)}, {5: np.where(at == 0, 32, 1)})


def float_cases():
    ins = {2: u32(FX), 3: u32(FY), 4: u32(FZ)}
    with np.errstate(all="ignore"):
        yield Case("FADD", "FADD R5, R2, R3", ins, {5: u32(FSUM)})
        yield Case("FADD", "FADD R5, |R2|, -R3", ins, {5: u32(np.abs(FX) - FY)})
        yield Case("FADD", "FADD R5, R2, -2.5", ins, {5: u32(FX - np.float32(2.5))}, imm=0xC0200000)
        ok = np.isfinite(FX) & np.isfinite(FY) & (FX + FY != 0) & (FX * FY != 0)
        down = _to_float_directed(np.where(ok, FX64 + FY64, 1), False)
        finite = {2: u32(np.where(ok, FX, 0)), 3: u32(np.where(ok, FY, 1)), 4: u32(FZ)}
        yield Case("FADD", "FADD.RM R5, R2, R3", finite, {5: u32(down)}, ulp=0)
        yield Case("FMUL", "FMUL R5, R2, R3", ins, {5: u32(FPROD)})
        tiny = {2: u32(np.full(32, 1e-39, np.float32)), 3: u32(np.float32(1))}
        yield Case("FMUL", "FMUL.FTZ R5, R2, R3", tiny, {5: u32(0)})
        up = _to_float_directed(np.where(ok, FX64 * FY64, 0), True)
        yield Case("FMUL", "FMUL.RP R5, R2, R3", finite, {5: u32(up)})
        yield Case("FFMA", "FFMA R5, R2, R3, R4", ins, {5: u32(FFMA)})
        zero = {2: u32(FZ), 3: u32(FZ), 4: u32(0)}
        square = FZ64 * FZ64
        yield Case(
            "FFMA", "FFMA.RZ R5, R2, R3, R4", zero, {5: u32(_to_float_directed(square, False))}
        )
        yield Case(
            "FFMA", "FFMA.RP R5, R2, R3, R4", zero, {5: u32(_to_float_directed(square, True))}
        )
        yield Case(
            "FFMA", "FFMA.RM R5, R2, R3, R4", zero, {5: u32(_to_float_directed(square, False))}
        )
        yield Case(
            "FFMA",
            "FFMA.SAT R5, R2, R3, R4",
            {2: u32(FZ), 3: u32(FZ), 4: u32(FZ)},
            {5: u32(np.clip((square + FZ64).astype(np.float32), 0, 1))},
        )
        low, high = np.fmin(FX, FY), np.fmax(FX, FY)
        low[:2], high[:2] = -0.0, 0.0
        yield Case("FMNMX", "FMNMX R5, R2, R3, PT", ins, {5: u32(low)})
        yield Case("FMNMX", "FMNMX R5, R2, R3, !PT", ins, {5: u32(high)})
        yield Case(
            "FSEL",
            "FSEL R5, R2, -R3, P1",
            ins,
            {5: np.where(P, u32(FX), u32(FY) ^ np.uint32(1 << 31))},
            {1: P},
        )
        nan = np.isnan(FX) | np.isnan(FY)
        for name, r in {
            "LT": FX < FY,
            "EQ": FX == FY,
            "LE": FX <= FY,
            "GT": FX > FY,
            "GE": FX >= FY,
            "NE": (FX != FY) & ~nan,
        }.items():
            yield Case(
                "FSETP",
                f"FSETP.{name}.AND P1, P2, R2, R3, P3",
                ins,
                preds={3: P},
                expect_preds={1: r & P, 2: ~r & P},
            )
            yield Case(
                "FSETP",
                f"FSETP.{name}U.FTZ.OR P1, PT, R2, R3, P3",
                ins,
                preds={3: P},
                expect_preds={1: r | nan | P},
            )
        yield Case("FSETP", "FSETP.NAN.AND P1, PT, R2, R3, PT", ins, expect_preds={1: nan})
        yield Case(
            "FSET", "FSET.BF.GT.AND R5, R2, R3, PT", ins, {5: u32((FX > FY).astype(np.float32))}
        )
        usual = {2: u32(FZ), 3: u32(FZ * 3)}
        yield Case("FCHK", "FCHK P1, R2, R3", usual, expect_preds={1: np.zeros(32, bool)})
        yield Case(
            "FCHK",
            "FCHK P1, R2, R3",
            {2: u32(np.float32(1)), 3: u32(0)},
            expect_preds={1: np.ones(32, bool)},
        )
        positive = np.abs(FZ) + np.float32(0.01)
        m = {2: u32(positive), 3: u32(FZ * 20)}
        yield Case("MUFU", "MUFU.RCP R5, R2", m, {5: u32(1 / positive.astype(float))}, ulp=1)
        yield Case(
            "MUFU", "MUFU.RSQ R5, R2", m, {5: u32(1 / np.sqrt(positive.astype(float)))}, ulp=1
        )
        yield Case("MUFU", "MUFU.EX2 R5, R3", m, {5: u32(np.exp2(FZ.astype(float) * 20))}, ulp=40)
        yield Case("MUFU", "MUFU.LG2 R5, R2", m, {5: u32(np.log2(positive.astype(float)))}, ulp=2)
        yield Case("MUFU", "MUFU.EX2 R5, R2", {2: u32(np.float32(-np.inf))}, {5: u32(0)})
        yield Case("FRND", "FRND.FLOOR R5, R2", usual, {5: u32(np.floor(FZ))})
        yield Case("FRND", "FRND R5, R2", usual, {5: u32(np.rint(FZ))})


def conversion_cases():
    x = np.where(np.isfinite(FX), FX, 0) * np.float32(100)
    clipped = np.clip(np.trunc(x.astype(float)), -(2**31), 2**31 - 1)
    yield Case("F2I", "F2I.TRUNC.NTZ R5, R2", {2: u32(x)}, {5: u32(clipped.astype(np.int64))})
    yield Case(
        "F2I",
        "F2I.FTZ.U32.TRUNC.NTZ R5, R2",
        {2: u32(x)},
        {5: u32(np.maximum(clipped, 0).astype(np.int64))},
    )
    yield Case("F2I", "F2I.NTZ R5, R2", {2: u32(FZ)}, {5: u32(np.rint(FZ).astype(np.int64))})
    yield Case("I2F", "I2F R5, R2", {2: A}, {5: u32(signed(A).astype(np.float32))})
    yield Case("I2F", "I2F.U32 R5, R2", {2: A}, {5: u32(A.astype(np.float32))})
    yield Case(
        "I2F", "I2F.U32.RP R5, R2", {2: A}, {5: u32(_to_float_directed(A.astype(float), True))}
    )
    yield Case(
        "I2F", "I2F.RP R5, R2", {2: A}, {5: u32(_to_float_directed(signed(A).astype(float), True))}
    )
    yield Case("I2F", "I2F.U8 R5, R2.B2", {2: A}, {5: u32((A >> 16 & 255).astype(np.float32))})
    yield Case("I2F", "I2F.S16 R5, R2.H1", {2: A}, {5: u32((signed(A) >> 16).astype(np.float32))})
    with np.errstate(all="ignore"):
        h = FX.astype(np.float16)
        h[np.isnan(FX)] = np.frombuffer(b"\xff\x7f", np.float16)[0]
        tiny = np.float32(2.0) ** RNG.integers(-27, -13, 32).astype(np.float32) * (
            1 + RNG.random(32, dtype=np.float32)
        )
        yield Case(
            "F2F", "F2F.F16.F32 R5, R2", {2: u32(FX)}, {5: h.view(np.uint16).astype(np.uint32)}
        )
        yield Case(
            "F2F",
            "F2F.F16.F32 R5, R2",
            {2: u32(tiny)},
            {5: tiny.astype(np.float16).view(np.uint16).astype(np.uint32)},
        )
        # straight at the ends: ties, the largest half, overflow
        edge = np.resize(
            np.array(
                [
                    65504,
                    65519.996,
                    65520,
                    2049,
                    2051,
                    -2049,
                    1.0009766,
                    5.9604645e-8,
                    2.9802322e-8,
                    2.99e-8,
                ],
                np.float32,
            ),
            32,
        )
        yield Case(
            "F2F",
            "F2F.F16.F32 R5, R2",
            {2: u32(edge)},
            {5: edge.astype(np.float16).view(np.uint16).astype(np.uint32)},
        )
    yield Case(
        "F2F", "F2F.F32.F16 R5, R2.H1", {2: halves(HX)}, {5: u32(HX[:, 1].astype(np.float32))}
    )
    lo, hi = double(FZ64)
    yield Case("F2F", "F2F.F64.F32 R6, R2", {2: u32(FZ)}, {6: lo, 7: hi})
    third = RNG.standard_normal(32)
    lo, hi = double(third)
    yield Case("F2F", "F2F.F32.F64 R5, R6", {6: lo, 7: hi}, {5: u32(third.astype(np.float32))})


def half_cases():
    ins = {2: halves(HX), 3: halves(HY), 4: halves(HZ)}
    x, y, z = (v.astype(np.float64) for v in (HX, HY, HZ))
    yield Case("HADD2", "HADD2 R5, R2, R3", ins, {5: halves(HX + HY)})
    yield Case("HADD2", "HADD2 R5, -R2.H0_H0, |R3|", ins, {5: halves(np.abs(HY) - HX[:, :1])})
    yield Case("HADD2", "HADD2.F32 R5, -RZ, R2.H1_H1", ins, {5: u32(HX[:, 1].astype(np.float32))})
    yield Case("HADD2", "HADD2.F32 R5, -RZ, R2.H0_H0", ins, {5: u32(HX[:, 0].astype(np.float32))})
    yield Case("HMUL2", "HMUL2 R5, R2, R3", ins, {5: halves(HX * HY)})
    bits = struct.unpack("<I", np.array([256, 256], np.float16).tobytes())[0]
    yield Case("HMUL2", "HMUL2 R5, R2, 256, 256", ins, {5: halves(HX * np.float16(256))}, imm=bits)
    yield Case("HFMA2", "HFMA2.MMA R5, R2, R3, R4", ins, {5: halves(x * y + z)})
    yield Case(
        "HSETP2",
        "HSETP2.GT.AND P1, P2, R2, R3, PT",
        ins,
        expect_preds={1: HX[:, 0] > HY[:, 0], 2: HX[:, 1] > HY[:, 1]},
    )
    yield Case("HSET2", "HSET2.BF.GT.AND R5, R2, R3, PT", ins, {5: halves(HX > HY)})


def double_cases():
    a, b, c = (RNG.standard_normal(32) * 100 for _ in range(3))
    ins = {}
    for n, v in ((2, a), (4, b), (6, c)):
        ins[n], ins[n + 1] = double(v)

    def out(v):
        lo, hi = double(v)
        return {8: lo, 9: hi}

    yield Case("DADD", "DADD R8, R2, -R4", ins, out(a - b))
    yield Case("DMUL", "DMUL R8, R2, R4", ins, out(a * b))
    exact = [
        float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    yield Case("DFMA", "DFMA R8, R2, R4, R6", ins, out(np.array(exact)))
    yield Case(
        "DSETP", "DSETP.LT.AND P1, P2, R2, R4, PT", ins, expect_preds={1: a < b, 2: ~(a < b)}
    )


def shared_and_shuffle_cases():
    at = u32(LANES * 16)
    words = {2: at, 4: A, 5: B, 6: C, 7: u32(FX)}
    yield Case(
        "STS", ["STS.128 [R2], R4", "LDS.U.128 R8, [R2]"], words, {8: A, 9: B, 10: C, 11: u32(FX)}
    )
    yield Case("LDS", ["STS.64 [R2+0x8], R4", "LDS.U R8, [R2+0xc]"], words, {8: B})
    yield Case(
        "LDS",
        ["STS [R2], R4", "LDS.U.U8 R8, [R2+0x1]", "LDS.S16 R9, [R2+0x2]"],
        words,
        {8: A >> 8 & 255, 9: u32(signed(A) >> 16)},
    )
    yield Case(
        "ATOMS",
        ["STS [0x0], RZ", "ATOMS.ADD R8, [RZ], R4"],
        {4: u32(LANES)},
        {8: u32(np.cumsum(LANES) - LANES)},
    )
    for mode, c, source in (
        ("IDX", 0x1F, B & 31),
        ("BFLY", 0x1F, LANES ^ 5),
        ("UP", 0x0, np.where(LANES >= 3, LANES - 3, LANES)),
        ("DOWN", 0x1F, np.where(LANES + 3 < 32, LANES + 3, LANES)),
    ):
        by = {"IDX": "R3", "BFLY": "0x5"}.get(mode, "0x3")
        yield Case("SHFL", f"SHFL.{mode} PT, R5, R2, {by}, 0x{c:x}", {2: A, 3: B}, {5: A[source]})
    ok = LANES >= 3
    yield Case(
        "SHFL",
        "SHFL.UP P1, R5, R2, 0x3, 0x0",
        {2: A},
        {5: A[np.where(ok, LANES - 3, LANES)]},
        expect_preds={1: ok},
    )


def mma_reference(a_col: bool, b_col: bool, f32_sums: bool, a, b, c):
    """One warp by the PTX fragment layout: a, b (32, 4), c (32, 8) -> (32, 8), exact."""
    am, bm = np.zeros((4, 8, 4)), np.zeros((4, 4, 8))
    for lane in range(32):
        q, g, t = lane % 16 // 4, lane // 16, lane % 4
        for i in range(4):
            am[q, g * 4 + (i if a_col else t), t if a_col else i] = a[lane, i]
            bm[q, i if b_col else t, g * 4 + (t if b_col else i)] = b[lane, i]
    d = np.einsum("qik,qkj->qij", am, bm)
    out = np.zeros((32, 8))
    for lane in range(32):
        q, g, t = lane % 16 // 4, lane // 16, lane % 4
        for i in range(8):
            row = g * 4 + ((t & 1) + (i & 2) if f32_sums else t)
            column = (i & 4) + (t & 2) + (i & 1) if f32_sums else i
            out[lane, i] = d[q, row, column] + c[lane, i]
    return out


def hmma_cases():
    # Small integers: every sum is exact, so the layouts are checked to the bit.
    a, b = (RNG.integers(-8, 9, (32, 4)).astype(np.float16) for _ in range(2))
    c = RNG.integers(-64, 65, (32, 8)).astype(np.float32)
    aw, bw = (np.ascontiguousarray(v).view(np.uint32).reshape(32, 2) for v in (a, b))
    ins = {2: aw[:, 0], 3: aw[:, 1], 4: bw[:, 0], 5: bw[:, 1]}
    for la in ("ROW", "COL"):
        for lb in ("ROW", "COL"):
            d = mma_reference(la == "COL", lb == "COL", True, a, b, c)
            lines = [
                f"HMMA.884.F32.F32.STEP{s} R{8 + 2 * s}, R2.{la}, R4.{lb}, R{8 + 2 * s}"
                for s in range(4)
            ]
            yield Case(
                "HMMA",
                lines,
                ins | {8 + i: u32(c[:, i]) for i in range(8)},
                {8 + i: u32(d[:, i]) for i in range(8)},
            )
            d = mma_reference(la == "COL", lb == "COL", False, a, b, c)
            lines = [
                f"HMMA.884.F16.F16.STEP{s} R{8 + 2 * s}, R2.{la}, R4.{lb}, R{8 + 2 * s}"
                for s in range(2)
            ]
            yield Case(
                "HMMA",
                lines,
                ins | {8 + i: halves(c[:, 2 * i : 2 * i + 2]) for i in range(4)},
                {8 + i: halves(d[:, 2 * i : 2 * i + 2]) for i in range(4)},
            )
    # Subnormal halves count, and products are summed with RZ as the sum of the accumulator
    tiny = np.full((32, 4), 2.0**-24, np.float16)
    tw = np.ascontiguousarray(tiny).view(np.uint32).reshape(32, 2)
    ones = np.ascontiguousarray(np.ones((32, 4), np.float16)).view(np.uint32).reshape(32, 2)
    yield Case(
        "HMMA",
        "HMMA.884.F32.F32.STEP0 R8, R2.ROW, R4.COL, RZ",
        {2: tw[:, 0], 3: tw[:, 1], 4: ones[:, 0], 5: ones[:, 1]},
        {8: u32(np.float32(2.0**-22)), 9: u32(np.float32(2.0**-22))},
    )


CASES: list[Case] = [
    *integer_cases(),
    *float_cases(),
    *conversion_cases(),
    *half_cases(),
    *double_cases(),
    *shared_and_shuffle_cases(),
    *hmma_cases(),
]


def _kernel(cases: list[Case]) -> tuple[Kernel, np.ndarray, list[dict]]:
    """One kernel with all cases; its memory; per case, word offsets of the outputs."""
    instrs, words, places = [], [], []

    def emit(text: str, imm: int = 0) -> None:
        n = len(instrs)
        instrs.append(instruction(f"{n * 16:x}", text, f"{imm << 32:x}", n))

    def slot(values=None) -> str:
        words.append(np.zeros(32, np.uint32) if values is None else values.astype(np.uint32))
        return f"0x{(len(words) - 1) * 128:x}"

    emit("S2R R240, SR_LANEID")
    emit(f"MOV R{BASE}, c[0x0][0x160]")
    emit(f"MOV R{BASE + 1}, c[0x0][0x164]")
    emit(f"IMAD R{BASE}, R240, 0x4, R{BASE}")
    emit(f"MOV R{ONE}, 0x1")
    for case in cases:
        for r, v in case.inputs.items():
            emit(f"LDG.E.SYS R{r}, [R{BASE}+{slot(v)}]")
        for p, v in case.preds.items():
            emit(f"LDG.E.SYS R{BITS}, [R{BASE}+{slot(v)}]")
            emit(f"ISETP.NE.AND P{p}, PT, R{BITS}, RZ, PT")
        for line in [case.lines] if isinstance(case.lines, str) else case.lines:
            emit(line, case.imm)
        place = {}
        for r in case.expect:
            place[r] = len(words)
            emit(f"STG.E.SYS [R{BASE}+{slot()}], R{r}")
        for p in case.expect_preds:
            place[f"P{p}"] = len(words)
            emit(f"SEL R{BITS}, R{ONE}, RZ, P{p}")
            emit(f"STG.E.SYS [R{BASE}+{slot()}], R{BITS}")
        places.append(place)
    emit("EXIT")
    kernel = Kernel("opcodes", instrs, {}, regs=248, static_smem=1024)
    kernel.params, kernel.param_size = [(0, 8)], 8
    return kernel, np.stack(words), places


class _Bare:
    """A Cubin of one kernel that has no file."""

    def __init__(self, kernel: Kernel):
        self.kernels, self.globals_size = {kernel.name: kernel}, 0

    def const_bank(self, kernel, bank, globals_at) -> bytes:
        return b""


def _module(kernel: Kernel, dev: Device) -> Module:
    mod = Module.__new__(Module)
    mod.cubin, mod.dev, mod.hmma_exact = _Bare(kernel), dev, False
    mod._translated, mod._globals = {}, 0
    return mod


def _run_cases() -> list[dict]:
    """Per case, the words that it stored, by register number or predicate name."""
    kernel, words, places = _kernel(CASES)
    dev = Device(16 << 20)
    memory = dev.put(words)
    _module(kernel, dev).launch("opcodes", 1, 32, [memory])
    return [{k: memory.np[n].copy() for k, n in place.items()} for place in places]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return _run_cases()


@pytest.mark.slow
def test_plain_code_gives_the_same_bits(results, monkeypatch):
    # No vector instructions beyond the base of the architecture, no hardware FMA.
    monkeypatch.setenv("SM70SIM_CXXFLAGS", "")
    for case, ours, plain in zip(CASES, results, _run_cases(), strict=True):
        for k, words in ours.items():
            np.testing.assert_array_equal(plain[k], words, err_msg=f"{case}: {k}")


@pytest.mark.parametrize("n", range(len(CASES)), ids=[f"{i}-{c}" for i, c in enumerate(CASES)])
def test_opcode(n: int, results):
    case, got = CASES[n], results[n]
    for r, want in case.expect.items():
        if case.ulp:
            a, b = got[r].view(np.int32).astype(np.int64), want.view(np.int32).astype(np.int64)
            assert (np.abs(a - b) <= case.ulp).all(), f"R{r}"
            continue
        both_nan = np.zeros(32, bool)
        if case.op.startswith("F") and case.op not in ("F2F", "F2I", "FLO"):
            both_nan = np.isnan(f32(got[r])) & np.isnan(f32(np.ascontiguousarray(want)))
        bad = (got[r] != want) & ~both_nan
        assert not bad.any(), (
            f"R{r}, lane {bad.argmax()}: got {got[r][bad][0]:#x}, want {want[bad][0]:#x}"
        )
    for p, want in case.expect_preds.items():
        np.testing.assert_array_equal(got[f"P{p}"].astype(bool), want, err_msg=f"P{p}")


# ---- control flow, memory and what needs a real kernel
SOURCES = {
    "divergence": r"""
        extern "C" __global__ void k(const int *a, int *out) {
          int t = threadIdx.x, n = a[t], s = 0;
          while (n != 1 && s < 500) { if (n & 1) { n = 3 * n + 1; s += 3; } else { n >>= 1; s++; } }
          out[t] = s + __shfl_xor_sync(~0u, s, 1);
        }""",
    "barriers": r"""
        extern "C" __global__ void k(const int *a, int *out) {
          __shared__ int s[128];
          int t = threadIdx.x;
          if (t < 64) {
            s[t] = a[t];
            asm volatile("bar.arrive 1, 128;" ::: "memory");
            asm volatile("bar.sync 2, 64;" ::: "memory");
            out[t] = s[63 - t];
          }
          else { asm volatile("bar.sync 1, 128;" ::: "memory"); out[t] = s[t - 64] + 1; }
          int any = __syncthreads_or(t == 5), all = __syncthreads_and(t != 7);
          int n = __syncthreads_count(t % 3 == 0);
          out[t] += 1000 * any + 2000 * all + 10000 * n;
        }""",
    "barrier_in_register": r"""
        extern "C" __global__ void k(const int *a, int *out) {
          __shared__ int s[128];
          int t = threadIdx.x, half = t / 64, id = a[half];
          s[t] = t * 3;
          asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
          out[t] = s[t ^ 63];
        }""",
    "calls": r"""
        __device__ __noinline__ int f(int x, int d) { return d == 0 ? x : f(x * 3 + 1, d - 1) + d; }
        extern "C" __global__ void k(const int *a, int *out) {
          int t = threadIdx.x, loc[40], s = 0;
          for (int i = 0; i < 40; i++) loc[i] = a[(t + i) & 63];
          for (int i = 0; i < 40; i++) s += loc[(i * a[t]) % 40] * i;
          out[t] = s + f(a[t], t & 7);
        }""",
    "atomics": r"""
        extern "C" __global__ void k(int *a, int *out) {
          int t = threadIdx.x;
          atomicAdd(a, t); atomicMax(a + 1, t * 7 % 113);
          out[t] = atomicCAS(a + 2, t, t + 1) >= 0;
          __threadfence();
        }""",
}
COVERED = {
    "divergence": {"BRA", "BSSY", "BSYNC", "EXIT", "LDG", "STG"},
    "barriers": {"BAR", "B2R"},
    "calls": {"CALL", "RET", "LDL", "STL", "BMOV"},
    "atomics": {"ATOMG", "RED", "MEMBAR"},
}


def _run(load, name: str, a: np.ndarray, threads: int):
    mod = load(SOURCES[name])
    buffer, out = mod.dev.put(a.astype(np.int32)), mod.dev.zeros(threads, np.int32)
    executed = mod.launch("k", 1, threads, [buffer, out], max_insts=2_000_000)
    present = {i.op for i in mod.kernel("k").instrs}
    assert COVERED.get(name, set()) <= present | set(executed.by_op())
    return out.np.copy(), buffer.np.copy()


def test_divergence(load, rng):
    a = rng.integers(1, 3000, 64)
    steps = []
    for n in a.tolist():
        s = 0
        while n != 1 and s < 500:
            n, s = (3 * n + 1, s + 3) if n & 1 else (n >> 1, s + 1)
        steps.append(s)
    s = np.array(steps)
    np.testing.assert_array_equal(_run(load, "divergence", a, 64)[0], s + s[np.arange(64) ^ 1])


def test_barriers(load, rng):
    a = rng.integers(0, 100, 64)
    want = np.concatenate([a[::-1], a + 1]) + 1000 + 10000 * 43
    np.testing.assert_array_equal(_run(load, "barriers", a, 128)[0], want)


def test_barrier_number_in_a_register(load):
    t = np.arange(128)
    got = _run(load, "barrier_in_register", np.array([3, 5]), 128)[0]
    np.testing.assert_array_equal(got, (t ^ 63) * 3)


def test_calls_and_local_memory(load, rng):
    a = rng.integers(1, 50, 64)

    def f(x: int, d: int) -> int:
        return x if d == 0 else f(x * 3 + 1, d - 1) + d

    t = np.arange(64)
    local = [sum(int(a[(k + i * int(a[k]) % 40) & 63]) * i for i in range(40)) for k in t]
    want = [s + f(int(a[k]), k & 7) for k, s in zip(t, local, strict=True)]
    np.testing.assert_array_equal(_run(load, "calls", a, 64)[0], want)


def _sass_module(lines: list[str], labels: dict[str, int]) -> Module:
    instrs = [instruction(f"{n * 16:x}", text, "0", n) for n, text in enumerate(lines)]
    kernel = Kernel("opcodes", instrs, {k: v * 16 for k, v in labels.items()}, regs=248)
    kernel.params, kernel.param_size = [(0, 8)], 8
    return _module(kernel, Device(1 << 20))


@pytest.mark.parametrize("synchronise", [True, False])
def test_warpsync_joins_the_splits_of_a_warp(synchronise):
    mod = _sass_module(
        [
            "S2R R240, SR_LANEID",
            f"MOV R{BASE}, c[0x0][0x160]",
            f"MOV R{BASE + 1}, c[0x0][0x164]",
            f"IMAD R{BASE}, R240, 0x4, R{BASE}",
            "ISETP.GE.AND P0, PT, R240, 0x10, PT",
            "@P0 BRA `(.L_join)",
            "NOP",
            "WARPSYNC 0xffffffff" if synchronise else "NOP",
            "VOTE.ANY R5, PT, PT",
            f"STG.E.SYS [R{BASE}], R5",
            "EXIT",
        ],
        {".L_join": 7},
    )
    out = mod.dev.zeros(32, np.uint32)
    mod.launch("opcodes", 1, 32, [out])
    apart = np.where(LANES >= 16, 0xFFFF0000, 0xFFFF)
    np.testing.assert_array_equal(out.np, np.full(32, M32) if synchronise else apart)


@pytest.mark.parametrize("leave", [True, False])
def test_break_takes_lanes_out_of_a_convergence_barrier(leave):
    # The upper half goes elsewhere and waits for the lower one there.  If it had stayed in the
    # barrier, the lower half would wait for it: a deadlock.
    store = [f"STG.E.SYS [R{BASE}], R5", "EXIT"]
    mod = _sass_module(
        [
            "S2R R240, SR_LANEID",
            f"MOV R{BASE}, c[0x0][0x160]",
            f"MOV R{BASE + 1}, c[0x0][0x164]",
            f"IMAD R{BASE}, R240, 0x4, R{BASE}",
            "ISETP.GE.AND P0, PT, R240, 0x10, PT",
            "BSSY B4, `(.L_end)",
            "@P0 BREAK B4" if leave else "NOP",
            "@P0 BRA `(.L_out)",
            "BSYNC B4",
            "VOTE.ANY R5, PT, PT",  # .L_end
            "WARPSYNC 0xffffffff",
            *store,
            "VOTE.ANY R5, PT, PT",  # .L_out
            "WARPSYNC 0xffffffff",
            *store,
        ],
        {".L_end": 9, ".L_out": 13},
    )
    out = mod.dev.zeros(32, np.uint32)
    if not leave:
        with pytest.raises(SimError, match="deadlock"):
            mod.launch("opcodes", 1, 32, [out])
        return
    mod.launch("opcodes", 1, 32, [out])
    np.testing.assert_array_equal(out.np, np.where(LANES >= 16, 0xFFFF0000, 0xFFFF))


def test_atomics(load):
    out, a = _run(load, "atomics", np.zeros(4), 64)
    t = np.arange(64)
    np.testing.assert_array_equal(a[:3], [t.sum(), (t * 7 % 113).max(), 64])
    assert out.all()


@pytest.mark.sm70
@pytest.mark.slow
def test_every_opcode_of_the_shipped_kernels_is_tested():
    cubins = pytest.importorskip("v100_build.cubins")
    tested = {c.op for c in CASES} | set().union(*COVERED.values()) | {"WARPSYNC", "BREAK"}
    untested: dict[str, str] = {}
    for spec in cubins.load_specs():
        built = cubins.compile_cubin(spec, 70)
        for kernel in Cubin(built.path).kernels.values():
            for ins in kernel.instrs:
                if ins.op not in tested:
                    untested.setdefault(ins.op, f"{kernel.name} at 0x{ins.pc:x}: {ins.text}")
    assert not untested, f"add a case to CASES or a kernel to SOURCES: {untested}"
