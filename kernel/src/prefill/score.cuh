// Warps 0-3: S = Q K^T, the softmax, and P in FP16 to shared memory.
//
// A warp owns kRows / 4 rows for all positions.  Its Q stays in registers: the four quadpairs have
// a quarter of the dims each, so that no element is held twice, and 24 (12) shuffles a group of 8
// tokens add the quarters.  K is fetched and converted by these warps, 8 tokens each, one step
// ahead, and lies in shared memory as FP16; one 128-bit load of it feeds 2 * kScoreTiles mma.
#pragma once

#include "prefill/schedule.cuh"

namespace sm70 {

#define kNothing __int_as_float(0xff800000)  // minus infinity: a score that does not count
constexpr float kLazy = 8.f;                 // log2 of the growth of a maximum that is let pass

// K of the score warps: 8-byte units from global memory, FP16 to shared memory.
template <class S>
struct KeyStage {
  using Kv = typename S::Kv;
  static constexpr int kUnits = S::kD * Kv::kBytes / 8;  // of a token
  static constexpr int kFetch = kUnits / 4;  // units of a lane and step: 8 tokens a warp
  uint2 raw[kFetch];
  const u8* source;  // of unit 0 of this lane in the step that is fetched
  u32 target;        // place of unit 0 in buffer 0

  // Row and unit of fetch j, relative to this lane's first.
  static __device__ __forceinline__ int row(int lane, int j) {
    return kUnits >= 32 ? j / (kUnits / 32) : j * (32 / kUnits) + lane / kUnits;
  }
  static __device__ __forceinline__ int unit(int lane, int j) {
    return kUnits >= 32 ? j % (kUnits / 32) * 32 + lane : lane % kUnits;
  }
  __device__ __forceinline__ void fetch(int lane, int j, int token_bytes) {
    raw[j] = load_stream64(source + row(lane, j) * token_bytes + unit(lane, j) * 8);
  }
  __device__ __forceinline__ void store(u32 buffer, int warp, int lane, int j) {
    const int r = warp * 8 + row(lane, j), u = unit(lane, j);
    if constexpr (Kv::kBytes == 1) {
      const uint2 lo = Kv::quad(raw[j].x), hi = Kv::quad(raw[j].y);
      store_shared128(buffer + r * S::kKeyRow + key_chunk<S::kD>(r, u) * 16,
                      make_uint4(lo.x, lo.y, hi.x, hi.y));
    } else {
      store_shared64(buffer + r * S::kKeyRow + key_chunk<S::kD>(r, u >> 1) * 16 + (u & 1) * 8,
                     raw[j]);
    }
  }
};

// Scores of a step to probabilities, for the rows of one score warp. The probabilities of a step
// are computed in pieces between the mma of the next step.
//
// A lane has rows first + 8 r and first + 8 r + 2 of row tile r, and of every 8 tokens the four at
// 4 * half + (t & 2) + {0, 1} of two rows: s[j][r][i] is row + (i & 2), token 8 j + ... + (i & 1).
template <class S>
struct Softmax {
  static constexpr int NT = S::kScoreTiles, NG = S::kStep / 8;
  const PrefillArgs& a;
  const PrefillTile& tile;
  u32 smem, write, flip;
  int lane, warp, first, half;
  float s[NG][NT / 2][4];
  // Of row 8 (r >> 1) + 2 (r & 1): maximum in log2 units, sum, and largest score of the step.
  float m[NT], l[NT], top[NT];

