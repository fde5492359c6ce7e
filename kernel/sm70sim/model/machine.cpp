// Cycle model of a V100 driven by the emulator's binary trace and by the
// scheduling control bits (stall counts, scoreboards) of the machine code.
// Memory is modelled by reservation: every request books its place at the
// request port, L2 slice, DRAM channel and return port, which gives its
// completion time.  All numbers that can be tuned are in struct Cfg.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <vector>
#include <algorithm>
typedef uint8_t u8; typedef int8_t i8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef int64_t i64;

enum Cls { ALU, FMA, FP16, TENSOR, XU, FP64, CTL, LDSST, LDG, STG, ATOM, SHFL, LDC, MISC, BAR, MEMBAR, NOPC, EXITC, NCLS };
enum Rec : u8 { R_NONE, R_SHARED, R_GLOBAL, R_LOCAL, R_BAR };   // record of a traced instruction (runtime/trace.h)
struct InstrT { u8 cls, stall, yield, wbar, rbar, wait, bytes, rec, lat, interval, bank, guarded, barkind, l1bypass; };
struct BlockT { u32 first, len; };
constexpr u32 TRACE_MAGIC = 0x32544143u, TRACE_SHARED = 0x80000000u, TRACE_LOCAL = 0x40000000u;
struct Cfg {              // mirrored in timing.py
  u32 nsm, nslice, nchan, max_warps, max_ctas, policy;
  u32 smem_per_sm, l1_total;
  double chan_sector, slice_sector, ret_sector, req_line, wr_sector, dram_wr, dram_q;   // cycles per unit
  u32 lat_l1, lat_noc, lat_l2, lat_dram, lat_lds, lat_shfl, lat_bar, lat_ldc, lat_branch, mio_q, lsu_q;
  u32 icache_lines, lat_icache, icache_seq, launch, l2_sets, l2_ways, atom_lane_x10, l1_ways, max_inflight, lat_cta, max_stores, hmma_fwd;
};
struct TP {
  const char *bin; const InstrT *ins; u32 nins; const BlockT *blocks; Cfg cfg;
  u32 nregs, smem, nthreads, nctas_total;
  u64 cycles, winsts, l1_acc, l1_hit, l2_acc, l2_hit, dram_rd, dram_wr, smem_waves, l2_wr, cta_per_sm;
  u64 issued[NCLS]; u64 stall[16];     // warp-cycles by reason
  u64 subcore_busy, subcore_cycles;
  u64 *pc_cycles, *pc_count, *pc_long;
  u64 max_cycles; double tail_frac; char err[256];
  u32 l2_flags, nwarm; const u64 *warm;   // 1: L2 content of the last call that saved it, 2: save; warm: address, bytes pairs loaded first
};
enum Why { W_FIXED, W_LONG, W_SHORT, W_PIPE, W_MIO, W_BAR, W_BRANCH, W_ICACHE, W_MEMBAR, W_NOTSEL, NWHY };

