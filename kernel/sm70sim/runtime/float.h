// Float and half arithmetic of the FMA, FP16 and conversion instructions on vectors.
#pragma once
#include "vec.h"

INL vf vabs(vf x) { return (vf)((vu)x & 0x7fffffffu); }
INL vf vneg(vf x) { return (vf)((vu)x ^ 0x80000000u); }
INL vu ftz(vu x) { return pick((vi)((x & 0x7f800000u) == 0u), x & 0x80000000u, x); }
INL vu fsat(vu x) {  // NaN gives 0
  vf v = asf(x);
  return pick((vi)(v > 1.0f), splat(0x3f800000), pick((vi)(v > 0.0f), x, splat(0)));
}
INL vf vfma(vf a, vf b, vf c) {
#if defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < VL; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
// Directed rounding (runtime.cpp): rare, so one lane at a time under the host's rounding mode.
vf add_rounded(vf a, vf b, int mode);
vf mul_rounded(vf a, vf b, int mode);
vf fma_rounded(vf a, vf b, vf c, int mode);
vf int_to_float_rounded(vu a, bool is_signed, int mode);
template <int M>
INL vf vadd_r(vf a, vf b) {
  return add_rounded(a, b, M);
}
template <int M>
INL vf vmul_r(vf a, vf b) {
  return mul_rounded(a, b, M);
}
template <int M>
INL vf vfma_r(vf a, vf b, vf c) {
  return fma_rounded(a, b, c, M);
}

// ---- to integral values; 2^23 and above are integral already, NaN passes
INL vf vtrunc(vf x) {
  vi small = (vi)(vabs(x) < 8388608.0f);
  vf t = __builtin_convertvector(__builtin_convertvector(pickf(small, x, vf{}), vi), vf);
  return pickf(small, (vf)((vu)t | ((vu)x & 0x80000000u)), x);
}
INL vf vfloor(vf x) {
  vf t = vtrunc(x);
  return (vf)((vu)pickf((vi)(t > x), t - 1.0f, t) | ((vu)x & 0x80000000u));
}
INL vf vceil(vf x) {
  vf t = vtrunc(x);
  return (vf)((vu)pickf((vi)(t < x), t + 1.0f, t) | ((vu)x & 0x80000000u));
}
INL vf vrint(vf x) {
  vf a = vabs(x), t = (a + 8388608.0f) - 8388608.0f;
  return pickf((vi)(a < 8388608.0f), (vf)((vu)t | ((vu)x & 0x80000000u)), x);
}
INL vf vsqrt(vf a) {
  for (int i = 0; i < VL; i++) a[i] = sqrtf(a[i]);
  return a;
}

// ---- integer <-> float
INL vf i2f(vu a) { return __builtin_convertvector((vi)a, vf); }
INL vf u2fv(vu a) {
  for (int i = 0; i < VL; i++) ((vf&)a)[i] = (float)a[i];
  return (vf)a;
}
INL vu f2i_in_range(vf a) { return (vu) __builtin_convertvector(a, vi); }  // |a| < 2^31 only
INL vu cvt_f2i(vf x, bool is_signed, int mode) {
  vf r = mode == RM_RZ   ? vtrunc(x)
         : mode == RM_RM ? vfloor(x)
         : mode == RM_RP ? vceil(x)
                         : vrint(x);
  vi nan = nan_lanes(asu(x));
  if (is_signed) {
    vi big = (vi)(r >= 2147483648.0f), low = (vi)(r < -2147483648.0f);
    vu out = f2i_in_range(pickf(big | low | nan, vf{}, r));
    return pick(nan, splat(0), pick(big, splat(0x7fffffff), pick(low, splat(0x80000000u), out)));
  }
  vi big = (vi)(r >= 4294967296.0f), low = (vi)(r > 0.0f) == 0, top = (vi)(r >= 2147483648.0f);
  vf in = pickf(big | low | nan, vf{}, pickf(top, r - 2147483648.0f, r));
  vu out = f2i_in_range(in) + pick(top, splat(0x80000000u), splat(0));
  return pick(nan | low, splat(0), pick(big, splat(0xffffffffu), out));
}

// ---- half <-> float
// Low 16 bits of each lane.  The product re-biases the exponent and is exact, subnormals included.
INL vf h2f(vu x) {
  vu em = (x & 0x7fffu) << 13;
  vu f = asu(asf(em) * 0x1p112f);
  f = pick((vi)(em >= 0x0f800000u), em | 0x7f800000u, f);
  return asf(f | (x & 0x8000u) << 16);
}
// Round to nearest even; NaN gives 0x7fff as the hardware does.
INL vu f2h(vf x) {
  vu u = asu(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  vu normal = (a + 0xc8000fffu + (a >> 13 & 1u)) >> 13;  // exponent - 112, ties to even
  vu tiny = asu(asf(a) + 0.5f) - 0x3f000000u;            // below 2^-14: the sum rounds at 2^-24
  vu h = pick((vi)(a < 0x38800000u), tiny, normal);
  h = pick((vi)(a >= 0x477ff000u), splat(0x7c00), h);  // 65520 and above overflow
  return pick((vi)(a > 0x7f800000u), splat(0x7fff), h | sign);
}
vu f2h_rounded(vf x, int mode);
template <int M>
INL vu f2h_r(vf x) {
  return M == RM_RN ? f2h(x) : f2h_rounded(x, M);
}
INL vu pack(vu lo, vu hi) { return (lo & 0xffffu) | hi << 16; }
INL vu hftz(vu h) { return pick((vi)((h & 0x7c00u) == 0u), h & 0x8000u, h); }
INL vu hsat(vu h) {
  vf v = h2f(h);
  return pick((vi)(v > 1.0f), splat(0x3c00), pick((vi)(v > 0.0f), h, splat(0)));
}
// Fused multiply-add of halves: exact product, sum rounded to odd in float, so that the one
// rounding to half that follows is right.
INL vf fma_odd(vf a, vf b, vf c) {
  vf p = a * b, s = p + c, bb = s - p, e = (p - (s - bb)) + (c - bb);
  vi inexact = (vi)(e != 0.0f) & ~nan_lanes(asu(e)) & (vi)((asu(s) & 1u) == 0u) &
               (vi)(vabs(s) < asf(splat(0x7f800000))) & (vi)(s != 0.0f);
  vi grow = (vi)(((asu(e) ^ asu(s)) & 0x80000000u) == 0u);
  return asf(pick(inexact, pick(grow, asu(s) + 1u, asu(s) - 1u), asu(s)));
}
// FMNMX: a NaN loses against a number, -0 < +0; pmin has a bit set where the minimum is wanted
INL vu fmnmx(vu a, vu b, u32 pmin) {
  vi an = nan_lanes(a), bn = nan_lanes(b);
  vi lt = (vi)(asf(a) < asf(b)) | ((vi)(asf(a) == asf(b)) & ((vi)a < 0));
  vu r = pick(lanes(pmin), pick(lt, a, b), pick(lt, b, a));
  r = pick(an, b, r);
  r = pick(bn & ~an, a, r);
  return pick(an & bn, splat(0x7fffffff), r);
}
// 2^x, error below 1.5 ulp, results below 2^-126 flushed: MUFU.EX2
INL vu ex2v(vu a) {
  vf x = asf(ftz(a));
  vi nan = nan_lanes(a), hi = (vi)(x >= 128.0f), lo = (vi)(x < -126.0f);
  vf xc = pickf(hi | lo | nan, vf{}, x), n = vrint(xc), t = xc - n;
  vf p = splatf(1.5252733804e-5f);
  p = vfma(p, t, splatf(1.5403530394e-4f));
  p = vfma(p, t, splatf(1.3333558146e-3f));
  p = vfma(p, t, splatf(9.6181291076e-3f));
  p = vfma(p, t, splatf(5.5504108665e-2f));
  p = vfma(p, t, splatf(2.4022650696e-1f));
  p = vfma(p, t, splatf(6.9314718056e-1f));
  p = vfma(p, t, splatf(1.0f));
  vu r = asu(p) + (f2i_in_range(n) << 23);
  r = pick(lo, splat(0), pick(hi, splat(0x7f800000), r));
  return pick(nan, splat(0x7fffffff), r);
}
enum Mufu { kRcp, kRsq, kEx2, kLg2, kSin, kCos, kSqrt, kTanh };
void mufu_lanes(int f, const u32* a, u32* d, u32 m);  // the others, with libm's accuracy
