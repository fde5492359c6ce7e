// What the prefill kernel needs of the device beyond common/: shared stores by address, division.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

__device__ __forceinline__ void store_shared128(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared64(u32 address, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared32(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0,[%1];" : "=f"(v) : "r"(address));
  return v;
}

// Read-only data that other warps of the SM read at about the same time: may stay in L1.
__device__ __forceinline__ uint2 load_cached64(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// x / d by magic = 2^32 / d + 1 (0 when d is 1); exact while x * d < 2^32.
__device__ __forceinline__ int divide(int x, u32 magic) {
  return magic ? static_cast<int>(__umulhi(x, magic)) : x;
}

}  // namespace sm70
