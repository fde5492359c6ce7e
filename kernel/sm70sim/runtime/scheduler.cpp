// Runs the thread blocks of a launch: splits of a warp, convergence and block barriers.
//
// Warps of a block run one after the other until each waits, exits or has used its quantum.
// Another block is admitted when all running ones wait (or spin), so blocks may wait for
// each other.
#include <stdlib.h>

#include <memory>
#include <string>

#include "lanes.h"
#include "trace.h"

extern Ctx* g_ctx;

// ---- convergence barriers
static void make_ready(Warp& w, int b, u32 lanes) {  // one split per resume point
  while (lanes) {
    u32 pc = w.bpc[b][__builtin_ctz(lanes)], same = 0;
    FORL(lanes) if (w.bpc[b][l] == pc) same |= 1u << l;
    w.ready.push_back({pc, same});
    lanes &= ~same;
  }
}
static bool release(Warp& w) {  // groups whose live members have all arrived
  bool any = false;
  for (int b = 0; b < kConvergence; b++) {
    u32 todo = w.blocked[b];
    while (todo) {
      u32 l = (u32)__builtin_ctz(todo), group = w.bm[b][l] | 1u << l, need = group & w.live;
      todo &= ~group;
      if (need & ~w.blocked[b]) continue;
      make_ready(w, b, need);
      w.blocked[b] &= ~need;
      any = true;
    }
    w.blocked[b] &= w.live;
  }
  return any;
}
// Threads in `act` give way: groups that only wait for them are released without them.
bool yield_release(Warp& w, u32 act) {
  bool any = false;
  for (int b = 0; b < 16; b++) {
    u32 todo = w.blocked[b] & w.live;
    while (todo) {
      u32 first = (u32)__builtin_ctz(todo), group = (w.bm[b][first] | 1u << first) & w.live;
      todo &= ~(group | 1u << first);
      u32 got = group & w.blocked[b], rest = group & ~got;
      if ((rest & ~act) || !(group & act)) continue;
      FORL(group) w.bm[b][l] &= (got >> l & 1) ? ~rest : ~got;
      any = true;
    }
  }
  return any && release(w);
}

// ---- CTA barriers
static void reset(BarState& b) { b.used = false, b.expected = 0, b.pop = 0, b.all = 1, b.any = 0; }
static void bar_try(Cta& t, u32 id) {
  BarState& b = t.bar[id];
  if (!b.used) return;
  u32 full = 0;
  bool everyone = true;
  for (u32 i = 0; i < t.w.size(); i++) {
    Warp& w = t.w[i];
    if (!w.live) {
      full += b.arrived[i] != 0;
      continue;
    }
    if ((w.live & ~b.arrived[i]) == 0)
      full++;
    else
      everyone = false;
  }
  if (!(b.expected ? full * 32 >= b.expected : everyone)) return;
  for (u32 i = 0; i < t.w.size(); i++) {
    Warp& w = t.w[i];
    b.arrived[i] = 0;
    auto& v = t.waiting[i];
    for (size_t k = 0; k < v.size();) {
      if (v[k].id != id) {
        k++;
        continue;
      }
      w.ready.push_back({v[k].pc, v[k].mask});
      w.red_count = b.pop, w.red_and = b.all, w.red_or = b.any;
      if (t.races) t.races->leave(i, id);
      v.erase(v.begin() + (long)k);
    }
  }
  if (t.races) t.races->opened(id);
  reset(b);
}
void bar_arrive(Ctx& c, Warp& w, u32 id, u32 count, u32 pc, u32 mask, bool sync, bool red,
                u32 pval) {
  if (id >= kBarriers) fault("barrier number %llu does not exist (at 0x%llx)", id, pc - 16);
  BarState& b = w.cta->bar[id];
  if (c.tracing) w.trace.push_back(id | count << 8);
  // Hardware would count the warp twice and open the barrier too early; here it would go unseen.
  if (w.cta->races && b.arrived[w.wid] & mask)
    fault("warp %llu arrives again at barrier %llu, which has not opened since (at 0x%llx)", w.wid,
          id, pc - 16);
  b.used = true;
  if (count) b.expected = count;
  b.arrived[w.wid] |= mask;
  if (w.cta->races) w.cta->races->arrive(w.wid, id);
  if (red) {
    b.pop += (u32)__builtin_popcount(pval & mask);
    if ((pval & mask) != mask) b.all = 0;
    if (pval & mask) b.any = 1;
  }
  if (sync) w.cta->waiting[w.wid].push_back({id, pc, mask});
}

