"""Translates one sm_70 kernel (cubin.Kernel) into a C++ function.

Each SASS instruction becomes one block that works on 32 lanes (two 16-lane
vectors) under the mask `m` = active lanes & guard predicate.  An instruction,
modifier or operand form that is not known raises Unknown, naming it."""
import re, struct


from .errors import UnknownInstruction as Unknown


class Op:
    __slots__ = ("kind", "n", "neg", "abs", "inv", "not_", "suf", "imm", "bank", "off", "idx", "text", "is_float", "fval", "scale")

    def __init__(self):
        self.neg = self.abs = self.inv = self.not_ = False
        self.suf = []
        self.n = None
        self.idx = None
        self.is_float = False
        self.scale = 1


_NUM = re.compile(r"^[-+]?(0x[0-9a-fA-F]+|\d+)$")
_FLT = re.compile(r"^[-+]?(\d+\.?\d*(e[-+]?\d+)?|INF|QNAN|SNAN|\.\d+)$", re.I)


def parse_op(t):
    o = Op()
    o.text = t
    s = t.strip()
    while s and s[0] in "-~!|+":
        if s[0] == "+":
            s = s[1:]
            continue
        if s[0] == "-":
            if _NUM.match(s) or _FLT.match(s):
                break
            o.neg = True
        elif s[0] == "~":
            o.inv = True
        elif s[0] == "!":
            o.not_ = True
        elif s[0] == "|":
            o.abs = True
        s = s[1:]
    if o.abs:
        s = s.replace("|", "")
    m = re.match(r"^(R\d+|RZ)((?:\.\w+)*)$", s)
    if m:
        o.kind, o.n = "reg", None if m.group(1) == "RZ" else int(m.group(1)[1:])
        o.suf = [x for x in m.group(2).split(".") if x and x != "reuse"]
        return o
    m = re.match(r"^(P\d|PT)$", s)
    if m:
        o.kind, o.n = "pred", 7 if s == "PT" else int(s[1:])
        return o
    m = re.match(r"^c\[(0x[0-9a-f]+)\]\s*\[(.*?)\]((?:\.\w+)*)$", s)
    if m:
        o.kind, o.bank = "const", int(m.group(1), 16)
        o.suf = [x for x in m.group(3).split(".") if x]
        inner = m.group(2)
        mm = re.match(r"^(R\d+|RZ)(?:\+(-?0x[0-9a-f]+))?$", inner)
        if mm:
            o.idx = None if mm.group(1) == "RZ" else int(mm.group(1)[1:])
            o.off = int(mm.group(2), 16) if mm.group(2) else 0
        else:
            o.off = int(inner, 16)
        return o
    if s.startswith("["):
        o.kind = "mem"
        inner = s[1:-1]
        o.off = 0
        for part in re.split(r"\+(?=[R0-9\-U])", inner):
            mm = re.match(r"^(R\d+|RZ)((?:\.\w+)*)$", part)
            if mm:
                if o.n is not None:
                    raise Unknown("memory operand " + t)
                o.n = -1 if mm.group(1) == "RZ" else int(mm.group(1)[1:])
                for x in mm.group(2).split("."):
                    if x in ("X4", "X8", "X16"):
                        o.scale = int(x[1:])
                    elif x in ("U32", "64"):
                        o.suf.append(x)
                    elif x and x != "reuse":
                        raise Unknown("memory operand " + t)
            elif re.match(r"^-?0x[0-9a-f]+$", part):
                o.off += int(part, 16)
            else:
                raise Unknown("memory operand " + t)
        if o.n is None:
            o.n = -1
        return o
    if s.startswith("SR") or s in ("PR",):
        o.kind = "sr"
        return o
    m = re.match(r"^B(\d+)$", s)
    if m:
        o.kind, o.n = "bar", int(m.group(1))
        return o
    m = re.match(r"^SB(\d+)$", s)
    if m:
        o.kind, o.n = "sb", int(m.group(1))
        return o
    m = re.match(r"^`\((.*)\)$", s)
    if m:
        o.kind = "label"
        o.text = m.group(1)
        return o
    if _NUM.match(s):
        o.kind, o.imm = "imm", int(s, 0)
        return o
    if _FLT.match(s):
        o.kind, o.is_float = "imm", True
        o.fval = float(s.lower().replace("qnan", "nan").replace("snan", "nan"))
        o.imm = None
        return o
    m = re.match(r"^(\d+)@(lo|hi)\((.*)\)$", s)
    if m:
        o.kind = "labelimm"
        o.text = m.group(3)
        o.suf = [m.group(2)]
        return o
    raise Unknown("operand " + t)


WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
CMPS = {"LT", "EQ", "LE", "GT", "NE", "GE"}
CMPF = CMPS | {"LTU", "EQU", "LEU", "GTU", "NEU", "GEU", "NUM", "NAN"}


def _lop3_table():
    """Shortest of the expressions in a, b, c for each truth table, by growing cost."""
    best = {0xF0: ("{a}", 0), 0xCC: ("{b}", 0), 0xAA: ("{c}", 0), 0x00: ("splat(0)", 0), 0xFF: ("splat(~0u)", 0)}
    by_cost = {0: list(best)}
    for cost in range(1, 9):
        new = {}
        for ca in range(cost):
            cb = cost - 1 - ca
            for x in by_cost.get(cost - 1, ()):
                new.setdefault(~x & 0xFF, f"(~{best[x][0]})")
            for x in by_cost.get(ca, ()):
                for y in by_cost.get(cb, ()):
                    for v, op in ((x & y, "&"), (x | y, "|"), (x ^ y, "^")):
                        if v not in best:
                            new.setdefault(v, f"({best[x][0]}{op}{best[y][0]})")
        by_cost[cost] = [v for v in new if v not in best]
        for v in by_cost[cost]:
            best[v] = (new[v], cost)
        if len(best) == 256:
            break
    return {v: e for v, (e, _) in best.items()}


_LOP3 = _lop3_table()


def lop3(lut, a, b, c):
    return _LOP3[lut].format(a=a, b=b, c=c)


