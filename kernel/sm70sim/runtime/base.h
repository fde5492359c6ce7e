// Types shared by the translated kernel, the runtime and (through ctypes) Python:
// launch parameters, warps, thread blocks, and how a fault is reported.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

#define INL static inline __attribute__((always_inline))
#define NOINL __attribute__((noinline))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

constexpr int kBarriers = 16;     // CTA barriers of a block
constexpr int kConvergence = 17;  // convergence barriers B0..B15 of a warp; 16 is WARPSYNC
constexpr int kConstBanks = 18;

typedef u32 Row[32];  // one register of a warp, one word per lane

enum Space : u8 { kNoSpace = 0, kGlobal = 1, kShared = 2, kLocal = 3 };

// Mirrored by ctypes in module.py: keep the two in step.
struct Params {
  u32 grid[3], block[3];
  u32 smem_bytes, local_bytes, nregs, cta_begin, cta_end, max_live;
  u8* gmem;          // simulated global memory
  u64 gbase, gsize;  // its device address and size in bytes
  u8* ginit;         // 1 per initialised byte of it; NULL: not tracked
  const u8* cb[kConstBanks];
  u32 cbsize[kConstBanks];
  u64 quantum;  // instructions a warp may run before it must give way
  u64 *count, *lanes,
      *sectors;  // per instruction: warp executions; traced runs: lanes, sectors or wavefronts
  const char* trace_path;  // NULL: no trace file
  u64 max_insts;           // 0: no limit
  u32 reverse;             // 1: the warps of a block run last to first
  u32 trace;               // 1: record every instruction (for trace_path and sectors)
  u32 races;               // 1: hazards on shared memory are faults
  char err[512];
};

struct Split {
  u32 pc, mask;
};  // threads of a warp that run together, and where
struct Cta;
struct Races;

struct Warp {
  Row* R;
  u32 P[8];
  u32 pc;         // where the running split goes on
  bool gave_way;  // the split that ended was put back to let others run
  u32 live;       // lanes that have not exited
  u32 wid;
  Cta* cta;
  u32 bm[kConvergence][32];   // per lane: mask of its group
  u32 blocked[kConvergence];  // lanes that wait at it
  u32 bpc[kConvergence][32];  // per lane: where it goes on
  std::vector<Split> ready;
  u32 red_count, red_and, red_or;  // result of the last BAR.RED
  u32 red_kind;                    // 0 popc, 1 and, 2 or
  u8* local;
  u8* local_init;
  std::vector<u32> trace;  // words, see trace.cpp
  u32 ninstrs, yields;
};

struct BarState {  // one CTA barrier
  bool used;
  u32 expected;  // threads; 0: all of the block
  u32 pop, all, any;
  std::vector<u32> arrived;  // per warp: lanes
};
struct BarWait {
  u32 id, pc, mask;
};

struct Cta {
  u32 id, ctaid[3];
  u8 *smem, *smem_init;
  u8 *local, *local_init;
  Row* regs;
  std::vector<Warp> w;
  BarState bar[kBarriers];
  std::vector<std::vector<BarWait>> waiting;  // per warp
  Races* races;                               // NULL: hazards are not looked for
};

struct Ctx {
  Params* p;
  u8* gmem;
  u64 gbase, gsize;
  const u8* cb[kConstBanks];
  u32 smem_bytes, local_bytes;
  Cta* cta;
  u64 total;  // warp instructions so far
  bool tracing;
};

// ---- what the translated file provides
// A block is straight-line code: it runs the lanes `act` and returns those that go on at
// w.pc (0: the split has ended, waits or was put into w.ready).
typedef u32 BlockFn(Ctx& c, Warp& w, u32 act);
struct Block {
  BlockFn* run;
  u32 pc, len;
};  // len: instructions
extern const Block kernel_blocks[];
extern const u32 kernel_nblocks, kernel_ninstrs;
extern const char* const kernel_text[];  // per instruction

// End the launch: Python raises SimError with the message.
struct Fault {};
[[noreturn]] void fault(const char* fmt, u64 a = 0, u64 b = 0, u64 c = 0);
[[noreturn]] void fault_at(u32 idx, u32 lane, const char* what, u64 value);