struct Sector { u64 ready; };
struct Line { u64 tag; u32 valid, dirty; u64 lru; u64 ready[4]; };
struct Cache {
  u32 sets, ways; std::vector<Line> l;
  void init(u32 s, u32 w) { sets = s; ways = w; l.assign((size_t)s * w, Line{~0ull, 0, 0, 0, {0, 0, 0, 0}}); }
  Line *find(u64 line, u32 set) { Line *p = &l[(size_t)set * ways]; for (u32 i = 0; i < ways; i++) if (p[i].tag == line) return p + i; return nullptr; }
  Line *victim(u32 set) { Line *p = &l[(size_t)set * ways], *b = p; for (u32 i = 1; i < ways; i++) if (p[i].lru < b->lru) b = p + i; return b; }
};
struct WarpT {
  const u32 *p, *end; u32 idx, left, act; u64 next; u64 rdy[6], rdyt[6]; u8 islong[6]; u64 prev_issue; u64 mem_done, st_done; u32 nh;
  u32 slot, cta; bool bar; u32 barid; bool done; u32 lastline; u64 age; u8 lastwhy;
};
struct CtaT { u32 left, nw; u32 arrived[16], cnt[16]; std::vector<u32> w; bool used; };
struct Sub { std::vector<u32> w; u64 pipe[NCLS]; u64 next; std::vector<u64> mio; u32 mioh; u32 last; std::vector<u32> ic; u32 icn; u64 fetch; };
struct SM {
  std::vector<WarpT> w; std::vector<CtaT> c; Sub s[4]; u64 lsu, req, ret, data; Cache l1; u32 warps, ctas, regs, smem; u32 rr;
  std::vector<u64> infl, stq; u32 inflh, stqh;
};
struct Machine {
  TP *t; Cfg f; std::vector<SM> sm; std::vector<Cache> l2; std::vector<double> slice, chan; std::vector<double> smreq, smret; u64 now, age;
  const u32 *trace; size_t words; std::vector<size_t> cta_off; u32 next_cta, done_cta; u64 lastdone, drain;
};
static inline void l2_index(const struct Cfg &f, u64 line, u32 &sl, u32 &set);
static inline u64 mix(u64 x) { x ^= x >> 33; x *= 0xff51afd7ed558ccdull; x ^= x >> 29; x *= 0xc4ceb9fe1a85ec53ull; x ^= x >> 32; return x; }

static inline void l2_index(const Cfg &f, u64 line, u32 &sl, u32 &set) {
  u64 grp = line / f.nslice;
  sl = (u32)((line + mix(grp)) % f.nslice); set = (u32)(grp % f.l2_sets);
}
// one 128-byte line request at L2; sm < 0: no return.  Gives the time the last sector is back at the SM
static u64 l2_access(Machine &m, u32 smi, u64 line, u32 mask, bool write, double at, bool atom, u32 lanes) {
  Cfg &f = m.f;
  u32 sl, set; l2_index(f, line, sl, set);
  u32 ch = sl * f.nchan / f.nslice;
  u32 ns = __builtin_popcount(mask);
  double arrive = at + f.lat_noc;
  double &sf = m.slice[sl];
  double st = std::max(arrive, sf);
  if (write || atom) st = std::max(st, m.chan[ch] - f.dram_q);
  sf = st + f.slice_sector * ns + (atom ? lanes * f.atom_lane_x10 * 0.1 : 0);
  Line *ln = m.l2[sl].find(line, set);
  m.t->l2_acc += ns;
  if (!ln) {
    ln = m.l2[sl].victim(set);
    if (ln->dirty) { u32 d = __builtin_popcount(ln->dirty); m.chan[ch] = std::max(m.chan[ch], st) + f.chan_sector * d * f.dram_wr; m.t->dram_wr += d; }
    ln->tag = line; ln->valid = ln->dirty = 0;
  }
  ln->lru = ++m.age;
  double done = sf;
  for (u32 s = 0; s < 4; s++) if (mask >> s & 1) {
    if (ln->valid >> s & 1) { m.t->l2_hit++; done = std::max(done, (double)ln->ready[s]); }
    else if (write && !atom) { ln->ready[s] = (u64)st; }
    else {
      double ds = std::max(st + f.lat_dram * 0.3, m.chan[ch]);
      m.chan[ch] = ds + f.chan_sector;
      double r = ds + f.chan_sector + f.lat_dram * 0.7;
      ln->ready[s] = (u64)r; done = std::max(done, r); m.t->dram_rd++;
    }
    ln->valid |= 1u << s;
    if (write || atom) ln->dirty |= 1u << s;
  }
  if (write && !atom) { m.t->l2_wr += ns; return (u64)(st + f.lat_l2 + f.lat_noc); }
  double back = done + f.lat_l2;
  double &rf = m.smret[smi];
  double rs = std::max(back, rf);
  rf = rs + f.ret_sector * ns;
  return (u64)(rs + f.ret_sector * ns + f.lat_noc);
}

