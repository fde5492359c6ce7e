#include "races.h"

#include <algorithm>

Races::Races(u32 warps, u32 bytes)
    : warps_(warps),
      clocks_(warps * warps),
      barriers_(kBarriers * warps),
      writes_(bytes),
      reads_((size_t)bytes * warps) {
  for (u32 i = 0; i < warps; i++) clock(i, i) = 1;  // time 0: never
}

[[noreturn]] static void report(u32 idx, u32 lane, u32 address, const char* how, u32 warp,
                                u32 other) {
  static char text[200];
  snprintf(text, sizeof text, "no barrier after warp %u %s (at 0x%x: \"%.60s\") shared address",
           warp, how, other * 16, kernel_text[other]);
  fault_at(idx, lane, text, address);
}

void Races::access(const Warp& w, u32 idx, u32 lane, u32 address, u32 n, Kind kind) {
  const u32 me = w.wid, now = clock(me, me);
  for (u32 a = address; a < address + n; a++) {
    Write& last = writes_[a];
    Read* read = &reads_[(size_t)a * warps_];
    if (last.time > clock(me, last.warp) && !(kind == kAtomic && last.atomic))
      report(idx, lane, a, "wrote", last.warp, last.idx);
    if (kind == kRead) {
      read[me] = {now, idx};
      continue;
    }
    for (u32 other = 0; other < warps_; other++)
      if (read[other].time > clock(me, other)) report(idx, lane, a, "read", other, read[other].idx);
    last = {now, idx, (u8)me, kind == kAtomic};
  }
}

void Races::arrive(u32 warp, u32 barrier) {
  for (u32 i = 0; i < warps_; i++) {
    u32& seen = barriers_[barrier * warps_ + i];
    seen = std::max(seen, clock(warp, i));
  }
  clock(warp, warp)++;
}

void Races::leave(u32 warp, u32 barrier) {
  for (u32 i = 0; i < warps_; i++)
    if (i != warp) clock(warp, i) = std::max(clock(warp, i), barriers_[barrier * warps_ + i]);
}

void Races::opened(u32 barrier) { std::fill_n(barriers_.begin() + barrier * warps_, warps_, 0u); }