  __device__ __forceinline__ Softmax(const PrefillArgs& a, const PrefillTile& tile, u32 smem,
                                     int tid)
      : a(a), tile(tile), smem(smem), lane(tid & 31), warp(tid >> 5) {
    const int t = lane & 3, quad = lane >> 2 & 3, g = lane >> 4, swap = (quad & 1) * (NT / 2);
    first = warp * (8 * NT) + 8 * swap + (t & 1) + 4 * g;
    half = quad >> 1;
    // Rows of every other half of the tiles are stored with bit 1 flipped, so that the 32 words of
    // a store lie in 32 banks.
    write = smem + S::kProbOffset + (warp * NT + swap) * S::kProbTile + ((t & 1) + 4 * g) * 16 +
            half * 8 + (t & 2) * 2;
    flip = (quad & 1) * 32;
#pragma unroll
    for (int r = 0; r < NT; r++) m[r] = -1e30f, l[r] = 0.f, top[r] = kNothing;
#pragma unroll
    for (int i = 0; i < NG * NT * 2; i++) s[i / (NT * 2)][i / 4 % (NT / 2)][i & 3] = kNothing;
  }

  // One score, complete.
  __device__ __forceinline__ void take(int j, int r, int i, float x) {
    s[j][r][i] = x;
    top[2 * r + (i >> 1)] = fmaxf(top[2 * r + (i >> 1)], x);
  }

  // Masks, and decides on the maxima that the probabilities of `step` are relative to. They stay
  // as they are until a score exceeds one by kLazy: P is at most 2^kLazy then.
  __device__ __forceinline__ void settle(int step) {
    const int buffer = step & 1;
    if (step >= tile.full_steps) {
      const int row = tile.first_row + opaque(first);
      const int position = step * S::kStep + 4 * opaque(half) + (opaque(lane) & 2);
#pragma unroll
      for (int r = 0; r < NT; r++) {
        const int token = divide(row + 8 * (r >> 1) + 2 * (r & 1), a.group_magic);
        const int limit = min(tile.past + token, tile.len - 1) - position;
#pragma unroll
        for (int j = 0; j < NG; j++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (8 * j + i > limit) s[j][r >> 1][(r & 1) * 2 + i] = kNothing;
        top[r] = kNothing;
#pragma unroll
        for (int j = 0; j < NG; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) top[r] = fmaxf(top[r], s[j][r >> 1][(r & 1) * 2 + i]);
      }
    }
    bool grow = false;
#pragma unroll
    for (int r = 0; r < NT; r++) grow |= fmaf(top[r], a.qk_scale, -m[r]) > kLazy;
    grow = __any_sync(~0u, grow);
    // The value warps are done with this buffer.
    if (step >= 2) barrier_sync_pair<kEmpty, kPrefillThreads>(buffer);
    if (grow) {  // rare: new maxima, and factors for what has been summed so far
      const u32 factor = smem + S::kFactorOffset + buffer * (S::kRows * 4) + opaque(first) * 4;
#pragma unroll
      for (int r = 0; r < NT; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 8));
        const float now = fmaxf(m[r], top[r] * a.qk_scale);
        const float f = exp2_fast(m[r] - now);
        m[r] = now;
        l[r] *= f;
        // four lanes have the same row and write the same
        store_shared32(factor + (8 * (r >> 1) + 2 * (r & 1)) * 4, __float_as_uint(f));
      }
    }
    if (lane == 0) store_shared32(smem + S::kFlagOffset + (buffer * 4 + warp) * 4, grow);
#pragma unroll
    for (int r = 0; r < NT; r++) top[r] = kNothing;
  }

  // Probabilities of one row, two tokens of group k / NT.
  __device__ __forceinline__ void piece(int step, int k) {
    const int j = k / NT, r = k % NT;
    const float x0 = exp2_fast(fmaf(s[j][r >> 1][(r & 1) * 2], a.qk_scale, -m[r]));
    const float x1 = exp2_fast(fmaf(s[j][r >> 1][(r & 1) * 2 + 1], a.qk_scale, -m[r]));
    l[r] += x0 + x1;
    store_shared32(write + (step & 1) * S::kProbBytes + j * S::kProbGroup +
                       (r >> 1) * S::kProbTile + (((r & 1) * 32) ^ flip),
                   pack_halves(x0, x1));
  }

