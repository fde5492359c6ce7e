"""Cycle estimate of a launch with our own V100 model (timing.cpp)."""
import ctypes
import os
from pathlib import Path

import numpy as np

from .. import build
from ..errors import SimError

CLS = {n: i for i, n in enumerate("ALU FMA FP16 TENSOR XU FP64 CTL LDSST LDG STG ATOM SHFL LDC MISC BAR MEMBAR NOPC EXITC".split())}
NCLS = len(CLS)
WHY = ["fixed", "long_scoreboard", "short_scoreboard", "pipe_busy", "mio_queue", "cta_barrier", "branch", "icache", "membar", "not_selected"]

INS = np.dtype([("cls", "u1"), ("stall", "u1"), ("yield", "u1"), ("wbar", "u1"), ("rbar", "u1"), ("wait", "u1"), ("bytes", "u1"), ("rec", "u1"),
                ("lat", "u1"), ("interval", "u1"), ("bank", "u1"), ("guarded", "u1"), ("barkind", "u1"), ("l1bypass", "u1")])

CFG_U = ["nsm", "nslice", "nchan", "max_warps", "max_ctas", "policy", "smem_per_sm", "l1_total"]
CFG_D = ["chan_sector", "slice_sector", "ret_sector", "req_line", "wr_sector", "dram_wr", "dram_q"]
CFG_U2 = ["lat_l1", "lat_noc", "lat_l2", "lat_dram", "lat_lds", "lat_shfl", "lat_bar", "lat_ldc", "lat_branch", "mio_q", "lsu_q",
          "icache_lines", "lat_icache", "icache_seq", "launch", "l2_sets", "l2_ways", "atom_lane_x10", "l1_ways", "max_inflight", "lat_cta", "max_stores", "hmma_fwd"]


class Cfg(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in CFG_U] + [(n, ctypes.c_double) for n in CFG_D] + [(n, ctypes.c_uint32) for n in CFG_U2]


class TP(ctypes.Structure):
    _fields_ = [("bin", ctypes.c_char_p), ("ins", ctypes.c_void_p), ("nins", ctypes.c_uint32), ("blocks", ctypes.c_void_p), ("cfg", Cfg),
                ("nregs", ctypes.c_uint32), ("smem", ctypes.c_uint32), ("nthreads", ctypes.c_uint32), ("nctas", ctypes.c_uint32)] + \
               [(n, ctypes.c_uint64) for n in ("cycles", "winsts", "l1_acc", "l1_hit", "l2_acc", "l2_hit", "dram_rd", "dram_wr", "smem_waves", "l2_wr", "cta_per_sm")] + \
               [("issued", ctypes.c_uint64 * NCLS), ("stall", ctypes.c_uint64 * 16), ("subcore_busy", ctypes.c_uint64), ("subcore_cycles", ctypes.c_uint64),
                ("pc_cycles", ctypes.c_void_p), ("pc_count", ctypes.c_void_p), ("pc_long", ctypes.c_void_p), ("max_cycles", ctypes.c_uint64),
                ("tail_frac", ctypes.c_double), ("err", ctypes.c_char * 256),
                ("l2_flags", ctypes.c_uint32), ("nwarm", ctypes.c_uint32), ("warm", ctypes.c_void_p)]


def default_cfg(core=1380.0, mem=877.0, nsm=80, dram_eff=0.965):
    """V100: 80 SMs, 64 L2 slices, 32 HBM2 channels.  Latencies in core cycles."""
    scale = nsm / 80
    chan_bytes = 32 * mem * 1e6 / (core * 1e6)          # 16 B wide, double rate: bytes per core cycle and channel
    return dict(nsm=nsm, nslice=max(2, int(64 * scale)), nchan=max(1, int(32 * scale)), max_warps=64, max_ctas=32, policy=0,
                smem_per_sm=98304, l1_total=131072,
                chan_sector=32 / chan_bytes / dram_eff, slice_sector=1.13, ret_sector=0.5, req_line=1.0, wr_sector=1.0, dram_wr=1.16, dram_q=120.0,
                lat_l1=28, lat_noc=30, lat_l2=146, lat_dram=212, lat_lds=17, lat_shfl=20, lat_bar=16, lat_ldc=24, lat_branch=9, mio_q=8, lsu_q=0,
                icache_lines=96, lat_icache=32, icache_seq=2, launch=0, l2_sets=48, l2_ways=16, atom_lane_x10=5, l1_ways=16, max_inflight=512, lat_cta=238, max_stores=192, hmma_fwd=25)


ALU_OPS = set("IADD3 LOP3 SHF PRMT LEA ISETP IMNMX SEL FMNMX FSETP FSEL FSET PLOP3 PSETP MOV VOTE P2R R2P BMSK SGXT IABS VABSDIFF VABSDIFF4 HSETP2 HSET2 CS2R FCHK FSWZADD LEPC".split())
FMA_OPS = set("FFMA FADD FMUL IMAD IDP".split())
XU_OPS = set("MUFU I2F F2I F2F FRND POPC FLO BREV".split())
CTL_OPS = set("BRA BRX JMP JMX CALL RET BSSY BSYNC BREAK BMOV WARPSYNC YIELD NANOSLEEP KILL BPT DEPBAR PMTRIG".split())


