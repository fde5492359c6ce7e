// Controls for sanitize.py: does a tool understand warps that hand shared memory to each other with
// bar.arrive and bar.sync, as the PTX manual's producer and consumer do?
//
//   handed   a warp writes a double buffer, another reads it; each waits for the other: no hazard
//   raced    the same, but the reader gives its half back before it reads: hazards
//
// Exit status 0, or 1 when `handed` computed the wrong sum.
#include <cstdio>
#include <cstring>

constexpr int kRounds = 16;

// Barriers 1, 2: half 0, 1 of the buffer is written. 3, 4: it is read.
template <int Id>
__device__ void sync() {
  asm volatile("bar.sync %0, 64;" ::"n"(Id) : "memory");
}
template <int Id>
__device__ void arrive() {
  asm volatile("bar.arrive %0, 64;" ::"n"(Id) : "memory");
}

template <int Half, bool Waits>
__device__ void round(int* half, int i, int* sum) {
  const int lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    if (i >= 2) sync<3 + Half>();
    half[lane] = i * 32 + lane;
    arrive<1 + Half>();
  } else {
    sync<1 + Half>();
    if (!Waits && i + 2 < kRounds) arrive<3 + Half>();
    *sum += half[31 - lane];
    if (Waits && i + 2 < kRounds) arrive<3 + Half>();
  }
}

template <bool Waits>
__global__ void hand_over(int* out) {
  __shared__ int buffer[2][32];
  int sum = 0;
  for (int i = 0; i < kRounds; i += 2) {
    round<0, Waits>(buffer[0], i, &sum);
    round<1, Waits>(buffer[1], i + 1, &sum);
  }
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = sum;
}

int main(int, char** argv) {
  const bool waits = strcmp(argv[1], "handed") == 0;
  int *out, sums[32] = {}, total = 0;
  cudaMalloc(&out, sizeof sums);
  if (waits)
    hand_over<true><<<1, 64>>>(out);
  else
    hand_over<false><<<1, 64>>>(out);
  cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
  for (int x : sums) total += x;
  const int want = (kRounds * 32 - 1) * kRounds * 32 / 2;
  printf("%d, want %d, %s\n", total, want, cudaGetErrorString(cudaGetLastError()));
  return waits && total != want;
}
