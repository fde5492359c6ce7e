"""Single and double precision arithmetic and comparison."""

from __future__ import annotations

from ..emitter import COMBINE, Emitter, op

COMPARE = "LT EQ LE GT NE GE LTU EQU LEU GTU NEU GEU NUM NAN"
_SCALE = {"D2": 0.5, "D4": 0.25, "D8": 0.125, "M2": 2.0, "M4": 4.0, "M8": 8.0}
_MUFU = {"RCP": "kRcp", "RSQ": "kRsq", "LG2": "kLg2", "SIN": "kSin", "COS": "kCos"}
_MUFU |= {"SQRT": "kSqrt", "TANH": "kTanh"}


def finish(g: Emitter, e: str) -> str:
    """Apply .FTZ and .SAT to a float result and write it."""
    e = f"asu({e})"
    if "FTZ" in g.mods:
        e = f"ftz({e})"
    if "SAT" in g.mods:
        e = f"fsat({e})"
    return g.assign(g.args[0], e)


@op("FADD", "FTZ SAT RM RP RZ")
def fadd(g: Emitter) -> str:
    a, b = (g.f(o, "FTZ" in g.mods) for o in g.args[1:3])
    return finish(g, f"vadd_r<{g.rounding}>({a},{b})" if g.rounding else f"({a}+{b})")


@op("FMUL", "FTZ SAT RM RP RZ D2 D4 D8 M2 M4 M8")
def fmul(g: Emitter) -> str:
    a, b = (g.f(o, "FTZ" in g.mods) for o in g.args[1:3])
    e = f"vmul_r<{g.rounding}>({a},{b})" if g.rounding else f"({a}*{b})"
    for name in g.mods:
        if name in _SCALE:
            e = f"({e}*{_SCALE[name]}f)"
    return finish(g, e)


@op("FFMA", "FTZ SAT RM RP RZ")
def ffma(g: Emitter) -> str:
    a, b, c = (g.f(o, "FTZ" in g.mods) for o in g.args[1:4])
    name = f"vfma_r<{g.rounding}>" if g.rounding else "vfma"
    return finish(g, f"{name}({a},{b},{c})")


@op("FMNMX", "FTZ")
def fmnmx(g: Emitter) -> str:
    a, b = (g.f(o, "FTZ" in g.mods) for o in g.args[1:3])
    return g.assign(g.args[0], f"fmnmx(asu({a}),asu({b}),{g.pred_v(g.args[3])})")


@op("FSEL", "FTZ")
def fsel(g: Emitter) -> str:
    a, b = (g.f(o, "FTZ" in g.mods) for o in g.args[1:3])
    return g.assign(g.args[0], f"selm({g.pred_v(g.args[3])},asu({a}),asu({b}))")


@op("FSETP", f"{COMPARE} FTZ AND OR XOR")
def fsetp(g: Emitter) -> str:
    p, q, a, b, z = g.args
    x, y = (g.f(o, "FTZ" in g.mods) for o in (a, b))
    return g.set_compare(f"cf_{g.one_of(COMPARE.split())}(asu({x}),asu({y}))", p, q, z)


@op("FSET", f"{COMPARE} FTZ AND OR XOR BF")
def fset(g: Emitter) -> str:
    d, a, b, z = g.args
    x, y = (g.f(o, "FTZ" in g.mods) for o in (a, b))
    test = f"cf_{g.one_of(COMPARE.split())}(asu({x}),asu({y}))"
    test = f"({test}{COMBINE[g.one_of(COMBINE)]}{g.pred_v(z)})"
    true = "0x3f800000u" if "BF" in g.mods else "0xffffffffu"
    return g.assign(d, f"selm({test},splat({true}),splat(0))")


@op("FCHK", "DIVIDE")
def fchk(g: Emitter) -> str:
    p, a, b = g.args
    return g.gather("r", f"fchk(asu({g.f(a)}),asu({g.f(b)}))") + g.set_pred(p, "r")


@op("MUFU", "RCP RSQ EX2 LG2 SIN COS SQRT TANH RCP64H RSQ64H")
def mufu(g: Emitter) -> str:
    d, a = g.args
    name = g.mods[0]
    if name == "EX2":
        return g.assign(d, f"ex2v(asu({g.f(a)}))")
    if name in ("RCP64H", "RSQ64H"):
        return g.assign(d, f"mufu64h<{'true' if name == 'RSQ64H' else 'false'}>(asu({g.f(a)}))")
    n = g.dst(d)
    if n is None:
        return ""
    return (
        f"alignas(64) u32 x[32]; for(int h=0;h<NV;h++) *(vu*)(x+VL*h)=asu({g.f(a)}); "
        f"mufu_lanes({_MUFU[name]},x,R[{n}],m);"
    )


_DOUBLE = {"DADD": "kAdd", "DMUL": "kMul", "DFMA": "kFma"}


def _double(g: Emitter) -> str:
    sources = [g.d(o) for o in g.args[1:]]
    if len(sources) == 2:
        sources.append(sources[0])  # not used
    return g.assign2(g.args[0], f"darith<{_DOUBLE[g.ins.op]}>({','.join(sources)},{g.rounding})")


for _name in _DOUBLE:
    op(_name, "RM RP RZ")(_double)


@op("DSETP", f"{COMPARE} AND OR XOR")
def dsetp(g: Emitter) -> str:
    p, q, a, b, z = g.args
    return g.set_compare(f"dcompare<k{g.one_of(COMPARE.split())}>({g.d(a)},{g.d(b)})", p, q, z)


@op("FRND", "FLOOR CEIL TRUNC FTZ")
def frnd(g: Emitter) -> str:
    return g.assign(g.args[0], f"asu({integral(g)}({g.f(g.args[1])}))")


def integral(g: Emitter) -> str:
    """The function that rounds to an integral value."""
    names = {"FLOOR": "vfloor", "CEIL": "vceil", "TRUNC": "vtrunc", "": "vrint"}
    return names[g.one_of(names, "")]
