"""Control flow, convergence and barriers.

A split of a warp (lanes ``act``) runs until it returns 0: ended, waiting, or split up into
w.ready.  Otherwise w.pc is where it goes on.
"""

from __future__ import annotations

import re

from ...errors import UnknownInstruction
from ..emitter import Emitter, op
from ..operands import PT

# The instruction after one of these starts a block.
ENDS_BLOCK = frozenset(
    [
        "BRA",
        "BRX",
        "CALL",
        "RET",
        "EXIT",
        "KILL",
        "BSYNC",
        "BREAK",
        "BAR",
        "WARPSYNC",
        "NANOSLEEP",
        "YIELD",
        "JMP",
    ]
)
_LEAVE = "act&=~m; if(!act) return 0;"
_BRED = {"AND": 1, "OR": 2, "POPC": 0}


def _next(g: Emitter) -> str:
    return f"0x{g.ins.pc + 16:x}u"


def _branch(target: str, mask: str) -> str:
    """Lanes `mask` go to the target: the whole split, or a new one."""
    return (
        f"u32 t={mask}; if(t){{ if(t==act){{w.pc={target}; return act;}} "
        f"w.ready.push_back({{{target},t}}); act&=~t; }}"
    )


@op("BRA", "U CONV DIV", always=True)
def bra(g: Emitter) -> str:
    target = g.target(g.args[-1])
    if target == g.ins.pc and g.ins.pred == "PT":
        return 'fault("reached the trap loop at the end of the kernel");'
    mask = "m"
    if len(g.args) > 1:
        mask = f"(m&({g.pred(g.args[0])}))"
    if "CONV" in g.mods:
        mask = "(act==w.live?m:0u)"
    elif "DIV" in g.mods:
        mask = "(act!=w.live?m:0u)"
    return _branch(f"0x{target:x}u", mask)


op("JMP", "U", always=True)(bra)


@op("CALL", "REL ABS NOINC", always=True)
def call(g: Emitter) -> str:
    return _branch(f"0x{g.target(g.args[-1]):x}u", "m")


def _computed(lane_target: str) -> str:
    """Every lane goes to an address of its own."""
    return (
        f"u32 left=m; while(left){{u32 l=(u32)__builtin_ctz(left), to={lane_target}, same=0; "
        f"for(u32 q=left;q;q&=q-1){{l=(u32)__builtin_ctz(q); if({lane_target}==to) same|=1u<<l;}} "
        f"if(same==act){{w.pc=to; return act;}} w.ready.push_back({{to,same}}); left&=~same;}} "
        f"{_LEAVE}"
    )


@op("BRX", always=True)
def brx(g: Emitter) -> str:
    m = re.match(r"(R\d+)\s*\+?(-?0x[0-9a-f]+)?", g.ins.text.split("BRX", 1)[1].strip())
    if not m:
        raise UnknownInstruction("BRX operand")
    offset = int(m.group(2), 16) if m.group(2) else 0
    return _computed(f"(u32)({g.reg(int(m.group(1)[1:]), 2)}[l]+{_next(g)}+(u32)({offset}))")


@op("RET", "REL ABS NODEC", always=True)
def ret(g: Emitter) -> str:
    m = re.match(r"(R\d+)", g.ins.args[0])
    if not m:
        raise UnknownInstruction("RET operand")
    label = re.search(r"`\((.*)\)", g.ins.text)
    base = g.kernel.labels.get(label.group(1), 0) if label else 0
    return _computed(f"({g.reg(int(m.group(1)[1:]), 2)}[l]+{base}u)")


@op("EXIT", always=True)
def exit_(g: Emitter) -> str:
    return f"w.live&=~m; {_LEAVE}"


op("KILL", always=True)(exit_)


@op("BPT", "TRAP")
def bpt(g: Emitter) -> str:
    return f'fault_at({g.ins.idx},(u32)__builtin_ctz(m),"trap",0);'


