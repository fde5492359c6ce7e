// The score warps: S^T = K Q^T and the softmax.
//
// Warp w has tokens 16 w .. 16 w + 15 of each 64-token tile, and multiplies with K as the A
// operand (row-major): a lane holds four consecutive dims of one token, which is one 32-bit word
// of E4M3. Quadpairs 0, 1 have dims 0 .. 127 of the 16 tokens, quadpairs 2, 3 dims 128 .. 255;
// one shuffle and one addition per value join the two, and each lane ends with 24 of the 48 rows.
//
//   K    global -> registers (coalesced, one tile ahead) -> shared -> registers in operand order.
//        Each word is converted once, by the lane that multiplies it.
//   Q    a ring of six fragments; each is loaded again right after its use, ten mma ahead of the
//        next: the loads hide behind the tensor cores without a second register set.
//   max  is lazy: only when a value exceeds the reference by 2^8 do the warps compute new maxima
//        (always in the first tile of a leaf). P <= 2^8 fits a half, and FP32 sums do not mind.
//   sums stay per thread until the leaf ends.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "long_fold.cuh"
#include "long_shared.cuh"

namespace sm70 {

constexpr float kLazyLog2 = 8.0f;
constexpr float kNoMaximum = -1e30f;  // finite: fully masked rows give 2^-inf = 0, never NaN

// 16 tokens of K on their way from global to shared memory, for 16-byte and 8-byte alignment.
template <int Align>
struct KeyStage;

template <>
struct KeyStage<16> {  // an instruction has two tokens, a lane 16 bytes
  uint4 word[8];
  __device__ __forceinline__ static int lane_offset(int lane, int token_stride) {
    return (lane >> 4) * token_stride + (lane & 15) * 16;
  }
  __device__ __forceinline__ void load(const u8* p, int token_stride) {
#pragma unroll
    for (int j = 0; j < 8; j++) word[j] = load_stream128(p), p += 2 * token_stride;
  }
  __device__ __forceinline__ void store(u8* stage, int lane) const {
    u8* row = stage + (lane >> 4) * kLongHeadDim;
    const int chunk = ((lane & 15) ^ (lane >> 4)) << 4;
#pragma unroll
    for (int j = 0; j < 8; j++)
      *reinterpret_cast<uint4*>(row + j * 2 * kLongHeadDim + (chunk ^ ((2 * j & 7) << 4))) =
          word[j];
  }
};

template <>
struct KeyStage<8> {  // an instruction has one token, a lane 8 bytes
  uint2 word[16];
  __device__ __forceinline__ static int lane_offset(int lane, int) { return lane * 8; }
  __device__ __forceinline__ void load(const u8* p, int token_stride) {
#pragma unroll
    for (int j = 0; j < 16; j++) word[j] = load_stream64(p), p += token_stride;
  }
  __device__ __forceinline__ void store(u8* stage, int lane) const {
    const int at = lane * 8;
#pragma unroll
    for (int j = 0; j < 16; j++)
      *reinterpret_cast<uint2*>(stage + j * kLongHeadDim + (at ^ ((j & 7) << 4))) = word[j];
  }
};

// A lane's 24 scores are acc[j][i], j < 3: row 24 half + 8 j + (i & 4) + (t & 2) + (i & 1), token
// 8 g + 4 (quadpair & 1) + (t & 1) + (i & 2). So it has 12 rows, two tokens of each.
__device__ __forceinline__ int row_slot(int j, int i) { return j * 4 + (i >> 2) * 2 + (i & 1); }
__device__ __forceinline__ int slot_row(int slot) {
  return 8 * (slot >> 2) + (slot & 2) * 2 + (slot & 1);  // on top of 24 half + (t & 2)
}

// One warp's part of a run. `stage` holds the first 16 tokens, already asked for.
template <int Align>
__device__ __forceinline__ void score_run(const LongArgs& args, LongShared& sh, const LongRun& run,
                                          int begin_tile, int groups, const u8* keys,
                                          KeyStage<Align>& stage, int thread, int head_slot) {
  const Lane lane(thread);
  const int warp = thread >> 5;
  const int half = lane.quadpair >> 1;
  const int row =
      (lane.id & 7) + 8 * lane.g;  // token of the warp's 16 whose K this lane multiplies
  const LongRequest& request = run.request;
  const int tiles = (groups + kLongTileGroups - 1) / kLongTileGroups;

  u8* key_stage = sh.key[warp];
  const u8* key_row = key_stage + row * kLongHeadDim + half * 128;
  const int key_swizzle = (row & 7) << 4;
  // Fragments 0 .. 2 are the lane's own 24 rows, 3 .. 5 those of lane ^ 8.
  const u32 query = shared_address(sh.query) + half * (kQuerySteps / 2) * kQueryStepBytes +
                    lane.operand_row() * 16;
  const u32 query_own = query + half * 384, query_other = query + (1 - half) * 384 - 384;
  u8* prob = sh.prob[0] + (2 * warp + lane.g) * kProbStepPitch + half * kProbHalfPitch +
             (lane.t & 2) * 16 + (lane.quadpair & 1) * 8 + (lane.t & 1) * 4;

  float maximum[12], sum[12];
  float max_before = 0, sum_before = 0;  // of the block so far; thread = row, below 48
  int leaf = run.first;
  int leaf_end = request.leaf_begin(leaf + 1) - begin_tile;
  bool leaf_begins = true;

  for (int tile = 0, group = warp; tile < tiles; tile++, group += kLongTileGroups) {
    const int buffer = tile & 1;
    if (leaf_begins) {
#pragma unroll
      for (int r = 0; r < 12; r++) maximum[r] = kNoMaximum, sum[r] = 0;
    }
    float acc[6][8];
#pragma unroll
    for (int j = 0; j < 6; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[j][i] = 0;

    const bool live = group < groups;
    if (live) {
      __syncwarp();
      stage.store(key_stage, lane.id);
      __syncwarp();
      if (group + kLongTileGroups < groups)
        stage.load(keys + static_cast<size_t>(sh.key_offset[group + kLongTileGroups]) * 8,
                   args.k_token_stride);

      auto fragment = [&](int j, u32 step) {
        return load_shared128((j < 3 ? query_own : query_other) + step + j * 128);
      };
      uint4 q[6];
      uint4 words = *reinterpret_cast<const uint4*>(key_row + key_swizzle);
#pragma unroll
      for (int j = 0; j < 6; j++) q[j] = fragment(j, 0);
#pragma unroll 2
      for (int c = 0; c < 8; c++) {  // 16 dims of each half
        const uint4 next =
            *reinterpret_cast<const uint4*>(key_row + (key_swizzle ^ (((c + 1) & 7) << 4)));
        const uint2 k0 = E4M3::quad(words.x), k1 = E4M3::quad(words.y);
        const uint2 k2 = E4M3::quad(words.z), k3 = E4M3::quad(words.w);
#pragma unroll
        for (int j = 0; j < 6; j++) {
          mma_row_col(acc[j], k0.x, k0.y, q[j].x, q[j].y);
          mma_row_col(acc[j], k1.x, k1.y, q[j].z, q[j].w);
          q[j] = fragment(j, (c * 2 + 1) * kQueryStepBytes);
        }
        const u32 step = (c * 2 + 2 & 15) * kQueryStepBytes;  // wraps: never past Q's area
#pragma unroll
        for (int j = 0; j < 6; j++) {
          mma_row_col(acc[j], k2.x, k2.y, q[j].x, q[j].y);
          mma_row_col(acc[j], k3.x, k3.y, q[j].z, q[j].w);
          q[j] = fragment(j, step);
        }
        words = next;
      }
#pragma unroll
      for (int j = 0; j < 3; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[j][i] += __shfl_xor_sync(~0u, acc[j + 3][i], 8);
    }

    // The mask: query token i of n sees positions <= len - n + i.
    const int position = begin_tile * kLongTileTokens + group * kLongGroupTokens;
    if (!live || position + kLongGroupTokens > request.len - request.tokens) {
      const int t = opaque(lane.t), h = opaque(half);
      const int first = position + 8 * lane.g + 4 * (lane.quadpair & 1) + (t & 1);
#pragma unroll
      for (int j = 0; j < 3; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int query_row = 24 * h + 8 * j + (i & 4) + (t & 2) + (i & 1);
          if (!live || first + (i & 2) > request.len - request.tokens + query_row / kLongGroup)
            acc[j][i] = minus_infinity();
        }
    }

    float excess = minus_infinity();
#pragma unroll
    for (int j = 0; j < 3; j++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        excess = fmaxf(excess, fmaf(acc[j][i], args.qk_scale, -maximum[row_slot(j, i)]));
    const bool raise = barrier_any<kBarrierScore, kRoleThreads>(excess > kLazyLog2);
    if (tile >= 2) barrier_sync_pair<kBarrierProbFree, kLongThreads>(buffer);

    if (raise) {  // new maxima of all four warps; factors for the sums and the O so far
      const int base = 24 * opaque(half) + (opaque(lane.t) & 2);
      float x[12];
#pragma unroll
      for (int r = 0; r < 12; r++)
        x[r] = fmaxf(acc[r >> 2][(r & 2) * 2 + (r & 1)], acc[r >> 2][(r & 2) * 2 + (r & 1) + 2]);
#pragma unroll
      for (int d = 1; d <= 16; d <<= 2) {  // over the lane bits that number tokens: 0, 2, 4
        float y[12];
#pragma unroll
        for (int r = 0; r < 12; r++) y[r] = __shfl_xor_sync(~0u, x[r], d);
#pragma unroll
        for (int r = 0; r < 12; r++) x[r] = fmaxf(x[r], y[r]);
      }
      if ((lane.id & 21) == 0) {
#pragma unroll
        for (int r = 0; r < 12; r++) sh.reduce[warp][base + slot_row(r)] = x[r] * args.qk_scale;
      }
      barrier_sync<kBarrierScore, kRoleThreads>();
      float raised[12];
#pragma unroll
      for (int r = 0; r < 12; r++) {
        const int at = base + slot_row(r);
        raised[r] = fmaxf(fmaxf(fmaxf(sh.reduce[0][at], sh.reduce[1][at]),
                                fmaxf(sh.reduce[2][at], sh.reduce[3][at])),
                          maximum[r]);
      }
#pragma unroll
      for (int r = 0; r < 12; r++) {
        x[r] = exp2_fast(maximum[r] - raised[r]);
        maximum[r] = raised[r];
        sum[r] *= x[r];
      }
      if (warp == 0 && (lane.id & 21) == 0) {
#pragma unroll
        for (int r = 0; r < 12; r++) sh.factor[buffer][base + slot_row(r)] = x[r];
      }
    }
    if (thread == 0) sh.raised[buffer] = raise && !leaf_begins;

#pragma unroll
    for (int j = 0; j < 3; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float p = exp2_fast(fmaf(acc[j][i], args.qk_scale, -maximum[row_slot(j, i)]));
        sum[row_slot(j, i)] += p;
        acc[j][i] = p;
      }
#pragma unroll
    for (int j = 0; j < 3; j++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (!(i & 2))
          *reinterpret_cast<u32*>(prob + buffer * kProbBytes + j * 128 + ((i & 4) + (i & 1)) * 16) =
              pack_halves(acc[j][i], acc[j][i | 2]);
    barrier_arrive_pair<kBarrierProbFull, kLongThreads>(buffer);

    leaf_begins = tile + 1 == leaf_end;
    if (leaf_begins) {  // the leaf is complete: its sums over lanes and warps, its weights
      const int base = 24 * opaque(half) + (opaque(lane.t) & 2);
      const int parity = leaf & 1;
      barrier_sync<kBarrierScore, kRoleThreads>();  // `reduce` may still be read
#pragma unroll
      for (int d = 1; d <= 16; d <<= 2) {
        float y[12];
#pragma unroll
        for (int r = 0; r < 12; r++) y[r] = __shfl_xor_sync(~0u, sum[r], d);
#pragma unroll
        for (int r = 0; r < 12; r++) sum[r] += y[r];
      }
      if ((lane.id & 21) == 0) {
#pragma unroll
        for (int r = 0; r < 12; r++) {
          sh.reduce[warp][base + slot_row(r)] = sum[r];
          if (warp == 0) sh.leaf_scale[parity][base + slot_row(r)] = maximum[r];
        }
      }
      barrier_sync<kBarrierScore, kRoleThreads>();
      if (thread < kLongRows) {
        const LeafFate fate = leaf_fate(leaf, run.first, run.last);
        const float max_leaf = sh.leaf_scale[parity][thread];
        const float sum_leaf = sh.reduce[0][thread] + sh.reduce[1][thread] + sh.reduce[2][thread] +
                               sh.reduce[3][thread];
        sh.leaf_scale[parity][thread] = sum_leaf > 0 ? args.out_scale / sum_leaf : 0.0f;
        if (fate.first) {
          max_before = max_leaf, sum_before = sum_leaf;
        } else {
          const FoldWeights w = fold_weights(max_before, sum_before, max_leaf, sum_leaf);
          max_before = w.maximum, sum_before = w.sum;
          sh.weight_before[parity][thread] = w.before;
          sh.weight_leaf[parity][thread] = w.leaf;
        }
        if (fate.last)
          static_cast<float2*>(args.partial_stats)[(head_slot + fate.slot) * kLongRows + thread] =
              make_float2(max_before, sum_before);
        if (thread == 0) {
          if (leaf != fate.slot) args.partial_leaves[head_slot + leaf] = 0;
          if (fate.last) args.partial_leaves[head_slot + fate.slot] = leaf + 1 - fate.slot;
        }
      }
      barrier_arrive_pair<kBarrierWeights, kLongThreads>(parity);
      leaf++;
      leaf_end = request.leaf_begin(leaf + 1) - begin_tile;
    }
  }
}

}  // namespace sm70
