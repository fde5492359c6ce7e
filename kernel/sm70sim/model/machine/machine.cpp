// Cycle model of a V100 driven by the emulator's trace and by the scheduling control bits of
// the machine code (stall counts, scoreboards).
//
// Each sub-core issues at most one instruction a cycle, of the warp that issued last if it can,
// else of the oldest that can.  A warp can issue when its stall count has passed, the
// scoreboards that it waits for are released, the pipe takes another instruction, the queue to
// the memory pipe has room and the code is in the L0 instruction cache.
#include <stdio.h>

#include "calendar.h"
#include "sm.h"

// Mirrored by ctypes in timing.py.
struct Job {
  const char* trace;
  const InstrT* instrs;
  const BlockT* blocks;
  const char* const* names;  // parameters
  const double* values;
  u32 n_instrs, n_values, n_warm;
  u32 registers, shared_bytes, threads;
  const u64* warm;  // pairs of address and bytes that are in L2 at the start
  L2Contents* l2;   // left by the launch before, kept for the next
  // results
  u64 cycles, instrs_issued, ctas_per_sm, waves_shared, l1_sectors, l1_hits, subcore_cycles,
      issue_cycles;
  u64 memory_pipe_busy;
  MemoryCounts memory;
  u64 pipe_issued[kPipes], pipe_busy[kPipes], stalls[kWhys];
  u64 *waited, *executed;  // per instruction: warp cycles from the issue before; issues
  char err[256];
};

namespace {

constexpr u64 kNever = ~0ull;

// Distinct 128-byte lines of a global access.
struct Lines {
  u32 n = 0, lanes = 0;
  const u32* words = nullptr;
  void get(u32 i, u64& line, u32& nlanes, u32& sectors) const {
    u64 v = words[2 * i] | (u64)words[2 * i + 1] << 32;
    line = v >> 12, nlanes = v >> 4 & 63, sectors = v & 15;
  }
};

class Machine {
 public:
  Machine(Job& job, const Config& f, L2Contents& l2)
      : j_(job), f_(f), memory_(f, l2, job.memory), calendar_((u32)f.machine_sms * 4) {}
  bool run();

 private:
  u32 registers_per_warp() const { return (j_.registers + 7) / 8 * 8 * 32; }
  u32 shared_per_cta() const { return (j_.shared_bytes + 255) / 256 * 256; }
  bool fail(const char* text, u64 a = 0, u64 b = 0) {
    snprintf(j_.err, sizeof j_.err, text, (unsigned long long)a, (unsigned long long)b);
    return false;
  }
  bool next_block_of_code(Warp& w) const {
    if (w.at >= w.end) return false;
    const BlockT& b = j_.blocks[w.at[0]];
    w.idx = b.first, w.left = b.len, w.act = w.at[1], w.at += 2;
    return true;
  }
  void wake(u32 sm, u32 sub, u64 time) {
    SubCore& b = sm_[sm].sub[sub];
    b.next = std::min(b.next, time);
    calendar_.enter(sm * 4 + sub, time);
  }
  bool start_cta(u32 sm);
  void end_cta(u32 sm, u32 cta);
  void open_barrier(u32 sm, u32 cta, u32 id);
  u64 earliest(Sm& s, SubCore& b, Warp& w, Why& why);
  void issue(u32 sm, u32 sub, u32 place);
  void step(u32 sm, u32 sub);
  u64 global_access(u32 sm, Warp& w, const InstrT& in, const Lines& lines, u64 start);

