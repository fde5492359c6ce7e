"""Conversions between types."""

from __future__ import annotations

from ...errors import UnknownInstruction
from ..emitter import Emitter, op
from ..operands import Operand
from .floating import finish, integral
from .integer import cpp

_SMALL = ("S8", "U8", "S16", "U16")
_INTEGERS = ("U32", *_SMALL, "S64", "U64")
_SHIFT = {"B0": 0, "B1": 8, "B2": 16, "B3": 24, "H0": 0, "H1": 16}
_MODE = {"": 0, "FLOOR": 1, "CEIL": 2, "TRUNC": 3}


def _field(g: Emitter, o: Operand, kind: str) -> str:
    """A byte or half of a register, extended."""
    if o.neg or o.abs or len(o.suffixes) > 1 or not set(o.suffixes) <= set(_SHIFT):
        raise UnknownInstruction(f"operand {o.text}")
    shift = _SHIFT[o.suffixes[0]] if o.suffixes else 0
    return f"field<{int(kind[1:])},{cpp(kind[0] == 'S')}>({g.x(o.plain())},{shift})"


@op("I2F", "F64 F16 U32 S8 U8 S16 U16 S64 U64 RP RM RZ")
def i2f(g: Emitter) -> str:
    d, a = g.args
    kind = g.one_of(_INTEGERS, "S32")
    signed = cpp(kind[0] == "S")
    if kind in ("S64", "U64"):
        if "F64" in g.mods:
            return g.assign2(d, f"i64_to_double<{signed}>({g.xx(a)})")
        return g.assign(d, f"asu(i64_to_float<{signed}>({g.xx(a)},{g.rounding}))")
    e = _field(g, a, kind) if kind in _SMALL else g.x(a)
    if "F64" in g.mods:
        return g.assign2(d, f"i32_to_double<{signed}>({e})")
    if g.rounding:
        e = f"int_to_float_rounded({e},{signed},{g.rounding})"
    else:
        e = f"{'i2f' if kind[0] == 'S' else 'u2fv'}({e})"
    return g.assign(d, f"f2h({e})" if "F16" in g.mods else f"asu({e})")


@op("F2I", "FTZ NTZ TRUNC FLOOR CEIL U32 S64 U64 S16 U16 S8 U8 F64 F16")
def f2i(g: Emitter) -> str:
    d, a = g.args
    mode, kind = _MODE[g.one_of(_MODE, "")], g.one_of(_INTEGERS, "S32")
    signed = cpp(kind[0] == "S")
    if "F64" in g.mods or kind in ("S64", "U64"):
        source = g.d(a) if "F64" in g.mods else f"to_double({g.f(a)})"
        e = f"double_to_int<{64 if kind[1:] == '64' else 32},{signed}>({source},{mode})"
        return g.assign2(d, e) if kind[1:] == "64" else g.assign(d, f"({e}).lo")
    source = g.hh(a)[0] if "F16" in g.mods else g.f(a, "FTZ" in g.mods)
    if kind in _SMALL:
        return g.assign(d, f"cvt_f2i_small<{int(kind[1:])},{signed}>({source},{mode})")
    return g.assign(d, f"cvt_f2i({source},{signed},{mode})")


@op("F2F", "F16 F32 F64 FTZ SAT RM RP RZ FLOOR CEIL TRUNC")
def f2f(g: Emitter) -> str:
    d, a = g.args
    types = tuple(m for m in g.mods if m in ("F16", "F32", "F64"))
    ftz = "FTZ" in g.mods
    if types == ("F16", "F32"):
        e = f"f2h_r<{g.rounding}>({g.f(a, ftz)})"
        return g.assign(d, f"hsat({e})" if "SAT" in g.mods else e)
    if types == ("F32", "F16"):
        return g.assign(d, f"asu({g.hh(a)[0]})")
    if types == ("F64", "F32"):
        return g.assign2(d, f"to_double({g.f(a)})")
    if types == ("F32", "F64"):
        return g.assign(d, f"asu(to_float({g.d(a)}))")
    if types == ("F32", "F32"):
        e = g.f(a, ftz)
        return finish(g, f"{integral(g)}({e})" if {"FLOOR", "CEIL", "TRUNC"} & set(g.mods) else e)
    raise UnknownInstruction(f"conversion {g.ins.opcode}")
