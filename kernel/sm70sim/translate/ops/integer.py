"""Integer and logic instructions."""

from __future__ import annotations

from ...errors import UnknownInstruction
from ..emitter import COMBINE, Emitter, op
from ..lop3 import expression
from ..operands import Operand

COMPARE = "F LT EQ LE GT NE GE T"
_BYTE = {"B0": 0, "B1": 8, "B2": 16, "B3": 24}


def cpp(flag: bool) -> str:
    """C++ literal."""
    return "true" if flag else "false"


def split(args: list[Operand], sources: int) -> tuple[list, list, list]:
    """[Rd, P.., source.., P..] -> carry-out predicates, sources, carry-in predicates."""
    n = 1
    while args[n].kind == "pred":
        n += 1
    return args[1:n], args[n : n + sources], args[n + sources :]


@op("NOP")
def nop(g: Emitter) -> str:
    return ""


@op("MOV")
def mov(g: Emitter) -> str:
    return g.assign(g.args[0], g.x(g.args[1]))


@op("IADD3", "X")
def iadd3(g: Emitter) -> str:
    outs, sources, ins = split(g.args, 3)
    extended = "X" in g.mods
    if not outs and not extended:
        return g.assign(g.args[0], "+".join(g.x(o) for o in sources))
    # A negated term is its complement plus one; with .X the one comes as carry-in.
    terms, extra = [], 0
    for o in sources:
        bare = o.plain()
        if o.neg or o.inv:
            bare.inv = True
            extra += o.neg and not extended
        terms.append(g.x(bare))
    carry_in = f"splat({extra}u)"
    for o in ins if extended else []:
        carry_in += f"+bit_lanes({g.pred_v(o)})"
    n = g.dst(g.args[0])
    write = "" if n is None else f"st(R[{n}],h,m,v);"
    sets = "".join(g.set_pred(o, f"c{k}") for k, o in enumerate(outs))
    return (
        f"u32 c0=0,c1=0; for(int h=0;h<NV;h++){{u32 k0,k1; "
        f"vu v=add3({','.join(terms)},{carry_in},k0,k1); c0|=k0<<(VL*h); c1|=k1<<(VL*h); {write}}} "
        f"{sets}"
    )


@op("IMAD", "MOV U32 SHL IADD WIDE HI X")
def imad(g: Emitter) -> str:
    outs, (a, b, c), ins = split(g.args, 3)
    if "WIDE" in g.mods or "HI" in g.mods:
        return _imad_wide(g, outs, a, b, c, ins)
    if outs:
        raise UnknownInstruction("IMAD carry-out")
    if a.is_zero or b.is_zero:
        e = g.x(c)
    elif b.kind == "imm" and b.imm == 1:
        e = f"{g.x(a)}+{g.x(c)}"
    else:
        e = f"{g.x(a)}*{g.x(b)}+{g.x(c)}"
    if "X" in g.mods:
        e += f"+bit_lanes({g.pred_v(ins[0])})"
    return g.assign(g.args[0], e)


def _imad_wide(g: Emitter, outs, a: Operand, b: Operand, c: Operand, ins) -> str:
    wide = "WIDE" in g.mods
    negate = a.neg != b.neg
    if a.inv or b.inv:
        raise UnknownInstruction(f"operands {a.text}, {b.text}")
    product = f"mul_wide<{cpp('U32' not in g.mods)}>({g.x(a.plain())},{g.x(b.plain())})"
    if negate:
        product = f"neg2({product})"
    addend = g.xx(c) if wide else f"V2{{splat(0),{g.x(c)}}}"
    carry_in = f"bit_lanes({g.pred_v(ins[0])})" if "X" in g.mods else "splat(0)"
    if "X" in g.mods and not wide:  # IMAD.HI.X adds the carry to the high word
        addend, carry_in = f"V2{{splat(0),{g.x(c)}+{carry_in}}}", "splat(0)"
    n = g.dst(g.args[0], 2 if wide else 1)
    write = ""
    if n is not None:
        write = (
            f"st(R[{n}],h,m,v.lo); st(R[{n + 1}],h,m,v.hi);" if wide else f"st(R[{n}],h,m,v.hi);"
        )
    sets = "".join(g.set_pred(o, "cy") for o in outs)
    return (
        f"u32 cy=0; for(int h=0;h<NV;h++){{u32 k; V2 v=add2({product},{addend},{carry_in},k); "
        f"cy|=k<<(VL*h); {write}}} {sets}"
    )