@op("BSSY")
def bssy(g: Emitter) -> str:
    return f"FORL(m) w.bm[{g.args[0].n}][l]=m;"


def _wait(g: Emitter, barrier: int) -> str:
    """The split waits at a convergence barrier."""
    return f"w.blocked[{barrier}]|=m; FORL(m) w.bpc[{barrier}][l]={_next(g)}; {_LEAVE}"


@op("BSYNC", always=True)
def bsync(g: Emitter) -> str:
    b = g.args[0].n
    return (
        f"if(m){{u32 g=w.bm[{b}][__builtin_ctz(m)]|m; "
        f"if(((g&w.live)&~m)!=0||m!=act){{{_wait(g, b)}}}}}"
    )


@op("BREAK")
def break_(g: Emitter) -> str:
    b = next(o.n for o in g.args if o.kind == "bar")
    return f"u32 g=0; FORL(m) g|=w.bm[{b}][l]; FORL(g) w.bm[{b}][l]&=~m; FORL(m) w.bm[{b}][l]=0;"


@op("BMOV", "32 CLEAR")
def bmov(g: Emitter) -> str:
    d, a = g.args
    if d.kind == "bar":
        return f"FORL(m) w.bm[{d.n}][l]={g.lane(a)};"
    if a.kind != "bar":
        raise UnknownInstruction("BMOV operands")
    clear = f"FORL(m) w.bm[{a.n}][l]=0;" if "CLEAR" in g.mods else ""
    return g.assign_lanes(d, f"w.bm[{a.n}][l]") + clear


@op("WARPSYNC", "EXCLUSIVE", always=True)
def warpsync(g: Emitter) -> str:
    return (
        f"u32 g=0; FORL(m){{w.bm[16][l]={g.lane(g.args[0])}; g|=w.bm[16][l];}} "
        f"if(m&&((g&w.live)&~m)!=0){{{_wait(g, 16)}}}"
    )


_GIVE_WAY = "w.ready.insert(w.ready.begin(),{{{pc},act}}); w.gave_way=true; return 0;"


@op("YIELD", always=True)
def yield_(g: Emitter) -> str:
    # A spinning split lets threads that wait for it at a convergence barrier go ahead.
    return (
        "u32 b=0; for(int k=0;k<16;k++) b|=w.blocked[k]; "
        f"if(unlikely(b)&&(++w.yields&31)==0&&yield_release(w,act)){{"
        f"{_GIVE_WAY.format(pc=_next(g))}}}"
    )


@op("NANOSLEEP", always=True)
def nanosleep(g: Emitter) -> str:
    return f"if(m){{{_GIVE_WAY.format(pc=_next(g))}}}"


@op("BAR", "SYNC ARV RED AND OR POPC DEFER_BLOCKING", always=True)
def bar(g: Emitter) -> str:
    kind = g.mods[0]
    numbers = [o for o in g.args if o.kind != "pred"]
    predicates = [o for o in g.args if o.kind == "pred"]
    reduced, value = "", "0u"
    if kind == "RED":
        reduced = f"w.red_kind={_BRED[g.one_of(_BRED)]};"
        value = g.pred(predicates[0]) if predicates else "0u"
    elif predicates and any(o.n != PT for o in predicates):
        raise UnknownInstruction("BAR with a predicate")

    def first_lane(k: int) -> str:
        if k >= len(numbers):
            return "0u"
        return f"[&]{{u32 l=(u32)__builtin_ctz(m); (void)l; return {g.lane(numbers[k])};}}()"

    g.info.record = "bar"
    waits = "false" if kind == "ARV" else "true"
    return (
        f"if(m){{{reduced} bar_arrive(c,w,{first_lane(0)},{first_lane(1)},{_next(g)},m,"
        f"{waits},{'true' if kind == 'RED' else 'false'},{value}); "
        f"{_LEAVE if kind != 'ARV' else ''}}}"
    )
