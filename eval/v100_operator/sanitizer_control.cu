// Controls for sanitize.py: does a tool understand warps that hand shared memory to each other with
// bar.arrive and bar.sync, as the PTX manual's producer and consumer do? Built as our kernels are:
// four warps a side, a double buffer, barriers chosen at run time.
//
//   handed   four warps write a half, four others read it; each side waits for the other: no hazard
//   raced    the same, but the readers give their half back before they read it: hazards
//
// tests/sm70sim/test_races.py holds the emulator to both. As a program: exit status 0, or 1 when
// `handed` computed a wrong sum.
constexpr int kRounds = 16, kSide = 128;

// Barriers 1, 2: half 0, 1 of the buffer is written. 3, 4: it is read.
enum { kWritten = 1, kRead = 3 };
template <int Id>
__device__ void sync(int half) {
  if (half)
    asm volatile("bar.sync %0, 256;" ::"n"(Id + 1) : "memory");
  else
    asm volatile("bar.sync %0, 256;" ::"n"(Id) : "memory");
}
template <int Id>
__device__ void arrive(int half) {
  if (half)
    asm volatile("bar.arrive %0, 256;" ::"n"(Id + 1) : "memory");
  else
    asm volatile("bar.arrive %0, 256;" ::"n"(Id) : "memory");
}

template <bool Raced>
__device__ void hand_over(int* out) {
  __shared__ int buffer[2][kSide];
  const int place = threadIdx.x % kSide;
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < kRounds; i++) {
    const int half = i & 1;
    if (threadIdx.x < kSide) {
      if (i >= 2) sync<kRead>(half);
      buffer[half][place] = i * kSide + place;
      arrive<kWritten>(half);
    } else {
      const bool wanted = i + 2 < kRounds;
      sync<kWritten>(half);
      if (Raced && wanted) arrive<kRead>(half);
      sum += buffer[half][kSide - 1 - place];
      if (!Raced && wanted) arrive<kRead>(half);
    }
  }
  if (threadIdx.x >= kSide) out[place] = sum;
}
extern "C" __global__ void handed(int* out) { hand_over<false>(out); }
extern "C" __global__ void raced(int* out) { hand_over<true>(out); }

#ifndef __CUDACC_RTC__
#include <cstdio>
#include <cstring>

int main(int, char** argv) {
  const bool right = strcmp(argv[1], "handed") == 0;
  int *out, sums[kSide] = {}, total = 0;
  cudaMalloc(&out, sizeof sums);
  if (right)
    handed<<<1, 2 * kSide>>>(out);
  else
    raced<<<1, 2 * kSide>>>(out);
  cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
  for (int x : sums) total += x;
  const int want = (kRounds * kSide - 1) * kRounds * kSide / 2;
  printf("%d, want %d, %s\n", total, want, cudaGetErrorString(cudaGetLastError()));
  return right && total != want;
}
#endif
