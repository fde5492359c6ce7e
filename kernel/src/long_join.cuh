// The join: folds the leaves that the split kernel left alone, and adds the blocks of a request.
//
// CTA (fragment, request, KV head) has one of the 48 fragments of O: 8 rows x 64 dims, of which
// four dims of every eight. Warp w takes blocks w, w + 10, ...
#pragma once
#include "long_deal.cuh"
#include "long_fold.cuh"

namespace sm70 {

constexpr int kJoinWarps = kLongJoinThreads / 32;
constexpr int kJoinBlocks = 2 * kLongLeaves / kLongBlock;  // of a request, at most
constexpr int kJoinTurns = 2;  // blocks of a warp in one pass: 20 of a request, and most have 20

struct JoinShared {
  float weight_before[kJoinBlocks][kLongBlock][8];
  float weight_leaf[kJoinBlocks][kLongBlock][8];
  float2 stats[kJoinBlocks][8];
  float weight[kJoinBlocks][8];  // of a block in the request
  float out[kJoinWarps - 1][32][8];
};

// Bit e: slot e of these four holds a result. Slots behind the request's leaves keep what an
// earlier launch left there; leaves_left masks them.
__device__ __forceinline__ u32 present_bits(int4 held, int leaves_left) {
  const u32 bits = (held.x > 0) | (held.y > 0) << 1 | (held.z > 0) << 2 | (held.w > 0) << 3;
  return leaves_left >= kLongBlock ? bits : leaves_left > 0 ? bits & ((1u << leaves_left) - 1) : 0;
}

__device__ __forceinline__ void join_fragment(const LongArgs& args, JoinShared& sh) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int fragment = blockIdx.x, head = blockIdx.z;
  const int row_tile = fragment % 12 >> 1;
  const size_t head_slot = (static_cast<size_t>(blockIdx.y) * gridDim.z + head) * args.slots;
  const int4* held = reinterpret_cast<const int4*>(args.partial_leaves + head_slot);
  const int slot_blocks = args.slots / kLongBlock;

  int4 turn_held[kJoinTurns];
  auto load_held = [&](int pass) {
#pragma unroll
    for (int i = 0; i < kJoinTurns; i++) {
      const int block = pass + i * kJoinWarps + warp;
      turn_held[i] = block < slot_blocks ? held[block] : make_int4(0, 0, 0, 0);
    }
  };
  // Eight threads a block, one per row, have its statistics. Asked for together with the request:
  // nothing below waits for more than two loads in a row.
  const int stat_block = thread >> 3, stat_row = thread & 7;
  static_assert(kLongJoinThreads == kJoinBlocks * 8, "a thread for every row of every block");
  int4 stat_held = make_int4(0, 0, 0, 0);
  float2 stat[kLongBlock];
  if (stat_block < slot_blocks) {
    const float2* p = static_cast<const float2*>(args.partial_stats) +
                      (head_slot + stat_block * kLongBlock) * kLongRows + row_tile * 8 + stat_row;
    stat_held = held[stat_block];
#pragma unroll
    for (int e = 0; e < kLongBlock; e++) stat[e] = p[e * kLongRows];
  }
  load_held(0);
  const LongRequest request = read_request(args, blockIdx.y);
  if (!request.leaves) return;
  const int blocks = (request.leaves + kLongBlock - 1) / kLongBlock;

  const uint4* partial = static_cast<const uint4*>(args.partial_out) +
                         (head_slot * kLongFragments + fragment) * 32 + lane;
  constexpr int kSlotWords = kLongFragments * 32;
  uint4 x[kJoinTurns][kLongBlock];
  u32 present[kJoinTurns];
  auto load_partials = [&](int pass) {
#pragma unroll
    for (int i = 0; i < kJoinTurns; i++) {
      const int leaf = (pass + i * kJoinWarps + warp) * kLongBlock;
      present[i] = present_bits(turn_held[i], request.leaves - leaf);
#pragma unroll
      for (int e = 0; e < kLongBlock; e++)
        if (present[i] >> e & 1) x[i][e] = partial[(leaf + e) * kSlotWords];
    }
  };
  load_partials(0);  // of the first pass, while the weights are worked out

