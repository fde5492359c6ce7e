// Double precision and 64-bit conversions: eight lanes as a V2, one at a time.
#pragma once
#include "float.h"
#include "integer.h"

INL double get_double(const V2& a, int i) { return u2d(a.lo[i], a.hi[i]); }
INL void set_double(V2& a, int i, double d) {
  u64 v = d2u(d);
  a.lo[i] = (u32)v, a.hi[i] = (u32)(v >> 32);
}
INL V2 dneg(V2 a) { return {a.lo, a.hi ^ 0x80000000u}; }
INL V2 dabs(V2 a) { return {a.lo, a.hi & 0x7fffffffu}; }
#define DOUBLE(name, args, expr)                         \
  INL V2 name args {                                     \
    V2 r;                                                \
    for (int i = 0; i < VL; i++) set_double(r, i, expr); \
    return r;                                            \
  }
DOUBLE(to_double, (vf a), (double)a[i])
template <bool SIGNED>
DOUBLE(i32_to_double, (vu a), SIGNED ? (double)(i32)a[i] : (double)a[i])
template <bool SIGNED>
DOUBLE(i64_to_double, (V2 a),
       SIGNED ? (double)(i64)(a.lo[i] | (u64)a.hi[i] << 32)
              : (double)(a.lo[i] | (u64)a.hi[i] << 32))
#undef DOUBLE
enum DArith {
  kAdd,
  kMul,
  kFma
};
INL double dvalue(DArith op, double a, double b, double c) {
  return op == kAdd ? a + b : op == kMul ? a * b : fma(a, b, c);
}
V2 darith_rounded(DArith op, V2 a, V2 b, V2 c, int mode);  // runtime.cpp
template <DArith OP>
INL V2 darith(V2 a, V2 b, V2 c, int mode) {
  if (mode != RM_RN) return darith_rounded(OP, a, b, c, mode);
  V2 r;
  for (int i = 0; i < VL; i++)
    set_double(r, i, dvalue(OP, get_double(a, i), get_double(b, i), get_double(c, i)));
  return r;
}
INL vf to_float(V2 a) {
  vf r{};
  for (int i = 0; i < VL; i++) r[i] = (float)get_double(a, i);
  return r;
}
vf wide_to_float(V2 a, bool is_signed, int mode);  // runtime.cpp
template <bool SIGNED>
INL vf i64_to_float(V2 a, int mode) {
  return wide_to_float(a, SIGNED, mode);
}

enum DCompare { kLT, kEQ, kLE, kGT, kNE, kGE, kNUM, kNAN, kLTU, kEQU, kLEU, kGTU, kNEU, kGEU };
template <DCompare OP>
INL u32 dcompare(V2 a, V2 b) {
  u32 r = 0;
  for (int i = 0; i < VL; i++) {
    double x = get_double(a, i), y = get_double(b, i);
    bool unordered = x != x || y != y, t = false;
    switch (OP) {
      case kLT:
      case kLTU:
        t = x < y;
        break;
      case kEQ:
      case kEQU:
        t = x == y;
        break;
      case kLE:
      case kLEU:
        t = x <= y;
        break;
      case kGT:
      case kGTU:
        t = x > y;
        break;
      case kNE:
      case kNEU:
        t = x < y || x > y;
        break;
      case kGE:
      case kGEU:
        t = x >= y;
        break;
      case kNUM:
        t = !unordered;
        break;
      case kNAN:
        t = unordered;
        break;
    }
    if (OP >= kLTU && unordered) t = true;
    r |= (u32)t << i;
  }
  return r;
}
// Saturating; NaN gives 0, or the smallest value for 64 bits.
template <int BITS, bool SIGNED>
INL V2 double_to_int(V2 a, int mode) {
  V2 r;
  for (int i = 0; i < VL; i++) {
    double x = get_double(a, i);
    x = mode == RM_RZ   ? trunc(x)
        : mode == RM_RM ? floor(x)
        : mode == RM_RP ? ceil(x)
                        : nearbyint(x);
    double top = SIGNED ? (BITS == 64 ? 0x1p63 : 0x1p31) : (BITS == 64 ? 0x1p64 : 0x1p32);
    u64 most = SIGNED ? ~0ull >> (65 - BITS) : ~0ull >> (64 - BITS), least = SIGNED ? ~most : 0, v;
    if (x != x)
      v = BITS == 64 ? 1ull << 63 : 0;
    else if (x >= top)
      v = most;
    else if (x <= (SIGNED ? -top : 0.0))
      v = least;
    else
      v = SIGNED ? (u64)(i64)x : (u64)x;
    r.lo[i] = (u32)v, r.hi[i] = (u32)(v >> 32);
  }
  return r;
}
template <bool RSQ>
INL vu mufu64h(vu hi) {  // MUFU.RCP64H, RSQ64H: high words
  for (int i = 0; i < VL; i++) {
    double d = u2d(0, hi[i]);
    hi[i] = (u32)(d2u(RSQ ? 1.0 / sqrt(d) : 1.0 / d) >> 32);
  }
  return hi;
}
// FCHK.DIVIDE: a / b needs the slow path
INL u32 fchk(vu a, vu b) {
  u32 r = 0;
  for (int i = 0; i < VL; i++) {
    i32 x = (i32)(a[i] >> 23 & 255) - 127, y = (i32)(b[i] >> 23 & 255) - 127;
    bool slow = x == 128 || y == 128 || y == -127 || x == -127 || x - y >= 125 || x - y <= -125 ||
                y >= 126 || y <= -126 || x <= -103;
    r |= (u32)slow << i;
  }
  return r;
}
template <int BITS, bool SIGNED>
INL vu cvt_f2i_small(vf x, int mode) {
  vu v = cvt_f2i(x, SIGNED, mode);
  const u32 most = SIGNED ? (1u << (BITS - 1)) - 1 : (1u << BITS) - 1;
  if (!SIGNED) return pick((vi)(v > most), splat(most), v);
  v = pick((vi)v > (vi)splat(most), splat(most), v);
  return pick((vi)v < (vi)splat(~most), splat(~most), v);
}
