// Hazards on shared memory: two warps of a block touch the same byte, at least one of them
// writes, and no barrier orders the two.
//
// Vector clocks: clock[a][b] is how far warp a has seen warp b's accesses.  Arriving at a barrier
// gives away what a warp has seen, leaving it takes what all who arrived have seen; so BAR.ARV
// orders a producer before its consumers and not the other way round.  The lanes of a warp are
// taken as ordered, and so are atomic operations among themselves.
#pragma once
#include "base.h"

struct Races {
  enum Kind { kRead, kWrite, kAtomic };

  Races(u32 warps, u32 bytes);
  void access(const Warp& w, u32 idx, u32 lane, u32 address, u32 n, Kind kind);
  void arrive(u32 warp, u32 barrier);  // before the warp goes on or waits
  void leave(u32 warp, u32 barrier);   // a warp that waited goes on
  void opened(u32 barrier);            // all who waited have left

 private:
  struct Write {
    u32 time, idx;  // the writer's clock; the instruction
    u8 warp;
    bool atomic;
  };
  struct Read {
    u32 time, idx;
  };
  u32& clock(u32 a, u32 b) { return clocks_[a * warps_ + b]; }
  u32 warps_;
  std::vector<u32> clocks_, barriers_;
  std::vector<Write> writes_;  // per byte
  std::vector<Read> reads_;    // per byte and warp
};
