// Shared memory of the split kernel, its named barriers, and the two warp roles' common ground.
#pragma once
#include "common/barrier.cuh"
#include "common/memory.cuh"
#include "long_args.h"
#include "long_deal.cuh"

namespace sm70 {

constexpr int kRoleThreads = 128;    // four score warps, four value warps
constexpr int kMaxRunGroups = 1024;  // groups of 16 tokens whose offsets fit the table

// Q, in the order in which the score warps multiply it. A step is 8 dims: 48 rows of 16 bytes.
constexpr int kQueryStepBytes = kLongRows * 16;
constexpr int kQuerySteps = kLongHeadDim / 8;

// K of one score warp: 16 tokens of 256 bytes. The 16-byte chunk c of token r lies at c ^ (r & 7),
// so that eight lanes with eight tokens read one chunk each without bank conflicts.
constexpr int kKeyStageBytes = kLongGroupTokens * kLongHeadDim;

// P of a tile: 8 steps of 8 tokens; of each, 48 rows of 16 bytes in two halves of 24 rows.
// The half pitch is 64 and the step pitch 16 modulo 128: the 32-bit stores of the softmax hit
// every bank once, and eight rows read as 128-bit words do too.
constexpr int kProbHalfPitch = 448;
constexpr int kProbStepPitch = 912;
constexpr int kProbBytes = 8 * kProbStepPitch;

struct __align__(128) LongShared {
  u8 query[kQuerySteps * kQueryStepBytes];
  u8 key[4][kKeyStageBytes];
  u8 prob[2][kProbBytes];
  float factor[2][kLongRows];       // of the old O, for a tile that raised the maxima
  float reduce[4][kLongRows];       // one row of values per score warp
  float leaf_scale[2][kLongRows];   // 1 / sum of a leaf, with the V scale
  u32 weight_before[2][kLongRows];  // of the block so far
  u32 weight_leaf[2][kLongRows];
  int raised[2];  // the tile raised the maxima
  int run_count, pad;
  int runs[kLongRequests * kRunWords];
  u8 block_out[4 * 12 * 512];     // O of the block so far, halves, in fragment order
  u32 key_offset[kMaxRunGroups];  // of a group of 16 tokens, in units of 8 bytes
  u32 value_offset[kMaxRunGroups];
};

static_assert(sizeof(LongShared) == kLongSharedBytes, "tell the host");

// Each pair is one barrier for each half of a double buffer.
enum Barrier {
  kBarrierProbFull = 1,  // pair: P of a tile is written
  kBarrierProbFree = 3,  // pair: P of a tile is used up
  kBarrierScore = 5,     // among the score warps
  kBarrierWeights = 6,   // pair: scale and weights of a leaf are written
};

// What becomes of a leaf of a run [first, last) of leaves. The leaves of a block that the run has
// from the block's beginning are folded here; those of a block that began in another CTA stay
// alone and are folded by the join, in the same order.
struct LeafFate {
  int slot;    // where the result goes
  bool first;  // begins a result
  bool last;   // ends it: it is written
};
__device__ __forceinline__ LeafFate leaf_fate(int leaf, int run_first, int run_last) {
  const int block = leaf & -kLongBlock;
  const bool alone = block < run_first;
  return {alone ? leaf : block, alone || leaf == block,
          alone || leaf + 1 == run_last || leaf + 1 == block + kLongBlock};
}

}  // namespace sm70