  // What the value warps multiply by at the end. Rows that saw nothing give zeros.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < NT; r++) {
      l[r] += __shfl_xor_sync(~0u, l[r], 2);
      l[r] += __shfl_xor_sync(~0u, l[r], 8);
      const float inverse = l[r] != 0.f ? a.out_scale / l[r] : 0.f;  // NaN stays NaN
      store_shared32(smem + S::kInverseOffset + (opaque(first) + 8 * (r >> 1) + 2 * (r & 1)) * 4,
                     __float_as_uint(inverse));
    }
  }
};

template <class S>
__device__ __forceinline__ void score_role(const PrefillArgs& a, const PrefillTile& tile,
                                           int kv_head, u32 smem, int tid) {
  using Kv = typename S::Kv;
  constexpr int NT = S::kScoreTiles, NC = S::kScoreChunks, NG = S::kStep / 8;
  const int lane = tid & 31, warp = tid >> 5, t = lane & 3, quad = lane >> 2 & 3, g = lane >> 4;
  // Quadpairs with an odd number hold the row tiles, those with an upper number the tokens, in
  // swapped halves: so every lane keeps the first half of its registers when the quarters are
  // added.
  const int tile_swap = (quad & 1) * (NT / 2), token_swap = quad >> 1;

  KeyStage<S> key;
  PageWalk walk(a, tile);
  const u8* k_base = a.k + kv_head * a.k_head_stride + (warp & 1) * 8ll * a.k_token_stride;
  auto ask = [&](int step) { walk.ask(step * (S::kStep / 16) + (warp >> 1)); };
  auto go = [&] { key.source = walk.at(k_base, a.k_page_stride, a.k_token_stride); };
  ask(0);
  go();
#pragma unroll
  for (int j = 0; j < key.kFetch; j++) key.fetch(lane, j, a.k_token_stride);
  ask(1);

  // Q: row tile r of this lane, 4 dims a fragment, in the order in which K is expanded.
  u32 q[NT][NC * 2][2];
#pragma unroll
  for (int r = 0; r < NT; r++) {
    const int row = tile.first_row + warp * (8 * NT) + 8 * (r ^ tile_swap) + t + 4 * g;
    const int token = divide(row, a.group_magic), head = row - token * a.group;
    const bool live = row < tile.rows;
    const __half* p = static_cast<const __half*>(a.q) +
                      (tile.first_token + token) * a.q_token_stride +
                      (kv_head * a.group + head) * a.q_head_stride + quad * (S::kD / 4);
#pragma unroll
    for (int c = 0; c < NC * 2; c++) {
      uint2 x = make_uint2(0, 0);
      if (live) x = load_cached64(p + c * 4);
      q[r][c][0] = Kv::kEvenOddQuads ? __byte_perm(x.x, x.y, 0x5410) : x.x;
      q[r][c][1] = Kv::kEvenOddQuads ? __byte_perm(x.x, x.y, 0x7632) : x.y;
    }
  }

#pragma unroll
  for (int j = 0; j < key.kFetch; j++) key.store(smem + S::kKeyOffset, warp, lane, j);
  go();
#pragma unroll
  for (int j = 0; j < key.kFetch; j++) key.fetch(lane, j, a.k_token_stride);
  ask(2);
  barrier_sync<kScore, 128>();

  // Its K row of a group of 8 tokens.
  const int key_row = t + 4 * (g ^ token_swap);
  const u32 key_read = smem + S::kKeyOffset + key_row * S::kKeyRow;
  Softmax<S> soft(a, tile, smem, tid);

  float acc[2][NT][8];  // of a group of 8 tokens, and of the one before
#pragma unroll
  for (int i = 0; i < NT * 8; i++) acc[(NG - 1) & 1][i >> 3][i & 7] = kNothing;
  // Adds the quarters of group j: first half of the tiles of lane ^ 4, first half of the tokens of
  // lane ^ 8. In 12 parts.
  auto add = [&](int j, int part) {
    const int i = part & 7;
#pragma unroll
    for (int r = 0; r < NT / 2; r++) {
      float (&own)[8] = acc[j & 1][r];
      if (part < 8)
        own[i] += __shfl_xor_sync(~0u, acc[j & 1][r + NT / 2][i], 4);
      else
        soft.take(j, r, i, own[i] + __shfl_xor_sync(~0u, own[i + 4], 8));
    }
  };

#pragma unroll 1
  for (int step = 0; step < tile.steps; step++) {
    const u32 keys = key_read + (step & 1) * S::kKeyBytes;
    const u32 staging = smem + S::kKeyOffset + (~step & 1) * S::kKeyBytes;
    auto chunk = [&](int n) {
      return load_shared128(keys + n / NC * 8 * S::kKeyRow +
                            key_chunk<S::kD>(key_row, quad * NC + n % NC) * 16);
    };
    // The chunks of a step, and what is done between their mma: the last quarters of the step
    // before, until kSettle; its P, in kSlots; the quarters of the group before; K of the next
    // step.
    constexpr int kAhead = NT > 2 ? 2 : 3, kTotal = NG * NC;
    constexpr int kSettle = NC / 2, kSlots = kTotal / 2, kPieces = NG * NT;
    uint4 x[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) x[n] = chunk(n);
    go();
    ask(step + 3);
#pragma unroll
    for (int n = 0; n < kTotal; n++) {
      const int j = n / NC, c = n % NC;
      if (c == 0) {
#pragma unroll
        for (int i = 0; i < NT * 8; i++) acc[j & 1][i >> 3][i & 7] = 0.f;
      }
      const uint4 y = x[n % kAhead];
#pragma unroll
      for (int r = 0; r < NT; r++)
        mma_row_col(acc[j & 1][r], q[r][2 * c][0], q[r][2 * c][1], y.x, y.y);
#pragma unroll
      for (int r = 0; r < NT; r++)
        mma_row_col(acc[j & 1][r], q[r][2 * c + 1][0], q[r][2 * c + 1][1], y.z, y.w);
      if (n + kAhead < kTotal) x[n % kAhead] = chunk(n + kAhead);
      if (n < kSettle) {
#pragma unroll
        for (int part = n * 12 / kSettle; part < (n + 1) * 12 / kSettle; part++) add(NG - 1, part);
        if (n + 1 == kSettle && step > 0) soft.settle(step - 1);
      } else if (n < kSettle + kSlots) {
        const int slot = n - kSettle;
#pragma unroll
        for (int k = slot * kPieces / kSlots; k < (slot + 1) * kPieces / kSlots; k++)
          soft.piece(step - 1, k);
        if (slot + 1 == kSlots && step > 0) barrier_arrive_pair<kFull, kPrefillThreads>(~step & 1);
      }
      if (j > 0) {
#pragma unroll
        for (int part = c * 12 / NC; part < (c + 1) * 12 / NC; part++) add(j - 1, part);
      }
#pragma unroll
      for (int f = n * key.kFetch / kTotal; f < (n + 1) * key.kFetch / kTotal; f++) {
        key.store(staging, warp, lane, f);
        key.fetch(lane, f, a.k_token_stride);
      }
    }
    barrier_sync<kScore, 128>();  // K of the next step is complete
  }
  if (tile.steps > 0) {
#pragma unroll
    for (int part = 0; part < 12; part++) add(NG - 1, part);
    soft.settle(tile.steps - 1);
#pragma unroll
    for (int k = 0; k < NG * NT; k++) soft.piece(tile.steps - 1, k);
    barrier_arrive_pair<kFull, kPrefillThreads>(~tile.steps & 1);
  }
  soft.finish();
  barrier_arrive<kSums, kPrefillThreads>();
}

}  // namespace sm70
