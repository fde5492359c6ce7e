// Micro-kernels for the validation of the cycle model (micro.py says what each is compared with).
#include <cuda_fp16.h>
#define ENTRY extern "C" __global__ void
#define UNROLL _Pragma("unroll")
typedef unsigned u32;
typedef unsigned long long u64;

// ---- global memory
ENTRY copy(const float4* a, float4* b, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    b[i] = a[i];
}
ENTRY read_only(const float4* a, float* b, int n) {
  float s = 0;
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step * 4) {
    float4 v[4];
    UNROLL for (int j = 0; j < 4; j++) v[j] = a[i + j * step];
    UNROLL for (int j = 0; j < 4; j++) s += v[j].x + v[j].y + v[j].z + v[j].w;
  }
  if (s == 1.2345f) b[0] = s;
}
ENTRY chase(const u64* p, u64* out, int n) {
  for (int i = 0; i < n; i++) p = (const u64*)*p;
  out[0] = (u64)p;
}
// every block of 256 threads reads the same n doubles, again and again (as gpu-benches does)
ENTRY block_sum(double* a, const double* __restrict__ b, int n, int iterations, int zero) {
  double s = 0;
  b += threadIdx.x;
  for (int it = 0; it < iterations; it++) {
    b += zero;
#pragma unroll 32
    for (int i = 0; i < n; i += 256) s += b[i];
    s *= 1.3;
  }
  if (s == 1233.) a[threadIdx.x] += s;
}

// ---- tensor cores
#define MMA32(c)                                                                            \
  asm volatile(                                                                             \
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},"  \
      "{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};"                                                \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
        "+f"(c[7])                                                                          \
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
template <int CHAINS>
__device__ void mma(const u32* a, float* out, int n) {
  u32 a0 = a[threadIdx.x], a1 = a[threadIdx.x + 1], b0 = a[threadIdx.x + 2],
      b1 = a[threadIdx.x + 3];
  float c[CHAINS][8] = {};
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 16; j++) MMA32(c[j % CHAINS]);
  }
  float s = 0;
  UNROLL for (int j = 0; j < 8 * CHAINS; j++) s += c[j / 8][j & 7];
  out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}
ENTRY hmma(const u32* a, float* out, int n) { mma<4>(a, out, n); }
ENTRY hmma_dependent(const u32* a, float* out, int n) { mma<1>(a, out, n); }

// ---- shared memory
// stride in words between lanes; WIDTH words a lane
template <class T>
__device__ void lds(float* out, int n, int stride) {
  __shared__ float s[8192];
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) s[i] = i;
  __syncthreads();
  const u32 p = (u32)__cvta_generic_to_shared(s) + (threadIdx.x % 32) * stride * 4;
  u32 x = 0;
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 16; j++) {
      u32 v[4] = {};
      if (sizeof(T) == 16)
        asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(p + j * 16));
      else
        asm volatile("ld.volatile.shared.u32 %0,[%1];" : "=r"(v[0]) : "r"(p + j * 4));
      x ^= v[0];
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
ENTRY lds128(float* out, int n) { lds<float4>(out, n, 4); }
ENTRY lds32(float* out, int n) { lds<float>(out, n, 1); }
ENTRY lds32_conflict2(float* out, int n) { lds<float>(out, n, 2); }
ENTRY lds32_conflict4(float* out, int n) { lds<float>(out, n, 4); }
ENTRY lds32_conflict32(float* out, int n) { lds<float>(out, n, 32); }
ENTRY lds_chase(int* out, int n) {
  __shared__ int s[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) s[i] = (i * 4 + 128) & 4095;
  __syncthreads();
  u32 q = (u32)__cvta_generic_to_shared(s);
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 32; j++) asm volatile("ld.shared.u32 %0,[%0];" : "+r"(q));
  }
  out[threadIdx.x] = q;
}

// the same chase by index, as CUDA code is written
ENTRY lds_index(int* out, int n) {
  __shared__ int s[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) s[i] = (i + 32) & 1023;
  __syncthreads();
  volatile int* v = s;
  int q = 0;
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 32; j++) q = v[q];
  }
  out[threadIdx.x] = q;
}

// ---- arithmetic: eight chains for the rate, one for the latency
template <int CHAINS, class T, class F>
__device__ void chains(T* out, int n, T seed, F f) {
  T a[CHAINS];
  UNROLL for (int j = 0; j < CHAINS; j++) a[j] = seed;
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 64; j++) f(a[j % CHAINS]);
  }
  UNROLL for (int j = 1; j < CHAINS; j++) a[0] = a[0] + a[j];
  out[blockIdx.x * blockDim.x + threadIdx.x] = a[0];
}
#define RATE_AND_LATENCY(name, T, TEXT, C)                                                  \
  ENTRY name##_rate(T* out, int n, T k) {                                                   \
    chains<8>(out, n, (T)threadIdx.x, [k](T& a) { asm volatile(TEXT : "+" C(a) : C(k)); }); \
  }                                                                                         \
  ENTRY name##_latency(T* out, int n, T k) {                                                \
    chains<1>(out, n, (T)threadIdx.x, [k](T& a) { asm volatile(TEXT : "+" C(a) : C(k)); }); \
  }
RATE_AND_LATENCY(ffma, float, "fma.rn.f32 %0,%0,%1,%1;", "f")
RATE_AND_LATENCY(lop3, u32, "lop3.b32 %0,%0,%1,%1,0x6a;", "r")
RATE_AND_LATENCY(iadd_xor, u32, "add.s32 %0,%0,%1; xor.b32 %0,%0,%1;", "r")
RATE_AND_LATENCY(imad, u32, "mad.lo.s32 %0,%0,%1,%1;", "r")
RATE_AND_LATENCY(hfma2, u32, "fma.rn.f16x2 %0,%0,%1,%1;", "r")
RATE_AND_LATENCY(ex2, float, "ex2.approx.ftz.f32 %0,%0;", "f")
RATE_AND_LATENCY(shfl, u32, "shfl.sync.bfly.b32 %0,%0,1,31,0xffffffff;", "r")
RATE_AND_LATENCY(dfma, double, "fma.rn.f64 %0,%0,%1,%1;", "d")
// FMA and integer pipes together
ENTRY fma_and_lop(float* out, int n, float k, u32 m) {
  float a[4] = {};
  u32 b[4] = {threadIdx.x, 1, 2, 3};
  for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 32; j++) {
      asm volatile("fma.rn.f32 %0,%0,%1,%1;" : "+f"(a[j & 3]) : "f"(k));
      asm volatile("lop3.b32 %0,%0,%1,%1,0x6a;" : "+r"(b[j & 3]) : "r"(m));
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      a[0] + a[1] + a[2] + a[3] + (b[0] ^ b[1] ^ b[2] ^ b[3]);
}