// the next block of a warp's trace; false: the trace has ended
static bool next_block(TP &t, WarpT &w) {
  if (w.p >= w.end) return false;
  const BlockT &b = t.blocks[w.p[0]];
  w.idx = b.first; w.left = b.len; w.act = w.p[1]; w.p += 2;
  return true;
}

static bool start_cta(Machine &m, u32 smi) {
  if (m.next_cta >= m.cta_off.size()) return false;
  SM &s = m.sm[smi]; TP &t = *m.t; Cfg &f = m.f;
  const u32 *p = m.trace + m.cta_off[m.next_cta];
  u32 nw = p[2];
  u32 rpw = (t.nregs + 7) / 8 * 8 * 32; rpw = (rpw + 255) / 256 * 256;
  u32 sme = (t.smem + 255) / 256 * 256;
  if (s.warps + nw > f.max_warps || s.ctas + 1 > f.max_ctas || s.regs + rpw * nw > 65536 || s.smem + sme > f.smem_per_sm) return false;
  // register file is split between the four sub-cores
  u32 ci = 0; while (ci < s.c.size() && s.c[ci].used) ci++;
  if (ci == s.c.size()) s.c.emplace_back();
  CtaT &c = s.c[ci]; c.used = true; c.nw = c.left = nw; memset(c.arrived, 0, sizeof c.arrived); memset(c.cnt, 0, sizeof c.cnt); c.w.clear();
  p += 3;
  for (u32 i = 0; i < nw; i++) {
    u32 words = p[1]; const u32 *b = p + 2; p = b + words;
    u32 sub = 0; u32 best = ~0u;
    for (u32 k = 0; k < 4; k++) { u32 q = (i + s.rr + k) & 3; if (s.s[q].w.size() < best) { best = (u32)s.s[q].w.size(); sub = q; } }
    u32 wi = 0; while (wi < s.w.size() && !s.w[wi].done) wi++;
    if (wi == s.w.size()) s.w.emplace_back();
    WarpT &w = s.w[wi]; memset((void *)&w, 0, sizeof w);
    w.p = b; w.end = b + words; w.next = m.now + m.f.lat_cta; w.cta = ci; w.slot = sub; w.done = false; w.prev_issue = m.now; w.lastline = ~0u; w.age = ++m.age;
    if (!next_block(t, w)) { w.done = true; c.left--; continue; }
    s.s[sub].w.push_back(wi); c.w.push_back(wi);
    s.s[sub].next = std::min(s.s[sub].next, w.next);
  }
  s.rr++;
  s.warps += nw; s.ctas++; s.regs += rpw * nw; s.smem += sme;
  t.cta_per_sm = std::max<u64>(t.cta_per_sm, s.ctas);
  m.next_cta++;
  return true;
}

static void end_cta(Machine &m, u32 smi, u32 ci) {
  SM &s = m.sm[smi]; TP &t = *m.t;
  u32 nw = s.c[ci].nw, rpw = (t.nregs + 7) / 8 * 8 * 32; rpw = (rpw + 255) / 256 * 256;
  s.c[ci].used = false; s.warps -= nw; s.ctas--; s.regs -= rpw * nw; s.smem -= (t.smem + 255) / 256 * 256;
  m.done_cta++; m.lastdone = m.now;
  while (start_cta(m, smi)) {}
}

static void bar_check(Machine &m, SM &s, u32 ci, u32 id) {
  CtaT &c = s.c[ci]; u32 cnt = c.cnt[id];
  if (!c.arrived[id]) return;
  u32 need = cnt ? (cnt + 31) / 32 : c.left;
  if (c.arrived[id] < need) return;
  c.arrived[id] = 0;
  for (u32 wi : c.w) { WarpT &w = s.w[wi]; if (!w.done && w.bar && w.barid == id) { w.bar = false; w.next = m.now + m.f.lat_bar; Sub &b = s.s[w.slot]; b.next = std::min(b.next, w.next); } }
}

