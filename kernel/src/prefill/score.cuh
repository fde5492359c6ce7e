// Warps 0-3: S = Q K^T, the softmax, and P in FP16 to shared memory.
//
// A warp owns kRows / 4 rows for all positions.  Its Q stays in registers: the four quadpairs have
// a quarter of the dims each, so that no element is held twice, and 24 (12) shuffles a group of 8
// tokens add the quarters.  K is fetched and converted by these warps, 8 tokens each, one step
// ahead, and lies in shared memory as FP16; one 128-bit load of it feeds 2 * kScoreTiles mma.
#pragma once

#include "prefill/schedule.cuh"

namespace sm70 {

constexpr float kLazy = 8.f;  // log2 of the growth of a maximum that is let pass

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

  // This lane's two rows of row tile r < NT / 2 are first + 8 r and + 2.
  const int first = warp * (8 * NT) + 8 * tile_swap + (t & 1) + 4 * g;
  // Its K row of a group of 8, and its P words: rows of every other half of the tiles are stored
  // with bit 1 flipped, so that the 32 words of a store lie in 32 banks.
  const int key_row = t + 4 * (g ^ token_swap);
  const u32 key_read = smem + S::kKeyOffset + key_row * S::kKeyRow;
  const u32 p_write = smem + S::kProbOffset + (warp * NT + tile_swap) * S::kProbTile +
                      ((t & 1) + 4 * g) * 16 + token_swap * 8 + (t & 2) * 2;
  const u32 p_flip = (quad & 1) * 32;

  float m[NT], l[NT];
#pragma unroll
  for (int r = 0; r < NT; r++) m[r] = -1e30f, l[r] = 0.f;

#pragma unroll 1
  for (int step = 0; step < tile.steps; step++) {
    const int buffer = step & 1;
    const u32 keys = key_read + buffer * S::kKeyBytes;
    const u32 staging = smem + S::kKeyOffset + (buffer ^ 1) * S::kKeyBytes;
    auto chunk = [&](int n) {
      return load_shared128(keys + n / NC * 8 * S::kKeyRow +
                            key_chunk<S::kD>(key_row, quad * NC + n % NC) * 16);
    };
    go();
    ask(step + 3);

    float s[NG][NT / 2][4];
    float acc[2][NT][8];
    // Adds the quarters of group j: first half of the tiles of lane ^ 4, first half of the tokens
    // of lane ^ 8.
    auto add_tiles = [&](int j, int i) {
#pragma unroll
      for (int r = 0; r < NT / 2; r++)
        acc[j & 1][r][i] += __shfl_xor_sync(~0u, acc[j & 1][r + NT / 2][i], 4);
    };
    auto add_tokens = [&](int j, int i) {
#pragma unroll
      for (int r = 0; r < NT / 2; r++)
        s[j][r][i] = acc[j & 1][r][i] + __shfl_xor_sync(~0u, acc[j & 1][r][i + 4], 8);
    };
    auto add = [&](int j, int part) {  // 12 parts
      if (part < 8)
        add_tiles(j, part);
      else if (part < 12)
        add_tokens(j, part - 8);
    };

    constexpr int kAhead = 3, kTotal = NG * NC;
    uint4 x[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) x[n] = chunk(n);
#pragma unroll
    for (int j = 0; j < NG; j++) {
#pragma unroll
      for (int r = 0; r < NT; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[j & 1][r][i] = 0.f;
#pragma unroll
      for (int c = 0; c < NC; c++) {
        const int n = j * NC + c;
        const uint4 y = x[n % kAhead];
#pragma unroll
        for (int r = 0; r < NT; r++)
          mma_row_col(acc[j & 1][r], q[r][2 * c][0], q[r][2 * c][1], y.x, y.y);
#pragma unroll
        for (int r = 0; r < NT; r++)
          mma_row_col(acc[j & 1][r], q[r][2 * c + 1][0], q[r][2 * c + 1][1], y.z, y.w);
        if (n + kAhead < kTotal) x[n % kAhead] = chunk(n + kAhead);
        // Between the mma: the quarters of the group before, and K of the next step.
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
    }
#pragma unroll
    for (int part = 0; part < 12; part++) add(NG - 1, part);

    // s[j][r][i]: row first + 8 r + (i & 2), position 32 step + 8 j + 4 token_swap + (t & 2) + (i &
    // 1)
    if (step >= tile.full_steps) {
      const int row = tile.first_row + opaque(first);
      const int position = step * S::kStep + 4 * opaque(token_swap) + (opaque(t) & 2);
#pragma unroll
      for (int r = 0; r < NT; r++) {
        const int token = divide(row + 8 * (r >> 1) + 2 * (r & 1), a.group_magic);
        const int limit = min(tile.past + token, tile.len - 1) - position;
#pragma unroll
        for (int j = 0; j < NG; j++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (8 * j + i > limit) s[j][r >> 1][(r & 1) * 2 + i] = __int_as_float(0xff800000);
      }
    }
    float top[NT];
    bool grow = false;
#pragma unroll
    for (int r = 0; r < NT; r++) {
      top[r] = s[0][r >> 1][(r & 1) * 2];
#pragma unroll
      for (int j = 0; j < NG; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) top[r] = fmaxf(top[r], s[j][r >> 1][(r & 1) * 2 + i]);
      grow |= fmaf(top[r], a.qk_scale, -m[r]) > kLazy;
    }
    grow = __any_sync(~0u, grow);
    if (step >= 2) {  // the value warps are done with this buffer
      barrier_sync_pair<kEmpty, kPrefillThreads>(buffer);
    }
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
    const u32 p = p_write + buffer * S::kProbBytes;
#pragma unroll
    for (int j = 0; j < NG; j++)
#pragma unroll
      for (int r = 0; r < NT; r++) {
        const float x0 = exp2_fast(fmaf(s[j][r >> 1][(r & 1) * 2], a.qk_scale, -m[r]));
        const float x1 = exp2_fast(fmaf(s[j][r >> 1][(r & 1) * 2 + 1], a.qk_scale, -m[r]));
        l[r] += x0 + x1;
        store_shared32(p + j * S::kProbGroup + (r >> 1) * S::kProbTile + (((r & 1) * 32) ^ p_flip),
                       pack_halves(x0, x1));
      }
    barrier_arrive_pair<kFull, kPrefillThreads>(buffer);
    barrier_sync<kScore, 128>();  // K of the next step is complete
  }

  // What the value warps divide by.  Rows that saw nothing give zeros.
#pragma unroll
  for (int r = 0; r < NT; r++) {
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    l[r] += __shfl_xor_sync(~0u, l[r], 8);
    const float inverse = l[r] != 0.f ? a.out_scale / l[r] : 0.f;  // NaN stays NaN
    store_shared32(smem + S::kInverseOffset + (opaque(first) + 8 * (r >> 1) + 2 * (r & 1)) * 4,
                   __float_as_uint(inverse));
  }
  __syncthreads();
}

}  // namespace sm70
