// The arithmetic of HMMA.884 (hmma.h has the layouts).
#include "hmma.h"

#ifndef HMMA_EXACT
#define HMMA_EXACT 0  // 1: exact sums rounded once, instead of what the hardware does
#endif

// One five-term sum as the hardware forms it (Fasi et al. 2021): exact products, all terms
// aligned to the largest exponent, bits below dropped, the sum truncated.
INL vf five(vf p0, vf p1, vf p2, vf p3, vf c) {
#if HMMA_EXACT
  for (int i = 0; i < VL; i++) c[i] = (float)((double)p0[i] + p1[i] + p2[i] + p3[i] + c[i]);
  return c;
#else
  auto larger = [](vu a, vu b) { return pick((vi)(a > b), a, b); };
  vu mx = larger(larger(larger(asu(vabs(p0)), asu(vabs(p1))), larger(asu(vabs(p2)), asu(vabs(p3)))),
                 asu(vabs(c)));
  vf plain = p0 + p1 + p2 + p3 + c;
  vi odd = (vi)(mx >= 0x7f800000u) | (vi)(mx == 0u);  // infinity, NaN, or all zero
  mx = pick(odd, splat(0), mx);
  vu e = mx >> 23;  // biased exponent of the largest term
  e = pick((vi)(e < 25u), splat(25), e);
  vu s = 277u - e;  // 2^(150 - e), as biased exponent: at most 252
  vf scale = asf(s << 23), back = asf((e - 23u) << 23);
  // a term is below 2^24 after scaling; the clearing of non-finite terms keeps the conversion
  // defined
  auto fixed = [&](vf x) { return f2i_in_range(pickf(odd, vf{}, x * scale)); };
  vu sum = fixed(p0) + fixed(p1) + fixed(p2) + fixed(p3) + fixed(c);
  // toward zero: undo a conversion that rounded the magnitude up
  vu mag = vabs_i(sum), f = asu(i2f(mag));
  f += (vu)(vi)(f2i_in_range(asf(f)) > mag);  // a true comparison is -1
  vf r = asf(f | (sum & 0x80000000u)) * back;
  return pickf(odd, plain, r);
#endif
}

template <int A, int B, int C, int D>
INL vf quad(vf x) {  // within every four lanes
  return __builtin_shufflevector(x, x, A, B, C, D, A + 4, B + 4, C + 4, D + 4);
}
template <int A, int B, int C, int D>
INL vf quad2(vf x, vf y) {  // 0..3 from x, 4..7 from y
#define Q(i, b) ((i) < 4 ? (i) + (b) : (i) + 4 + (b))
  return __builtin_shufflevector(x, y, Q(A, 0), Q(B, 0), Q(C, 0), Q(D, 0), Q(A, 4), Q(B, 4),
                                 Q(C, 4), Q(D, 4));
#undef Q
}
struct Halves {
  vf x[4][NV];
};  // [half of the fragment][vector]
INL Halves unpack(const u32* r0, const u32* r1) {
  Halves u;
  for (int h = 0; h < NV; h++) {
    vu a = ldv(r0, h), b = ldv(r1, h);
    u.x[0][h] = h2f(a), u.x[1][h] = h2f(a >> 16), u.x[2][h] = h2f(b), u.x[3][h] = h2f(b >> 16);
  }
  return u;
}