// tries to issue one instruction on sub-core k; returns true if issued
static bool step(Machine &m, u32 smi, u32 k) {
  SM &s = m.sm[smi]; Sub &b = s.s[k]; TP &t = *m.t; Cfg &f = m.f; u64 now = m.now;
  u64 soonest = ~0ull;
  u32 n = (u32)b.w.size();
  if (!n) { b.next = ~0ull; return false; }
  // candidate order: greedy (last issued first) then oldest, or loose round robin
  u32 start = 0;
  int pick = -1; u8 firstwhy = W_NOTSEL;
  for (u32 q = 0; q < n; q++) {
    u32 pos = f.policy == 0 ? (q == 0 ? b.last % n : (q <= b.last % n ? q - 1 : q)) : (b.last + 1 + q) % n;
    u32 wi = b.w[pos]; WarpT &w = s.w[wi];
    const InstrT &in = t.ins[w.idx];
    u64 at = w.next; u8 why = w.lastwhy == W_BRANCH ? W_BRANCH : W_FIXED;
    if (w.bar) { at = ~0ull; why = W_BAR; }
    else {
      const u64 *rdy = in.cls == TENSOR ? w.rdyt : w.rdy;   // HMMA after HMMA: accumulators are forwarded (hmma_fwd), not read back
      for (u32 z = in.wait, bi; z; z &= z - 1) { bi = __builtin_ctz(z); if (rdy[bi] > at) { at = rdy[bi]; why = w.islong[bi] ? W_LONG : W_SHORT; } }
      if (in.cls == MEMBAR && w.st_done > at) { at = w.st_done; why = W_MEMBAR; }
      if (b.pipe[in.cls] > at) { at = b.pipe[in.cls]; why = W_PIPE; }
      if (in.cls >= LDSST && in.cls <= MISC) { u64 q0 = b.mio[b.mioh]; if (q0 > at) { at = q0; why = W_MIO; } }
      if ((in.cls == LDG || in.cls == ATOM) && s.infl[s.inflh] > at) { at = s.infl[s.inflh]; why = W_MIO; }
      if (in.cls == STG && s.stq[s.stqh] > at) { at = s.stq[s.stqh]; why = W_MIO; }
      u32 line = w.idx >> 3;
      if (at <= now && line != w.lastline) {     // instruction fetch from the sub-core's L0
        bool hit = false; for (u32 x = 0; x < b.icn; x++) if (b.ic[x] == line) { hit = true; if (x) { std::rotate(b.ic.begin(), b.ic.begin() + x, b.ic.begin() + x + 1); } break; }
        bool seq = line == w.lastline + 1;
        w.lastline = line;
        if (!hit) {
          if (b.icn < f.icache_lines) b.icn++;
          std::rotate(b.ic.begin(), b.ic.begin() + b.icn - 1, b.ic.begin() + b.icn); b.ic[0] = line;
          w.next = std::max(now, b.fetch) + (seq ? f.icache_seq : f.lat_icache); b.fetch = std::max(now, b.fetch) + 4; at = w.next; why = W_ICACHE; w.lastwhy = W_FIXED;
        }
      }
    }
    if (at <= now) { if (pick < 0) pick = (int)pos; else t.stall[W_NOTSEL]++; if (q == 0 && f.policy == 0) break; if (pick >= 0) break; }
    else { if (q == 0) firstwhy = why; soonest = std::min(soonest, at); }
    (void)start;
  }
  if (pick < 0) { t.stall[firstwhy] += (soonest == ~0ull ? 1 : 0); b.next = soonest; if (soonest != ~0ull) t.stall[firstwhy] += soonest - now; return false; }
  u32 wi = b.w[pick]; WarpT &w = s.w[wi]; u32 idx = w.idx; const InstrT &in = t.ins[idx];
  u32 mask = in.guarded ? *w.p++ : w.act;
  const u32 *rec = w.p; u32 nl = 0, waves = 0; bool shared = in.rec == R_SHARED, local = in.rec == R_LOCAL;
  if (in.rec != R_NONE && mask) {
    u32 x = *w.p++;
    if (in.rec == R_GLOBAL && (x & (TRACE_SHARED | TRACE_LOCAL))) { shared = x & TRACE_SHARED; local = !shared; waves = x & 0xffffffu; }
    else if (in.rec == R_GLOBAL) { nl = x; rec = w.p; w.p += 2 * nl; }
    else waves = x;
  }
  t.winsts++; t.issued[in.cls]++;
  t.pc_cycles[idx] += now - w.prev_issue; t.pc_count[idx]++;
  w.prev_issue = now;
  w.next = now + std::max<u32>(in.stall, 1) + in.bank;
  w.lastwhy = W_FIXED;
  b.last = (u32)pick;
  b.pipe[in.cls] = now + in.interval;
  u64 done = now + in.lat, rd = now + 6; bool lng = false;
  switch (in.cls) {
    case LDSST: case SHFL: case LDC: case MISC: case LDG: case STG: case ATOM: {
      double st = (double)std::max<u64>(now + 2, s.lsu);
      u32 cost = 1;
      if (shared && waves) { cost = waves; t.smem_waves += cost; }
      if (shared || in.cls == SHFL) done = (u64)st + (in.cls == SHFL ? f.lat_shfl : f.lat_lds) + (cost - 1);
      else if (in.cls == LDC) done = (u64)st + f.lat_ldc;
      else if (in.cls == MISC) done = (u64)st + in.lat;
      else if (local && waves) { done = (u64)st + f.lat_l1; cost = waves; }
      else if (nl) {
        u64 lines[64]; u32 sm_[64], lanes[64], total = 0;
        for (u32 j = 0; j < nl; j++) {
          u64 v = rec[2 * j] | (u64)rec[2 * j + 1] << 32;
          lines[j] = v >> 12; lanes[j] = v >> 4 & 63; sm_[j] = v & 15; total += lanes[j];
        }
        cost = std::max<u32>(nl, (total * in.bytes + 127) / 128);
        u64 fin = 0;
        for (u32 j = 0; j < nl; j++) {
          double tj = st + j;
          if (in.cls == LDG) {
            lng = true;
            u32 set = (u32)(lines[j] % s.l1.sets); Line *L = in.l1bypass ? nullptr : s.l1.find(lines[j], set);
            u32 miss = sm_[j]; u64 r = (u64)tj + f.lat_l1;
            t.l1_acc += __builtin_popcount(sm_[j]);
            if (L) { for (u32 q = 0; q < 4; q++) if ((sm_[j] >> q & 1) && (L->valid >> q & 1)) { miss &= ~(1u << q); r = std::max(r, L->ready[q]); t.l1_hit++; } }
            if (miss) {
              double &rq = m.smreq[smi]; double q0 = std::max(tj + 6, rq); rq = q0 + f.req_line;
              u64 back = l2_access(m, smi, lines[j], miss, false, q0, false, 0);
              r = std::max(r, back);
              if (!in.l1bypass) {
                if (!L) { L = s.l1.victim(set); L->tag = lines[j]; L->valid = 0; }
                for (u32 q = 0; q < 4; q++) if (miss >> q & 1) { L->valid |= 1u << q; L->ready[q] = back; }
              }
            }
            if (L) L->lru = ++m.age;
            fin = std::max(fin, r);
          } else {
            double &rq = m.smreq[smi]; double q0 = std::max(tj + 6, rq);
            rq = q0 + (in.cls == STG ? f.wr_sector * __builtin_popcount(sm_[j]) : f.req_line * 2);
            u64 back = l2_access(m, smi, lines[j], sm_[j], true, q0, in.cls == ATOM, lanes[j]);
            fin = std::max(fin, back);
            if (in.cls == ATOM) lng = true;
            Line *L = s.l1.find(lines[j], (u32)(lines[j] % s.l1.sets));
            if (L && in.cls == ATOM) L->valid &= ~sm_[j];
          }
        }
        done = std::max<u64>(fin, (u64)st + f.lat_l1 + cost - 1);
        if (in.cls != LDG) { w.st_done = std::max(w.st_done, done); m.drain = std::max(m.drain, done); }
        if (in.cls == STG) { s.stq[s.stqh] = done; s.stqh = (s.stqh + 1) % (u32)s.stq.size(); }
        if (in.cls == STG) done = (u64)st + 12;
        if (in.cls == LDG || in.cls == ATOM) { s.infl[s.inflh] = done; s.inflh = (s.inflh + 1) % (u32)s.infl.size(); }
      }
      s.lsu = (u64)st + cost;
      b.mio[b.mioh] = (u64)st; b.mioh = (b.mioh + 1) % (u32)b.mio.size();
      rd = (u64)st + 4;
      break;
    }
    case BAR: {
      if (!mask) break;                       // predicated off: does not arrive
      CtaT &c = s.c[w.cta];
      u32 id = waves & 15, count = waves >> 8;
      c.arrived[id]++; c.cnt[id] = count;
      if (in.barkind != 1) { w.bar = true; w.barid = id; }
      bar_check(m, s, w.cta, id);
      break;
    }
    case EXITC: break;
    default: break;
  }
  if (in.wbar < 6) {
    w.rdy[in.wbar] = std::max(w.rdy[in.wbar], done); w.islong[in.wbar] = lng;
    w.rdyt[in.wbar] = std::max(w.rdyt[in.wbar], in.cls == TENSOR && f.hmma_fwd ? now + f.hmma_fwd / 10 + (w.nh++ % 10 * (f.hmma_fwd % 10) % 10 + f.hmma_fwd % 10 >= 10) : done);
  }
  if (in.rbar < 6) { w.rdy[in.rbar] = std::max(w.rdy[in.rbar], rd); w.rdyt[in.rbar] = std::max(w.rdyt[in.rbar], rd); w.islong[in.rbar] = 0; }
  w.idx++; w.left--;
  if (w.left == 0 && !next_block(t, w)) {
    w.done = true; CtaT &c = s.c[w.cta]; c.left--;
    b.w.erase(b.w.begin() + pick); b.last = 0;
    for (u32 i = 0; i < 16; i++) if (c.left) bar_check(m, s, w.cta, i);
    if (!c.left) end_cta(m, smi, w.cta);
  } else if (in.cls == CTL || in.cls == EXITC) {
    if (w.idx != idx + 1) { w.next = std::max(w.next, now + f.lat_branch); w.lastwhy = W_BRANCH; }
  }
  b.next = now + 1;
  return true;
}

