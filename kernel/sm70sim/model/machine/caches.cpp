#include "caches.h"

MemorySystem::MemorySystem(const Config& f, L2Contents& l2, MemoryCounts& counts)
    : f_(f), channel_sector_(f.channel_sector()), l2_(l2), n_(counts) {
  slice_free_.assign((size_t)f.machine_l2_slices, 0);
  channel_free_.assign((size_t)f.machine_channels, 0);
  return_free_.assign((size_t)f.machine_sms, 0);
  if (l2_.slices.size() != slice_free_.size()) {
    l2_.slices.assign(slice_free_.size(), Cache());
    for (Cache& c : l2_.slices) c.init((u32)f.l2_sets, (u32)f.l2_ways);
    l2_.age = 0;
  }
  for (Cache& c : l2_.slices)
    for (Line& l : c.lines()) std::fill(l.ready, l.ready + 4, 0);
}

// Lines are spread over the slices by a hash, so that no stride meets one slice only.
void MemorySystem::place(u64 line, u32& slice, u32& set) const {
  u64 slices = l2_.slices.size(), group = line / slices, x = group;
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 29, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 32;
  slice = (u32)((line + x) % slices);
  set = (u32)(group % (u64)f_.l2_sets);
}

u64 MemorySystem::access(u32 sm, u64 line, u32 mask, double at, Kind kind, u32 lanes) {
  u32 slice, set, sectors = (u32)__builtin_popcount(mask);
  place(line, slice, set);
  double& slice_free = slice_free_[slice];
  double& channel = channel_free_[slice * channel_free_.size() / slice_free_.size()];
  double start = std::max(at + f_.l2_crossbar, slice_free);
  if (kind != kLoad) start = std::max(start, channel - f_.dram_write_queue);
  slice_free = start + f_.l2_sector * sectors + (kind == kAtomic ? lanes * f_.l2_atomic_lane : 0);
  n_.l2_sectors += sectors;

  Cache& cache = l2_.slices[slice];
  Line* l = cache.find(line, set);
  if (!l) {
    l = cache.least_recent(set);
    if (l->dirty) {  // write back
      u32 n = (u32)__builtin_popcount(l->dirty);
      channel = std::max(channel, start) + channel_sector_ * n * f_.dram_write_cost;
      n_.dram_written += n;
    }
    l->tag = line;
    l->valid = l->dirty = 0;
  }
  l->used = ++l2_.age;

  double done = slice_free;
  for (u32 s = 0; s < 4; s++) {
    if (!(mask >> s & 1)) continue;
    if (l->valid >> s & 1) {
      n_.l2_hits++;
      done = std::max(done, (double)l->ready[s]);
    } else if (kind == kStore) {  // a written sector is not fetched
      l->ready[s] = (u64)start;
    } else {
      double from = std::max(start + f_.dram_latency * 0.3, channel);
      channel = from + channel_sector_;
      double there = channel + f_.dram_latency * 0.7;
      l->ready[s] = (u64)there;
      done = std::max(done, there);
      n_.dram_read++;
    }
    l->valid |= 1u << s;
    if (kind != kLoad) l->dirty |= 1u << s;
  }
  if (kind == kStore) {
    n_.l2_written += sectors;
    return (u64)(start + f_.l2_latency + f_.l2_crossbar);
  }
  double& port = return_free_[sm];
  port = std::max(done + f_.l2_latency, port) + f_.l1_return_sector * sectors;
  return (u64)(port + f_.l2_crossbar);
}

void MemorySystem::warm(u64 address, u64 nbytes) {
  for (u64 line = address >> 7; nbytes && line <= (address + nbytes - 1) >> 7; line++) {
    u32 slice, set;
    place(line, slice, set);
    Cache& cache = l2_.slices[slice];
    Line* l = cache.find(line, set);
    if (!l) {
      l = cache.least_recent(set);
      *l = Line();
      l->tag = line;
    }
    l->valid = 15;
    l->used = ++l2_.age;
  }
}
