// Named barriers between some of the warps of a block (bar.sync / bar.arrive / bar.red).
//
// Barrier numbers are template arguments: a number in a register costs an indirect barrier, and
// makes the order of arrivals unreadable. Barrier 0 is __syncthreads().
#pragma once
#include "common/memory.cuh"

namespace sm70 {

template <int Id, int Threads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
template <int Id, int Threads>
__device__ __forceinline__ void barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

// A pair of barriers, Id and Id + 1, for the two halves of a double buffer.
template <int Id, int Threads>
__device__ __forceinline__ void barrier_sync_pair(int half) {
  if (half) {
    barrier_sync<Id + 1, Threads>();
  } else {
    barrier_sync<Id, Threads>();
  }
}
template <int Id, int Threads>
__device__ __forceinline__ void barrier_arrive_pair(int half) {
  if (half) {
    barrier_arrive<Id + 1, Threads>();
  } else {
    barrier_arrive<Id, Threads>();
  }
}

// Waits for `Threads` threads; true for all of them when `vote` is true for any.
template <int Id, int Threads>
__device__ __forceinline__ bool barrier_any(bool vote) {
  u32 any;
  asm volatile(
      "{.reg .pred in, out; setp.ne.u32 in, %1, 0; bar.red.or.pred out, %2, %3, in; "
      "selp.u32 %0, 1, 0, out;}"
      : "=r"(any)
      : "r"(static_cast<u32>(vote)), "n"(Id), "n"(Threads)
      : "memory");
  return any != 0;
}

}  // namespace sm70