class Gen:
    def __init__(self, k, cbsize):
        self.k = k
        self.cbsize = cbsize
        self.nregs = k.regs
        self.out = []
        self.leaders = set([0])
        self.io = []            # per instruction: dict(dst, src, pdst, psrc, mem, space)
        self.maxreg = 0

    # ---------------- operand expressions (vector half h)
    def R(self, n, w=1):
        self.maxreg = max(self.maxreg, n + w - 1)
        return f"R[{n}]"

    def cb(self, o, d=0):
        if o.idx is not None:
            raise Unknown("indexed constant operand " + o.text)
        off = o.off + d
        if off + 4 > self.cbsize.get(o.bank, 0):
            raise Unknown(f"constant {o.text} is outside bank {o.bank} ({self.cbsize.get(o.bank, 0)} bytes)")
        return f"CB({o.bank},{off})"

    def raw32(self):
        return (self.ins.enc >> 32) & 0xFFFFFFFF

    def fimm(self, o):
        """bits of a float immediate; the encoding holds the exact value"""
        raw = self.raw32()
        if o.is_float and o.fval == o.fval:
            try:
                v = struct.unpack("<I", struct.pack("<f", o.fval))[0]
            except OverflowError:
                v = raw
            if v & 0x7FFFFFFF != raw & 0x7FFFFFFF:
                d = abs((v & 0x7FFFFFFF) - (raw & 0x7FFFFFFF))
                if d > 2:
                    raise Unknown(f"float immediate {o.text} does not agree with the encoding 0x{raw:08x}")
                v = (v & 0x80000000) | (raw & 0x7FFFFFFF)
            return v
        if not o.is_float:          # small integers printed without a point: value from the text
            v = struct.unpack("<I", struct.pack("<f", float(o.imm)))[0]
            if v & 0x7FFFFFFF != raw & 0x7FFFFFFF:
                raise Unknown(f"float immediate {o.text} does not agree with the encoding 0x{raw:08x}")
            return v
        return raw

    def I(self, o, d=0):
        """integer source as vu expression; d: register offset within a wide operand"""
        if o.kind == "reg":
            if o.n is None:
                e = "splat(0)"
            else:
                self.srcs.append((o.n, 1))
                e = f"ldv({self.R(o.n + d)},h)"
        elif o.kind == "imm":
            v = o.imm & 0xFFFFFFFFFFFFFFFF
            return f"splat(0x{(v >> (32 * d)) & 0xFFFFFFFF:x}u)" if not d else f"splat(0x{(0xFFFFFFFF if o.imm < 0 else 0):x}u)"
        elif o.kind == "labelimm":
            return f"splat(0x{self.label_value(o):x}u)"
        elif o.kind == "const":
            e = f"splat({self.cb(o, 4 * d)})"
        else:
            raise Unknown("integer operand " + o.text)
        if o.suf and not set(o.suf) <= {"H0", "H1", "B0", "B1", "B2", "B3"}:
            raise Unknown("operand suffix " + o.text)
        if o.suf:
            raise Unknown("operand suffix " + o.text)
        if o.inv:
            e = f"(~{e})"
        if o.neg:
            e = f"(0u-{e})"
        if o.abs:
            raise Unknown("absolute value on integer " + o.text)
        return e

    def F(self, o, ftz=False):
        if o.kind == "reg":
            if o.suf:
                raise Unknown("operand suffix " + o.text)
            if o.n is None:
                e = "splat(0)"
            else:
                self.srcs.append((o.n, 1))
                e = f"ldv({self.R(o.n)},h)"
        elif o.kind == "imm":
            return f"asf(splat(0x{self.fimm(o):08x}u))"
        elif o.kind == "const":
            e = f"splat({self.cb(o)})"
        else:
            raise Unknown("float operand " + o.text)
        if ftz:
            e = f"ftz({e})"
        if o.abs:
            e = f"({e}&0x7fffffffu)"
        if o.neg:
            e = f"({e}^0x80000000u)"
        return f"asf({e})"

    def H(self, o, ftz=False):
        """half pair source -> (lo, hi) vf expressions"""
        if o.kind == "himm":
            lo, hi = o.imm & 0xFFFF, o.imm >> 16
            return f"h2f(splat(0x{lo:x}u))", f"h2f(splat(0x{hi:x}u))"
        suf = [s for s in o.suf]
        f32 = "F32" in suf
        if f32:
            e = self.F(self.strip(o))
            return e, e
        sw = "H1_H0"
        for s in suf:
            if s in ("H0_H0", "H1_H1", "H1_H0"):
                sw = s
            elif s in ("H0_NH1",):
                raise Unknown("operand suffix " + o.text)
            else:
                raise Unknown("operand suffix " + o.text)
        if o.kind == "reg":
            if o.n is None:
                x = "splat(0)"
            else:
                self.srcs.append((o.n, 1))
                x = f"ldv({self.R(o.n)},h)"
        elif o.kind == "const":
            x = f"splat({self.cb(o)})"
        elif o.kind == "imm":
            raise Unknown("half immediate " + o.text)
        else:
            raise Unknown("half operand " + o.text)
        lo, hi = {"H1_H0": (x, f"({x}>>16)"), "H0_H0": (x, x), "H1_H1": (f"({x}>>16)", f"({x}>>16)")}[sw]
        r = []
        for e in (lo, hi):
            if ftz:
                e = f"hftz({e}&0xffffu)"
            e = f"h2f({e})"
            if o.abs:
                e = f"vabs({e})"
            if o.neg:
                e = f"vneg({e})"
            r.append(e)
        return tuple(r)

    def strip(self, o):
        p = Op()
        for a in Op.__slots__:
            if hasattr(o, a):
                setattr(p, a, getattr(o, a))
        p.suf = []
        return p

    def P(self, o):
        if o.kind != "pred":
            raise Unknown("predicate operand " + o.text)
        self.psrc.append(o.n)
        e = "~0u" if o.n == 7 else f"P{o.n}"
        return f"(~{e})" if o.not_ else e

    def setP(self, o, val):
        if o.kind != "pred":
            raise Unknown("predicate destination " + o.text)
        if o.n == 7:
            return ""
        self.pdst.append(o.n)
        return f"setp(P{o.n},m,{val});"

    def dst(self, o, w=1):
        if o.kind != "reg":
            raise Unknown("destination " + o.text)
        if o.n is None:
            return None
        self.dsts.append((o.n, w))
        self.R(o.n, w)
        return o.n

    def W(self, o, e):
        n = self.dst(o)
        return f"for(int h=0;h<NV;h++) st(R[{n}],h,m,{e});" if n is not None else ""

    def label_value(self, o):
        t = o.text.replace("(", "").replace(")", "")
        m = re.match(r"^(\S+)\s*\+\s*(\S+?)@srel$", t)
        lab = m.group(2) if m else t
        if lab not in self.k.labels:
            raise Unknown("label " + o.text)
        self.addr_taken.add(self.k.labels[lab])
        v = self.k.labels[lab]
        return v if o.suf[0] == "lo" else v >> 32

    def target(self, o):
        if o.kind == "label":
            if o.text not in self.k.labels:
                raise Unknown("label " + o.text)
            return self.k.labels[o.text]
        if o.kind == "imm":
            return o.imm
        raise Unknown("branch target " + o.text)

    def mod(self, allowed):
        bad = [x for x in self.ins.mods if x not in allowed]
        if bad:
            raise Unknown("modifier ." + ".".join(bad))

    def round(self):
        for r, n in (("RM", 1), ("RP", 2), ("RZ", 3)):
            if r in self.ins.mods:
                return n
        return 0

    # ---------------- whole kernel
    def run(self):
        k = self.k
        self.addr_taken = set()
        has_brx = any(i.op in ("BRX", "JMX") for i in k.instrs)
        n = len(k.instrs)
        # trailing self-branch and NOP padding are never reached
        for i in k.instrs:
            if i.op in ("BRA", "CALL", "BSSY", "JMP"):
                for a in i.args:
                    try:
                        o = parse_op(a)
                    except Unknown:
                        continue
                    if o.kind in ("label", "imm") and i.op != "BSSY":
                        self.leaders.add(self.target(o))
            if i.op in ("BRA", "CALL", "BSYNC", "BAR", "WARPSYNC", "NANOSLEEP", "YIELD", "RET", "BRX", "BREAK", "EXIT", "JMP"):
                if i.pc + 16 < n * 16:
                    self.leaders.add(i.pc + 16)
        if has_brx:
            self.leaders |= {i.pc for i in k.instrs}
        body, starts = [], []
        for i in k.instrs:
            self.ins = i
            self.srcs, self.dsts, self.psrc, self.pdst = [], [], [], []
            self.mem, self.guarded = None, False
            try:
                code = self.one(i)
            except Unknown as e:
                raise Unknown(f"{k.name} at 0x{i.pc:x}: \"{i.text}\": {e}") from None
            except (IndexError, KeyError, AttributeError, TypeError) as e:
                raise Unknown(f"{k.name} at 0x{i.pc:x}: \"{i.text}\": unexpected form ({type(e).__name__}: {e})") from None
            if i.pc in self.leaders:
                if starts:
                    body.append(f"w.pc=0x{i.pc:x}u; return act; }}")
                starts.append(i.pc)
                body.append(f"static u32 b_{i.pc:x}(Ctx &c, Warp &w, u32 act) {{ Row *const R = w.R; (void)R;")
            body.append(f"// {i.pc:04x} {i.text}")
            body.append(code)
            self.io.append(dict(dst=self.dsts, src=self.srcs, pdst=self.pdst, psrc=self.psrc, mem=self.mem, guarded=self.guarded))
        body.append('fault("ran past the end of the kernel"); }')
        bad = [a for a in self.addr_taken if a not in self.leaders]
        if bad:
            raise Unknown(f"{k.name}: address taken of {bad} which is not a block start")
        self.starts = starts
        o = ['#include "hmma.h"', '#include "lanes.h"']
        o += [f"#define P{i} w.P[{i}]" for i in range(7)]
        o.append("#define CB(b,off) (*(const u32*)(c.cb[b]+(off)))")
        o += body
        o.append("const char *const kernel_text[] = {")
        for i in k.instrs:
            o.append('"' + i.text.replace("\\", "\\\\").replace('"', '\\"') + '",')
        o.append("};")
        ends = starts[1:] + [n * 16]
        o.append("const Block kernel_blocks[] = {" + ",".join(f"{{b_{a:x},0x{a:x},{(e - a) // 16}}}" for a, e in zip(starts, ends)) + "};")
        o.append(f"const u32 kernel_nblocks = {len(starts)}, kernel_ninstrs = {n};")
        return "\n".join(o) + "\n"

    # wraps a statement with the guard and the trace hook
    def wrap(self, body, always=False):
        i = self.ins
        p = parse_op(i.pred)
        self.psrc.append(p.n)
        g = "~0u" if p.n == 7 else f"P{p.n}"
        if p.not_:
            g = f"~{g}" if p.n != 7 else "0u"
        if g == "~0u":
            return f"{{const u32 m=act; (void)m; {body}}}"
        self.guarded = True
        mexpr = "0u" if g == "0u" else f"(act&{g})"
        guard = "" if always else "if(likely(m))"
        return f"{{const u32 m={mexpr}; (void)m; if(unlikely(c.tracing)) w.trace.push_back(m); {guard}{{{body}}}}}"

    def one(self, i):
        f = getattr(self, "i_" + i.op, None)
        if f is None:
            raise Unknown("instruction " + i.opcode)
        if i.pred == "!PT" and i.op not in ("BRA",):
            # never executes: keep it in the trace only
            return self.wrap("")
        a = []
        j = 0
        args = i.args
        self.a = []
        half = i.op.startswith("H") and i.op != "HMMA"
        while j < len(args):
            try_num = half and (_NUM.match(args[j].lstrip("+-")) or _FLT.match(args[j].strip())) and j + 1 < len(args) and \
                (_NUM.match(args[j + 1].lstrip("+-")) or _FLT.match(args[j + 1].strip()))
            if try_num:
                o = Op()
                o.kind, o.imm, o.text = "himm", self.raw32(), args[j] + "," + args[j + 1]
                self.check_himm(args[j], args[j + 1], o.imm)
                self.a.append(o)
                j += 2
                continue
            self.a.append(parse_op(args[j]) if i.op not in ("BRX", "RET") else None)
            j += 1
        return f(i, self.a)

    def check_himm(self, t0, t1, raw):
        def val(t):
            t = t.strip().lower()
            return float(t.replace("qnan", "nan").replace("snan", "nan"))
        hi, lo = struct.unpack("<e", struct.pack("<H", raw >> 16))[0], struct.unpack("<e", struct.pack("<H", raw & 0xFFFF))[0]
        a, b = val(t0), val(t1)
        if not ((a == hi or a != a) and (b == lo or b != b)):
            raise Unknown(f"half immediates {t0},{t1} do not agree with the encoding 0x{raw:08x} ({hi},{lo})")

    # ---------------- integer
    def i_NOP(self, i, a):
        return self.wrap("")

    def i_MOV(self, i, a):
        return self.wrap(self.W(a[0], self.I(a[1])))

    def split_preds(self, a, n):
        """a = [Rd, P.., R.., P..]: returns carry-out predicates, n sources, carry-in predicates"""
        j = 1
        po = []
        while a[j].kind == "pred":
            po.append(a[j])
            j += 1
        src = a[j:j + n]
        return po, src, a[j + n:]

    def i_IADD3(self, i, a):
        self.mod({"X"})
        po, s, pi = self.split_preds(a, 3)
        x = "X" in i.mods
        if not po and not x:
            e = "+".join(self.I(o) for o in s)
            return self.wrap(self.W(a[0], f"({e})"))
        # general: 64-bit sum per lane so that carries are exact
        terms, extra = [], 0
        for o in s:
            neg = o.neg and not x
            b = self.strip(o)
            b.neg = b.inv = False
            if o.kind == "imm":
                v = o.imm & 0xFFFFFFFF
                terms.append(f"0x{v:x}u")
                continue
            t = self.lane(b)
            if o.inv or neg or (o.neg and x):
                t = f"(~{t})"
            if neg:
                extra += 1
            terms.append(t)
        cin = ""
        if x:
            for o in pi:
                cin += f"+(({self.P(o)})>>l&1)"
        n = self.dst(a[0])
        body = f"u32 c0=0,c1=0; FORL(m){{u64 t=(u64)0" + "".join(f"+(u64)(u32)({t})" for t in terms) + (f"+{extra}" if extra else "") + cin + ";"
        if n is not None:
            body += f"R[{n}][l]=(u32)t;"
        body += "u32 k=(u32)(t>>32); c0|=(u32)(k>0)<<l; c1|=(u32)(k>1)<<l;}"
        for j, o in enumerate(po):
            body += self.setP(o, f"c{j}")
        return self.wrap(body)

    def lane(self, o, d=0):
        """scalar expression for lane l"""
        if o.kind == "reg":
            if o.suf:
                raise Unknown("operand suffix " + o.text)
            if o.n is None:
                e = "0u"
            else:
                self.srcs.append((o.n, d + 1))
                e = f"{self.R(o.n + d)}[l]"
        elif o.kind == "imm":
            e = f"0x{(o.imm >> (32 * d)) & 0xFFFFFFFF:x}u"
        elif o.kind == "const":
            e = self.cb(o, 4 * d)
        elif o.kind == "labelimm":
            e = f"0x{self.label_value(o):x}u"
        else:
            raise Unknown("operand " + o.text)
        if o.inv:
            e = f"(~{e})"
        if o.neg:
            e = f"(0u-{e})"
        return e

    def i_IMAD(self, i, a):
        self.mod({"MOV", "U32", "SHL", "IADD", "WIDE", "HI", "X"})
        md = set(i.mods)
        uns = "U32" in md
        if "WIDE" in md or "HI" in md:
            po, s, pi = self.split_preds(a, 3)
            A, B = self.strip(s[0]), self.strip(s[1])
            C = s[2]
            mul = "mulwide_u" if uns else "mulwide_s"
            neg = False
            for o in (A, B):
                if o.neg:
                    neg = not neg
                    o.neg = False
                if o.inv:
                    raise Unknown("operand " + o.text)
            body = "u32 cy=0; (void)cy;"
            n = self.dst(a[0], 2 if "WIDE" in md else 1)
            pre = f"vu lo,hi; {mul}({self.I(A)},{self.I(B)},lo,hi);"
            if neg:
                pre += "{vu z=splat(0); u32 nz=cu_NE(lo,z); lo=z-lo; hi=z-hi-selm(nz,splat(1),z);}"
            if "WIDE" in md:
                cl, ch = self.I(C), self.I(C, 1) if C.kind != "imm" else f"splat(0x{0xFFFFFFFF if C.imm < 0 else 0:x}u)"
                if C.neg or C.inv:
                    C2 = self.strip(C)
                    C2.neg = C2.inv = False
                    cl, ch = self.I(C2), self.I(C2, 1)
                    if C.inv:
                        cl, ch = f"(~{cl})", f"(~{ch})"
                    else:
                        pre += f"vu n0={cl},n1={ch}; u32 nz0=cu_NE(n0,splat(0)); n1=(0u-n1)-selm(nz0,splat(1),splat(0)); n0=0u-n0;"
                        cl, ch = "n0", "n1"
            else:
                cl, ch = "splat(0)", self.I(C)
            pre += f"vu l2=lo+{cl}; u32 k=cu_LT(l2,lo); vu kv=selm(k,splat(1),splat(0)); vu hc=hi+{ch}; u32 k2=cu_LT(hc,hi); vu h2=hc+kv; k2|=cu_LT(h2,hc);"
            if "X" in md and "HI" in md:
                pre += f"h2=h2+selm(({self.P(pi[0])})>>(VL*h),splat(1),splat(0));"
            if "X" in md and "WIDE" in md:
                pre += f"{{vu ci=selm(({self.P(pi[0])})>>(VL*h),splat(1),splat(0)); vu l3=l2+ci; u32 q=cu_LT(l3,l2); l2=l3; vu qv=selm(q,splat(1),splat(0)); vu h3=h2+qv; k2|=cu_LT(h3,h2); h2=h3;}}"
            pre += "cy|=(k2&0xffu)<<(VL*h);"
            if n is not None:
                if "WIDE" in md:
                    pre += f"st(R[{n}],h,m,l2); st(R[{n + 1}],h,m,h2);"
                else:
                    pre += f"st(R[{n}],h,m,h2);"
            body += f"for(int h=0;h<NV;h++){{{pre}}}"
            for o in po:
                body += self.setP(o, "cy")
            return self.wrap(body)
        po, s, pi = self.split_preds(a, 3)
        if po:
            raise Unknown("IMAD carry-out")
        one = s[1].kind == "imm" and s[1].imm == 1
        zero = (s[0].kind == "reg" and s[0].n is None) or (s[1].kind == "reg" and s[1].n is None)
        C = s[2]
        if zero:
            e = self.I(C)
        elif one:
            e = f"({self.I(s[0])}+{self.I(C)})"
        else:
            e = f"({self.I(s[0])}*{self.I(s[1])}+{self.I(C)})"
        if "X" in md:
            e = f"({e}+selm(({self.P(pi[0])})>>(VL*h),splat(1),splat(0)))"
        return self.wrap(self.W(a[0], e))

    def i_LEA(self, i, a):
        self.mod({"HI", "X", "SX32"})
        md = set(i.mods)
        po, rest = [], a[1:]
        while rest[0].kind == "pred":
            po.append(rest.pop(0))
        cin = None
        if "X" in md:
            cin = rest.pop()
        sh = rest.pop()
        if sh.kind != "imm":
            raise Unknown("LEA shift " + sh.text)
        sh = sh.imm
        A, B = rest[0], rest[1]
        n = self.dst(a[0])
        if "HI" not in md:
            if po and (A.neg or A.inv or B.neg or B.inv):
                raise Unknown("LEA carry with negated operand")
            pre = f"vu s={self.I(A)}<<{sh}; vu r=s+{self.I(B)}; cy|=cu_LT(r,s)<<(VL*h);"
            if "X" in md:
                raise Unknown("LEA.X")
        else:
            if "SX32" in md:
                hs = f"(vu)((vi){self.I(A)}>>{32 - sh})" if sh else f"(vu)((vi){self.I(A)}>>31)"
            else:
                C = rest[2]
                hs = f"(({self.I(C)}<<{sh})|({self.I(A)}>>{32 - sh}))" if sh else self.I(C)
            pre = f"vu s={hs}; vu r=s+{self.I(B)}; u32 k=cu_LT(r,s);"
            if cin is not None:
                pre += f"vu kv=selm(({self.P(cin)})>>(VL*h),splat(1),splat(0)); vu r2=r+kv; k|=cu_LT(r2,r); r=r2;"
            pre += "cy|=(k&0xffu)<<(VL*h);"
        if n is not None:
            pre += f"st(R[{n}],h,m,r);"
        body = f"u32 cy=0; for(int h=0;h<NV;h++){{{pre}}}"
        for o in po:
            body += self.setP(o, "cy")
        return self.wrap(body)

    def i_LOP3(self, i, a):
        self.mod({"LUT", "PAND"})
        j = 0
        pd = None
        if a[0].kind == "pred":
            pd, j = a[0], 1
        d, A, B, C, lut, pin = a[j], a[j + 1], a[j + 2], a[j + 3], a[j + 4].imm, a[j + 5]
        n = self.dst(d)
        pre = f"vu r={lop3(lut,self.I(A),self.I(B),self.I(C))};"
        if n is not None:
            pre += f"st(R[{n}],h,m,r);"
        body = "u32 nz=0;" if pd else ""
        if pd:
            pre += "nz|=cu_NE(r,splat(0))<<(VL*h);"
        body += f"for(int h=0;h<NV;h++){{{pre}}}"
        if pd:
            op = "&" if "PAND" in i.mods else "|"
            body += self.setP(pd, f"(nz{op}{self.P(pin)})")
        return self.wrap(body)

    def i_PLOP3(self, i, a):
        self.mod({"LUT"})
        p, q, x, y, z, l1, l2 = a
        e = [self.P(o) for o in (x, y, z)]
        body = f"u32 x={e[0]},y={e[1]},z={e[2]}; u32 r1=plut({l1.imm},x,y,z), r2=plut({l2.imm},x,y,z); (void)r1;(void)r2;"
        return self.wrap(body + self.setP(p, "r1") + self.setP(q, "r2"))

    def i_PSETP(self, i, a):
        # two boolean operators: (x op1 y) op2 z, second result uses !(x op1 y)
        b = {"AND": "&", "OR": "|", "XOR": "^"}
        o1, o2 = [m for m in i.mods if m in b]
        p, q, x, y, z = a
        body = f"u32 t=({self.P(x)}){b[o1]}({self.P(y)}), z=({self.P(z)}); u32 r1=t{b[o2]}z, r2=(~t){b[o2]}z; (void)r1;(void)r2;"
        return self.wrap(body + self.setP(p, "r1") + self.setP(q, "r2"))

    def i_SHF(self, i, a):
        self.mod({"L", "R", "U32", "S32", "U64", "S64", "HI", "W"})
        md = set(i.mods)
        d, A, S, C = a
        n = self.dst(d)
        if n is None:
            return self.wrap("")
        t64 = "U64" in md or "S64" in md
        sgn = "S32" in md or "S64" in md
        lim = 64 if t64 else 32
        hi = "HI" in md
        # vector forms of the common 32-bit cases
        rzA, rzC = A.kind == "reg" and A.n is None, C.kind == "reg" and C.n is None
        if not t64:
            s = self.I(S)
            if "W" in md:
                s = f"({s}&31u)"
            if "L" in md and not hi and rzC:
                return self.wrap(self.W(d, f"shlv({self.I(A)},{s})"))
            if "R" in md and hi and rzA:
                return self.wrap(self.W(d, (f"sarv({self.I(C)},{s})" if sgn else f"shrv({self.I(C)},{s})")))
        body = f"u32 s={self.lane(S)}; "
        body += f"s&={lim - 1};" if "W" in md else f"if(s>{lim})s={lim};"
        body += f"u64 v=((u64)({self.lane(C)})<<32)|({self.lane(A)}); u64 r;"
        if "L" in md:
            body += "r=s>63?0:v<<s;"
        elif sgn:
            body += "r=(u64)((i64)v>>(s>63?63:s));"
        else:
            body += "r=s>63?0:v>>s;"
        body += f"R[{n}][l]=(u32)(r>>{32 if hi else 0});"
        return self.wrap(f"FORL(m){{{body}}}")

    def i_PRMT(self, i, a):
        self.mod(set())
        sel = a[2]
        if sel.kind == "imm" and not (sel.imm & 0x8888):
            # constant selector: or of shifted bytes
            parts = []
            for k in range(4):
                nb = (sel.imm >> (4 * k)) & 7
                src = a[1] if nb < 4 else a[3]
                sh = 8 * (nb & 3) - 8 * k
                e = self.I(src)
                e = f"({e}>>{sh})" if sh > 0 else f"({e}<<{-sh})" if sh < 0 else e
                parts.append(f"({e}&0x{0xFF << (8 * k):x}u)")
            return self.wrap(self.W(a[0], "(" + "|".join(parts) + ")"))
        return self.wrap(self.W(a[0], f"prmt({self.I(a[1])},{self.I(sel)},{self.I(a[3])})"))

    BOOL = {"AND": "&", "OR": "|", "XOR": "^"}

    def i_ISETP(self, i, a):
        md = list(i.mods)
        cmp_ = md[0]
        if cmp_ not in CMPS and cmp_ not in ("F", "T"):
            raise Unknown("modifier ." + cmp_)
        self.mod(CMPS | {"U32", "EX", "AND", "OR", "XOR"})
        uns = "U32" in md
        bop = self.BOOL[[x for x in md if x in self.BOOL][0]]
        p, q, A, B, pc = a[:5]
        x, y = self.I(A), self.I(B)
        t = "u" if uns else "s"
        body = f"u32 r=0,e=0; (void)e; for(int h=0;h<NV;h++){{vu x={x},y={y}; r|=c{t}_{cmp_}(x,y)<<(VL*h);"
        if "EX" in md:
            body += "e|=cu_EQ(x,y)<<(VL*h);"
        body += "}"
        if "EX" in md:
            lo = self.P(a[5])
            if cmp_ == "EQ":
                body += f"r&=({lo});"
            elif cmp_ == "NE":
                body += f"r|=({lo});"
            else:
                body += f"r=(r&~e)|(e&({lo}));"
        body += f"u32 z={self.P(pc)}; u32 r1=r{bop}z, r2=(~r){bop}z; (void)r1;(void)r2;"
        return self.wrap(body + self.setP(p, "r1") + self.setP(q, "r2"))

    def i_IMNMX(self, i, a):
        self.mod({"U32"})
        t = "u" if "U32" in i.mods else "s"
        n = self.dst(a[0])
        body = f"u32 pm={self.P(a[3])}; for(int h=0;h<NV;h++){{vu x={self.I(a[1])},y={self.I(a[2])}; u32 lt=c{t}_LT(x,y); u32 pk=pm>>(VL*h); st(R[{n}],h,m,selm((lt&pk)|(~lt&~pk),x,y));}}"
        return self.wrap(body)

    def i_SEL(self, i, a):
        self.mod(set())
        n = self.dst(a[0])
        return self.wrap(f"u32 pm={self.P(a[3])}; for(int h=0;h<NV;h++) st(R[{n}],h,m,selm(pm>>(VL*h),{self.I(a[1])},{self.I(a[2])}));")

    def i_IABS(self, i, a):
        return self.wrap(self.W(a[0], f"vabs_i({self.I(a[1])})"))

    def i_POPC(self, i, a):
        return self.wrap(self.W(a[0], f"popcv({self.I(a[1])})"))

    def i_FLO(self, i, a):
        self.mod({"U32", "SH"})
        d, s = [o for o in a if o.kind != "pred"][:2]
        x = self.I(s)
        if "U32" not in i.mods:
            x = f"({x}^(vu)((vi)({x})>>31))"
        z = f"lzv({x})"
        if "SH" in i.mods:
            return self.wrap(self.W(d, f"selm(cu_EQ({z},splat(32)),splat(0xffffffffu),{z})"))
        return self.wrap(self.W(d, f"(31u-{z})"))

    def i_BREV(self, i, a):
        return self.wrap(self.W(a[0], f"brevv({self.I(a[1])})"))

    def i_SGXT(self, i, a):
        self.mod({"U32", "W"})
        n = self.dst(a[0])
        u = "U32" in i.mods
        body = f"u32 v={self.lane(a[1])}, b={self.lane(a[2])};" + ("b&=31;" if "W" in i.mods else "")
        body += f"R[{n}][l]=b==0?0:b>=32?v:" + ("(v&((1u<<b)-1));" if u else "(u32)((i32)(v<<(32-b))>>(32-b));")
        return self.wrap(f"FORL(m){{{body}}}")

    def i_BMSK(self, i, a):
        self.mod({"W", "C"})
        n = self.dst(a[0])
        body = f"u32 s={self.lane(a[1])}, b={self.lane(a[2])};" + ("s&=31;b&=31;" if "W" in i.mods else "if(b>32)b=32;")
        body += f"u64 k=((1ull<<b)-1); R[{n}][l]=s>31?0:(u32)(k<<s);"
        return self.wrap(f"FORL(m){{{body}}}")

    def i_VABSDIFF4(self, i, a):
        self.mod({"U8", "ACC"})
        n = self.dst(a[0])
        acc = "ACC" in i.mods
        body = f"u32 x={self.lane(a[1])},y={self.lane(a[2])},z={self.lane(a[3])},r=0,s=0; for(int k=0;k<4;k++){{int d=(int)(x>>8*k&255)-(int)(y>>8*k&255); d=d<0?-d:d; r|=(u32)d<<8*k; s+=d;}} R[{n}][l]=" + ("s+z;" if acc else "r+z;")
        return self.wrap(f"FORL(m){{{body}}}")

    def i_VABSDIFF(self, i, a):
        self.mod({"U32"})
        n = self.dst(a[0])
        t = "u32" if "U32" in i.mods else "i32"
        return self.wrap(f"FORL(m){{{t} x=({t}){self.lane(a[1])},y=({t}){self.lane(a[2])}; R[{n}][l]=(x>y?(u32)x-(u32)y:(u32)y-(u32)x)+{self.lane(a[3])};}}")

    def i_IDP(self, i, a):
        self.mod({"4A", "2A", "U8", "S8", "U16", "S16", "LO", "HI"})
        n = self.dst(a[0])
        ts = [m for m in i.mods if m in ("U8", "S8", "U16", "S16")]
        if "4A" in i.mods:
            ta = "i8" if ts[0] == "S8" else "u8"
            tb = "i8" if ts[1] == "S8" else "u8"
            body = f"u32 x={self.lane(a[1])},y={self.lane(a[2])}; i32 s=0; for(int k=0;k<4;k++) s+=(i32)({ta})(x>>8*k)*(i32)({tb})(y>>8*k); R[{n}][l]=(u32)s+{self.lane(a[3])};"
        else:
            raise Unknown("IDP.2A")
        return self.wrap(f"FORL(m){{{body}}}")

    def i_P2R(self, i, a):
        n = self.dst(a[0])
        sh = {"B1": 8, "B2": 16, "B3": 24}.get((i.mods or ["B0"])[0], 0)
        mask = a[-1].imm
        for k in range(7):
            if mask >> k & 1:
                self.psrc.append(k)
        e = "|".join(f"((P{k}>>l&1)<<{k})" for k in range(7))
        return self.wrap(f"FORL(m){{u32 v=({e})&0x{mask:x}u; R[{n}][l]=({self.lane(a[2])}&~(0x{mask:x}u<<{sh}))|v<<{sh};}}")

    def i_R2P(self, i, a):
        sh = {"B1": 8, "B2": 16, "B3": 24}.get((i.mods or ["B0"])[0], 0)
        mask = a[-1].imm
        body = f"FORL(m){{u32 v=({self.lane(a[1])})>>{sh};"
        for k in range(7):
            if mask >> k & 1:
                self.pdst.append(k)
                body += f"P{k}=(P{k}&~(1u<<l))|((v>>{k}&1)<<l);"
        return self.wrap(body + "}")

    # ---------------- float
    def rfun(self, base, n):
        return f"v{base}_r<{n}>" if n else None

    def fwrap(self, d, e, mods):
        x = f"asu({e})"
        if "FTZ" in mods:
            x = f"ftz({x})"
        if "SAT" in mods:
            x = f"fsat({x})"
        return self.wrap(self.W(d, x))

    def i_FADD(self, i, a):
        self.mod({"FTZ", "SAT", "RM", "RP", "RZ"})
        z = "FTZ" in i.mods
        r = self.round()
        x, y = self.F(a[1], z), self.F(a[2], z)
        return self.fwrap(a[0], f"vadd_r<{r}>({x},{y})" if r else f"({x}+{y})", i.mods)

    def i_FMUL(self, i, a):
        self.mod({"FTZ", "SAT", "RM", "RP", "RZ", "D2", "D4", "D8", "M2", "M4", "M8"})
        z = "FTZ" in i.mods
        r = self.round()
        x, y = self.F(a[1], z), self.F(a[2], z)
        e = f"vmul_r<{r}>({x},{y})" if r else f"({x}*{y})"
        for m, s in (("D2", 0.5), ("D4", 0.25), ("D8", 0.125), ("M2", 2.0), ("M4", 4.0), ("M8", 8.0)):
            if m in i.mods:
                e = f"({e}*{s}f)"
        return self.fwrap(a[0], e, i.mods)

    def i_FFMA(self, i, a):
        self.mod({"FTZ", "SAT", "RM", "RP", "RZ"})
        z = "FTZ" in i.mods
        r = self.round()
        x, y, w = self.F(a[1], z), self.F(a[2], z), self.F(a[3], z)
        return self.fwrap(a[0], f"vfma_r<{r}>({x},{y},{w})" if r else f"vfma({x},{y},{w})", i.mods)

    def i_FMNMX(self, i, a):
        self.mod({"FTZ"})
        z = "FTZ" in i.mods
        n = self.dst(a[0])
        return self.wrap(f"u32 pm={self.P(a[3])}; for(int h=0;h<NV;h++) st(R[{n}],h,m,fmnmx(asu({self.F(a[1], z)}),asu({self.F(a[2], z)}),pm>>(VL*h)));")

    def i_FSEL(self, i, a):
        self.mod({"FTZ"})
        z = "FTZ" in i.mods
        n = self.dst(a[0])
        return self.wrap(f"u32 pm={self.P(a[3])}; for(int h=0;h<NV;h++) st(R[{n}],h,m,selm(pm>>(VL*h),asu({self.F(a[1], z)}),asu({self.F(a[2], z)})));")

    def i_FSETP(self, i, a):
        self.mod(CMPF | {"FTZ", "AND", "OR", "XOR"})
        cmp_ = i.mods[0]
        z = "FTZ" in i.mods
        bop = self.BOOL[[x for x in i.mods if x in self.BOOL][0]]
        p, q, A, B, pc = a
        body = f"u32 r=0; for(int h=0;h<NV;h++) r|=cf_{cmp_}(asu({self.F(A, z)}),asu({self.F(B, z)}))<<(VL*h);"
        body += f"u32 z={self.P(pc)}; u32 r1=r{bop}z, r2=(~r){bop}z; (void)r1;(void)r2;"
        return self.wrap(body + self.setP(p, "r1") + self.setP(q, "r2"))

    def i_FSET(self, i, a):
        self.mod(CMPF | {"FTZ", "AND", "OR", "XOR", "BF"})
        cmp_ = [x for x in i.mods if x in CMPF][0]
        bop = self.BOOL[[x for x in i.mods if x in self.BOOL][0]]
        one = "0x3f800000u" if "BF" in i.mods else "0xffffffffu"
        n = self.dst(a[0])
        return self.wrap(f"u32 pm={self.P(a[3])}; for(int h=0;h<NV;h++) st(R[{n}],h,m,selm(cf_{cmp_}(asu({self.F(a[1])}),asu({self.F(a[2])})){bop}(pm>>(VL*h)),splat({one}),splat(0)));")

    def i_FCHK(self, i, a):
        # true when a/b needs the slow path: exponents out of the safe range
        body = f"u32 r=0; FORL(m){{u32 x={self.laneF(a[1])},y={self.laneF(a[2])}; i32 ex=(x>>23&255)-127, ey=(y>>23&255)-127;"
        body += "bool b=ex==128||ey==128||ey==-127||ex==-127||(ex-ey)>=125||(ex-ey)<=-125||ey>=126||ey<=-126||ex<=-103; r|=(u32)b<<l;}"
        return self.wrap(body + self.setP(a[0], "r"))

    def laneF(self, o):
        if o.kind == "imm":
            return f"0x{self.fimm(o):08x}u"
        b = self.strip(o)
        b.neg = b.abs = False
        e = self.lane(b)
        if o.abs:
            e = f"({e}&0x7fffffffu)"
        if o.neg:
            e = f"({e}^0x80000000u)"
        return e

    MUFU = {"RCP": 0, "RSQ": 1, "EX2": 2, "LG2": 3, "SIN": 4, "COS": 5, "SQRT": 6, "TANH": 7}

    def i_MUFU(self, i, a):
        f = i.mods[0]
        n = self.dst(a[0])
        if f in ("RCP64H", "RSQ64H"):
            ex = "1.0/d" if f == "RCP64H" else "1.0/sqrt(d)"
            return self.wrap(f"FORL(m){{double d=u2d(0,{self.laneF(a[1])}); R[{n}][l]=(u32)(d2u({ex})>>32);}}")
        if f == "EX2":
            return self.wrap(self.W(a[0], f"ex2v(asu({self.F(a[1])}))"))
        if f not in self.MUFU:
            raise Unknown("MUFU." + f)
        return self.wrap(f"alignas(64) u32 x[32]; for(int h=0;h<NV;h++) *(vu*)(x+VL*h)=asu({self.F(a[1])}); mufu_lanes({self.MUFU[f]},x,R[{n}],m);")

    def i_FSWZADD(self, i, a):
        raise Unknown("FSWZADD")

    def i_FRND(self, i, a):
        self.mod({"FLOOR", "CEIL", "TRUNC", "FTZ"})
        f = "vfloor" if "FLOOR" in i.mods else "vceil" if "CEIL" in i.mods else "vtrunc" if "TRUNC" in i.mods else "vrint"
        return self.wrap(self.W(a[0], f"asu({f}({self.F(a[1])}))"))

    # ---------------- conversions
    def sub(self, o, ty):
        """integer source of a conversion with byte/half select, sign or zero extended (vector)"""
        sel = o.suf[0] if o.suf else None
        b = self.strip(o)
        e = self.I(b)
        w = 8 if ty.endswith("8") else 16
        sh = {"B0": 0, "B1": 8, "B2": 16, "B3": 24, "H0": 0, "H1": 16, None: 0}[sel]
        if ty[0] == "S":
            return f"(vu)((vi)({e}<<{32 - w - sh})>>{32 - w})"
        return f"(({e}>>{sh})&0x{(1 << w) - 1:x}u)"

    def i_I2F(self, i, a):
        self.mod({"F64", "F16", "U32", "S8", "U8", "S16", "U16", "S64", "U64", "RP", "RM", "RZ"})
        md = i.mods
        r = self.round()
        src = next((m for m in md if m in ("U32", "S8", "U8", "S16", "U16", "S64", "U64")), "S32")
        if src in ("S8", "U8", "S16", "U16"):
            e = self.sub(a[1], src)
        elif src in ("S64", "U64"):
            t = "i64" if src == "S64" else "u64"
            v = f"({t})((u64){self.lane(a[1])}|(u64)({self.lane(a[1], 1)})<<32)"
            if "F64" in md:
                n = self.dst(a[0], 2)
                return self.wrap(f"FORL(m){{u64 d=d2u((double)({v})); R[{n}][l]=(u32)d; R[{n + 1}][l]=(u32)(d>>32);}}")
            n = self.dst(a[0])
            fix = ""
            if r == 2:
                fix = "if((double)f<(double)x && (i64)1) {if((__float128)f<(__float128)x) f=nextafterf(f,INFINITY);} else if((__float128)f<(__float128)x) f=nextafterf(f,INFINITY);"
            elif r:
                raise Unknown("rounding of " + i.opcode)
            return self.wrap(f"FORL(m){{{t} x={v}; float f=(float)x; {fix} R[{n}][l]=f2u(f);}}")
        else:
            e = self.I(a[1])
        if "F64" in md:
            n = self.dst(a[0], 2)
            t = "u32" if src in ("U32", "U8", "U16") else "i32"
            return self.wrap(f"alignas(64) u32 x[32]; for(int h=0;h<NV;h++) *(vu*)(x+VL*h)={e}; FORL(m){{u64 d=d2u((double)({t})x[l]); R[{n}][l]=(u32)d; R[{n + 1}][l]=(u32)(d>>32);}}")
        uns = src in ("U32", "U8", "U16")
        conv = f"int_to_float_rounded({e},{'false' if uns else 'true'},{r})" if r else f"{'u2fv' if uns else 'i2f'}({e})"
        if "F16" in md:
            return self.wrap(self.W(a[0], f"f2h({conv})"))
        return self.wrap(self.W(a[0], f"(vu){conv}"))

    def i_F2I(self, i, a):
        self.mod({"FTZ", "NTZ", "TRUNC", "FLOOR", "CEIL", "U32", "S64", "U64", "S16", "U16", "S8", "U8", "F64", "F16"})
        md = i.mods
        mode = 3 if "TRUNC" in md else 1 if "FLOOR" in md else 2 if "CEIL" in md else 0
        dt = next((m for m in md if m in ("U32", "S64", "U64", "S16", "U16", "S8", "U8")), "S32")
        if "F64" in md or dt in ("S64", "U64"):
            wide = dt in ("S64", "U64")
            n = self.dst(a[0], 2 if wide else 1)
            if "F64" in md:
                b = self.strip(a[1])
                x = f"u2d({self.lane(b)},{self.lane(b, 1)})" if a[1].kind == "reg" else None
                if x is None:
                    raise Unknown("F2I.F64 operand")
            else:
                x = f"(double)u2f({self.laneF(a[1])})"
            rn = {3: "trunc", 1: "floor", 2: "ceil", 0: "nearbyint"}[mode]
            lim = {"S32": ("-2147483648.0", "2147483647.0", "i32", "0x7fffffff", "(i32)0x80000000"), "U32": ("0.0", "4294967295.0", "u32", "0xffffffffu", "0u"),
                   "S64": ("-9223372036854775808.0", "9223372036854775807.0", "i64", "0x7fffffffffffffffll", "(i64)0x8000000000000000ull"),
                   "U64": ("0.0", "18446744073709551615.0", "u64", "~0ull", "0ull")}[dt]
            body = f"double x={rn}({x}); u64 v; if(x!=x) v={'0x8000000000000000ull' if wide else '0'}; else if(x<={lim[0]}) v=(u64)({lim[4]}); else if(x>={lim[1]}) v=(u64)({lim[3]}); else v=(u64)({lim[2]})x;"
            body += f"R[{n}][l]=(u32)v;" + (f"R[{n + 1}][l]=(u32)(v>>32);" if wide else "")
            return self.wrap(f"FORL(m){{{body}}}")
        if "F16" in md:
            lo, _ = self.H(a[1]) if not (a[1].suf and a[1].suf[0] in ("H0", "H1")) else self.H_sel(a[1])
            x = lo
        else:
            x = self.F(a[1], "FTZ" in md)
        sg = dt[0] == "S"
        e = f"cvt_f2i({x},{'true' if sg else 'false'},{mode})"
        if dt in ("S16", "S8", "U16", "U8"):
            w = int(dt[1:])
            lo, hi = (-(1 << (w - 1)), (1 << (w - 1)) - 1) if sg else (0, (1 << w) - 1)
            t = "s" if sg else "u"
            e = f"({{vu q_={e}; q_=selm(c{t}_GT(q_,splat((u32){hi})),splat((u32){hi}),q_); " + (f"q_=selm(cs_LT(q_,splat((u32)({lo}))),splat((u32)({lo})),q_);" if sg else "") + f" q_&0x{(1 << w) - 1:x}u;}})"
            if sg:
                e = f"(vu)((vi)({e}<<{32 - w})>>{32 - w})"
        return self.wrap(self.W(a[0], e))

    def H_sel(self, o):
        b = self.strip(o)
        b.suf = ["H0_H0" if o.suf[0] == "H0" else "H1_H1"]
        return self.H(b)

    def i_F2F(self, i, a):
        self.mod({"F16", "F32", "F64", "FTZ", "SAT", "RM", "RP", "RZ", "FLOOR", "CEIL", "TRUNC"})
        tys = [m for m in i.mods if m in ("F16", "F32", "F64")]
        d, s = tys
        r = self.round()
        if (d, s) == ("F16", "F32"):
            e = f"f2h_r<{r}>({self.F(a[1], 'FTZ' in i.mods)})"
            if "SAT" in i.mods:
                e = f"hsat({e})"
            return self.wrap(self.W(a[0], e))
        if (d, s) == ("F32", "F16"):
            o = a[1]
            lo = (self.H_sel(o) if o.suf and o.suf[0] in ("H0", "H1") else self.H(o))[0]
            return self.wrap(self.W(a[0], f"asu({lo})"))
        if (d, s) == ("F64", "F32"):
            n = self.dst(a[0], 2)
            return self.wrap(f"FORL(m){{u64 d=d2u((double)u2f({self.laneF(a[1])})); R[{n}][l]=(u32)d; R[{n + 1}][l]=(u32)(d>>32);}}")
        if (d, s) == ("F32", "F64"):
            n = self.dst(a[0])
            return self.wrap(f"FORL(m){{R[{n}][l]=f2u((float){self.D(a[1])});}}")
        if (d, s) == ("F32", "F32"):
            f = "vfloor" if "FLOOR" in i.mods else "vceil" if "CEIL" in i.mods else "vtrunc" if "TRUNC" in i.mods else None
            e = self.F(a[1], "FTZ" in i.mods)
            return self.fwrap(a[0], f"{f}({e})" if f else e, i.mods)
        raise Unknown("conversion " + i.opcode)

    # ---------------- double
    def D(self, o):
        if o.kind == "imm":
            hi = self.raw32()
            v = struct.unpack("<d", struct.pack("<II", 0, hi))[0]
            t = o.fval if o.is_float else float(o.imm)
            if t == t and abs(t) != float("inf") and abs(abs(v) - abs(t)) > 1e-6 * abs(t):
                raise Unknown("double immediate " + o.text)
            return f"u2d(0,0x{(hi & 0x7FFFFFFF) | (0x80000000 if (o.text.strip().startswith('-')) else 0):x}u)"
        b = self.strip(o)
        b.neg = b.abs = False
        if o.kind == "reg" and o.n is None:
            e = "0.0"
        else:
            e = f"u2d({self.lane(b)},{self.lane(b, 1)})"
        if o.abs:
            e = f"fabs({e})"
        if o.neg:
            e = f"(-{e})"
        return e

    def dd(self, i, a, expr):
        n = self.dst(a[0], 2)
        return self.wrap(f"FORL(m){{u64 d=d2u({expr}); R[{n}][l]=(u32)d; R[{n + 1}][l]=(u32)(d>>32);}}")

    def i_DADD(self, i, a):
        self.mod({"RM", "RP", "RZ"})
        return self.dd(i, a, f"{self.D(a[1])}+{self.D(a[2])}")

    def i_DMUL(self, i, a):
        self.mod({"RM", "RP", "RZ"})
        return self.dd(i, a, f"{self.D(a[1])}*{self.D(a[2])}")

    def i_DFMA(self, i, a):
        self.mod({"RM", "RP", "RZ"})
        return self.dd(i, a, f"fma({self.D(a[1])},{self.D(a[2])},{self.D(a[3])})")

    def i_DSETP(self, i, a):
        cmp_ = i.mods[0]
        bop = self.BOOL[[x for x in i.mods if x in self.BOOL][0]]
        ops = {"LT": "x<y", "EQ": "x==y", "LE": "x<=y", "GT": "x>y", "NE": "x<y||x>y", "GE": "x>=y", "NUM": "x==x&&y==y", "NAN": "x!=x||y!=y",
               "LTU": "!(x>=y)", "EQU": "!(x<y||x>y)", "LEU": "!(x>y)", "GTU": "!(x<=y)", "NEU": "x!=y", "GEU": "!(x<y)"}
        if cmp_ not in ops:
            raise Unknown("modifier ." + cmp_)
        p, q, A, B, pc = a
        body = f"u32 r=0; FORL(m){{double x={self.D(A)},y={self.D(B)}; r|=(u32)({ops[cmp_]})<<l;}} u32 z={self.P(pc)}; u32 r1=r{bop}z, r2=(~r){bop}z; (void)r1;(void)r2;"
        return self.wrap(body + self.setP(p, "r1") + self.setP(q, "r2"))

    # ---------------- half
    def hout(self, i, d, lo, hi):
        z, s = "FTZ" in i.mods, "SAT" in i.mods
        def fin(e):
            e = f"f2h({e})"
            if z:
                e = f"hftz({e})"
            if s:
                e = f"hsat({e})"
            return e
        if "F32" in i.mods:
            return self.wrap(self.W(d, f"asu({lo})" if not s else f"fsat(asu({lo}))"))
        n = self.dst(d)
        if n is None:
            return self.wrap("")
        return self.wrap(f"for(int h=0;h<NV;h++){{vu lo={fin(lo)},hi={fin(hi)}; st(R[{n}],h,m,pack(lo,hi));}}")

    def i_HADD2(self, i, a):
        self.mod({"F32", "FTZ", "SAT"})
        z = "FTZ" in i.mods
        x, y = self.H(a[1], z), self.H(a[2], z)
        return self.hout(i, a[0], f"({x[0]}+{y[0]})", f"({x[1]}+{y[1]})")

    def i_HMUL2(self, i, a):
        self.mod({"F32", "FTZ", "SAT"})
        z = "FTZ" in i.mods
        x, y = self.H(a[1], z), self.H(a[2], z)
        return self.hout(i, a[0], f"({x[0]}*{y[0]})", f"({x[1]}*{y[1]})")

    def i_HFMA2(self, i, a):
        self.mod({"F32", "FTZ", "SAT", "MMA"})
        z = "FTZ" in i.mods
        x, y, w = self.H(a[1], z), self.H(a[2], z), self.H(a[3], z)
        f = "vfma" if "F32" in i.mods else "fma_odd"
        return self.hout(i, a[0], f"{f}({x[0]},{y[0]},{w[0]})", f"{f}({x[1]},{y[1]},{w[1]})")

    def i_HSETP2(self, i, a):
        self.mod(CMPF | {"FTZ", "AND", "OR", "XOR", "H_AND"})
        cmp_ = [x for x in i.mods if x in CMPF][0]
        bop = self.BOOL[[x for x in i.mods if x in self.BOOL][0]]
        p, q, A, B, pc = a
        x, y = self.H(A), self.H(B)
        body = f"u32 r0=0,r1=0; for(int h=0;h<NV;h++){{r0|=cf_{cmp_}(asu({x[0]}),asu({y[0]}))<<(VL*h); r1|=cf_{cmp_}(asu({x[1]}),asu({y[1]}))<<(VL*h);}} u32 z={self.P(pc)};"
        if "H_AND" in i.mods:
            body += f"u32 t=r0&r1; r0=t{bop}z; r1=(~t){bop}z;"
        else:
            body += f"r0=r0{bop}z; r1=r1{bop}z;"
        return self.wrap(body + self.setP(p, "r0") + self.setP(q, "r1"))

    def i_HSET2(self, i, a):
        self.mod(CMPF | {"FTZ", "AND", "OR", "XOR", "BF"})
        cmp_ = [x for x in i.mods if x in CMPF][0]
        bop = self.BOOL[[x for x in i.mods if x in self.BOOL][0]]
        n = self.dst(a[0])
        x, y = self.H(a[1]), self.H(a[2])
        one = "0x3c00u" if "BF" in i.mods else "0xffffu"
        body = f"u32 z={self.P(a[3])}; for(int h=0;h<NV;h++){{u32 r0=cf_{cmp_}(asu({x[0]}),asu({y[0]})){bop}(z>>(VL*h)), r1=cf_{cmp_}(asu({x[1]}),asu({y[1]})){bop}(z>>(VL*h)); st(R[{n}],h,m,pack(selm(r0,splat({one}),splat(0)),selm(r1,splat({one}),splat(0))));}}"
        return self.wrap(body)

    def i_HMMA(self, i, a):
        self.mod({"884", "F32", "F16", "STEP0", "STEP1", "STEP2", "STEP3"})
        tys = [m for m in i.mods if m in ("F16", "F32")]
        step = int([m for m in i.mods if m.startswith("STEP")][0][4:])
        d, A, B, C = a
        col = []
        for o in (A, B):
            if "ROW" in o.suf:
                col.append("false")
            elif "COL" in o.suf:
                col.append("true")
            else:
                raise Unknown("HMMA operand " + o.text)
            if o.n is None:
                raise Unknown("HMMA operand " + o.text)
            self.srcs.append((o.n, 2))
            self.R(o.n, 2)
        n = self.dst(d, 2)
        if C.n is None:
            c0 = c1 = "kZeroRow"
        else:
            self.srcs.append((C.n, 2))
            c0, c1 = self.R(C.n), self.R(C.n + 1)
        if C.neg or A.neg or B.neg:
            raise Unknown("negated HMMA operand")
        if tys == ["F32", "F32"]:
            f = "hmma_f32"
        elif tys == ["F16", "F16"]:
            f = "hmma_f16"
        else:
            raise Unknown("HMMA types " + ".".join(tys))
        return self.wrap(f"if(unlikely(m!=~0u)) fault_at({i.idx},0,\"HMMA with inactive lanes, mask\",m); {f}<{col[0]},{col[1]},{step}>({self.R(A.n)},R[{A.n + 1}],R[{B.n}],R[{B.n + 1}],{c0},{c1},R[{n}],R[{n + 1}]);")

    # ---------------- memory
    def width(self, i):
        w, s = 4, False
        for m in i.mods:
            if m in WIDTH:
                w, s = WIDTH[m], m in ("S8", "S16")
        return w, s

    def gmem_addr(self, o, e64):
        if o.n < 0:
            base = "0ull"
        elif e64 and "U32" not in o.suf:
            self.srcs.append((o.n, 2))
            base = f"((u64){self.R(o.n)}[l]|(u64){self.R(o.n + 1)}[l]<<32)"
        else:
            self.srcs.append((o.n, 1))
            base = f"(u64){self.R(o.n)}[l]"
        return f"({base}+(u64)(i64)({o.off}ll))"

    def smem_addr(self, o):
        if o.n < 0:
            return f"(u32)({o.off})"
        self.srcs.append((o.n, 1))
        b = f"{self.R(o.n)}[l]" + (f"*{o.scale}u" if o.scale != 1 else "")
        return f"(u32)({b}+(u32)({o.off}))"

    LDMODS = {"E", "SYS", "CONSTANT", "STRONG", "GPU", "CTA", "WEAK", "U", "U8", "S8", "U16", "S16", "64", "128", "EF", "EL", "LU", "NA", "LTC64B", "LTC128B", "PRIVATE", "EU", "SM", "MMIO"}

    def addresses(self, i, o, space):
        """C++ that fills ad[] of the active lanes"""
        if space in "gx":
            e = self.gmem_addr(o, space == "x" or "E" in i.mods)
        else:
            e = self.smem_addr(o)
        return f"u64 ad[32]; FORL(m) ad[l]={e};"

    SPACES = {"x": 1, "g": 1, "s": 2, "l": 3}

    def load(self, i, a, space):
        self.mod(self.LDMODS)
        w, s = self.width(i)
        n = self.dst(a[0], max(1, w // 4))
        self.mem = (w, self.SPACES[space])
        rd = -1 if n is None else n
        return self.wrap(f"{self.addresses(i, a[1], space)} load<'{space}',{w},{'true' if s else 'false'}>(c,w,{i.idx},m,ad,{rd});")

    def store(self, i, a, space):
        self.mod(self.LDMODS)
        w, _ = self.width(i)
        o, s = a[0], a[1]
        if s.kind != "reg":
            raise Unknown("store source " + s.text)
        if s.n is not None:
            self.srcs.append((s.n, max(1, w // 4)))
            self.R(s.n, max(1, w // 4))
        self.mem = (w, self.SPACES[space])
        return self.wrap(f"{self.addresses(i, o, space)} store<'{space}',{w}>(c,w,{i.idx},m,ad,{-1 if s.n is None else s.n});")

    def i_LDG(self, i, a): return self.load(i, a, "g")
    def i_LDS(self, i, a): return self.load(i, a, "s")
    def i_LDL(self, i, a): return self.load(i, a, "l")
    def i_LD(self, i, a): return self.load(i, a, "x")
    def i_STG(self, i, a): return self.store(i, a, "g")
    def i_STS(self, i, a): return self.store(i, a, "s")
    def i_STL(self, i, a): return self.store(i, a, "l")
    def i_ST(self, i, a): return self.store(i, a, "x")

    def i_LDC(self, i, a):
        self.mod({"64", "U8", "S8", "U16", "S16", "U"})
        w, s = self.width(i)
        o = a[1]
        n = self.dst(a[0], max(1, w // 4))
        size = self.cbsize.get(o.bank, 0)
        if o.idx is None:
            ad = f"{o.off}u"
        else:
            self.srcs.append((o.idx, 1))
            ad = f"({self.R(o.idx)}[l]+{o.off & 0xFFFFFFFF}u)"
        return self.wrap(f"FORL(m){{u32 A={ad}; if(unlikely((u64)A+{w}>{size}u)) fault_at({i.idx},l,\"constant address out of range\",A); to_register<{w},{'true' if s else 'false'}>(R,{n},l,c.cb[{o.bank}]+A);}}")

    ATOMDT = {"S32": "i32", "64": "u64", "S64": "i64", "F32": "float", "F64": "double", "F16x2": "h2"}

    def atom(self, i, a, space):
        md = [m for m in i.mods if m not in ("E", "STRONG", "GPU", "SYS", "CTA", "WEAK", "SM", "FTZ", "RN", "PRIVATE", "SPIN")]
        ops = ("ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR", "EXCH", "CAS", "CAST", "POPC")
        op = next((m for m in md if m in ops), None)
        ty = next((m for m in md if m in self.ATOMDT), None)
        left = [m for m in md if m not in ops and m not in self.ATOMDT and not (m == "32")]
        if op is None or left:
            raise Unknown("modifier ." + ".".join(left or md))
        t = self.ATOMDT.get(ty, "u32")
        w = 8 if t in ("u64", "i64", "double") else 4
        a = list(a)
        if i.op == "RED":
            d, pd = None, None
        else:
            pd = a.pop(0) if a[0].kind == "pred" else None
            d = a.pop(0)
        o = a.pop(0)
        n = self.dst(d, w // 4) if d is not None else None
        self.mem = (w, {"g": 1, "x": 1, "s": 2}[space])
        st = "u64" if w == 8 else "u32"

        def val(x):
            if w == 8:
                return f"((u64){self.lane(x)}|(u64)({self.lane(x, 1)})<<32)" if not (x.kind == "reg" and x.n is None) else "0ull"
            return self.lane(x)
        b = f"Ref q=ref<'{space}'>(c,w,{i.idx},l,ad[l],{w}); check_init(q,{i.idx},l,ad[l],{w},'{space}'); {st}*p=({st}*)q.p; {st} old=*p;"
        if op in ("CAS", "CAST"):
            b += f"{st} cm={val(a[0])}, v={val(a[1])}; {st} nv=old==cm?v:old;"
        else:
            b += f"{st} v={val(a[0])}; (void)v; {st} nv;" if a else f"{st} nv;"
            if t == "float":
                b += {"ADD": "nv=f2u(u2f(old)+u2f(v));"}[op]
            elif t == "double":
                b += {"ADD": "{double x,y; memcpy(&x,&old,8); memcpy(&y,&v,8); x+=y; memcpy(&nv,&x,8);}"}[op]
            elif t == "h2":
                if op != "ADD":
                    raise Unknown("half atomic " + op)
                b += "{u32 r=0; for(int k=0;k<2;k++){vf s=h2f(splat(old>>16*k))+h2f(splat(v>>16*k)); r|=(f2h(s)[0]&0xffff)<<16*k;} nv=r;}"
            else:
                b += {"ADD": "nv=old+v;", "MIN": f"nv=({t})v<({t})old?v:old;", "MAX": f"nv=({t})v>({t})old?v:old;",
                      "INC": "nv=old>=v?0:old+1;", "DEC": "nv=(old==0||old>v)?v:old-1;", "AND": "nv=old&v;", "OR": "nv=old|v;",
                      "XOR": "nv=old^v;", "EXCH": "nv=v;", "POPC": "nv=old+1;"}[op]
        b += "*p=nv;"
        if n is not None:
            # operands of later lanes must not see this lane's result: results go to a buffer first
            b += "res[l]=old;"
        if pd is not None and pd.n != 7:
            b += "pr|=1u<<l;"
        body = f"{self.addresses(i, o, space)} trace_access(c,w,{i.idx},m,ad,{w},'{space}'); u64 res[32]; (void)res; u32 pr=0; (void)pr; FORL(m){{{b}}}"
        if n is not None:
            body += f"FORL(m){{R[{n}][l]=(u32)res[l];" + (f"R[{n + 1}][l]=(u32)(res[l]>>32);" if w == 8 else "") + "}"
        if pd is not None and pd.n != 7:
            body += self.setP(pd, "pr")
        return self.wrap(body)

    def i_ATOMG(self, i, a): return self.atom(i, a, "g")
    def i_RED(self, i, a): return self.atom(i, a, "g")
    def i_ATOM(self, i, a): return self.atom(i, a, "x")
    def i_ATOMS(self, i, a): return self.atom(i, a, "s")

    def i_MEMBAR(self, i, a): return self.wrap("")
    def i_ERRBAR(self, i, a): return self.wrap("")
    def i_CCTL(self, i, a): return self.wrap("")
    def i_DEPBAR(self, i, a): return self.wrap("")
    def i_PMTRIG(self, i, a): return self.wrap("")

    def i_QSPC(self, i, a):
        sp = "S" if "S" in i.mods else "L" if "L" in i.mods else "G" if "G" in i.mods else None
        raise Unknown("QSPC")

    # ---------------- cross-lane
    def i_SHFL(self, i, a):
        mode = {"IDX": 0, "UP": 1, "DOWN": 2, "BFLY": 3}[i.mods[0]]
        p, d, s, b, c = a
        n = self.dst(d)
        body = "alignas(64) u32 x[32],y[32],z[32],o[32]; for(int h=0;h<NV;h++){*(vu*)(x+VL*h)=" + self.I(s) + ";*(vu*)(y+VL*h)=" + self.I(b) + ";*(vu*)(z+VL*h)=" + self.I(c) + f";}} u32 pr=shfl({mode},x,y,z,o,m); (void)pr;"
        if n is not None:
            body += f"for(int h=0;h<NV;h++) st(R[{n}],h,m,*(vu*)(o+VL*h));"
        return self.wrap(body + self.setP(p, "pr"))

    def i_VOTE(self, i, a):
        mode = i.mods[0]
        d = a[0] if a[0].kind == "reg" else None
        rest = a[1:] if d is not None else a
        pd, ps = rest
        body = f"u32 v=({self.P(ps)})&m; u32 r=" + {"ANY": "v?~0u:0u", "ALL": "v==m?~0u:0u", "EQ": "(v==m||v==0)?~0u:0u"}[mode] + "; (void)r;"
        if d is not None:
            body += self.W(d, "splat(v)")
        return self.wrap(body + self.setP(pd, "r"))

    def i_MATCH(self, i, a):
        self.mod({"ANY", "ALL", "U64"})
        a = list(a)
        pd = a.pop(0) if a[0].kind == "pred" else None
        d, s = a
        n = self.dst(d)
        v = f"(u64){self.lane(s)}" + (f"|(u64)({self.lane(s, 1)})<<32" if "U64" in i.mods else "")
        body = f"u64 x[32]; FORL(m) x[l]={v}; u32 pr=0; (void)pr;"
        if "ANY" in i.mods:
            body += f"u32 o[32]; FORL(m){{u32 g=0; for(u32 q=m;q;q&=q-1){{u32 j=__builtin_ctz(q); if(x[j]==x[l]) g|=1u<<j;}} o[l]=g;}} FORL(m) R[{n}][l]=o[l];"
        else:
            body += f"bool eq=true; u32 f=__builtin_ctz(m); FORL(m) if(x[l]!=x[f]) eq=false; FORL(m) R[{n}][l]=eq?m:0; pr=eq?~0u:0;"
        if pd is not None:
            body += self.setP(pd, "pr")
        return self.wrap(body)

    # ---------------- special registers
    def sr(self, t):
        b = "c.p->block"
        lin = "(w.wid*32+l)"
        return {"SR_TID.X": f"{lin}%{b}[0]", "SR_TID.Y": f"{lin}/{b}[0]%{b}[1]", "SR_TID.Z": f"{lin}/{b}[0]/{b}[1]",
                "SR_CTAID.X": "w.cta->ctaid[0]", "SR_CTAID.Y": "w.cta->ctaid[1]", "SR_CTAID.Z": "w.cta->ctaid[2]",
                "SR_LANEID": "l", "SR_NTID.X": f"{b}[0]", "SR_NTID.Y": f"{b}[1]", "SR_NTID.Z": f"{b}[2]",
                "SR_EQMASK": "1u<<l", "SR_LTMASK": "(1u<<l)-1", "SR_LEMASK": "(2u<<l)-1", "SR_GTMASK": "~((2u<<l)-1)", "SR_GEMASK": "~((1u<<l)-1)",
                "SR_CLOCKLO": "(u32)(c.total)", "SR_CLOCKHI": "(u32)((c.total)>>32)", "SR_GLOBALTIMERLO": "(u32)(c.total)", "SR_GLOBALTIMERHI": "0u",
                "SR_TID": f"({lin}%{b}[0])|({lin}/{b}[0]%{b}[1])<<16|({lin}/{b}[0]/{b}[1])<<26", "SR_VIRTUALSMID": "w.cta->id%80u", "SR_VIRTID": "(w.cta->id%80u)<<20", "SRZ": "0u"}.get(t)

    def i_S2R(self, i, a):
        e = self.sr(a[1].text)
        if e is None:
            raise Unknown("special register " + a[1].text)
        n = self.dst(a[0])
        return self.wrap(f"FORL(m) R[{n}][l]={e};")

    def i_CS2R(self, i, a):
        self.mod({"32"})
        t = a[1].text
        if "32" in i.mods:
            return self.i_S2R(i, a)
        n = self.dst(a[0], 2)
        lo, hi = ("0u", "0u") if t == "SRZ" else (self.sr(t), self.sr(t.replace("LO", "HI")))
        if lo is None:
            raise Unknown("special register " + t)
        return self.wrap(f"FORL(m){{R[{n}][l]={lo}; R[{n + 1}][l]={hi};}}")

    def i_B2R(self, i, a):
        if "RESULT" not in i.mods:
            raise Unknown("B2R")
        body = ""
        n = self.dst(a[0])
        if n is not None:
            body += f"FORL(m) R[{n}][l]=w.red_count;"
        if len(a) > 1:
            body += self.setP(a[1], "((w.red_kind==1?w.red_and:w.red_or)?~0u:0u)")
        return self.wrap(body)

    # ---------------- control flow
    def goto(self, t):
        return f"w.pc=0x{t:x}u; return act;"

    def i_BRA(self, i, a):
        md = i.mods
        nxt = i.pc + 16
        t = self.target(a[-1])
        cond = "m"
        if len(a) > 1:
            cond = f"(m&({self.P(a[0])}))"
        pre = ""
        if "CONV" in md:
            cond = "(act==w.live?m:0u)"
        elif "DIV" in md:
            cond = "(act!=w.live?m:0u)"
        elif md not in ([], ["U"]):
            raise Unknown("modifier ." + ".".join(md))
        if t == i.pc and i.pred == "PT":
            return self.wrap('fault("reached the end-of-kernel trap loop");', always=True)
        body = f"u32 t={cond}; if(t){{ if(t==act){{{self.goto(t)}}} w.ready.push_back({{0x{t:x}u,t}}); act&=~t; }}"
        return self.wrap(body, always=True)

    def i_JMP(self, i, a):
        return self.i_BRA(i, a)

    def i_BRX(self, i, a):
        m = re.match(r"^(R\d+)\s*(?:\+)?(-?0x[0-9a-f]+)?", i.text.split("BRX", 1)[1].strip())
        r = int(m.group(1)[1:])
        off = int(m.group(2), 16) if m.group(2) else 0
        self.srcs.append((r, 2))
        self.R(r, 2)
        body = f"u32 left=m; while(left){{u32 f=__builtin_ctz(left); u32 tp=(u32)(R[{r}][f]+{i.pc + 16}u+(u32)({off})); u32 same=0; for(u32 q=left;q;q&=q-1){{u32 j=__builtin_ctz(q); if((u32)(R[{r}][j]+{i.pc + 16}u+(u32)({off}))==tp) same|=1u<<j;}} w.ready.push_back({{tp,same}}); left&=~same;}} act&=~m; if(!act) return 0;"
        return self.wrap(body, always=True)

    def i_CALL(self, i, a):
        if "REL" not in i.mods and "ABS" not in i.mods:
            raise Unknown("modifier ." + ".".join(i.mods))
        t = self.target(a[-1])
        return self.wrap(f"if(m){{ if(m==act){{w.pc=0x{t:x}u; return act;}} w.ready.push_back({{0x{t:x}u,m}}); act&=~m; }}", always=True)

    def i_RET(self, i, a):
        if "REL" not in i.mods and "ABS" not in i.mods:
            raise Unknown("modifier ." + ".".join(i.mods))
        mm = re.match(r"^(R\d+)", i.args[0])
        r = int(mm.group(1)[1:])
        self.srcs.append((r, 2))
        self.R(r, 2)
        base = 0
        m2 = re.search(r"`\((.*)\)", i.text)
        if m2 and m2.group(1) in self.k.labels:
            base = self.k.labels[m2.group(1)]
        body = f"u32 left=m; while(left){{u32 f=__builtin_ctz(left); u32 tp=R[{r}][f]; u32 same=0; for(u32 q=left;q;q&=q-1){{u32 j=__builtin_ctz(q); if(R[{r}][j]==tp) same|=1u<<j;}} if(same==act){{w.pc=tp+{base}u; return act;}} w.ready.push_back({{tp+{base}u,same}}); left&=~same;}} act&=~m; if(!act) return 0;"
        return self.wrap(body, always=True)

    def i_EXIT(self, i, a):
        return self.wrap("w.live&=~m; act&=~m; if(!act) return 0;", always=True)

    def i_KILL(self, i, a):
        return self.i_EXIT(i, a)

    def i_BPT(self, i, a):
        return self.wrap(f"fault_at({i.idx},__builtin_ctz(m),\"trap\",0);")

    def i_BSSY(self, i, a):
        b = a[0].n
        return self.wrap(f"FORL(m) w.bm[{b}][l]=m;")

    def i_BSYNC(self, i, a):
        b = a[0].n
        nxt = i.pc + 16
        # fast path: every live member of the group is here
        return self.wrap(f"if(m){{u32 g=w.bm[{b}][__builtin_ctz(m)]|m; if(((g&w.live)&~m)!=0||m!=act){{ w.blocked[{b}]|=m; FORL(m) w.bpc[{b}][l]=0x{nxt:x}u; act&=~m; if(!act) return 0; }}}}", always=True)

    def i_BREAK(self, i, a):
        a = [o for o in a if o.kind == "bar"]
        b = a[0].n
        return self.wrap(f"u32 g=0; FORL(m) g|=w.bm[{b}][l]; FORL(g) w.bm[{b}][l]&=~m; FORL(m) w.bm[{b}][l]=0;")

    def i_BMOV(self, i, a):
        self.mod({"32", "CLEAR"})
        d, s = a
        if d.kind == "bar":
            return self.wrap(f"FORL(m) w.bm[{d.n}][l]={self.lane(s)};")
        if s.kind != "bar":
            raise Unknown("BMOV operands")
        n = self.dst(d)
        body = f"FORL(m) R[{n}][l]=w.bm[{s.n}][l];" if n is not None else ""
        if "CLEAR" in i.mods:
            body += f"FORL(m) w.bm[{s.n}][l]=0;"
        return self.wrap(body)

    def i_WARPSYNC(self, i, a):
        self.mod({"EXCLUSIVE"})
        nxt = i.pc + 16
        e = self.lane(a[0])
        body = f"u32 g=0; FORL(m){{w.bm[16][l]={e}; g|=w.bm[16][l];}} if(m&&((g&w.live)&~m)!=0){{w.blocked[16]|=m; FORL(m) w.bpc[16][l]=0x{nxt:x}u; act&=~m; if(!act) return 0;}}"
        return self.wrap(body, always=True)

    def i_YIELD(self, i, a):
        # a spinning split lets threads that wait for it at a convergence barrier go ahead
        nxt = i.pc + 16
        body = f"u32 b=0; for(int k=0;k<16;k++) b|=w.blocked[k]; if(unlikely(b)&&(++w.yields&31)==0&&yield_release(w,act)){{w.ready.insert(w.ready.begin(),{{0x{nxt:x}u,act}}); w.gave_way=true; return 0;}}"
        return self.wrap(body, always=True)

    def i_NANOSLEEP(self, i, a):
        nxt = i.pc + 16
        return self.wrap(f"if(m){{w.ready.insert(w.ready.begin(),{{0x{nxt:x}u,act}}); w.gave_way=true; return 0;}}", always=True)

    def i_BAR(self, i, a):
        md = i.mods
        nxt = i.pc + 16
        kind = md[0]
        if kind not in ("SYNC", "ARV", "RED"):
            raise Unknown("modifier ." + ".".join(md))
        red = kind == "RED"
        pv = "0u"
        regs = [o for o in a if o.kind != "pred"]
        preds = [o for o in a if o.kind == "pred"]
        setk = ""
        if red:
            if preds:
                pv = self.P(preds[0])
            setk = "w.red_kind=%d;" % (1 if "AND" in md else 2 if "OR" in md else 0)

        def first(o):
            return f"({{u32 l=__builtin_ctz(m); (void)l; {self.lane(o)};}})"
        bid = first(regs[0])
        cntv = first(regs[1]) if len(regs) > 1 else "0u"
        sync = "false" if kind == "ARV" else "true"
        tail = f"act&=~m; if(!act) return 0;" if kind != "ARV" else ""
        return self.wrap(f"if(m){{{setk} bar_arrive(c,w,{bid},{cntv},0x{nxt:x}u,m,{sync},{'true' if red else 'false'},{pv}); {tail}}}", always=True)


def build(k, cbsize):
    g = Gen(k, cbsize)
    return g.run(), g
