// The join: folds the leaves that the split kernel left alone, and adds the blocks of a request.
//
// CTA (fragment, request, KV head) has one of the 48 fragments of O (8 rows x 64 dims, of which
// four dims of every eight); ten warps, one for each chain of blocks. Two kernels with the same
// bits: `long_join_few` asks for two blocks of a warp at once, the shortest way for few results;
// `long_join_many` asks for one, and leaves the registers to a third CTA on each SM.
//
// The order of addition is fixed: chain c of ten adds blocks c, c + 10, c + 20, ...; chains 0 to 4
// are added from the first to the last, chains 5 to 9 likewise, then the two sums.
#pragma once
#include "long_deal.cuh"
#include "long_fold.cuh"

namespace sm70 {

constexpr int kJoinChains = 10, kJoinHalf = kJoinChains / 2;
constexpr int kJoinBlocks = 2 * kLongLeaves / kLongBlock;  // of a request, at most
constexpr int kSlotWords = kLongFragments * 32;

struct JoinShared {
  u32 weight_before[kJoinBlocks][kLongBlock][8];
  u32 weight_leaf[kJoinBlocks][kLongBlock][8];
  float2 stats[kJoinBlocks][8];
  float weight[kJoinBlocks][8];   // of a block in the request
  float out[kJoinChains][8][32];  // of every chain
};

// Bit e: slot e of these four holds a result. Slots behind the request's leaves keep what an
// earlier launch left there; leaves_left masks them.
__device__ __forceinline__ u32 present_bits(int4 held, int leaves_left) {
  const u32 bits = (held.x > 0) | (held.y > 0) << 1 | (held.z > 0) << 2 | (held.w > 0) << 3;
  return leaves_left >= kLongBlock ? bits : leaves_left > 0 ? bits & ((1u << leaves_left) - 1) : 0;
}

// Leaves of one row of one block: statistics as the split kernel left them.
struct LeafStats {
  int4 held;
  float2 leaf[kLongBlock];