@op("LEA", "HI X SX32")
def lea(g: Emitter) -> str:
    high, extended = "HI" in g.mods, "X" in g.mods
    if extended and not high:
        raise UnknownInstruction("LEA.X")
    rest = g.args[1:]
    outs = []
    while rest[0].kind == "pred":
        outs.append(rest.pop(0))
    carry_in = rest.pop() if extended else None
    shift = rest.pop()
    if shift.kind != "imm":
        raise UnknownInstruction(f"LEA shift {shift.text}")
    a, b, n = rest[0], rest[1], shift.imm
    if not high:
        if outs and (a.neg or a.inv or b.neg or b.inv):
            raise UnknownInstruction("LEA carry with a negated operand")
        e = f"({g.x(a)}<<{n})"
    elif "SX32" in g.mods:
        e = f"(vu)((vi)({g.x(a)})>>{32 - n if n else 31})"
    else:
        e = f"(({g.x(rest[2])}<<{n})|({g.x(a)}>>{32 - n}))" if n else g.x(rest[2])
    cin = f"bit_lanes({g.pred_v(carry_in)})" if carry_in else "splat(0)"
    d = g.dst(g.args[0])
    write = "" if d is None else f"st(R[{d}],h,m,v);"
    sets = "".join(g.set_pred(o, "cy") for o in outs)
    return (
        f"u32 cy=0; for(int h=0;h<NV;h++){{u32 k,k2; vu v=add3({e},{g.x(b)},splat(0),{cin},k,k2); "
        f"cy|=k<<(VL*h); {write}}} {sets}"
    )


@op("LOP3", "LUT PAND")
def lop3(g: Emitter) -> str:
    args = list(g.args)
    out = args.pop(0) if args[0].kind == "pred" else None
    d, a, b, c, table, pin = args
    e = expression(table.imm, "xa", "xb", "xc")
    body = f"vu xa={g.x(a)},xb={g.x(b)},xc={g.x(c)}; (void)xa,(void)xb,(void)xc; vu v={e};"
    n = g.dst(d)
    if n is not None:
        body += f"st(R[{n}],h,m,v);"
    if out is None:
        return f"for(int h=0;h<NV;h++){{{body}}}"
    sign = "&" if "PAND" in g.mods else "|"
    return (
        f"u32 nz=0; for(int h=0;h<NV;h++){{{body} nz|=cu_NE(v,splat(0))<<(VL*h);}} "
        f"{g.set_pred(out, f'nz{sign}{g.pred(pin)}')}"
    )


@op("PLOP3", "LUT")
def plop3(g: Emitter) -> str:
    p, q, x, y, z, first, second = g.args
    return (
        f"u32 x={g.pred(x)},y={g.pred(y)},z={g.pred(z)}; "
        f"u32 r1=plut({first.imm},x,y,z), r2=plut({second.imm},x,y,z); (void)r1,(void)r2; "
        f"{g.set_pred(p, 'r1')}{g.set_pred(q, 'r2')}"
    )


@op("PSETP", "AND OR XOR")
def psetp(g: Emitter) -> str:
    first, second = (COMBINE[m] for m in g.mods)
    p, q, x, y, z = g.args
    return (
        f"u32 t={g.pred(x)}{first}{g.pred(y)}, z={g.pred(z)}; (void)z; "
        f"{g.set_pred(p, f't{second}z')}{g.set_pred(q, f'(~t){second}z')}"
    )


@op("SHF", "L R U32 S32 U64 S64 HI W")
def shf(g: Emitter) -> str:
    d, a, s, c = g.args
    left, high, wrap = "L" in g.mods, "HI" in g.mods, "W" in g.mods
    wide = "U64" in g.mods or "S64" in g.mods
    signed = "S32" in g.mods or "S64" in g.mods
    if not wide:  # the common forms are plain shifts
        amount = f"({g.x(s)}&31u)" if wrap else g.x(s)
        if left and not high and c.is_zero:
            return g.assign(d, f"shlv({g.x(a)},{amount})")
        if not left and high and a.is_zero:
            return g.assign(d, f"{'sarv' if signed else 'shrv'}({g.x(c)},{amount})")
    flags = f"{cpp(left)},{cpp(high)},{cpp(wrap)},{64 if wide else 32},{cpp(signed)}"
    return g.assign(d, f"shf<{flags}>({g.x(a)},{g.x(s)},{g.x(c)})")


@op("PRMT")
def prmt(g: Emitter) -> str:
    d, a, selector, c = g.args
    if selector.kind != "imm" or selector.imm & 0x8888:
        return g.assign(d, f"prmt({g.x(a)},{g.x(selector)},{g.x(c)})")
    parts = []
    for k in range(4):  # a constant selector is an OR of shifted bytes
        byte = selector.imm >> (4 * k) & 7
        e, right = g.x(a if byte < 4 else c), 8 * (byte & 3) - 8 * k
        moved = f"{e}>>{right}" if right > 0 else f"{e}<<{-right}"
        parts.append(f"(({moved if right else e})&0x{0xFF << 8 * k:x}u)")
    return g.assign(d, "|".join(parts))


