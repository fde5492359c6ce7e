// Integer instructions on vectors: what does not fit one expression.
#pragma once
#include "vec.h"

struct V2 {  // a 64-bit value per lane: low and high word
  vu lo, hi;
};
INL vu ones(vi c) { return (vu)c & 1u; }            // a true comparison is -1
INL vu bit_lanes(u32 m) { return ones(lanes(m)); }  // 1 where the bit is set
INL V2 not2(V2 a) { return {~a.lo, ~a.hi}; }
INL V2 neg2(V2 a) { return {0u - a.lo, 0u - a.hi - ones((vi)(a.lo != 0u))}; }
// a + b + cin; carry: bits of the lanes that overflow
INL V2 add2(V2 a, V2 b, vu cin, u32& carry) {
  vu lo = a.lo + b.lo, k = ones((vi)(lo < a.lo)), lo2 = lo + cin;
  k += ones((vi)(lo2 < lo));
  vu hi = a.hi + b.hi, hi2 = hi + k;
  carry = bits((vi)(hi < a.hi) | (vi)(hi2 < hi));
  return {lo2, hi2};
}
template <bool SIGNED>
INL V2 mul_wide(vu a, vu b) {
  V2 r;
  SIGNED ? mulwide_s(a, b, r.lo, r.hi) : mulwide_u(a, b, r.lo, r.hi);
  return r;
}
// IADD3 with carries: sum of three terms and `extra`; c0, c1: carry of at least 1 and 2
INL vu add3(vu a, vu b, vu c, vu extra, u32& c0, u32& c1) {
  vu s = a + b, k = ones((vi)(s < a)), t = s + c;
  k += ones((vi)(t < s));
  vu r = t + extra;
  k += ones((vi)(r < t));
  c0 = bits((vi)(k > 0u)), c1 = bits((vi)(k > 1u));
  return r;
}
// SHF: (c:a) shifted; L left, else right; HI takes the high word of the result; W wraps the amount
template <bool L, bool HI, bool W, int BITS, bool SIGNED>
INL vu shf(vu a, vu s, vu c) {
  for (int i = 0; i < VL; i++) {
    u32 n = W ? s[i] & (BITS - 1) : s[i] > BITS ? BITS : s[i];
    u64 v = (u64)c[i] << 32 | a[i];
    if (L)
      v = n > 63 ? 0 : v << n;
    else if (SIGNED)
      v = (u64)((i64)v >> (n > 63 ? 63 : n));
    else
      v = n > 63 ? 0 : v >> n;
    a[i] = (u32)(v >> (HI ? 32 : 0));
  }
  return a;
}
template <bool SIGNED>
INL vu flo(vu a) {  // position of the highest bit that differs from the sign
  return 31u - lzv(SIGNED ? a ^ (vu)((vi)a >> 31) : a);
}
template <bool SIGNED>
INL vu flo_shift(vu a) {  // FLO.SH: the shift that normalises
  vu z = lzv(SIGNED ? a ^ (vu)((vi)a >> 31) : a);
  return pick((vi)(z == 32u), splat(~0u), z);
}
template <bool SIGNED, bool W>
INL vu sgxt(vu v, vu b) {
  for (int i = 0; i < VL; i++) {
    u32 n = W ? b[i] & 31 : b[i];
    u32 x = v[i];
    v[i] = n == 0    ? 0
           : n >= 32 ? x
           : SIGNED  ? (u32)((i32)(x << (32 - n)) >> (32 - n))
                     : x & ((1u << n) - 1);
  }
  return v;
}
template <bool W>
INL vu bmsk(vu s, vu b) {
  for (int i = 0; i < VL; i++) {
    u32 at = W ? s[i] & 31 : s[i], n = W ? b[i] & 31 : b[i] > 32 ? 32 : b[i];
    s[i] = at > 31 ? 0 : (u32)(((1ull << n) - 1) << at);
  }
  return s;
}
template <bool SIGNED>
INL vu vabsdiff(vu a, vu b) {
  vi less = SIGNED ? (vi)a < (vi)b : (vi)(a < b);
  return pick(less, b - a, a - b);
}
template <bool ACC>
INL vu vabsdiff4(vu a, vu b, vu c) {  // bytes, unsigned; ACC: their sum
  vu r = splat(0);
  for (int k = 0; k < 32; k += 8) {
    vu d = vabsdiff<true>(a >> (u32)k & 255u, b >> (u32)k & 255u);
    r += ACC ? d : d << (u32)k;
  }
  return r + c;
}
template <class A, class B>
INL vu idp4a(vu a, vu b, vu c) {
  for (int i = 0; i < VL; i++) {
    i32 s = 0;
    for (int k = 0; k < 32; k += 8) s += (i32)(A)(a[i] >> k) * (i32)(B)(b[i] >> k);
    c[i] += (u32)s;
  }
  return c;
}
// a field of a word, sign or zero extended (I2F of bytes and halves)
template <int BITS, bool SIGNED>
INL vu field(vu a, u32 shift) {
  vu up = a << (32 - BITS - shift);
  return SIGNED ? (vu)((vi)up >> (32 - BITS)) : up >> (32 - BITS);
}
template <bool SIGNED>
INL vu imnmx(vu a, vu b, u32 pmin) {
  vi less = SIGNED ? (vi)a < (vi)b : (vi)(a < b);
  return pick(lanes(pmin), pick(less, a, b), pick(less, b, a));
}