// ---- warps
static std::vector<u32> g_block_at;  // per instruction: block that starts there, or ~0
static std::vector<u64> g_block_count;

// Runs a split until it ends or waits; true: it gave way and is in ready again.
static bool run_split(Ctx& c, Warp& w, Split s) {
  u64 end = c.total + c.p->quantum;
  u32 act = s.mask;
  w.pc = s.pc, w.gave_way = false;
  do {
    u32 i = w.pc >> 4, b = i < g_block_at.size() ? g_block_at[i] : ~0u;
    if (b == ~0u) fault("jump to 0x%llx, which is not the start of a block of instructions", w.pc);
    const Block& k = kernel_blocks[b];
    g_block_count[b]++;
    c.total += k.len;
    if (c.tracing) w.trace.push_back(b), w.trace.push_back(act), w.ninstrs += k.len;
    act = k.run(c, w, act);
    if (unlikely(c.total > end) && act) {
      w.ready.insert(w.ready.begin(), {w.pc, act});
      return true;
    }
  } while (act);
  return w.gave_way;
}
static void run_warp(Ctx& c, Warp& w) {
  size_t rounds = 0;
  while (!w.ready.empty() || release(w)) {
    Split s = w.ready.back();
    w.ready.pop_back();
    s.mask &= w.live;
    if (!s.mask) continue;
    if (run_split(c, w, s) && ++rounds > w.ready.size() + 1) break;
    if (w.ready.empty()) release(w);
  }
}

// ---- blocks
struct Free {
  void operator()(void* p) const { free(p); }
};
struct LiveCta {
  Cta t;
  std::unique_ptr<u8, Free> smem, smem_init, local, local_init;
  std::unique_ptr<Row, Free> regs;
  std::unique_ptr<Races> races;
};
static std::unique_ptr<LiveCta> make_cta(Ctx& c, u32 id) {
  const Params& p = *c.p;
  u32 threads = p.block[0] * p.block[1] * p.block[2], nw = (threads + 31) / 32, nr = p.nregs + 8;
  auto r = std::make_unique<LiveCta>();
  Cta& t = r->t;
  t.id = id;
  t.ctaid[0] = id % p.grid[0], t.ctaid[1] = id / p.grid[0] % p.grid[1],
  t.ctaid[2] = id / p.grid[0] / p.grid[1];
  size_t smem = (p.smem_bytes + 127) & ~63u, regs = (size_t)nw * nr * sizeof(Row),
         loc = (size_t)nw * 32 * p.local_bytes;
  r->smem.reset((u8*)aligned_alloc(64, smem));
  memset(r->smem.get(), 0xCD, smem);  // uninitialised shared memory is not zero
  r->regs.reset((Row*)aligned_alloc(64, regs));
  memset(r->regs.get(), 0, regs);
  if (loc) r->local.reset((u8*)calloc(loc, 1));
  if (p.ginit) {
    r->smem_init.reset((u8*)calloc(smem, 1));
    if (loc) r->local_init.reset((u8*)calloc(loc, 1));
  }
  t.smem = r->smem.get(), t.smem_init = r->smem_init.get();
  if (p.races) r->races = std::make_unique<Races>(nw, p.smem_bytes);
  t.races = r->races.get();
  t.local = r->local.get(), t.local_init = r->local_init.get(), t.regs = r->regs.get();
  for (BarState& b : t.bar) {
    b.arrived.assign(nw, 0);
    reset(b);
  }
  t.waiting.resize(nw);
  t.w.resize(nw);
  for (u32 i = 0; i < nw; i++) {
    Warp& w = t.w[i];
    u32 left = threads - i * 32;
    w.R = t.regs + (size_t)i * nr;
    w.P[7] = ~0u;
    w.live = left >= 32 ? ~0u : (1u << left) - 1;
    w.wid = i, w.cta = &t;
    w.ready.push_back({0, w.live});
    size_t off = (size_t)i * 32 * p.local_bytes;
    w.local = t.local ? t.local + off : nullptr;
    w.local_init = t.local_init ? t.local_init + off : nullptr;
  }
  return r;
}
static bool finished(const Cta& t) {
  for (const Warp& w : t.w)
    if (w.live) return false;
  return true;
}
static std::string deadlock(const Cta& t) {
  std::string s = "deadlock in block " + std::to_string(t.id) + ":";
  for (const Warp& w : t.w) {
    if (!w.live || s.size() > 380) continue;
    u32 blocked = 0;
    for (u32 b : w.blocked) blocked |= b;
    const auto& v = t.waiting[w.wid];
    char b[100];
    snprintf(b, sizeof b, " [warp %u live %x", w.wid, w.live);
    s += b;
    if (blocked) snprintf(b, sizeof b, " convergence %x", blocked), s += b;
    if (!v.empty()) snprintf(b, sizeof b, " barrier %u before 0x%x", v[0].id, v[0].pc), s += b;
    s += "]";
  }
  return s;
}
// An arrival that nobody waited for would open the barrier too early, were there a next round.
static void check_barriers_closed(const Cta& t) {
  for (u32 id = 0; id < kBarriers; id++)
    if (t.bar[id].used)
      fault("block %llu ends, and barrier %llu of %llu threads has some that arrived", t.id, id,
            t.bar[id].expected);
}
static void run_grid(Ctx& c, FILE* trace) {
  Params& p = *c.p;
  constexpr u64 kSpin = 50000000;  // instructions without a finished block: let another in
  std::vector<std::unique_ptr<LiveCta>> live;
  u32 next = p.cta_begin;
  bool stuck = false;
  u64 last = 0;
  while (next < p.cta_end || !live.empty()) {
    if (next < p.cta_end && (live.empty() || (stuck && live.size() < p.max_live))) {
      live.push_back(make_cta(c, next++));
      stuck = false, last = c.total;
    }
    u64 before = c.total;
    for (size_t k = 0; k < live.size();) {
      Cta& t = live[k]->t;
      c.cta = &t;
      size_t nw = t.w.size();
      for (size_t j = 0; j < nw; j++) {
        Warp& w = t.w[p.reverse ? nw - 1 - j : j];
        if (!w.ready.empty()) run_warp(c, w);
      }
      for (u32 id = 0; id < kBarriers; id++) bar_try(t, id);
      if (!finished(t)) {
        k++;
        continue;
      }
      if (t.races) check_barriers_closed(t);
      if (trace) trace_emit(trace, t);
      live.erase(live.begin() + (long)k);
      last = c.total;
    }
    if (c.total == before && !live.empty()) {
      bool pending = false;  // a barrier may just have opened
      for (auto& r : live)
        for (Warp& w : r->t.w) pending |= !w.ready.empty();
      if (pending) continue;
      if (next >= p.cta_end || live.size() >= p.max_live) {
        std::string s = deadlock(live[0]->t);
        fault("%s", (u64)(uintptr_t)s.c_str());
      }
      stuck = true;
    } else if (c.total - last > kSpin) {
      stuck = true, last = c.total;
    }
    if (p.max_insts && c.total > p.max_insts)
      fault("more than %llu warp instructions", p.max_insts);
  }
}

