// State of the streaming multiprocessors.
#pragma once
#include <array>
#include <vector>

#include "caches.h"
#include "trace.h"

// Why a sub-core could not issue; in the order of STALLS in timing.py.
enum Why : u8 {
  kFixed,
  kLongScoreboard,
  kShortScoreboard,
  kPipeBusy,
  kMemoryQueue,
  kBarrierWait,
  kBranch,
  kInstructionCache,
  kFence,
  kWhys
};

constexpr int kScoreboards = 6;

struct Warp {
  const u32 *at, *end;           // its words of the trace
  u32 idx, left, act;            // instruction, instructions left in the block of code, lanes
  u64 next;                      // when its next instruction may issue
  u64 ready[kScoreboards];       // when a scoreboard is released
  u64 ready_hmma[kScoreboards];  // the same for a waiting HMMA: sums are forwarded
  bool is_long[kScoreboards];    // a load from L1, L2 or DRAM
  u64 issued;                    // when the instruction before issued
  u64 stores_done;
  u32 forwarded;  // HMMA sets so far, to spread fractions of a cycle
  u32 fetched;    // 128-byte line of code
  u32 sub, cta, barrier;
  bool waits, done;
  Why why;
};

struct CtaState {
  bool used;
  u32 warps, left;
  u32 arrived[16], expected[16];
  std::vector<u32> members;
};

// A fixed number of places; a new entry needs the oldest to be over.
class Ring {
 public:
  void init(size_t n) { t_.assign(n, 0), at_ = 0; }
  u64 oldest() const { return t_[at_]; }
  void push(u64 t) { t_[at_] = t, at_ = (at_ + 1) % t_.size(); }

 private:
  std::vector<u64> t_;
  size_t at_ = 0;
};

struct SubCore {
  std::vector<u32> warps;  // oldest first
  u32 last;                // place of the warp that issued last
  u64 next;                // ~0: nothing to do until a barrier opens or a block starts
  u64 pipe_free[kPipes];
  Ring mio;
  std::vector<u32> code;  // lines in the L0 instruction cache, last used first
  u64 fetch_free;
};

struct Sm {
  std::vector<Warp> warps;
  std::vector<CtaState> ctas;
  std::array<SubCore, 4> sub;
  u64 memory_pipe_free;
  double request_free;
  Cache l1;
  Ring loads, stores;
  u32 n_warps, n_ctas, n_registers, n_shared, turn;
};