def table(k, io):
    t = np.zeros(len(k.instrs), INS)
    prev = None
    for n, (i, x) in enumerate(zip(k.instrs, io)):
        r = t[n]
        r["stall"], r["yield"], r["wbar"], r["rbar"], r["wait"] = i.stall, i.yield_, i.wbar, i.rbar, i.wait
        r["guarded"], r["bytes"] = x.guarded, x.nbytes
        r["rec"] = ("none", "shared", "global", "local", "bar").index(x.record)
        op, lat, iv = i.op, 4, 2
        if op in ALU_OPS: c = "ALU"
        elif op in FMA_OPS: c = "FMA"
        elif op in ("HADD2", "HMUL2", "HFMA2"): c, lat = "FP16", 6
        elif op == "HMMA":
            c, lat = "TENSOR", 10
            iv = 4 if i.mods.count("F16") == 2 else 2
        elif op in XU_OPS:
            c, lat, iv = "XU", 18, 8
        elif op in ("DADD", "DMUL", "DFMA", "DSETP"): c, lat, iv = "FP64", 8, 4
        elif op in CTL_OPS: c, iv = "CTL", 1
        elif op in ("LDS", "STS", "ATOMS"): c = "LDSST"
        elif op in ("LDG", "LD", "LDL"): c = "LDG"
        elif op in ("STG", "ST", "STL"): c = "STG"
        elif op in ("ATOMG", "ATOM", "RED"): c = "ATOM"
        elif op in ("SHFL", "MATCH"): c = "SHFL"
        elif op == "LDC": c = "LDC"
        elif op in ("S2R", "B2R"): c, lat = "MISC", 18
        elif op == "BAR": c = "BAR"
        elif op in ("MEMBAR",): c = "MEMBAR"
        elif op == "EXIT": c, iv = "EXITC", 1
        elif op in ("NOP", "ERRBAR", "CCTL"): c, iv = "NOPC", 1
        else: raise SimError("timing class of " + i.opcode)
        if i.pred == "!PT":
            c, iv = "NOPC", 1
        # loads wider than 32 bits from shared memory and stores read/write more register words
        r["cls"], r["lat"], r["interval"] = CLS[c], lat, iv
        if op == "LDG" and ("STRONG" in i.mods):
            r["l1bypass"] = 1
        if op == "BAR":
            r["barkind"] = 1 if i.mods[0] == "ARV" else 0
        # three source registers in one of the two banks and no operand held by .reuse
        if c in ("FMA", "ALU", "FP16"):
            srcs = []
            for slot, a in enumerate(i.args[1:]):
                b = a.strip("-|~!").split(".")[0]
                if b.startswith("R") and b[1:].isdigit():
                    held = prev is not None and slot < len(prev) and prev[slot] == b
                    if not held:
                        srcs.append(int(b[1:]))
            srcs = set(srcs)
            if len(srcs) >= 3 and len({s & 1 for s in srcs}) == 1:
                r["bank"] = 1
        prev = [a.strip("-|~!").split(".")[0] if ".reuse" in a else None for a in i.args[1:]]
    return t


_lib = None


def lib():
    global _lib
    if _lib is None:
        _lib = build.plain_library(Path(__file__).with_name("machine.cpp"))
    return _lib


class Timing:
    pass


# plausible ends of what is not known well; used for the range of an estimate
LOW = dict(dram_eff=0.985, lat_tensor=8, lat_branch=6, icache_seq=0, lat_icache=20, lat_bar=10, lat_dram=195, lat_l2=135, lat_shfl=18, lat_cta=150)
HIGH = dict(dram_eff=0.90, lat_tensor=14, lat_branch=14, icache_seq=5, lat_icache=45, lat_bar=28, lat_dram=270, lat_l2=165, lat_shfl=24, slice_sector=1.4, lat_cta=350)


