// Joining two partial results. The same operations serve the split kernel, which folds the leaves
// of a block that it has whole, and the join kernel, which folds the others: explicit IEEE
// operations, so that no compiler contraction can make the two differ by a bit.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct FoldWeights {
  float maximum, sum;  // of both together
  float before, leaf;  // weights of the two normalised outputs
};

__device__ __forceinline__ FoldWeights fold_weights(float max_before, float sum_before,
                                                    float max_leaf, float sum_leaf) {
  FoldWeights w;
  w.maximum = fmaxf(max_before, max_leaf);
  const float before = __fmul_rn(sum_before, exp2_fast(__fsub_rn(max_before, w.maximum)));
  const float leaf = __fmul_rn(sum_leaf, exp2_fast(__fsub_rn(max_leaf, w.maximum)));
  w.sum = __fadd_rn(before, leaf);
  const float inverse = w.sum > 0 ? __frcp_rn(w.sum) : 0.0f;
  w.before = __fmul_rn(before, inverse);
  w.leaf = __fmul_rn(leaf, inverse);
  return w;
}

// Two halves of O of the block so far, and of a leaf: their weighted sum, rounded once.
__device__ __forceinline__ u32 fold_halves(u32 before, u32 leaf, float weight_before,
                                           float weight_leaf) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&before));
  const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&leaf));
  return pack_halves(__fmaf_rn(y.x, weight_leaf, __fmul_rn(x.x, weight_before)),
                     __fmaf_rn(y.y, weight_leaf, __fmul_rn(x.y, weight_before)));
}

}  // namespace sm70