  __device__ __forceinline__ void load(const LongArgs& args, size_t head_slot, int block, int row) {
    const float2* p = static_cast<const float2*>(args.partial_stats) +
                      (head_slot + block * kLongBlock) * kLongRows + row;
    held = reinterpret_cast<const int4*>(args.partial_leaves + head_slot)[block];
#pragma unroll
    for (int e = 0; e < kLongBlock; e++) leaf[e] = p[e * kLongRows];
  }
  // Folds them; leaves the weights in shared memory.
  __device__ __forceinline__ void fold(JoinShared& sh, int block, int row, int leaves_left) const {
    const u32 bits = present_bits(held, leaves_left);
    float maximum = leaf[0].x, sum = leaf[0].y;
    if (bits > 1) {
#pragma unroll
      for (int e = 1; e < kLongBlock; e++) {  // no branches: the weights are no part of the chain
        const bool present = bits >> e & 1;
        const FoldWeights w = fold_weights(maximum, sum, leaf[e].x, leaf[e].y);
        maximum = present ? w.maximum : maximum, sum = present ? w.sum : sum;
        sh.weight_before[block][e][row] = w.before;
        sh.weight_leaf[block][e][row] = w.leaf;
      }
    }
    sh.stats[block][row] = make_float2(maximum, sum);
  }
};

// One warp: the weights of all blocks for one row.
__device__ __forceinline__ void weigh_blocks(JoinShared& sh, int blocks, int row) {
  const int lane = threadIdx.x & 31;
  float2 s[2];
  float most = minus_infinity(), total = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s[i] = make_float2(minus_infinity(), 0);
    if (lane + i * 32 < blocks) s[i] = sh.stats[lane + i * 32][row];
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
    if (lane + i * 32 < blocks) sh.weight[lane + i * 32][row] = total != 0 ? s[i].y / total : 0.0f;
}

// A lane of a fragment has rows `row` and `row` + 2 of its row tile (see common/mma.cuh).
__device__ __forceinline__ int fragment_row(int lane) { return (lane >> 4) * 4 + (lane & 1); }

// Folds leaf e of a block into y, and adds a block to the chain.
__device__ __forceinline__ void fold_leaf(const JoinShared& sh, int block, int e, int row, uint4& y,
                                          uint4 leaf) {
  const u32 before0 = sh.weight_before[block][e][row];
  const u32 before1 = sh.weight_before[block][e][row + 2];
  const u32 leaf0 = sh.weight_leaf[block][e][row];
  const u32 leaf1 = sh.weight_leaf[block][e][row + 2];
  y.x = fold_halves(y.x, leaf.x, before0, leaf0);
  y.y = fold_halves(y.y, leaf.y, before1, leaf1);
  y.z = fold_halves(y.z, leaf.z, before0, leaf0);
  y.w = fold_halves(y.w, leaf.w, before1, leaf1);
}
__device__ __forceinline__ void add_block(const JoinShared& sh, int block, int row, uint4 y,
                                          float (&out)[8]) {
  const float w0 = sh.weight[block][row], w1 = sh.weight[block][row + 2];
  const u32 word[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float2 o = __half22float2(*reinterpret_cast<const __half2*>(&word[k]));
    out[2 * k] = __fmaf_rn(o.x, k & 1 ? w1 : w0, out[2 * k]);
    out[2 * k + 1] = __fmaf_rn(o.y, k & 1 ? w1 : w0, out[2 * k + 1]);
  }
}

// Value i of a lane of a fragment, to its place in the output.
__device__ __forceinline__ void write_value(const LongArgs& args, const LongRequest& request,
                                            int fragment, int head, int lane, int i, float value) {
  const int t = lane & 3, quadpair = lane >> 2 & 3;
  const int query_row = (fragment % 12 >> 1) * 8 + fragment_row(lane) + (i & 2);
  const int token = query_row / kLongGroup;
  // The column order that the E4M3 conversion left: dims 0 2 1 3 of every four.
  const int dim = 64 * (fragment / 12) + (quadpair * 2 + (i >> 2)) * 8 + 4 * (fragment & 1) +
                  (i & 1) * 2 + (t >> 1);
  if (token < request.tokens)
    static_cast<__half*>(
        args.out)[(request.first_token + token) * args.out_token_stride +
                  (head * kLongGroup + query_row - token * kLongGroup) * args.out_head_stride +
                  dim] = __float2half(value);
}

// Turns: blocks of a chain that are asked for at once. Most requests have 20 blocks, two a chain.
template <int Turns>
__device__ __forceinline__ void join_results(const LongArgs& args, JoinShared& sh) {
  static_assert(kLongJoinFewThreads == kJoinBlocks * 8 && kLongJoinFewThreads == kJoinChains * 32,
                "a thread for every row of every block, a warp for every chain");
  const int thread = threadIdx.x, lane = thread & 31, chain = thread >> 5;
  const int fragment = blockIdx.x, head = blockIdx.z;
  const size_t head_slot = (static_cast<size_t>(blockIdx.y) * gridDim.z + head) * args.slots;
  const int4* held = reinterpret_cast<const int4*>(args.partial_leaves + head_slot);
  const int slot_blocks = args.slots / kLongBlock;

  // Asked for together with the request: nothing waits for more than two loads in a row. What an
  // earlier launch left behind the request's leaves is read too, and not used.
  const LongRequest request = read_request(args, blockIdx.y);
  const int stat_block = thread >> 3, stat_row = thread & 7;
  LeafStats stats;
  if (stat_block < slot_blocks)
    stats.load(args, head_slot, stat_block, (fragment % 12 >> 1) * 8 + stat_row);
  int4 turn_held[Turns];
  auto load_held = [&](int pass) {
#pragma unroll
    for (int i = 0; i < Turns; i++) {
      const int block = pass + i * kJoinChains + chain;
      turn_held[i] = block < slot_blocks ? held[block] : make_int4(0, 0, 0, 0);
    }
  };
  load_held(0);
  if (!request.leaves) return;
  const int blocks = (request.leaves + kLongBlock - 1) / kLongBlock;

  const uint4* partial = static_cast<const uint4*>(args.partial_out) +
                         (head_slot * kLongFragments + fragment) * 32 + lane;
  uint4 x[Turns][kLongBlock];
  u32 present[Turns];
  auto load_partials = [&](int pass) {
#pragma unroll
    for (int i = 0; i < Turns; i++) {
      const int leaf = (pass + i * kJoinChains + chain) * kLongBlock;
      present[i] = present_bits(turn_held[i], request.leaves - leaf);
#pragma unroll
      for (int e = 0; e < kLongBlock; e++)
        if (present[i] >> e & 1) x[i][e] = partial[(leaf + e) * kSlotWords];
    }
  };
  load_partials(0);  // while the weights are worked out

  if (stat_block < blocks)
    stats.fold(sh, stat_block, stat_row, request.leaves - stat_block * kLongBlock);
  __syncthreads();
  if (chain < 8) weigh_blocks(sh, blocks, chain);
  __syncthreads();

  const int row = fragment_row(lane);
  float out[8] = {};
#pragma unroll 1
  for (int pass = 0;;) {
#pragma unroll
    for (int i = 0; i < Turns; i++) {
      const int block = pass + i * kJoinChains + chain;
      if (block < blocks) {
        uint4 y = x[i][0];
#pragma unroll
        for (int e = 1; e < kLongBlock; e++)
          if (present[i] >> e & 1) fold_leaf(sh, block, e, row, y, x[i][e]);
        add_block(sh, block, row, y, out);
      }
    }
    pass += Turns * kJoinChains;
    if (pass >= blocks) break;
    load_held(pass);
    load_partials(pass);
  }
#pragma unroll
  for (int k = 0; k < 8; k++) sh.out[chain][k][lane] = out[k];
  __syncthreads();
  if (chain >= 8) return;
  // Warp k adds the chains of value k of every lane.
  float sum[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] = sh.out[h * kJoinHalf][chain][lane];
#pragma unroll
    for (int c = 1; c < kJoinHalf; c++)
      sum[h] = __fadd_rn(sum[h], sh.out[h * kJoinHalf + c][chain][lane]);
  }
  write_value(args, request, fragment, head, lane, chain, __fadd_rn(sum[0], sum[1]));
}

}  // namespace sm70