// Returns 0, or 1 with p->err set.
extern "C" int sm70sim_run(Params* p) {
  Ctx c = {};
  g_ctx = &c;
  c.p = p, c.gmem = p->gmem, c.gbase = p->gbase, c.gsize = p->gsize;
  c.smem_bytes = p->smem_bytes, c.local_bytes = p->local_bytes;
  for (int i = 0; i < kConstBanks; i++) c.cb[i] = p->cb[i];
  c.tracing = p->trace;
  g_block_at.assign(kernel_ninstrs, ~0u);
  g_block_count.assign(kernel_nblocks, 0);
  for (u32 b = 0; b < kernel_nblocks; b++) g_block_at[kernel_blocks[b].pc >> 4] = b;
  FILE* trace = p->trace_path ? fopen(p->trace_path, "wb") : nullptr;
  if (p->trace_path && !trace) {
    snprintf(p->err, sizeof p->err, "cannot write the trace %s", p->trace_path);
    return 1;
  }
  if (trace) setvbuf(trace, nullptr, _IOFBF, 1 << 22);
  int rc = 0;
  try {
    run_grid(c, trace);
  } catch (const Fault&) {
    rc = 1;
  }
  for (u32 b = 0; b < kernel_nblocks; b++)
    for (u32 i = 0; i < kernel_blocks[b].len; i++)
      p->count[(kernel_blocks[b].pc >> 4) + i] += g_block_count[b];
  if (trace && fclose(trace) && !rc) {
    snprintf(p->err, sizeof p->err, "cannot write the trace %s (disk full?)", p->trace_path);
    rc = 1;
  }
  return rc;
}
