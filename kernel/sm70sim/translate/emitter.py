"""Turns one instruction into a C++ statement.

The functions in ops/ are registered per opcode.  They get an Emitter, which renders operands
as C++ expressions and destinations as guarded writes.  Conventions of the C++ they write:

- ``R``: the registers of the warp, ``R[n][lane]``; ``w.P[n]``: predicates, one bit per lane.
- ``act``: lanes that run; ``m``: those of them whose guard predicate is true.
- vector expressions stand in a loop over ``h``: vector h has the lanes VL*h ... VL*h+7.
- lane expressions stand in a loop over ``l``, the lane.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cubin import Instr, Kernel
from ..errors import UnknownInstruction
from .operands import PT, Operand, is_number, number, parse

COMBINE = {"AND": "&", "OR": "|", "XOR": "^"}
ROUNDING = {"RM": 1, "RP": 2, "RZ": 3}
_BRANCHES_BY_TEXT = ("BRX", "RET")  # operands that these read from the text themselves


@dataclass
class OpSpec:
    """How an opcode is translated: the function, and the modifiers that it knows."""

    emit: Callable[[Emitter], str]
    modifiers: frozenset[str]
    always: bool  # runs even if no lane is active (control flow)


OPS: dict[str, OpSpec] = {}


def op(name: str, modifiers: str = "", always: bool = False):
    """Register the translation of an opcode; modifiers: those that it knows."""

    def register(function):
        OPS[name] = OpSpec(function, frozenset(modifiers.split()), always)
        return function

    return register


@dataclass
class Info:
    """What the cycle model wants to know of an instruction.

    guarded: its mask is in the trace.  record: the kind of its trace record (none, shared,
    global, local, bar).  nbytes: bytes per lane of an access.
    """

    guarded: bool = False
    record: str = "none"
    nbytes: int = 0


@dataclass
class Emitter:
    """State of the translation of one kernel, and of the instruction at hand."""

    kernel: Kernel
    const_sizes: dict[int, int]
    maxreg: int = 0
    address_taken: set[int] = field(default_factory=set)
    ins: Instr | None = None
    args: list[Operand] = field(default_factory=list)
    info: Info = field(default_factory=Info)

    # ---- one instruction
    def translate(self, ins: Instr) -> str:
        """C++ of one instruction, its guard and its trace of the mask."""
        self.ins, self.info = ins, Info()
        spec = OPS.get(ins.op)
        if spec is None:
            raise UnknownInstruction(f"instruction {ins.opcode}")
        guard = parse(ins.pred)
        never = guard.n == PT and guard.not_
        if never and ins.op != "BRA":
            body = ""
        else:
            unknown = [x for x in ins.mods if x not in spec.modifiers]
            if unknown:
                raise UnknownInstruction(f"modifier .{'.'.join(unknown)}")
            self.args = [] if ins.op in _BRANCHES_BY_TEXT else self._parse_args()
            body = spec.emit(self)
        if guard.n == PT and not guard.not_:
            return f"{{const u32 m=act; (void)m; {body}}}"
        self.info.guarded = True
        mask = "0u" if never else f"(act&{self.pred(guard)})"
        test = "" if spec.always else "if(likely(m))"
        return (
            f"{{const u32 m={mask}; (void)m; if(unlikely(c.tracing)) w.trace.push_back(m); "
            f"{test}{{{body}}}}}"
        )

    def _parse_args(self) -> list[Operand]:
        texts, out = list(self.ins.args), []
        halves = self.ins.op.startswith("H") and self.ins.op != "HMMA"
        while texts:
            first = texts.pop(0)
            if halves and is_number(first) and texts and is_number(texts[0]):
                out.append(self._half_pair(first, texts.pop(0)))
            else:
                out.append(parse(first))
        return out

    def _half_pair(self, high: str, low: str) -> Operand:
        bits = self.raw_immediate
        for text, part in ((high, bits >> 16), (low, bits & 0xFFFF)):
            value = struct.unpack("<e", struct.pack("<H", part))[0]
            if number(text) == number(text) and number(text) != value:
                raise UnknownInstruction(
                    f"half immediates {high},{low} do not agree with the encoding 0x{bits:08x}"
                )
        return Operand("himm", f"{high},{low}", imm=bits)

    @property
    def mods(self) -> list[str]:
        """The modifiers, in order."""
        return self.ins.mods

    def one_of(self, names, default: str | None = None) -> str:
        """The first modifier that is in names."""
        for m in self.ins.mods:
            if m in names:
                return m
        if default is None:
            raise UnknownInstruction(f"{self.ins.opcode} lacks one of {', '.join(sorted(names))}")
        return default

    @property
    def rounding(self) -> int:
        """enum Round of vec.h."""
        return ROUNDING[r] if (r := self.one_of(ROUNDING, "")) else 0

    @property
    def raw_immediate(self) -> int:
        """The 32-bit immediate field of the encoding."""
        return (self.ins.enc >> 32) & 0xFFFFFFFF

    # ---- registers, constants, predicates
    def reg(self, n: int, width: int = 1) -> str:
        """Register n as a row of 32 lanes; width: registers that are used from n on."""
        self.maxreg = max(self.maxreg, n + width - 1)
        return f"R[{n}]"

    def reg_number(self, o: Operand, width: int = 1) -> int:
        """Register number of an operand that must be a register; -1 is RZ."""
        if o.kind != "reg" or o.neg or o.inv or o.abs or o.suffixes:
            raise UnknownInstruction(f"operand {o.text}")
        if o.n is None:
            return -1
        self.reg(o.n, width)
        return o.n

    def const(self, o: Operand, word: int = 0) -> str:
        """A word of a constant bank."""
        if o.indexed:
            raise UnknownInstruction(f"indexed constant operand {o.text}")
        offset, size = o.offset + 4 * word, self.const_sizes.get(o.bank, 0)
        if offset + 4 > size:
            raise UnknownInstruction(
                f"constant {o.text} is outside bank {o.bank}, which has {size} bytes"
            )
        return f"CB({o.bank},{offset})"

    def pred(self, o: Operand) -> str:
        """A predicate source as a mask of 32 lanes."""
        if o.kind != "pred":
            raise UnknownInstruction(f"predicate operand {o.text}")
        mask = "~0u" if o.n == PT else f"w.P[{o.n}]"
        return f"(~{mask})" if o.not_ else mask

    def pred_v(self, o: Operand) -> str:
        """The bits of a predicate source that belong to vector h."""
        return f"(({self.pred(o)})>>(VL*h))"

    def set_pred(self, o: Operand, mask: str) -> str:
        """Write a predicate."""
        if o.kind != "pred":
            raise UnknownInstruction(f"predicate destination {o.text}")
        return "" if o.n == PT else f"setp(w.P[{o.n}],m,{mask});"

    # ---- vector expressions
    def x(self, o: Operand, word: int = 0) -> str:
        """Integer source; word: which register of a 64-bit operand."""
        if o.kind == "reg":
            if o.suffixes:
                raise UnknownInstruction(f"operand suffix {o.text}")
            e = "splat(0)" if o.n is None else f"ldv({self.reg(o.n + word)},h)"
        elif o.kind == "imm":
            return f"splat(0x{(o.imm >> (32 * word)) & 0xFFFFFFFF:x}u)"
        elif o.kind == "labelimm":
            return f"splat(0x{self.label_value(o):x}u)"
        elif o.kind == "const":
            if o.suffixes:
                raise UnknownInstruction(f"operand suffix {o.text}")
            e = f"splat({self.const(o, word)})"
        else:
            raise UnknownInstruction(f"integer operand {o.text}")
        if o.abs:
            raise UnknownInstruction(f"absolute value of an integer {o.text}")
        if o.inv:
            e = f"(~{e})"
        return f"(0u-{e})" if o.neg else e

    def xx(self, o: Operand) -> str:
        """64-bit integer source as a V2."""
        if o.neg or o.inv:
            flip = "neg2" if o.neg else "not2"
            return f"{flip}({self.xx(o.plain())})"
        return f"V2{{{self.x(o)},{self.x(o, 1)}}}"

    def f(self, o: Operand, ftz: bool = False) -> str:
        """Float source."""
        if o.kind == "reg":
            e = "splat(0)" if o.n is None else f"ldv({self.reg(o.n)},h)"
        elif o.kind in ("imm", "fimm"):
            return f"asf(splat(0x{self._float_bits(o):08x}u))"
        elif o.kind == "const":
            e = f"splat({self.const(o)})"
        else:
            raise UnknownInstruction(f"float operand {o.text}")
        if o.suffixes:
            raise UnknownInstruction(f"operand suffix {o.text}")
        if ftz:
            e = f"ftz({e})"
        if o.abs:
            e = f"({e}&0x7fffffffu)"
        if o.neg:
            e = f"({e}^0x80000000u)"
        return f"asf({e})"

    def _float_bits(self, o: Operand) -> int:
        """Bits of a float immediate: the encoding has the exact value, the text the sign."""
        raw = self.raw_immediate
        value = o.value if o.kind == "fimm" else float(o.imm)
        if value != value:
            return raw
        try:
            bits = struct.unpack("<I", struct.pack("<f", value))[0]
        except OverflowError:
            return raw
        if abs((bits & 0x7FFFFFFF) - (raw & 0x7FFFFFFF)) > 2:
            raise UnknownInstruction(
                f"float immediate {o.text} does not agree with the encoding 0x{raw:08x}"
            )
        return (bits & 0x80000000) | (raw & 0x7FFFFFFF)

    def hh(self, o: Operand, ftz: bool = False) -> tuple[str, str]:
        """Half pair source: its low and high half as float."""
        if o.kind == "himm":
            return f"h2f(splat(0x{o.imm & 0xFFFF:x}u))", f"h2f(splat(0x{o.imm >> 16:x}u))"
        if o.suffixes == ["F32"]:
            bare = o.plain()
            bare.neg, bare.abs = o.neg, o.abs
            return (self.f(bare),) * 2
        suffix = o.suffixes[0] if o.suffixes else "H1_H0"
        swizzle = {"H0": "H0_H0", "H1": "H1_H1"}.get(suffix, suffix)
        if len(o.suffixes) > 1 or swizzle not in ("H1_H0", "H0_H0", "H1_H1"):
            raise UnknownInstruction(f"operand suffix {o.text}")
        if o.kind == "reg":
            word = "splat(0)" if o.n is None else f"ldv({self.reg(o.n)},h)"
        elif o.kind == "const":
            word = f"splat({self.const(o)})"
        else:
            raise UnknownInstruction(f"half operand {o.text}")
        high = f"({word}>>16)"
        pair = {"H1_H0": (word, high), "H0_H0": (word, word), "H1_H1": (high, high)}[swizzle]
        return tuple(self._half_modifiers(e, o, ftz) for e in pair)

    @staticmethod
    def _half_modifiers(e: str, o: Operand, ftz: bool) -> str:
        e = f"h2f(hftz({e}&0xffffu))" if ftz else f"h2f({e})"
        if o.abs:
            e = f"vabs({e})"
        return f"vneg({e})" if o.neg else e

    def d(self, o: Operand) -> str:
        """Double source as a V2."""
        if o.kind in ("imm", "fimm"):
            value = o.value if o.kind == "fimm" else float(o.imm)
            high = self.raw_immediate & 0x7FFFFFFF
            exact = struct.unpack("<d", struct.pack("<II", 0, high))[0]
            if abs(value) < float("inf") and abs(exact - abs(value)) > 1e-6 * abs(value):
                raise UnknownInstruction(f"double immediate {o.text}")
            sign = 0x80000000 if o.text.strip().startswith("-") else 0
            return f"V2{{splat(0),splat(0x{high | sign:x}u)}}"
        e = self.xx(o.plain())
        if o.abs:
            e = f"dabs({e})"
        return f"dneg({e})" if o.neg else e

    # ---- lane expressions
    def lane(self, o: Operand, word: int = 0) -> str:
        """Integer source of lane l."""
        if o.kind == "reg" and not o.suffixes:
            e = "0u" if o.n is None else f"{self.reg(o.n + word)}[l]"
        elif o.kind == "imm":
            return f"0x{(o.imm >> (32 * word)) & 0xFFFFFFFF:x}u"
        elif o.kind == "const":
            e = self.const(o, word)
        else:
            raise UnknownInstruction(f"operand {o.text}")
        if o.inv:
            e = f"(~{e})"
        return f"(0u-{e})" if o.neg else e

    # ---- destinations
    def dst(self, o: Operand, width: int = 1) -> int | None:
        """Register number of a destination; None is RZ."""
        if o.kind != "reg":
            raise UnknownInstruction(f"destination {o.text}")
        if o.n is not None:
            self.reg(o.n, width)
        return o.n

    def assign(self, o: Operand, e: str) -> str:
        """Write a vector expression."""
        n = self.dst(o)
        return "" if n is None else f"for(int h=0;h<NV;h++) st(R[{n}],h,m,{e});"

    def assign2(self, o: Operand, e: str) -> str:
        """Write a V2 expression to two registers."""
        n = self.dst(o, 2)
        if n is None:
            return ""
        return f"for(int h=0;h<NV;h++){{V2 r={e}; st(R[{n}],h,m,r.lo); st(R[{n + 1}],h,m,r.hi);}}"

    def assign_lanes(self, o: Operand, e: str) -> str:
        """Write a lane expression."""
        n = self.dst(o)
        return "" if n is None else f"FORL(m) R[{n}][l]={e};"

    def gather(self, name: str, e: str) -> str:
        """Declare mask `name` from an expression that gives the bits of vector h."""
        return f"u32 {name}=0; for(int h=0;h<NV;h++) {name}|=(u32)({e})<<(VL*h);"

    def set_compare(self, e: str, p: Operand, q: Operand, z: Operand) -> str:
        """The two predicates of a comparison: e and not e, each combined with predicate z."""
        sign = COMBINE[self.one_of(COMBINE)]
        return (
            f"{self.gather('r', e)} u32 z={self.pred(z)}; (void)z; "
            f"{self.set_pred_later(p, f'r{sign}z')}{self.set_pred_later(q, f'(~r){sign}z')}"
        )

    def set_pred_later(self, o: Operand, mask: str) -> str:
        """set_pred; the sources have been read by then."""
        return self.set_pred(o, f"({mask})")

    # ---- labels
    def label_value(self, o: Operand) -> int:
        """Half of the address of a label."""
        text = o.text.replace("(", "").replace(")", "")
        if "@srel" in text:
            text = text.split("+")[-1].replace("@srel", "").strip()
        if text not in self.kernel.labels:
            raise UnknownInstruction(f"label {o.text}")
        address = self.kernel.labels[text]
        self.address_taken.add(address)
        return address if o.suffixes[0] == "lo" else address >> 32

    def target(self, o: Operand) -> int:
        """Address that a branch goes to."""
        if o.kind == "label" and o.text in self.kernel.labels:
            return self.kernel.labels[o.text]
        if o.kind == "imm":
            return o.imm
        raise UnknownInstruction(f"branch target {o.text}")