@op("ISETP", f"{COMPARE} U32 EX AND OR XOR")
def isetp(g: Emitter) -> str:
    compare = g.one_of(COMPARE.split())
    p, q, a, b, z = g.args[:5]
    if compare in ("F", "T"):
        return g.set_compare("~0u" if compare == "T" else "0u", p, q, z)
    e = f"c{'u' if 'U32' in g.mods else 's'}_{compare}({g.x(a)},{g.x(b)})"
    if "EX" in g.mods:  # high words; the result of the low words decides where these are equal
        low, equal = g.pred_v(g.args[5]), f"cu_EQ({g.x(a)},{g.x(b)})"
        if compare == "EQ":
            e = f"({e}&{low})"
        elif compare == "NE":
            e = f"({e}|({low}&0xffu))"
        else:
            e = f"(({e}&~{equal})|({equal}&{low}))"
    return g.set_compare(e, p, q, z)


@op("IMNMX", "U32")
def imnmx(g: Emitter) -> str:
    d, a, b, p = g.args
    signed = cpp("U32" not in g.mods)
    return g.assign(d, f"imnmx<{signed}>({g.x(a)},{g.x(b)},{g.pred_v(p)})")


@op("SEL")
def sel(g: Emitter) -> str:
    d, a, b, p = g.args
    return g.assign(d, f"selm({g.pred_v(p)},{g.x(a)},{g.x(b)})")


@op("IABS")
def iabs(g: Emitter) -> str:
    return g.assign(g.args[0], f"vabs_i({g.x(g.args[1])})")


@op("POPC")
def popc(g: Emitter) -> str:
    return g.assign(g.args[0], f"popcv({g.x(g.args[1])})")


@op("FLO", "U32 SH")
def flo(g: Emitter) -> str:
    d, a = [o for o in g.args if o.kind != "pred"]
    name = "flo_shift" if "SH" in g.mods else "flo"
    return g.assign(d, f"{name}<{cpp('U32' not in g.mods)}>({g.x(a)})")


@op("BREV")
def brev(g: Emitter) -> str:
    return g.assign(g.args[0], f"brevv({g.x(g.args[1])})")


@op("SGXT", "U32 W")
def sgxt(g: Emitter) -> str:
    d, a, b = g.args
    flags = f"{cpp('U32' not in g.mods)},{cpp('W' in g.mods)}"
    return g.assign(d, f"sgxt<{flags}>({g.x(a)},{g.x(b)})")


@op("BMSK", "W C")
def bmsk(g: Emitter) -> str:
    d, a, b = g.args
    return g.assign(d, f"bmsk<{cpp('W' in g.mods)}>({g.x(a)},{g.x(b)})")


@op("VABSDIFF4", "U8 ACC")
def vabsdiff4(g: Emitter) -> str:
    d, a, b, c = g.args
    return g.assign(d, f"vabsdiff4<{cpp('ACC' in g.mods)}>({g.x(a)},{g.x(b)},{g.x(c)})")


@op("VABSDIFF", "U32")
def vabsdiff(g: Emitter) -> str:
    d, a, b, c = g.args
    return g.assign(d, f"vabsdiff<{cpp('U32' not in g.mods)}>({g.x(a)},{g.x(b)})+{g.x(c)}")


@op("IDP", "4A U8 S8")
def idp(g: Emitter) -> str:
    d, a, b, c = g.args
    if "4A" not in g.mods:
        raise UnknownInstruction("IDP.2A")
    types = ["i8" if m == "S8" else "u8" for m in g.mods if m in ("U8", "S8")]
    return g.assign(d, f"idp4a<{','.join(types)}>({g.x(a)},{g.x(b)},{g.x(c)})")


def _byte(g: Emitter) -> int:
    return _BYTE[g.one_of(_BYTE, "B0")]


@op("P2R", "B0 B1 B2 B3")
def p2r(g: Emitter) -> str:
    d, a, mask = g.args[0], g.args[2], g.args[-1].imm
    shift = _byte(g)
    bits = [f"(bit_lanes(w.P[{k}]>>(VL*h))<<{k})" for k in range(7) if mask >> k & 1]
    value = "|".join(bits) or "splat(0)"
    return g.assign(d, f"({g.x(a)}&~0x{mask << shift:x}u)|(({value})<<{shift})")


@op("R2P", "B0 B1 B2 B3")
def r2p(g: Emitter) -> str:
    a, mask = g.args[1], g.args[-1].imm
    shift, body = _byte(g), ""
    for k in range(7):
        if mask >> k & 1:
            test = f"cu_NE({g.x(a)}>>{shift + k}&1u,splat(0))"
            body += f"{{{g.gather('r', test)} setp(w.P[{k}],m,r);}}"
    return body
