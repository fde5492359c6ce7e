// Loads and stores with the cache hints and widths that the attention kernels use.
#pragma once
#include <cuda_fp16.h>

namespace sm70 {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Cache bytes are read once by one SM: read-only path, and do not displace L1.
__device__ __forceinline__ u32 load_stream32(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_stream64(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_stream128(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same, or zero where `live` is false: one predicated load, nothing that waits for it.
__device__ __forceinline__ u32 load_stream32_if(bool live, const void* p) {
  u32 v;
  asm volatile(
      "{.reg .pred live; setp.ne.u32 live,%2,0; mov.u32 %0,0;\n"
      "@live ld.global.nc.L1::no_allocate.u32 %0,[%1];}"
      : "=&r"(v)
      : "l"(p), "r"(static_cast<u32>(live)));
  return v;
}
__device__ __forceinline__ uint2 load_stream64_if(bool live, const void* p) {
  uint2 v;
  asm volatile(
      "{.reg .pred live; setp.ne.u32 live,%3,0; mov.u32 %0,0; mov.u32 %1,0;\n"
      "@live ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(p), "r"(static_cast<u32>(live)));
  return v;
}

// Shared memory by 32-bit address (what cvta gives): keeps addresses in one register, and the
// volatile load stays where it is written, which is how fragments are fetched ahead of use.
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 load_shared128(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// 2^x; -infinity gives 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// The value of x as something that the compiler cannot look through: what depends on it is
// computed here, not hoisted out of the surrounding loop into registers.
__device__ __forceinline__ int opaque(int x) {
  int y;
  asm volatile("mov.b32 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ u32 pack_halves(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&h);
}

}  // namespace sm70
