"""Reads an sm_70 cubin: ELF sections, kernel metadata, and the instruction
stream as disassembled by nvdisasm (text for the operands, the raw 128-bit
words for immediates and scheduling control bits)."""
import os, re, struct, subprocess, tempfile

from .toolchain import nvdisasm

# .nv.info attribute numbers that are used here
EIATTR_PARAM_CBANK = 0x0A
EIATTR_CBANK_PARAM_SIZE = 0x19
EIATTR_KPARAM_INFO = 0x17
EIATTR_REGCOUNT = 0x2F
EIATTR_FRAME_SIZE = 0x11
EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_MAX_STACK_SIZE = 0x23


class Instr:
    __slots__ = ("pc", "pred", "op", "mods", "opcode", "args", "enc", "text", "idx",
                 "stall", "yield_", "wbar", "rbar", "wait", "reuse")

    def __repr__(self):
        return f"/*{self.pc:04x}*/ {self.text}"


class Kernel:
    def __init__(self, name):
        self.name = name
        self.regs = 0
        self.static_smem = 0
        self.params = []          # (offset, size)
        self.param_base = 0x160
        self.param_size = 0
        self.frame = 0
        self.instrs = []
        self.labels = {}          # label -> pc
        self.const = {}           # bank -> bytes


def _elf(data):
    if data[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    shoff, = struct.unpack_from("<Q", data, 0x28)
    shentsize, shnum, shstrndx = struct.unpack_from("<HHH", data, 0x3A)
    secs = []
    for i in range(shnum):
        f = struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shentsize)
        secs.append(dict(zip(("name", "type", "flags", "addr", "off", "size", "link", "info", "align", "entsize"), f)))
    st = secs[shstrndx]
    strs = data[st["off"]:st["off"] + st["size"]]
    for s in secs:
        e = strs.index(b"\0", s["name"])
        s["name"] = strs[s["name"]:e].decode()
        s["data"] = b"" if s["type"] == 8 else data[s["off"]:s["off"] + s["size"]]
    return secs


