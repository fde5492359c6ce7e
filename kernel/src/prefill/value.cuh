// Warps 4-7: O = P V, and the output.
//
// A warp has kValueRows rows and 64 dims, two mma of columns for each row tile.  V goes from global
// memory to its fragments and is converted by the lane that multiplies it: every element once at
// D = 256, where each warp has its own dims.  One 128-bit load of P feeds four mma.
#pragma once

#include "prefill/schedule.cuh"

namespace sm70 {

template <class S>
__device__ __forceinline__ void value_role(const PrefillArgs& a, const PrefillTile& tile,
                                           int kv_head, u32 smem, int tid) {
  using Kv = typename S::Kv;
  constexpr int MT = S::kValueTiles, NG = S::kStep / 8, NV = S::kStep / 4;
  const int lane = tid & 31, warp = tid >> 5, t = lane & 3, quad = lane >> 2 & 3, g = lane >> 4;
  const int dim0 = warp % S::kDimGroups * 64 + (quad * 2 + g) * 8;  // 8 dims of this lane as B
  const int row0 = warp / S::kDimGroups * S::kValueRows;

  float acc[MT][2][8];
#pragma unroll
  for (int i = 0; i < MT * 16; i++) acc[i >> 4][i >> 3 & 1][i & 7] = 0.f;

  uint2 raw[NV][Kv::kBytes];  // V of the step to come: token 4 j + t, 8 dims
  PageWalk walk0(a, tile), walk1(a, tile);
  const u8* base =
      a.v + kv_head * a.v_head_stride + t * (long long)a.v_token_stride + dim0 * Kv::kBytes;
  const u8 *half0, *half1;
  auto ask = [&](int step) {
    walk0.ask(step * 2);
    walk1.ask(step * 2 + 1);
  };
  auto go = [&] {
    half0 = walk0.at(base, a.v_page_stride, a.v_token_stride);
    half1 = walk1.at(base, a.v_page_stride, a.v_token_stride);
  };
  auto fetch = [&](int j) {
    const u8* p = (j < 4 ? half0 : half1) + (j & 3) * 4 * a.v_token_stride;
#pragma unroll
    for (int e = 0; e < Kv::kBytes; e++) raw[j][e] = load_cached64(p + e * 8);
  };
  ask(0);
  go();
#pragma unroll
  for (int j = 0; j < NV; j++) fetch(j);
  ask(1);

  // Rows of tiles in the upper half of each score warp's are stored with bit 1 flipped.
  constexpr int kHalf = S::kScoreTiles / 2;
  const u32 p_read = smem + S::kProbOffset + row0 / 8 * S::kProbTile + (t + 4 * g) * 16;
  const u32 p_flipped = smem + S::kProbOffset + row0 / 8 * S::kProbTile + ((t ^ 2) + 4 * g) * 16;

#pragma unroll 1
  for (int step = 0; step < tile.steps; step++) {
    const int buffer = step & 1;
    go();
    ask(step + 2);
    barrier_sync_pair<kFull, kPrefillThreads>(buffer);
    {
      uint4 flags = load_shared128(smem + S::kFlagOffset + buffer * 16);
      if (flags.x | flags.y | flags.z | flags.w) {
        const u32 flag[4] = {flags.x, flags.y, flags.z, flags.w};
        const u32 f0 = smem + S::kFactorOffset + buffer * (S::kRows * 4) +
                       (row0 + (opaque(t) & 1) + 4 * opaque(g)) * 4;
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const int owner = (row0 / 8 + m) / S::kScoreTiles;
          const u32 grown = owner == 0   ? flag[0]
                            : owner == 1 ? flag[1]
                            : owner == 2 ? flag[2]
                                         : flag[3];
          if (grown) {
            const float x0 = load_shared_float(f0 + m * 32);
            const float x1 = load_shared_float(f0 + m * 32 + 8);
#pragma unroll
            for (int i = 0; i < 16; i++) acc[m][i >> 3][i & 7] *= i & 2 ? x1 : x0;
          }
        }
      }
    }
    if ((step + 1) * S::kStep > tile.len) {  // stale bytes may be NaN, and 0 x NaN is not 0
#pragma unroll
      for (int j = 0; j < NV; j++)
        if (step * S::kStep + 4 * j + opaque(t) >= tile.len) {
#pragma unroll
          for (int e = 0; e < Kv::kBytes; e++) raw[j][e] = make_uint2(0, 0);
        }
    }
    const u32 offset = buffer * S::kProbBytes;
    auto probabilities = [&](int n) {  // of tile n % MT, tokens 8 (n / MT) ..
      return load_shared128((n % MT / kHalf & 1 ? p_flipped : p_read) + offset +
                            n / MT * S::kProbGroup + n % MT * S::kProbTile);
    };
    constexpr int kAhead = 4, kTotal = NG * MT;
    uint4 x[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; n++) x[n] = probabilities(n);
#pragma unroll
    for (int j = 0; j < NG; j++) {
      uint2 b[2][2];  // [4 tokens][4 dims]
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if constexpr (Kv::kBytes == 1) {
          b[i][0] = Kv::quad(raw[2 * j + i][0].x);
          b[i][1] = Kv::quad(raw[2 * j + i][0].y);
        } else {
          b[i][0] = raw[2 * j + i][0];
          b[i][1] = raw[2 * j + i][1];
        }
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const int n = j * MT + m;
        const uint4 y = x[n % kAhead];
        mma_row_row(acc[m][0], y.x, y.y, b[0][0].x, b[0][0].y);
        mma_row_row(acc[m][1], y.x, y.y, b[0][1].x, b[0][1].y);
        mma_row_row(acc[m][0], y.z, y.w, b[1][0].x, b[1][0].y);
        mma_row_row(acc[m][1], y.z, y.w, b[1][1].x, b[1][1].y);
        if (n + kAhead < kTotal) x[n % kAhead] = probabilities(n + kAhead);
        if (m == 0) {
          fetch(2 * j);
          fetch(2 * j + 1);
        }
      }
    }
    if (step + 2 < tile.steps) {
      barrier_arrive_pair<kEmpty, kPrefillThreads>(buffer);
    }
  }
  barrier_sync<kSums, kPrefillThreads>();

  // acc[m][e][i]: row row0 + 8 m + (t & 1) + (i & 2) + 4 g, column (i & 4) + (t & 2) + (i & 1) of
  // the eight of which lanes with g = 0 supplied 0-3; a column is dim e * 4 + order[column & 3] of
  // theirs.
  {
    const int lane = opaque(tid & 31), t = lane & 3, quad = lane >> 2 & 3, g = lane >> 4;
    const int dims = opaque(warp) % S::kDimGroups * 64 + quad * 16 + (t & 2);
    const int rows = opaque(warp) / S::kDimGroups * S::kValueRows + (t & 1) + 4 * g;
    const u32 pick = t & 2 ? 0x3276 : 0x5410;  // own and other's halves of dims t & 2 and the next
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int local = rows + 8 * m + 2 * r, row = tile.first_row + local;
        const int token = divide(row, a.group_magic), head = row - token * a.group;
        const float scale = load_shared_float(smem + S::kInverseOffset + local * 4);
        __half* out = static_cast<__half*>(a.out) +
                      (tile.first_token + token) * a.out_token_stride +
                      (kv_head * a.group + head) * a.out_head_stride + dims;
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const float* c = &acc[m][e][i * 4 + r * 2];
            u32 x = pack_halves(c[0] * scale, c[1] * scale);
            if (Kv::kEvenOddQuads) {  // dims 0 2 here, 1 3 in the lane beside
              const u32 other = __shfl_xor_sync(~0u, x, 2);
              x = __byte_perm(x, other, pick);
            }
            if (row < tile.rows) *reinterpret_cast<u32*>(out + i * 8 + e * 4) = x;
          }
      }
  }
}

}  // namespace sm70
