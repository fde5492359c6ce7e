// Eight lanes as one vector, in the vector extensions of GCC and Clang: the compiler
// maps them to AVX2, to pairs of SSE or NEON registers, or to plain code.  A warp is
// four such vectors.  Every function gives the same bits on every target.
#pragma once
#include <math.h>

#include "base.h"
#if defined(__FMA__) || defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int VL = 8;  // lanes of a vector
constexpr int NV = 4;  // vectors of a warp
typedef u32 vu __attribute__((vector_size(32)));
typedef i32 vi __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(32)));
enum Round { RM_RN = 0, RM_RM = 1, RM_RP = 2, RM_RZ = 3 };

INL vu ldv(const u32* r, int h) { return *(const vu*)(r + VL * h); }
INL vu splat(u32 x) { return vu{} + x; }
INL vf splatf(float x) { return vf{} + x; }
INL vf asf(vu x) { return (vf)x; }
INL vu asu(vf x) { return (vu)x; }
INL u32 f2u(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return u;
}
INL float u2f(u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INL double u2d(u32 lo, u32 hi) {
  u64 v = lo | (u64)hi << 32;
  double d;
  memcpy(&d, &v, 8);
  return d;
}
INL u64 d2u(double d) {
  u64 v;
  memcpy(&v, &d, 8);
  return v;
}

// ---- masks: bit i of a word <-> lane i of a vector
INL u32 bits(vi c) {
#if defined(__AVX2__)
  return (u32)_mm256_movemask_ps((__m256)c);
#else
  const vu one = {1, 2, 4, 8, 16, 32, 64, 128};
  vu t = (vu)c & one;
  u32 r = 0;
  for (int i = 0; i < VL; i++) r |= t[i];
  return r;
#endif
}
INL vi lanes(u32 m) {
  const vu one = {1, 2, 4, 8, 16, 32, 64, 128};
  return (splat(m) & one) == one;
}
INL vu pick(vi c, vu a, vu b) { return c ? a : b; }
INL vf pickf(vi c, vf a, vf b) { return c ? a : b; }
INL vu selm(u32 m, vu a, vu b) { return pick(lanes(m), a, b); }

// ---- comparisons as bit masks: cs_ signed, cu_ unsigned, cf_ float (given as bits)
#define COMPARE(name, op)                                        \
  INL u32 cs_##name(vu a, vu b) { return bits((vi)a op(vi) b); } \
  INL u32 cu_##name(vu a, vu b) { return bits((vi)(a op b)); }   \
  INL u32 cf_##name(vu a, vu b) { return bits((vi)(asf(a) op asf(b))); }
COMPARE(LT, <);
COMPARE(EQ, ==);
COMPARE(LE, <=);
COMPARE(GT, >);
COMPARE(GE, >=);
#undef COMPARE
INL u32 cs_NE(vu a, vu b) { return bits((vi)a != (vi)b); }
INL u32 cu_NE(vu a, vu b) { return bits((vi)(a != b)); }
INL vi nan_lanes(vu a) { return (vi)((a & 0x7fffffffu) > 0x7f800000u); }
INL u32 cf_NAN(vu a, vu b) { return bits(nan_lanes(a) | nan_lanes(b)); }
INL u32 cf_NUM(vu a, vu b) { return ~cf_NAN(a, b) & 0xffu; }
INL u32 cf_NE(vu a, vu b) { return bits((vi)(asf(a) != asf(b))) & cf_NUM(a, b); }
#define UNORDERED(name, opposite) \
  INL u32 cf_##name##U(vu a, vu b) { return ~cf_##opposite(a, b) & 0xffu; }
UNORDERED(LT, GE);
UNORDERED(LE, GT);
UNORDERED(GT, LE);
UNORDERED(GE, LT);
UNORDERED(EQ, NE);
UNORDERED(NE, EQ);
#undef UNORDERED

// ---- integers
INL vu shlv(vu a, vu s) { return pick((vi)(s < 32u), a << (s & 31u), splat(0)); }
INL vu shrv(vu a, vu s) { return pick((vi)(s < 32u), a >> (s & 31u), splat(0)); }
INL vu sarv(vu a, vu s) { return (vu)((vi)a >> (vi)pick((vi)(s < 32u), s, splat(31))); }
INL vu vabs_i(vu a) { return pick((vi)a < 0, 0u - a, a); }
INL vu popcv(vu a) {
  for (int i = 0; i < VL; i++) a[i] = (u32)__builtin_popcount(a[i]);
  return a;
}
INL vu lzv(vu a) {
  for (int i = 0; i < VL; i++) a[i] = a[i] ? (u32)__builtin_clz(a[i]) : 32;
  return a;
}
INL void mulwide_u(vu a, vu b, vu& lo, vu& hi) {
  lo = a * b;
  for (int i = 0; i < VL; i++) hi[i] = (u32)((u64)a[i] * b[i] >> 32);
}
INL void mulwide_s(vu a, vu b, vu& lo, vu& hi) {
  lo = a * b;
  for (int i = 0; i < VL; i++) hi[i] = (u32)((u64)((i64)(i32)a[i] * (i32)b[i]) >> 32);
}
INL vu prmt(vu a, vu s, vu c) {
  vu out = splat(0);
  for (int i = 0; i < 4; i++) {
    vu n = (s >> (u32)(4 * i)) & 0xfu;
    vu b = (pick((vi)((n & 4u) != 0u), c, a) >> ((n & 3u) << 3)) & 0xffu;
    vu sign = pick((vi)(b >= 0x80u), splat(0xff), splat(0));
    out |= pick((vi)(n >= 8u), sign, b) << (u32)(8 * i);
  }
  return out;
}
INL vu brevv(vu x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  x = (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
  return x >> 16 | x << 16;
}
// a three-input truth table over masks
INL u32 plut(u32 lut, u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (lut >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}

// ---- guarded writes
INL void st(u32* d, int h, u32 m, vu v) {
  vu* p = (vu*)(d + VL * h);
  *p = likely(m == ~0u) ? v : selm(m >> (VL * h), v, *p);
}
INL void setp(u32& p, u32 m, u32 v) { p = (p & ~m) | (v & m); }