// FP32 accumulators.  Rows of step S: (t&1) + R; columns: group S/2, (t&2) + J.
template <bool ACOL, int S, int K>
INL vf a32(const Halves& a, int h) {
  constexpr int R = 2 * (S & 1);
  return ACOL ? quad2<K, K + 4, K, K + 4>(a.x[R][h], a.x[R + 1][h])
              : quad<R, R + 1, R, R + 1>(a.x[K][h]);
}
template <bool BCOL, int S, int J, int K>
INL vf b32(const Halves& b, int h) {
  int v = (S >> 1) * 2 + (h & 1);  // the vector of the same quadpairs in group S/2
  return BCOL ? quad<J, J, J + 2, J + 2>(b.x[K][v])
              : quad2<K, K, K + 4, K + 4>(b.x[J][v], b.x[J + 2][v]);
}
template <bool ACOL, bool BCOL, int S>
void hmma_f32(const u32* a0, const u32* a1, const u32* b0, const u32* b1, const u32* c0,
              const u32* c1, u32* d0, u32* d1) {
  Halves a = unpack(a0, a1), b = unpack(b0, b1);
  vu o[2][NV];
  for (int h = 0; h < NV; h++) {
    vf p0 = a32<ACOL, S, 0>(a, h), p1 = a32<ACOL, S, 1>(a, h), p2 = a32<ACOL, S, 2>(a, h),
       p3 = a32<ACOL, S, 3>(a, h);
    o[0][h] =
        asu(five(p0 * b32<BCOL, S, 0, 0>(b, h), p1 * b32<BCOL, S, 0, 1>(b, h),
                 p2 * b32<BCOL, S, 0, 2>(b, h), p3 * b32<BCOL, S, 0, 3>(b, h), asf(ldv(c0, h))));
    o[1][h] =
        asu(five(p0 * b32<BCOL, S, 1, 0>(b, h), p1 * b32<BCOL, S, 1, 1>(b, h),
                 p2 * b32<BCOL, S, 1, 2>(b, h), p3 * b32<BCOL, S, 1, 3>(b, h), asf(ldv(c1, h))));
  }
  memcpy(d0, o[0], 128);
  memcpy(d1, o[1], 128);
}

// FP16 accumulators: row t, column 4 S + J.
template <bool ACOL, int K>
INL vf a16(const Halves& a, int h) {
  if (!ACOL) return a.x[K][h];
  vf lo = quad2<K, K + 4, K, K + 4>(a.x[0][h], a.x[1][h]),
     hi = quad2<K, K + 4, K, K + 4>(a.x[2][h], a.x[3][h]);
  return quad2<0, 1, 6, 7>(lo, hi);
}
template <bool BCOL, int S, int J, int K>
INL vf b16(const Halves& b, int h) {
  int v = S * 2 + (h & 1);
  return BCOL ? quad<J, J, J, J>(b.x[K][v]) : quad<K, K, K, K>(b.x[J][v]);
}
template <bool BCOL, int S, int J>
INL vu half16(const vf* p, const Halves& b, int h, vu c) {
  return f2h(five(p[0] * b16<BCOL, S, J, 0>(b, h), p[1] * b16<BCOL, S, J, 1>(b, h),
                  p[2] * b16<BCOL, S, J, 2>(b, h), p[3] * b16<BCOL, S, J, 3>(b, h), h2f(c)));
}
template <bool ACOL, bool BCOL, int S>
void hmma_f16(const u32* a0, const u32* a1, const u32* b0, const u32* b1, const u32* c0,
              const u32* c1, u32* d0, u32* d1) {
  Halves a = unpack(a0, a1), b = unpack(b0, b1);
  vu o[2][NV];
  for (int h = 0; h < NV; h++) {
    vf p[4] = {a16<ACOL, 0>(a, h), a16<ACOL, 1>(a, h), a16<ACOL, 2>(a, h), a16<ACOL, 3>(a, h)};
    vu x = ldv(c0, h), y = ldv(c1, h);
    o[0][h] = pack(half16<BCOL, S, 0>(p, b, h, x), half16<BCOL, S, 1>(p, b, h, x >> 16));
    o[1][h] = pack(half16<BCOL, S, 2>(p, b, h, y), half16<BCOL, S, 3>(p, b, h, y >> 16));
  }
  memcpy(d0, o[0], 128);
  memcpy(d1, o[1], 128);
}

// Every layout and step that exists.
#define INSTANTIATE(name, acol, bcol, step)                                                        \
  template void name<acol, bcol, step>(const u32*, const u32*, const u32*, const u32*, const u32*, \
                                       const u32*, u32*, u32*)
#define LAYOUTS(name, step)              \
  INSTANTIATE(name, false, false, step); \
  INSTANTIATE(name, false, true, step);  \
  INSTANTIATE(name, true, false, step);  \
  INSTANTIATE(name, true, true, step)
LAYOUTS(hmma_f32, 0);
LAYOUTS(hmma_f32, 1);
LAYOUTS(hmma_f32, 2);
LAYOUTS(hmma_f32, 3);
LAYOUTS(hmma_f16, 0);
LAYOUTS(hmma_f16, 1);
