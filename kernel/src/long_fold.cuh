// Joining two partial results. The same operations serve the split kernel, which folds the leaves
// of a block that it has whole, and the join kernel, which folds the others: explicit ones, so that
// no compiler contraction can make the two differ by a bit.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// 1 / x as the hardware has it, without the branch that an exact one takes.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

struct FoldWeights {
  float maximum, sum;  // of both together
  u32 before, leaf;    // weights of the two normalised outputs, as split_weight makes them
};

// A weight as the sum of two halves, the larger one below: 22 bits of it.
__device__ __forceinline__ u32 split_weight(float weight) {
  const float high = __half2float(__float2half_rn(weight));
  return pack_halves(high, __fsub_rn(weight, high));
}

__device__ __forceinline__ FoldWeights fold_weights(float max_before, float sum_before,
                                                    float max_leaf, float sum_leaf) {
  FoldWeights w;
  w.maximum = fmaxf(max_before, max_leaf);
  const float before = __fmul_rn(sum_before, exp2_fast(__fsub_rn(max_before, w.maximum)));
  const float leaf = __fmul_rn(sum_leaf, exp2_fast(__fsub_rn(max_leaf, w.maximum)));
  w.sum = __fadd_rn(before, leaf);
  const float inverse = w.sum > 0 ? reciprocal(w.sum) : 0.0f;
  w.before = split_weight(__fmul_rn(before, inverse));
  w.leaf = split_weight(__fmul_rn(leaf, inverse));
  return w;
}

__device__ __forceinline__ __half2 as_half2(u32 x) { return *reinterpret_cast<__half2*>(&x); }

// Two halves of O of the block so far, and of a leaf: their weighted sum. In halves throughout:
// conversions from FP32 have an eighth of the rate. Small parts first, so that only the last two
// of the four operations round at the size of the result.
__device__ __forceinline__ u32 fold_halves(u32 before, u32 leaf, u32 weight_before,
                                           u32 weight_leaf) {
  const __half2 x = as_half2(before), wx = as_half2(weight_before);
  const __half2 y = as_half2(leaf), wy = as_half2(weight_leaf);
  __half2 sum = __hmul2_rn(y, __high2half2(wy));
  sum = __hfma2(x, __high2half2(wx), sum);
  sum = __hfma2(y, __low2half2(wy), sum);
  sum = __hfma2(x, __low2half2(wx), sum);
  return *reinterpret_cast<u32*>(&sum);
}

}  // namespace sm70
