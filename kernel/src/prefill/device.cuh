// Volta instructions that the prefill kernel is written in: mma.m8n8k4, wide loads, named barriers.
#pragma once

#include <cuda_fp16.h>

namespace prefill {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr float kLog2E = 1.4426950408889634f;

// Fragments of mma.m8n8k4.  A warp is four quadpairs, lanes {0-3, 16-19}, {4-7, 20-23}, ...; each
// multiplies its own 8 x 4 by 4 x 8.  With t = lane & 3 and g = lane >> 4:
//   A .row: row t + 4 g, 4 consecutive k.       B .col: column t + 4 g, 4 consecutive k.
//   B .row: k = t, columns 4 g .. 4 g + 3.
//   C[i]: row (t & 1) + (i & 2) + 4 g, column (i & 4) + (t & 2) + (i & 1).
// Both are volatile: the order in which they are written is the order that keeps the tensor pipe
// fed, and the compiler must not undo it.
__device__ __forceinline__ void mma_row_col(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},"
      "{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_row_row(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},"
      "{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// Shared memory by 32-bit address: no generic address arithmetic in the loops.
__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ uint4 load_shared_16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a));
  return v;
}
__device__ __forceinline__ void store_shared_16(u32 a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_8(u32 a, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared_4(u32 a, u32 v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory");
}

// The cache is read 8 bytes at a time: pages and tokens need no more alignment than that.
__device__ __forceinline__ uint2 load_global_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// Barriers with constant numbers and thread counts (0 is __syncthreads).
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// x again, as a value of which the compiler knows nothing: what follows from it is computed where
// it is used and does not occupy registers through a loop.
__device__ __forceinline__ int here(int x) {
  int y;
  asm volatile("mov.b32 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_half2(float lo, float hi) {
  __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<u32*>(&h);
}

// x / d for 0 <= x < 2^26 and d <= 4096, by the constant that `division_magic` gives (0: d is 1).
__device__ __forceinline__ int divide(int x, u32 magic) { return magic ? __umulhi(x, magic) : x; }

}  // namespace prefill