  Job& j_;
  const Config& f_;
  MemorySystem memory_;
  Calendar calendar_;
  Trace trace_;
  std::vector<Sm> sm_;
  u32 next_cta_ = 0, done_ctas_ = 0;
  u64 age_ = 0, stores_done_ = 0;
};

// Puts the next block of the grid on an SM if there is room.
bool Machine::start_cta(u32 smi) {
  if (next_cta_ >= trace_.ctas.size()) return false;
  Sm& s = sm_[smi];
  const u32* p = trace_.words + trace_.ctas[next_cta_];
  u32 nw = p[2], regs = registers_per_warp() * nw, shared = shared_per_cta();
  if (s.n_warps + nw > f_.machine_max_warps || s.n_ctas + 1 > f_.machine_max_ctas ||
      s.n_registers + regs > f_.machine_registers || s.n_shared + shared > f_.machine_shared_bytes)
    return false;
  u32 ci = 0;
  while (ci < s.ctas.size() && s.ctas[ci].used) ci++;
  if (ci == s.ctas.size()) s.ctas.emplace_back();
  CtaState& c = s.ctas[ci];
  c = CtaState();
  c.used = true, c.warps = c.left = nw;
  p += 3;
  for (u32 i = 0; i < nw; i++) {
    const u32 *words = p + 2, *end = words + p[1];
    p = end;
    u32 sub = 0, fewest = ~0u;  // sub-cores in turn, the emptiest first
    for (u32 k = 0; k < 4; k++) {
      u32 q = (i + s.turn + k) & 3, n = (u32)s.sub[q].warps.size();
      if (n < fewest) fewest = n, sub = q;
    }
    u32 wi = 0;
    while (wi < s.warps.size() && !s.warps[wi].done) wi++;
    if (wi == s.warps.size()) s.warps.emplace_back();
    Warp& w = s.warps[wi];
    w = Warp();
    w.at = words, w.end = end, w.cta = ci, w.sub = sub, w.issued = calendar_.now(), w.fetched = ~0u;
    w.next = calendar_.now() + (u64)f_.launch_cta_start;
    if (!next_block_of_code(w)) {
      w.done = true, c.left--;
      continue;
    }
    s.sub[sub].warps.push_back(wi);
    c.members.push_back(wi);
    wake(smi, sub, w.next);
  }
  s.turn++;
  s.n_warps += nw, s.n_ctas++, s.n_registers += regs, s.n_shared += shared;
  j_.ctas_per_sm = std::max<u64>(j_.ctas_per_sm, s.n_ctas);
  next_cta_++;
  return true;
}

void Machine::end_cta(u32 smi, u32 ci) {
  Sm& s = sm_[smi];
  CtaState& c = s.ctas[ci];
  c.used = false;
  s.n_warps -= c.warps, s.n_ctas--;
  s.n_registers -= registers_per_warp() * c.warps, s.n_shared -= shared_per_cta();
  done_ctas_++;
  while (start_cta(smi)) {
  }
}

void Machine::open_barrier(u32 smi, u32 ci, u32 id) {
  Sm& s = sm_[smi];
  CtaState& c = s.ctas[ci];
  u32 need = c.expected[id] ? (c.expected[id] + 31) / 32 : c.left;
  if (!c.arrived[id] || c.arrived[id] < need) return;
  c.arrived[id] = 0;
  for (u32 wi : c.members) {
    Warp& w = s.warps[wi];
    if (w.done || !w.waits || w.barrier != id) continue;
    w.waits = false;
    w.next = calendar_.now() + (u64)f_.issue_barrier;
    wake(smi, w.sub, w.next);
  }
}

// The cycle at which a warp could issue, and what holds it until then.
u64 Machine::earliest(Sm& s, SubCore& b, Warp& w, Why& why) {
  const InstrT& in = j_.instrs[w.idx];
  u64 now = calendar_.now(), at = w.next;
  why = w.why;
  if (w.waits) {
    why = kBarrierWait;
    return kNever;
  }
  auto later = [&](u64 t, Why y) {
    if (t > at) at = t, why = y;
  };
  const u64* ready = in.pipe == TENSOR ? w.ready_hmma : w.ready;
  for (u32 z = in.wait; z; z &= z - 1) {
    int k = __builtin_ctz(z);
    later(ready[k], w.is_long[k] ? kLongScoreboard : kShortScoreboard);
  }
  if (in.pipe == FENCE) later(w.stores_done, kFence);
  later(b.pipe_free[in.pipe], kPipeBusy);
  if (on_memory_pipe(in.pipe)) later(b.mio.oldest(), kMemoryQueue);
  if (in.pipe == LOAD || in.pipe == ATOMIC) later(s.loads.oldest(), kMemoryQueue);
  if (in.pipe == STORE) later(s.stores.oldest(), kMemoryQueue);
  u32 line = w.idx >> 3;  // eight instructions of 16 bytes
  if (at > now || line == w.fetched) return at;
  bool follows = line == w.fetched + 1;
  w.fetched = line;
  auto& code = b.code;
  for (size_t x = 0; x < code.size(); x++)
    if (code[x] == line) {
      std::rotate(code.begin(), code.begin() + (long)x, code.begin() + (long)x + 1);
      return at;
    }
  if (code.size() < (size_t)f_.issue_l0_lines) code.push_back(line);
  std::rotate(code.begin(), code.end() - 1, code.end());
  code[0] = line;
  u64 from = std::max(now, b.fetch_free);
  w.next = from + (u64)(follows ? f_.issue_l0_next_line : f_.issue_l0_miss);
  b.fetch_free = from + (u64)f_.issue_l0_fetch;
  w.why = why = kInstructionCache;
  return w.next;
}

// Returns when the last sector is there (stores: accepted by L2).
u64 Machine::global_access(u32 smi, Warp& w, const InstrT& in, const Lines& lines, u64 start) {
  Sm& s = sm_[smi];
  u64 done = 0;
  for (u32 i = 0; i < lines.n; i++) {
    u64 line;
    u32 lanes, sectors;
    lines.get(i, line, lanes, sectors);
    double at = (double)start + i;
    u32 set = (u32)(line % s.l1.sets());
    if (in.pipe != LOAD) {
      double from = std::max(at + f_.l1_miss, s.request_free);
      s.request_free = from + (in.pipe == STORE ? f_.l1_write_sector * __builtin_popcount(sectors)
                                                : f_.l1_request_line * 2);
      auto kind = in.pipe == ATOMIC ? MemorySystem::kAtomic : MemorySystem::kStore;
      done = std::max(done, memory_.access(smi, line, sectors, from, kind, lanes));
      Line* l = s.l1.find(line, set);
      if (l && in.pipe == ATOMIC) l->valid &= ~sectors;
      continue;
    }
    Line* l = in.bypasses_l1 ? nullptr : s.l1.find(line, set);
    u32 miss = sectors;
    u64 there = (u64)(at + f_.l1_latency);
    j_.l1_sectors += (u32)__builtin_popcount(sectors);
    if (l)
      for (u32 q = 0; q < 4; q++)
        if (sectors >> q & 1 && l->valid >> q & 1) {
          miss &= ~(1u << q);
          there = std::max(there, l->ready[q]);
          j_.l1_hits++;
        }
    if (miss) {
      double from = std::max(at + f_.l1_miss, s.request_free);
      s.request_free = from + f_.l1_request_line;
      u64 back = memory_.access(smi, line, miss, from, MemorySystem::kLoad, 0);
      there = std::max(there, back);
      if (!in.bypasses_l1) {
        if (!l) l = s.l1.least_recent(set), l->tag = line, l->valid = 0;
        for (u32 q = 0; q < 4; q++)
          if (miss >> q & 1) l->valid |= 1u << q, l->ready[q] = back;
      }
    }
    if (l) l->used = ++age_;
    done = std::max(done, there);
  }
  (void)w;
  return done;
}

void Machine::issue(u32 smi, u32 subi, u32 place) {
  Sm& s = sm_[smi];
  SubCore& b = s.sub[subi];
  Warp& w = s.warps[b.warps[place]];
  const u64 now = calendar_.now();
  const u32 idx = w.idx;
  const InstrT& in = j_.instrs[idx];

  // its words of the trace
  u32 mask = in.guarded ? *w.at++ : w.act, value = 0;
  Record record = mask ? in.record : kNoRecord;
  Lines lines;
  if (record != kNoRecord) {
    value = *w.at++;
    if (record == kGlobalRecord && value & kTraceShared)
      record = kSharedRecord, value &= ~kTraceShared;
    if (record == kGlobalRecord && value & kTraceLocal)
      record = kLocalRecord, value &= ~kTraceLocal;
    if (record == kGlobalRecord) {
      lines.n = value, lines.words = w.at, w.at += 2 * value;
      for (u32 i = 0; i < lines.n; i++) lines.lanes += lines.words[2 * i] >> 4 & 63;
    }
  }

  j_.instrs_issued++, j_.issue_cycles++;
  j_.pipe_issued[in.pipe]++, j_.pipe_busy[in.pipe] += in.interval;
  j_.waited[idx] += now - w.issued, j_.executed[idx]++;
  w.issued = now;
  w.next = now + std::max<u32>(in.stall, 1) + in.bank_conflict;
  w.why = kFixed;
  b.last = place;
  b.pipe_free[in.pipe] = now + in.interval;

  u64 done = now + in.latency, sources_read = now + (u64)f_.issue_operands_read;
  bool is_long = false;
  if (on_memory_pipe(in.pipe)) {
    u64 start = std::max(now + (u64)f_.memory_pipe_issue_to_pipe, s.memory_pipe_free);
    u32 cost = 1;  // cycles of the memory pipe
    if (record == kSharedRecord) {
      cost = value;
      j_.waves_shared += cost;
      done = start + (u64)f_.memory_pipe_lds + cost - 1;
    } else if (record == kLocalRecord) {
      cost = value;
      done = start + (u64)f_.l1_latency;
    } else if (record == kGlobalRecord) {
      cost = std::max(lines.n, (lines.lanes * in.nbytes + 127) / 128);
      done =
          std::max(global_access(smi, w, in, lines, start), start + (u64)f_.l1_latency + cost - 1);
      is_long = in.pipe != STORE;
      if (in.pipe != LOAD) {
        w.stores_done = std::max(w.stores_done, done);
        stores_done_ = std::max(stores_done_, done);
      }
      (in.pipe == STORE ? s.stores : s.loads).push(done);
      if (in.pipe == STORE) done = start + in.latency;
    } else if (in.pipe == SHUFFLE) {
      done = start + (u64)f_.memory_pipe_shfl;
    } else if (in.pipe == SHARED) {  // predicated off
      done = start + (u64)f_.memory_pipe_lds;
    } else if (in.pipe == CONSTANT) {
      done = start + (u64)f_.memory_pipe_ldc;
    } else if (in.pipe == MISC) {
      done = start + in.latency;
    }
    s.memory_pipe_free = start + cost;
    j_.memory_pipe_busy += cost;
    b.mio.push(start);
    sources_read = start + (u64)f_.memory_pipe_read_release;
  } else if (record == kBarRecord) {
    CtaState& c = s.ctas[w.cta];
    u32 id = value & 15;
    c.arrived[id]++;
    c.expected[id] = value >> 8;
    if (!in.arrives_only) w.waits = true, w.barrier = id;
    open_barrier(smi, w.cta, id);
  }
  if (in.wbar < kScoreboards) {
    u64 hmma = done;
    if (in.pipe == TENSOR) {  // whole cycles whose mean is the parameter
      u32 tenths = (u32)(f_.pipes_TENSOR_forward * 10 + 0.5), part = tenths % 10;
      hmma = now + tenths / 10 + (w.forwarded++ % 10 * part % 10 + part >= 10);
    }
    w.ready[in.wbar] = std::max(w.ready[in.wbar], done);
    w.ready_hmma[in.wbar] = std::max(w.ready_hmma[in.wbar], hmma);
    w.is_long[in.wbar] = is_long;
  }
  if (in.rbar < kScoreboards) {
    w.ready[in.rbar] = std::max(w.ready[in.rbar], sources_read);
    w.ready_hmma[in.rbar] = std::max(w.ready_hmma[in.rbar], sources_read);
    w.is_long[in.rbar] = false;
  }

  w.idx++, w.left--;
  if (w.left == 0 && !next_block_of_code(w)) {
    u32 ci = w.cta;
    w.done = true;
    b.warps.erase(b.warps.begin() + place);
    b.last = 0;
    CtaState& c = s.ctas[ci];
    if (--c.left == 0)
      end_cta(smi, ci);
    else
      for (u32 id = 0; id < 16; id++) open_barrier(smi, ci, id);
  } else if (in.pipe == CTL && w.idx != idx + 1) {
    u64 at = now + (u64)f_.issue_branch;
    if (at > w.next) w.next = at, w.why = kBranch;
  }
}

void Machine::step(u32 smi, u32 subi) {
  Sm& s = sm_[smi];
  SubCore& b = s.sub[subi];
  const u64 now = calendar_.now();
  if (b.next > now) return;  // it was told to look later
  const u32 n = (u32)b.warps.size();
  u64 soonest = kNever;
  Why why = kFixed;
  for (u32 q = 0; q < n; q++) {
    u32 last = b.last % n, place = q == 0 ? last : q <= last ? q - 1 : q;
    Why y;
    u64 at = earliest(s, b, s.warps[b.warps[place]], y);
    if (at <= now) {
      b.next = now + 1;
      issue(smi, subi, place);
      calendar_.enter(smi * 4 + subi, b.next);
      return;
    }
    if (at < soonest || (soonest == kNever && q == 0)) soonest = at, why = y;
  }
  b.next = soonest;
  if (soonest == kNever) return;
  j_.stalls[why] += soonest - now;
  calendar_.enter(smi * 4 + subi, soonest);
}

bool Machine::run() {
  if (!trace_.open(j_.trace)) return fail("the trace cannot be read");
  for (u32 i = 0; i < j_.n_warm; i++) memory_.warm(j_.warm[2 * i], j_.warm[2 * i + 1]);
  u32 nw = (j_.threads + 31) / 32, shared = shared_per_cta();
  u32 fit = std::min<u32>((u32)std::min(f_.machine_max_ctas, f_.machine_max_warps / nw),
                          (u32)f_.machine_registers / (registers_per_warp() * nw));
  if (shared) fit = std::min(fit, (u32)f_.machine_shared_bytes / shared);
  if (!fit) return fail("the block does not fit an SM");
  // L1 is what the smallest sufficient share of shared memory leaves
  u32 carve = 98304;
  for (u32 option : {65536u, 32768u, 16384u, 8192u, 0u})
    if (option >= fit * shared) carve = option;
  u32 l1_lines = ((u32)f_.machine_l1_bytes - carve) / 128;
  sm_.resize((size_t)f_.machine_sms);
  for (Sm& s : sm_) {
    s = Sm();
    s.l1.init(std::max(1u, l1_lines / (u32)f_.l1_ways), (u32)f_.l1_ways);
    s.loads.init((size_t)f_.memory_pipe_loads_in_flight);
    s.stores.init((size_t)f_.memory_pipe_stores_in_flight);
    for (SubCore& b : s.sub) b.next = kNever, b.mio.init((size_t)f_.memory_pipe_mio_queue);
  }
  for (bool more = true; more;) {  // one block per SM at a time
    more = false;
    for (u32 i = 0; i < sm_.size(); i++) more |= start_cta(i);
  }
  u64 last = 0;
  while (done_ctas_ < trace_.ctas.size()) {
    if (!calendar_.next([&](u32 id) { last = calendar_.now(), step(id / 4, id % 4); }))
      return fail("no warp can go on at cycle %llu (%llu blocks done): barriers that never open",
                  last, done_ctas_);
  }
  j_.cycles = std::max(last, stores_done_);  // complete when L2 has its stores
  j_.subcore_cycles = j_.cycles * sm_.size() * 4;
  return true;
}

}  // namespace

// Returns 0, or 1 with job->err set.
extern "C" int sm70sim_time(Job* job) {
  Config f;
  for (u32 i = 0; i < job->n_values; i++)
    if (!f.set(job->names[i], job->values[i])) {
      snprintf(job->err, sizeof job->err, "the model has no parameter %s", job->names[i]);
      return 1;
    }
  if (const char* name = f.missing()) {
    snprintf(job->err, sizeof job->err, "parameter %s is not set", name);
    return 1;
  }
  L2Contents cold;
  Machine m(*job, f, job->l2 ? *job->l2 : cold);
  return m.run() ? 0 : 1;
}
extern "C" L2Contents* sm70sim_l2_new(const L2Contents* from) {
  return from ? new L2Contents(*from) : new L2Contents();
}
extern "C" void sm70sim_l2_free(L2Contents* l2) { delete l2; }