def _symbols(secs):
    out = []
    for s in secs:
        if s["type"] == 2:
            strs = secs[s["link"]]["data"]
            for i in range(s["size"] // 24):
                nm, info, other, shndx, val, size = struct.unpack_from("<IBBHQQ", s["data"], i * 24)
                e = strs.index(b"\0", nm)
                out.append(dict(name=strs[nm:e].decode(), info=info, sec=shndx, value=val, size=size))
    return out


def _nvinfo(b):
    """yield (attr, payload or int) of an .nv.info section"""
    i = 0
    while i + 4 <= len(b):
        fmt, attr, val = struct.unpack_from("<BBH", b, i)
        i += 4
        if fmt == 4:
            yield attr, b[i:i + val]
            i += val
        else:
            yield attr, val


_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s*(?:\(\*.*?\*\))?\s*/\* 0x([0-9a-f]+) \*/")
_LINE_BRX = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(BRX.*?)\s*\(\*.*\*\)\s*;?\s*/\* 0x([0-9a-f]+) \*/")
_HEX2 = re.compile(r"^\s*/\* 0x([0-9a-f]+) \*/")
_LABEL = re.compile(r"^([.$\w]+):\s*$")


def split_args(s):
    out, depth, cur = [], 0, ""
    for ch in s:
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        if ch == "," and depth == 0:
            out.append(cur.strip())
            cur = ""
        else:
            cur += ch
    if cur.strip():
        out.append(cur.strip())
    return out


def parse_text(txt):
    m = re.match(r"^(?:@(!?U?P[T0-9])\s+)?(\S+)\s*(.*)$", txt)
    pred, opcode, rest = m.group(1), m.group(2), m.group(3)
    toks = opcode.split(".")
    return pred or "PT", opcode, toks[0], toks[1:], split_args(rest)


def disassemble(data):
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as f:
        f.write(data)
        p = f.name
    try:
        return subprocess.run([str(nvdisasm()), "-c", "-hex", p], check=True, capture_output=True, text=True).stdout
    finally:
        os.unlink(p)


class Cubin:
    def __init__(self, data):
        if isinstance(data, (str, os.PathLike)):
            with open(data, "rb") as f:
                data = f.read()
        self.data = bytes(data)
        self.secs = _elf(self.data)
        self.syms = _symbols(self.secs)
        self.by_name = {s["name"]: s for s in self.secs}
        self.text_dis = disassemble(self.data)
        self.kernels = {}
        self.globals_size = 0
        self.globals_init = b""
        self.sym_global = {}
        self._layout_globals()
        self._parse_dis()
        for s in self.secs:
            if s["name"].startswith(".text."):
                self._meta(s)

    # module-scope variables: one block, .nv.global.init then .nv.global
    def _layout_globals(self):
        off = 0
        self.global_sec_off = {}
        init = bytearray()
        for nm in (".nv.global.init", ".nv.global"):
            for i, s in enumerate(self.secs):
                if s["name"] == nm:
                    off = (off + 255) & ~255
                    self.global_sec_off[i] = off
                    d = s["data"] if s["type"] != 8 else b"\0" * s["size"]
                    init += b"\0" * (off - len(init)) + d
                    off += s["size"]
        self.globals_size = off
        self.globals_init = bytes(init)
        for y in self.syms:
            if y["sec"] in self.global_sec_off:
                self.sym_global[y["name"]] = self.global_sec_off[y["sec"]] + y["value"]

    def _parse_dis(self):
        cur, pend = None, None
        for line in self.text_dis.splitlines():
            m = re.match(r"^\s*\.section\s+(\S+?),", line)
            if m:
                n = m.group(1).strip('"')
                cur = None
                if n.startswith(".text."):
                    cur = Kernel(n[6:])
                    self.kernels[cur.name] = cur
                continue
            if cur is None:
                continue
            m = _LINE_BRX.match(line) or _LINE.match(line)
            if m:
                ins = Instr()
                ins.pc = int(m.group(1), 16)
                ins.text = m.group(2).strip()
                ins.pred, ins.opcode, ins.op, ins.mods, ins.args = parse_text(ins.text)
                ins.enc = int(m.group(3), 16)
                ins.idx = len(cur.instrs)
                cur.instrs.append(ins)
                pend = ins
                continue
            m = _HEX2.match(line)
            if m and pend is not None:
                hi = int(m.group(1), 16)
                pend.enc |= hi << 64
                c = hi >> 41
                pend.stall, pend.yield_ = c & 15, (c >> 4) & 1
                pend.wbar, pend.rbar, pend.wait, pend.reuse = (c >> 5) & 7, (c >> 8) & 7, (c >> 11) & 63, (c >> 17) & 15
                pend = None
                continue
            m = _LABEL.match(line)
            if m:
                cur.labels[m.group(1)] = len(cur.instrs) * 16

    def _meta(self, s):
        name = s["name"][6:]
        k = self.kernels[name]
        if len(k.instrs) * 16 != s["size"]:
            raise ValueError(f"{name}: disassembly has {len(k.instrs)} instructions, section holds {s['size'] // 16}")
        k.regs = max(s["info"] >> 24, 4)
        sh = self.by_name.get(".nv.shared." + name)
        k.static_smem = sh["size"] if sh else 0
        symidx = {i: y for i, y in enumerate(self.syms)}
        for attr, v in _nvinfo(self.by_name.get(".nv.info." + name, {"data": b""})["data"]):
            if attr == EIATTR_PARAM_CBANK:
                _, off, size = struct.unpack_from("<IHH", v)
                k.param_base, k.param_size = off, size
            elif attr == EIATTR_KPARAM_INFO:
                _, ordinal, off, w = struct.unpack_from("<IHHI", v)
                k.params.append((ordinal, off, w >> 18))
        k.params = [(o, sz) for _, o, sz in sorted(k.params)]
        for attr, v in _nvinfo(self.by_name.get(".nv.info", {"data": b""})["data"]):
            if attr in (EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE, EIATTR_MAX_STACK_SIZE) and isinstance(v, bytes) and len(v) == 8:
                si, fs = struct.unpack("<II", v)
                if symidx[si]["name"] == name:
                    k.frame = max(k.frame, fs)
        for b in range(18):
            for nm in (f".nv.constant{b}.{name}", f".nv.constant{b}"):
                c = self.by_name.get(nm)
                if c is not None:
                    k.const[b] = bytes(c["data"])
                    break

    def const_bank(self, k, bank, gbase):
        """bytes of a constant bank with addresses of module variables filled in"""
        b = bytearray(k.const.get(bank, b""))
        for nm in (f".nv.constant{bank}.{k.name}", f".nv.constant{bank}"):
            for pre, rela in ((".rel", False), (".rela", True)):
                r = self.by_name.get(pre + nm)
                if r is None:
                    continue
                es = 24 if rela else 16
                for i in range(r["size"] // es):
                    off, info = struct.unpack_from("<QQ", r["data"], i * es)
                    add = struct.unpack_from("<q", r["data"], i * es + 16)[0] if rela else 0
                    sym, typ = self.syms[info >> 32], info & 0xFFFFFFFF
                    if sym["sec"] in self.global_sec_off:
                        if typ == 2:      # 64-bit absolute
                            base = struct.unpack_from("<q", b, off)[0] if not rela else add
                            struct.pack_into("<Q", b, off, gbase + self.global_sec_off[sym["sec"]] + sym["value"] + base)
                        else:
                            raise NotImplementedError(f"relocation type {typ} in constant bank {bank}")
        return bytes(b)


if __name__ == "__main__":
    import sys
    c = Cubin(sys.argv[1])
    for k in c.kernels.values():
        print(k.name, "regs", k.regs, "smem", k.static_smem, "params", k.params, "frame", k.frame, "instrs", len(k.instrs))
        if len(sys.argv) > 2:
            for i in k.instrs:
                print(f"{i.pc:05x} st{i.stall:2d} y{i.yield_} w{i.wbar} r{i.rbar} wait{i.wait:06b} | {i.text}")