extern "C" int sm70sim_time(TP *t) {
  Machine m; m.t = t; m.f = t->cfg; Cfg &f = m.f; m.now = 0; m.age = 0; m.next_cta = m.done_cta = 0; m.lastdone = m.drain = 0;
  int fd = open(t->bin, O_RDONLY); if (fd < 0) { snprintf(t->err, sizeof t->err, "cannot open %s", t->bin); return 1; }
  struct stat sb; fstat(fd, &sb); m.words = sb.st_size / 4;
  m.trace = (const u32 *)mmap(nullptr, sb.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  for (size_t o = 0; o + 3 <= m.words;) {
    if (m.trace[o] != TRACE_MAGIC) { snprintf(t->err, sizeof t->err, "bad trace at word %zu", o); return 1; }
    m.cta_off.push_back(o); u32 nw = m.trace[o + 2]; o += 3;
    for (u32 i = 0; i < nw; i++) o += 2 + m.trace[o + 1];
  }
  m.sm.resize(f.nsm); m.l2.resize(f.nslice); m.slice.assign(f.nslice, 0); m.chan.assign(f.nchan, 0); m.smreq.assign(f.nsm, 0); m.smret.assign(f.nsm, 0);
  static std::vector<Cache> saved;
  if ((t->l2_flags & 1) && saved.size() == m.l2.size()) {
    m.l2 = saved;
    for (auto &c : m.l2) for (auto &l : c.l) { for (auto &r : l.ready) r = 0; m.age = std::max(m.age, l.lru); }
  } else for (auto &c : m.l2) c.init(f.l2_sets, f.l2_ways);
  for (u32 i = 0; i < t->nwarm; i++)
    for (u64 a = t->warm[2 * i] >> 7; a <= (t->warm[2 * i] + t->warm[2 * i + 1] - 1) >> 7; a++) {
      u32 sl, set; l2_index(f, a, sl, set);
      Line *l = m.l2[sl].find(a, set); if (!l) { l = m.l2[sl].victim(set); *l = Line{a, 0, 0, 0, {0, 0, 0, 0}}; }
      l->valid = 15; l->lru = ++m.age;
    }
  u32 rpw = ((t->nregs + 7) / 8 * 8 * 32 + 255) / 256 * 256, nw = (t->nthreads + 31) / 32;
  u32 sme = (t->smem + 255) / 256 * 256;
  u32 occ = std::min({f.max_ctas, f.max_warps / nw, 65536 / (rpw * nw), sme ? f.smem_per_sm / sme : f.max_ctas});
  if (!occ) { snprintf(t->err, sizeof t->err, "the block does not fit an SM"); return 1; }
  u32 carve = occ * sme, opt[6] = {0, 8192, 16384, 32768, 65536, 98304}, cv = 98304;
  for (int i = 5; i >= 0; i--) if (opt[i] >= carve) cv = opt[i];
  u32 l1b = f.l1_total - cv, l1sets = std::max(1u, l1b / 128 / f.l1_ways);
  for (auto &s : m.sm) {
    s.lsu = s.req = s.ret = s.data = 0; s.warps = s.ctas = s.regs = s.smem = s.rr = 0; s.l1.init(l1sets, f.l1_ways); s.infl.assign(f.max_inflight, 0); s.inflh = 0; s.stq.assign(f.max_stores, 0); s.stqh = 0;
    for (auto &b : s.s) { memset(b.pipe, 0, sizeof b.pipe); b.next = ~0ull; b.mio.assign(f.mio_q, 0); b.mioh = 0; b.last = 0; b.ic.assign(f.icache_lines + 1, ~0u); b.icn = 0; b.fetch = 0; }
  }
  memset(t->issued, 0, sizeof t->issued); memset(t->stall, 0, sizeof t->stall);
  t->winsts = t->l1_acc = t->l1_hit = t->l2_acc = t->l2_hit = t->dram_rd = t->dram_wr = t->smem_waves = t->l2_wr = t->subcore_busy = t->cta_per_sm = 0;
  bool more = true;
  while (more) { more = false; for (u32 i = 0; i < f.nsm; i++) more |= start_cta(m, i); }
  while (m.done_cta < m.cta_off.size()) {
    u64 nx = ~0ull;
    for (u32 i = 0; i < f.nsm; i++) { SM &s = m.sm[i]; for (u32 k = 0; k < 4; k++) nx = std::min(nx, s.s[k].next); }
    if (nx == ~0ull) { snprintf(t->err, sizeof t->err, "no warp can go on at cycle %llu (%u of %zu blocks done)", (unsigned long long)m.now, m.done_cta, m.cta_off.size()); return 1; }
    m.now = std::max(m.now + 1, nx);
    if (t->max_cycles && m.now > t->max_cycles) { snprintf(t->err, sizeof t->err, "cycle limit"); return 1; }
    for (u32 i = 0; i < f.nsm; i++) { SM &s = m.sm[i]; for (u32 k = 0; k < 4; k++) if (s.s[k].next <= m.now) if (step(m, i, k)) t->subcore_busy++; }
  }
  u64 endt = std::max(m.now, m.drain);     // the grid is complete when its stores are accepted
  if (t->l2_flags & 2) saved = m.l2;
  t->cycles = endt + f.launch; t->subcore_cycles = endt * f.nsm * 4;
  munmap((void *)m.trace, sb.st_size); close(fd);
  return 0;
}
