// L1, L2 and DRAM.  A request books its place at each port that it passes: a port that is busy
// until t serves it from t on.  So bandwidth and queueing need no events of their own.
#pragma once
#include <algorithm>
#include <vector>

#include "config.h"

struct Line {
  u64 tag = ~0ull, used = 0;    // used: age of the last access
  u32 valid = 0, dirty = 0;     // masks of the four 32-byte sectors
  u64 ready[4] = {0, 0, 0, 0};  // cycle at which each arrives
};

class Cache {
 public:
  void init(u32 sets, u32 ways) {
    sets_ = sets, ways_ = ways, lines_.assign((size_t)sets * ways, Line());
  }
  u32 sets() const { return sets_; }
  Line* find(u64 tag, u32 set) {
    Line* p = &lines_[(size_t)set * ways_];
    for (u32 i = 0; i < ways_; i++)
      if (p[i].tag == tag) return p + i;
    return nullptr;
  }
  Line* least_recent(u32 set) {
    Line *p = &lines_[(size_t)set * ways_], *best = p;
    for (u32 i = 1; i < ways_; i++)
      if (p[i].used < best->used) best = p + i;
    return best;
  }
  std::vector<Line>& lines() { return lines_; }

 private:
  u32 sets_ = 0, ways_ = 0;
  std::vector<Line> lines_;
};

struct MemoryCounts {
  u64 l2_sectors, l2_hits, l2_written, dram_read, dram_written;
};

// The contents of L2: what one launch leaves to the next.
struct L2Contents {
  std::vector<Cache> slices;
  u64 age = 0;
};

class MemorySystem {
 public:
  MemorySystem(const Config& f, L2Contents& l2, MemoryCounts& counts);
  // One 128-byte line (its number) with the sectors of `mask`, which leaves SM `sm` at `at`.
  // Returns the cycle at which the SM has all of them (loads, atomics), or L2 has them (stores).
  enum Kind { kLoad, kStore, kAtomic };
  u64 access(u32 sm, u64 line, u32 mask, double at, Kind kind, u32 lanes);
  void warm(u64 address, u64 nbytes);

 private:
  void place(u64 line, u32& slice, u32& set) const;
  const Config& f_;
  const double channel_sector_;
  L2Contents& l2_;
  MemoryCounts& n_;
  std::vector<double> slice_free_, channel_free_, return_free_;  // per slice, channel, SM
};
