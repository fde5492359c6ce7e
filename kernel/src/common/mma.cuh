// The Volta tensor-core instruction m8n8k4 with FP32 accumulators, and who holds which element.
//
// A warp runs four independent 8x8x4 products, one per quadpair:
//   quadpair q = lanes {4q .. 4q+3, 4q+16 .. 4q+19};  t = lane % 4, g = lane / 16.
// A row-major (8 x 4)   lane holds row t + 4g, k = 0..3
// B col-major (4 x 8)   lane holds column t + 4g, k = 0..3
// B row-major (4 x 8)   lane holds k = t, columns 4g .. 4g+3
// C (8 x 8)             register i: row (t & 1) + (i & 2) + 4g, column (i & 4) + (t & 2) + (i & 1)
// Both operands are two 32-bit registers of packed halves.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

struct Lane {
  int id, t, g, quadpair;
  __device__ __forceinline__ explicit Lane(int thread)
      : id(thread & 31), t(thread & 3), g(thread >> 4 & 1), quadpair(thread >> 2 & 3) {}
  // Row of an A (row-major) or column of a B (column-major) fragment.
  __device__ __forceinline__ int operand_row() const { return t + 4 * g; }
  __device__ __forceinline__ int acc_row(int i) const { return (t & 1) + (i & 2) + 4 * g; }
  __device__ __forceinline__ int acc_column(int i) const { return (i & 4) + (t & 2) + (i & 1); }
};

// C += A B^T with both operands contiguous in k: S^T = K Q^T.
__device__ __forceinline__ void mma_row_col(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// C += A B with B contiguous in n: O = P V.
__device__ __forceinline__ void mma_row_row(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

}  // namespace sm70
