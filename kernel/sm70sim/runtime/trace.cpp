// Trace records (trace.h) and the sector and wavefront counts of a traced run.
#include "trace.h"

#include <algorithm>

#include "memory.h"

void trace_global(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, u32 bytes) {
  u64 line[64];
  u32 sectors[64], nlanes[64], n = 0, total = 0;
  FORL(m) {
    u64 a = ad[l] >> 7;
    u32 j = n;
    while (j > 0 && line[j - 1] != a) j--;  // the last line first: lanes are mostly in order
    if (j == 0) {
      line[n] = a, sectors[n] = nlanes[n] = 0, j = ++n;
    }
    sectors[j - 1] |= 1u << (ad[l] >> 5 & 3);
    nlanes[j - 1]++;
  }
  w.trace.push_back(n);
  for (u32 j = 0; j < n; j++) {
    u64 v = line[j] << 12 | nlanes[j] << 4 | sectors[j];
    w.trace.push_back((u32)v);
    w.trace.push_back((u32)(v >> 32));
    total += (u32)__builtin_popcount(sectors[j]);
  }
  c.p->lanes[idx] += (u32)__builtin_popcount(m);
  c.p->sectors[idx] += total;
  (void)bytes;
}
// Wavefronts: lanes are served in groups that ask for at most 128 bytes (32, 16 or 8 lanes);
// within a group every bank gives one word at a time, the same word to all who want it.
static u32 wavefronts(const u64* ad, u32 m, u32 bytes) {
  u32 per = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8, total = 0;
  for (u32 g = 0; g < 32; g += per) {
    u32 group = m & (per == 32 ? ~0u : ((1u << per) - 1) << g), words[32], k = 0;
    if (!group) continue;
    FORL(group) for (u32 b = 0; b < bytes; b += 4) words[k++] = (u32)(ad[l] + b) >> 2;
    bool sorted = true;
    for (u32 i = 1; i < k; i++)
      if (words[i] <= words[i - 1]) {
        sorted = false;
        break;
      }
    if (!sorted) {
      std::sort(words, words + k);
      k = (u32)(std::unique(words, words + k) - words);
    }
    u8 bank[32] = {0};
    u32 worst = 0;
    for (u32 i = 0; i < k; i++) worst = std::max<u32>(worst, ++bank[words[i] & 31]);
    total += worst;
  }
  return total ? total : 1;
}
void trace_shared(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, u32 bytes, bool generic) {
  u32 n = wavefronts(ad, m, bytes);
  w.trace.push_back(n | (generic ? kTraceShared : 0));
  c.p->lanes[idx] += (u32)__builtin_popcount(m);
  c.p->sectors[idx] += n;
}
void trace_local(Ctx& c, Warp& w, u32 idx, u32 m, u32 bytes, bool generic) {
  u32 n = ((u32)__builtin_popcount(m) * bytes + 127) / 128;
  w.trace.push_back(n | (generic ? kTraceLocal : 0));
  c.p->lanes[idx] += (u32)__builtin_popcount(m);
  c.p->sectors[idx] += n;
}
void trace_emit(FILE* f, const Cta& t) {
  u32 head[3] = {kTraceMagic, t.id, (u32)t.w.size()};
  fwrite(head, 4, 3, f);
  for (const Warp& w : t.w) {
    u32 h[2] = {w.ninstrs, (u32)w.trace.size()};
    fwrite(h, 4, 2, f);
    fwrite(w.trace.data(), 4, w.trace.size(), f);
  }
}
