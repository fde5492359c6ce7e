"""Loads, stores, constants and atomics."""

from __future__ import annotations

from ...errors import UnknownInstruction
from ..emitter import Emitter, op
from ..operands import Operand
from .integer import cpp

_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_ORDER = "E SYS CONSTANT STRONG GPU CTA WEAK U PRIVATE SM MMIO EF EL LU NA EU LTC64B LTC128B"
_ACCESS = f"{_ORDER} {' '.join(_WIDTH)}"
# space letter of runtime/memory.h -> kind of trace record; x is generic
_RECORD = {"g": "global", "x": "global", "s": "shared", "l": "local"}


def _width(g: Emitter) -> int:
    return _WIDTH[g.one_of(_WIDTH, "")] if g.one_of(_WIDTH, "") else 4


def _address(g: Emitter, o: Operand, space: str) -> str:
    """Address of lane l."""
    if o.kind != "mem":
        raise UnknownInstruction(f"memory operand {o.text}")
    if space in "sl":
        base = "0u" if o.n is None else f"{g.reg(o.n)}[l]"
        scale = f"*{o.scale}u" if o.scale != 1 else ""
        return f"(u32)({base}{scale}+(u32)({o.offset}))"
    if o.scale != 1:
        raise UnknownInstruction(f"memory operand {o.text}")
    if o.n is None:
        base = "0ull"
    elif (space == "x" or "E" in g.mods) and "U32" not in o.suffixes:
        base = f"((u64){g.reg(o.n, 2)}[l]|(u64){g.reg(o.n + 1)}[l]<<32)"
    else:
        base = f"(u64){g.reg(o.n)}[l]"
    return f"{base}+(u64)(i64)({o.offset}ll)"


def _addresses(g: Emitter, o: Operand, space: str) -> str:
    return f"u64 ad[32]; FORL(m) ad[l]={_address(g, o, space)};"


def _load(space: str):
    def emit(g: Emitter) -> str:
        d, address = g.args[:2]
        width = _width(g)
        n = g.dst(d, max(1, width // 4))
        g.info.record, g.info.nbytes = _RECORD[space], width
        flags = f"'{space}',{width},{cpp('S8' in g.mods or 'S16' in g.mods)}"
        return (
            f"{_addresses(g, address, space)} "
            f"load<{flags}>(c,w,{g.ins.idx},m,ad,{-1 if n is None else n});"
        )

    return emit


def _store(space: str):
    def emit(g: Emitter) -> str:
        address, source = g.args
        width = _width(g)
        n = g.reg_number(source, max(1, width // 4))
        g.info.record, g.info.nbytes = _RECORD[space], width
        return (
            f"{_addresses(g, address, space)} store<'{space}',{width}>(c,w,{g.ins.idx},m,ad,{n});"
        )

    return emit


for _name, _space in (("LDG", "g"), ("LDS", "s"), ("LDL", "l"), ("LD", "x")):
    op(_name, _ACCESS)(_load(_space))
for _name, _space in (("STG", "g"), ("STS", "s"), ("STL", "l"), ("ST", "x")):
    op(_name, _ACCESS)(_store(_space))


@op("LDC", "64 U8 S8 U16 S16 U")
def ldc(g: Emitter) -> str:
    d, o = g.args
    width, size = _width(g), g.const_sizes.get(o.bank, 0)
    n = g.dst(d, max(1, width // 4))
    if n is None:
        return ""
    address = f"{o.offset & 0xFFFFFFFF}u"
    if o.indexed and o.index is not None:
        address = f"{g.reg(o.index)}[l]+{address}"
    load = f"to_register<{width},{cpp('S8' in g.mods or 'S16' in g.mods)}>"
    return (
        f"u32 ad[32]; FORL(m){{ad[l]={address}; if(unlikely((u64)ad[l]+{width}>{size}u)) "
        f'fault_at({g.ins.idx},l,"constant address out of range",ad[l]);}} '
        f"FORL(m) {load}(R,{n},l,c.cb[{o.bank}]+ad[l]);"
    )


_IGNORED = "E STRONG GPU SYS CTA WEAK SM FTZ RN PRIVATE SPIN"
_TYPES = "32 U32 S32 64 U64 S64 F32 F64 F16x2"
_OPERATIONS = {
    "ADD": "old+v",
    "MIN": "(S)v<(S)old?v:old",
    "MAX": "(S)v>(S)old?v:old",
    "INC": "old>=v?0:old+1",
    "DEC": "old==0||old>v?v:old-1",
    "AND": "old&v",
    "OR": "old|v",
    "XOR": "old^v",
    "EXCH": "v",
    "CAS": "old==cmp?v:old",
    "CAST": "old==cmp?v:old",
    "POPC": "old+1",
}
_ADD = {"F32": "add_float(old,v)", "F64": "add_double(old,v)", "F16x2": "add_half2(old,v)"}
_ATOMIC = f"{_IGNORED} {_TYPES} {' '.join(_OPERATIONS)}"


def _atomic(space: str):
    def emit(g: Emitter) -> str:
        args = list(g.args)
        operation, kind = g.one_of(_OPERATIONS), g.one_of(_TYPES.split(), "32")
        wide = kind in ("64", "U64", "S64", "F64")
        word, signed = ("u64", "i64") if wide else ("u32", "i32")
        d = -1
        if g.ins.op != "RED":
            if args[0].kind == "pred" and args.pop(0).n != 7:
                raise UnknownInstruction("predicate result of an atomic")
            n = g.dst(args.pop(0), 2 if wide else 1)
            d = -1 if n is None else n
        address = args.pop(0)
        compare = (
            g.reg_number(args.pop(0), 2 if wide else 1) if operation in ("CAS", "CAST") else -1
        )
        value = g.reg_number(args.pop(0), 2 if wide else 1) if args else -1
        if args:
            raise UnknownInstruction(f"operand {args[0].text}")
        e = _OPERATIONS[operation]
        if kind in _ADD:
            if operation != "ADD":
                raise UnknownInstruction(f"{kind} atomic {operation}")
            e = _ADD[kind]
        e = e.replace("(S)", f"({signed})" if kind in ("S32", "S64") else "")
        g.info.record, g.info.nbytes = _RECORD[space], 8 if wide else 4
        return (
            f"{_addresses(g, address, space)} atomic<'{space}',{word}>(c,w,{g.ins.idx},m,ad,"
            f"{d},{value},{compare},[]({word} old,{word} v,{word} cmp)"
            f"{{(void)v,(void)cmp; return ({word})({e});}});"
        )

    return emit


for _name, _space in (("ATOMG", "g"), ("RED", "g"), ("ATOM", "x"), ("ATOMS", "s")):
    op(_name, _ATOMIC)(_atomic(_space))


def _nothing(g: Emitter) -> str:
    """Ordering and cache control: the emulator's memory is always in order."""
    return ""


for _name, _modifiers in (
    ("MEMBAR", "SC ALL GPU CTA SYS VC"),
    ("ERRBAR", ""),
    ("CCTL", "IVALL IVALLP PF1 PF2 E IV WB"),
    ("DEPBAR", "LE"),
    ("PMTRIG", ""),
):
    op(_name, _modifiers)(_nothing)
