"""Half precision: pairs in one register, and the tensor core."""

from __future__ import annotations

from ...errors import UnknownInstruction
from ..emitter import COMBINE, Emitter, op
from .floating import COMPARE


def _finish(g: Emitter, low: str, high: str) -> str:
    """Round two float results to a half pair (or keep one as float, .F32) and write them."""
    ftz, sat = "FTZ" in g.mods, "SAT" in g.mods
    if "F32" in g.mods:
        return g.assign(g.args[0], f"fsat(asu({low}))" if sat else f"asu({low})")
    halves = []
    for e in (low, high):
        e = f"f2h({e})"
        if ftz:
            e = f"hftz({e})"
        halves.append(f"hsat({e})" if sat else e)
    return g.assign(g.args[0], f"pack({halves[0]},{halves[1]})")


@op("HADD2", "F32 FTZ SAT")
def hadd2(g: Emitter) -> str:
    (a, b), (c, d) = (g.hh(o, "FTZ" in g.mods) for o in g.args[1:3])
    return _finish(g, f"({a}+{c})", f"({b}+{d})")


@op("HMUL2", "F32 FTZ SAT")
def hmul2(g: Emitter) -> str:
    (a, b), (c, d) = (g.hh(o, "FTZ" in g.mods) for o in g.args[1:3])
    return _finish(g, f"({a}*{c})", f"({b}*{d})")


@op("HFMA2", "F32 FTZ SAT MMA")
def hfma2(g: Emitter) -> str:
    a, b, c = (g.hh(o, "FTZ" in g.mods) for o in g.args[1:4])
    name = "vfma" if "F32" in g.mods else "fma_odd"
    return _finish(g, *(f"{name}({a[k]},{b[k]},{c[k]})" for k in (0, 1)))


def _compare(g: Emitter, a, b) -> tuple[str, str]:
    name = g.one_of(COMPARE.split())
    x, y = g.hh(a, "FTZ" in g.mods), g.hh(b, "FTZ" in g.mods)
    return tuple(f"cf_{name}(asu({x[k]}),asu({y[k]}))" for k in (0, 1))


@op("HSETP2", f"{COMPARE} FTZ AND OR XOR H_AND")
def hsetp2(g: Emitter) -> str:
    p, q, a, b, z = g.args
    low, high = _compare(g, a, b)
    if "H_AND" in g.mods:
        return g.set_compare(f"({low}&{high})", p, q, z)
    sign = COMBINE[g.one_of(COMBINE)]
    return (
        f"{g.gather('r0', low)} {g.gather('r1', high)} u32 z={g.pred(z)}; (void)z; "
        f"{g.set_pred(p, f'r0{sign}z')}{g.set_pred(q, f'r1{sign}z')}"
    )


@op("HSET2", f"{COMPARE} FTZ AND OR XOR BF")
def hset2(g: Emitter) -> str:
    d, a, b, z = g.args
    sign, true = COMBINE[g.one_of(COMBINE)], "0x3c00u" if "BF" in g.mods else "0xffffu"
    low, high = (f"selm({e}{sign}{g.pred_v(z)},splat({true}),splat(0))" for e in _compare(g, a, b))
    return g.assign(d, f"pack({low},{high})")


@op("HMMA", "884 F32 F16 STEP0 STEP1 STEP2 STEP3")
def hmma(g: Emitter) -> str:
    d, a, b, c = g.args
    types = [m for m in g.mods if m in ("F16", "F32")]
    if types not in (["F32", "F32"], ["F16", "F16"]):
        raise UnknownInstruction(f"HMMA types {'.'.join(types)}")
    step = int(g.one_of([f"STEP{k}" for k in range(4)])[4:])
    columns, rows = [], []
    for o in (a, b):
        if o.n is None or o.neg or o.suffixes not in (["ROW"], ["COL"]):
            raise UnknownInstruction(f"HMMA operand {o.text}")
        columns.append("true" if o.suffixes == ["COL"] else "false")
        rows += [g.reg(o.n, 2), g.reg(o.n + 1)]
    if c.neg or c.kind != "reg":
        raise UnknownInstruction(f"HMMA operand {c.text}")
    rows += ["kZeroRow"] * 2 if c.n is None else [g.reg(c.n, 2), g.reg(c.n + 1)]
    n = g.dst(d, 2)
    rows += [f"R[{n}]", f"R[{n + 1}]"]
    name = f"hmma_{types[0].lower()}<{columns[0]},{columns[1]},{step}>"
    return (
        f'if(unlikely(m!=~0u)) fault_at({g.ins.idx},0,"HMMA with inactive lanes, mask",m); '
        f"{name}({','.join(rows)});"
    )
