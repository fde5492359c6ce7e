"""Cross-lane instructions and special registers."""

from __future__ import annotations

from ...errors import UnknownInstruction
from ..emitter import Emitter, op

_SHFL = {"IDX": "kIdx", "UP": "kUp", "DOWN": "kDown", "BFLY": "kBfly"}
_VOTE = {"ANY": "v?~0u:0u", "ALL": "v==m?~0u:0u", "EQ": "v==m||v==0?~0u:0u"}

_BLOCK, _LINEAR = "c.p->block", "(w.wid*32+l)"
_TID = (
    f"{_LINEAR}%{_BLOCK}[0]",
    f"{_LINEAR}/{_BLOCK}[0]%{_BLOCK}[1]",
    f"{_LINEAR}/{_BLOCK}[0]/{_BLOCK}[1]",
)
_SPECIAL = {
    **{f"SR_TID.{axis}": _TID[k] for k, axis in enumerate("XYZ")},
    **{f"SR_CTAID.{axis}": f"w.cta->ctaid[{k}]" for k, axis in enumerate("XYZ")},
    **{f"SR_NTID.{axis}": f"{_BLOCK}[{k}]" for k, axis in enumerate("XYZ")},
    "SR_TID": f"({_TID[0]})|({_TID[1]})<<16|({_TID[2]})<<26",
    "SR_LANEID": "l",
    "SR_EQMASK": "1u<<l",
    "SR_LTMASK": "(1u<<l)-1",
    "SR_LEMASK": "(2u<<l)-1",
    "SR_GTMASK": "~((2u<<l)-1)",
    "SR_GEMASK": "~((1u<<l)-1)",
    "SR_CLOCKLO": "(u32)c.total",
    "SR_CLOCKHI": "(u32)(c.total>>32)",
    "SR_GLOBALTIMERLO": "(u32)c.total",
    "SR_GLOBALTIMERHI": "(u32)(c.total>>32)",
    "SR_VIRTUALSMID": "w.cta->id%80u",
    "SR_VIRTID": "(w.cta->id%80u)<<20",
    "SRZ": "0u",
}


def _special(name: str) -> str:
    if name not in _SPECIAL:
        raise UnknownInstruction(f"special register {name}")
    return _SPECIAL[name]


@op("SHFL", "IDX UP DOWN BFLY")
def shfl(g: Emitter) -> str:
    p, d, a, b, c = g.args
    return (
        f"alignas(64) u32 x[32],y[32],z[32],o[32]; for(int h=0;h<NV;h++){{"
        f"*(vu*)(x+VL*h)={g.x(a)}; *(vu*)(y+VL*h)={g.x(b)}; *(vu*)(z+VL*h)={g.x(c)};}} "
        f"u32 pr=shfl({_SHFL[g.mods[0]]},x,y,z,o,m); (void)pr; "
        f"{g.assign(d, 'ldv(o,h)')} {g.set_pred(p, 'pr')}"
    )


@op("VOTE", "ANY ALL EQ")
def vote(g: Emitter) -> str:
    args = list(g.args)
    d = args.pop(0) if args[0].kind == "reg" else None
    p, source = args
    write = g.assign(d, "splat(v)") if d else ""
    return f"u32 v={g.pred(source)}&m; {write} {g.set_pred(p, f'({_VOTE[g.mods[0]]})')}"


@op("MATCH", "ANY ALL U64")
def match(g: Emitter) -> str:
    args = list(g.args)
    p = args.pop(0) if args[0].kind == "pred" else None
    d, a = args
    value = f"(u64){g.lane(a)}" + (f"|(u64){g.lane(a, 1)}<<32" if "U64" in g.mods else "")
    equal = "u32 o[32]; FORL(m){o[l]=0; for(u32 j=0;j<32;j++) if(m>>j&1&&x[j]==x[l]) o[l]|=1u<<j;}"
    result = "o[l]" if "ANY" in g.mods else "o[l]==m?m:0u"
    body = f"u64 x[32]; FORL(m) x[l]={value}; {equal} {g.assign_lanes(d, result)}"
    if p is None:
        return body
    return f"{body} {g.set_pred(p, '(m&&o[__builtin_ctz(m)]==m?~0u:0u)')}"


@op("S2R")
def s2r(g: Emitter) -> str:
    return g.assign_lanes(g.args[0], _special(g.args[1].text))


@op("CS2R", "32")
def cs2r(g: Emitter) -> str:
    d, source = g.args
    if "32" in g.mods:
        return s2r(g)
    n = g.dst(d, 2)
    low, high = _special(source.text), _special(source.text.replace("LO", "HI"))
    return "" if n is None else f"FORL(m){{R[{n}][l]={low}; R[{n + 1}][l]={high};}}"


@op("B2R", "RESULT")
def b2r(g: Emitter) -> str:
    if "RESULT" not in g.mods:
        raise UnknownInstruction("B2R")
    write = g.assign_lanes(g.args[0], "w.red_count")
    if len(g.args) < 2:
        return write
    return write + g.set_pred(g.args[1], "((w.red_kind==1?w.red_and:w.red_or)?~0u:0u)")