def run(mod, name, block, smem, bin, core=1380.0, mem=877.0, **over):
    """time a binary trace written by Module.launch(..., bin=...)

    l2="cold" (default), "keep" (what the previous call with l2="keep" left);
    warm=[DevArray, ...]: buffers whose lines are in L2 at the start.
    Other keywords override entries of default_cfg, or lat_<class> of table()."""
    import time as _t
    k = mod.kernel(name)
    _, g = mod.translation(k)
    l2, warm = over.pop("l2", "cold"), over.pop("warm", ())
    cfg = default_cfg(core, mem, int(over.pop("nsm", 80)), over.pop("dram_eff", 0.965))
    tab = table(k, g.info)
    for op in list(over):
        if op.startswith("lat_") and op not in cfg:
            tab["lat"][tab["cls"] == CLS[op[4:].upper()]] = over.pop(op)
    for a in over:
        if a not in cfg:
            raise SimError("no such timing parameter: " + a)
    cfg.update(over)
    p = TP()
    p.bin = os.fsencode(bin)
    p.ins, p.nins = tab.ctypes.data, len(tab)
    starts = np.array(g.starts + [len(tab) * 16], np.uint32) // 16
    blocks = np.stack([starts[:-1], np.diff(starts)], 1).astype(np.uint32)
    p.blocks = blocks.ctypes.data
    for n, v in cfg.items():
        setattr(p.cfg, n, v if n in CFG_D else int(v))
    p.nregs, p.smem, p.nthreads = k.regs, k.static_smem + smem, int(np.prod(block))
    p.l2_flags = 3 if l2 == "keep" else 0
    wl = np.array([[w.addr, w.np.nbytes] for w in warm], np.uint64).reshape(-1)
    p.nwarm, p.warm = len(warm), wl.ctypes.data
    pcc, pcn, pcl = (np.zeros(len(tab), np.uint64) for _ in range(3))
    p.pc_cycles, p.pc_count, p.pc_long = pcc.ctypes.data, pcn.ctypes.data, pcl.ctypes.data
    t0 = _t.time()
    if lib().sm70sim_time(ctypes.byref(p)):
        raise SimError("timing: " + p.err.decode(errors="replace"))
    r = Timing()
    r.wall = _t.time() - t0
    r.cycles, r.insts, r.core = p.cycles, p.winsts, core
    r.us = p.cycles / core
    sec = r.us * 1e-6
    r.ipc = p.winsts / p.cycles
    r.dram_read, r.dram_write = p.dram_rd * 32, p.dram_wr * 32
    r.dram_gbs = (r.dram_read + r.dram_write) / sec / 1e9 if sec else 0
    r.l2_gbs = p.l2_acc * 32 / sec / 1e9 if sec else 0
    r.l1_hit = p.l1_hit / p.l1_acc if p.l1_acc else 0.0
    r.l2_hit = p.l2_hit / p.l2_acc if p.l2_acc else 0.0
    r.smem_gbs = p.smem_waves * 128 / sec / 1e9 if sec else 0
    r.smem_util = p.smem_waves / (p.cycles * cfg["nsm"])
    r.issued = {n: int(p.issued[i]) for n, i in CLS.items() if p.issued[i]}
    r.stall = {n: int(p.stall[i]) for i, n in enumerate(WHY) if p.stall[i]}
    r.issue_util = p.subcore_busy / p.subcore_cycles if p.subcore_cycles else 0
    r.ctas_per_sm = p.cta_per_sm
    iv = {"ALU": 2, "FMA": 2, "FP16": 2, "XU": 8, "FP64": 4}
    r.pipe_util = {n: r.issued.get(n, 0) * v / p.subcore_cycles for n, v in iv.items() if r.issued.get(n)}
    tens = sum(int(c) * int(i) for c, i, k_ in zip(pcn, tab["interval"], tab["cls"]) if k_ == CLS["TENSOR"])
    if tens:
        r.pipe_util["TENSOR"] = tens / p.subcore_cycles
    r.pc_cycles, r.pc_count, r.k = pcc, pcn, k
    return r


def report(r, top=0):
    o = [f"own model: {r.cycles} cycles = {r.us:.2f} us at {r.core:.0f} MHz; {r.insts} warp instructions, IPC {r.ipc:.2f} ({r.ipc / 80:.3f} per SM of 80)",
         f"  DRAM {r.dram_gbs:.0f} GB/s (read {r.dram_read / 1e6:.2f} MB, written {r.dram_write / 1e6:.2f} MB)   L2 {r.l2_gbs:.0f} GB/s, sector hits {100 * r.l2_hit:.1f}%   L1 hits {100 * r.l1_hit:.1f}%   shared memory busy {100 * r.smem_util:.1f}%",
         f"  blocks per SM {r.ctas_per_sm}; issue slots used {100 * r.issue_util:.1f}%; pipes busy " + ", ".join(f"{n} {100 * v:.1f}%" for n, v in r.pipe_util.items())]
    tot = sum(v for n, v in r.stall.items() if n != "not_selected") or 1
    o.append("  idle sub-core cycles by cause: " + ", ".join(f"{n} {100 * v / tot:.1f}%" for n, v in sorted(r.stall.items(), key=lambda x: -x[1]) if n != "not_selected"))
    if top:
        o.append("  instructions with most waiting (share of warp time, executions):")
        tt = r.pc_cycles.sum() or 1
        for i in np.argsort(-r.pc_cycles.astype(np.int64))[:top]:
            if r.pc_cycles[i]:
                o.append(f"    {100 * r.pc_cycles[i] / tt:5.1f}%  {int(r.pc_count[i]):9d}  {r.k.instrs[i].pc:05x} {r.k.instrs[i].text}")
    return "\n".join(o)