  if (stat_block < blocks) {  // the statistics of a block, the weights of its leaves
    const u32 bits = present_bits(stat_held, request.leaves - stat_block * kLongBlock);
    float maximum = stat[0].x, sum = stat[0].y;
#pragma unroll
    for (int e = 1; e < kLongBlock; e++)
      if (bits >> e & 1) {
        const FoldWeights w = fold_weights(maximum, sum, stat[e].x, stat[e].y);
        maximum = w.maximum, sum = w.sum;
        sh.weight_before[stat_block][e][stat_row] = w.before;
        sh.weight_leaf[stat_block][e][stat_row] = w.leaf;
      }
    sh.stats[stat_block][stat_row] = make_float2(maximum, sum);
  }
  __syncthreads();
  if (warp < 8) {  // the weights of all blocks for row `warp`
    float2 s[2];
    float most = minus_infinity(), total = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      s[i] = make_float2(minus_infinity(), 0);
      if (lane + i * 32 < blocks) s[i] = sh.stats[lane + i * 32][warp];
      most = fmaxf(most, s[i].x);
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
#pragma unroll
    for (int i = 0; i < 2; i++) s[i].y *= exp2_fast(s[i].x - most), total += s[i].y;
#pragma unroll
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (lane + i * 32 < blocks)
        sh.weight[lane + i * 32][warp] = total != 0 ? s[i].y / total : 0.0f;
  }
  __syncthreads();

  // A lane of a fragment has rows `row` and `row` + 2 (see common/mma.cuh).
  const int t = lane & 3, quadpair = lane >> 2 & 3, row = (lane >> 4) * 4 + (t & 1);
  float out[8] = {};
#pragma unroll 1
  for (int pass = 0;;) {
#pragma unroll
    for (int i = 0; i < kJoinTurns; i++) {
      const int block = pass + i * kJoinWarps + warp;
      if (block < blocks) {
        uint4 y = x[i][0];
#pragma unroll
        for (int e = 1; e < kLongBlock; e++)
          if (present[i] >> e & 1) {
            const float before0 = sh.weight_before[block][e][row];
            const float before1 = sh.weight_before[block][e][row + 2];
            const float leaf0 = sh.weight_leaf[block][e][row];
            const float leaf1 = sh.weight_leaf[block][e][row + 2];
            y.x = fold_halves(y.x, x[i][e].x, before0, leaf0);
            y.y = fold_halves(y.y, x[i][e].y, before1, leaf1);
            y.z = fold_halves(y.z, x[i][e].z, before0, leaf0);
            y.w = fold_halves(y.w, x[i][e].w, before1, leaf1);
          }
        const float w0 = sh.weight[block][row], w1 = sh.weight[block][row + 2];
        const u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float2 o = __half22float2(*reinterpret_cast<const __half2*>(&word[k]));
          out[2 * k] += o.x * (k & 1 ? w1 : w0);
          out[2 * k + 1] += o.y * (k & 1 ? w1 : w0);
        }
      }
    }
    pass += kJoinTurns * kJoinWarps;
    if (pass >= blocks) break;
    load_held(pass);
    load_partials(pass);
  }
  if (warp) {
#pragma unroll
    for (int k = 0; k < 8; k++) sh.out[warp - 1][lane][k] = out[k];
  }
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int i = 0; i < kJoinWarps - 1; i++)
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] += sh.out[i][lane][k];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int query_row = row_tile * 8 + row + (i & 2), token = query_row / kLongGroup;
    // The column order that the E4M3 conversion left: dims 0 2 1 3 of every four.
    const int dim = 64 * (fragment / 12) + (quadpair * 2 + (i >> 2)) * 8 + 4 * (fragment & 1) +
                    (i & 1) * 2 + (t >> 1);
    if (token < request.tokens)
      static_cast<__half*>(
          args.out)[(request.first_token + token) * args.out_token_stride +
                    (head * kLongGroup + query_row - token * kLongGroup) * args.out_head_stride +
                    dim] = __float2half(out[i]);
  }
}

}  // namespace sm70
