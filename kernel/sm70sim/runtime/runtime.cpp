// Parts of the runtime that are the same for every kernel: faults, rare arithmetic, shuffles.
#include <fenv.h>
#include <math.h>

#include "double.h"
#include "lanes.h"

Ctx* g_ctx;

void fault(const char* fmt, u64 a, u64 b, u64 c) {
  snprintf(g_ctx->p->err, sizeof g_ctx->p->err, fmt, (unsigned long long)a, (unsigned long long)b,
           (unsigned long long)c);
  throw Fault();
}
void fault_at(u32 idx, u32 lane, const char* what, u64 value) {
  const Cta* t = g_ctx->cta;
  snprintf(g_ctx->p->err, sizeof g_ctx->p->err,
           "%s 0x%llx at 0x%x: \"%s\" (lane %u, block %u,%u,%u)", what, (unsigned long long)value,
           idx * 16, kernel_text[idx], lane, t ? t->ctaid[0] : 0, t ? t->ctaid[1] : 0,
           t ? t->ctaid[2] : 0);
  throw Fault();
}

// ---- directed rounding: volatile keeps the operation between the two calls
namespace {
struct HostRounding {
  int old = fegetround();
  explicit HostRounding(int mode) {
    static const int host[4] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    fesetround(host[mode]);
  }
  ~HostRounding() { fesetround(old); }
};
}  // namespace
vf add_rounded(vf a, vf b, int mode) {
  HostRounding r(mode);
  for (int i = 0; i < VL; i++) {
    volatile float x = a[i], y = b[i], z = x + y;
    a[i] = z;
  }
  return a;
}
vf mul_rounded(vf a, vf b, int mode) {
  HostRounding r(mode);
  for (int i = 0; i < VL; i++) {
    volatile float x = a[i], y = b[i], z = x * y;
    a[i] = z;
  }
  return a;
}
vf fma_rounded(vf a, vf b, vf c, int mode) {
  HostRounding r(mode);
  for (int i = 0; i < VL; i++) {
    volatile float x = a[i], y = b[i], z = c[i], s = fmaf(x, y, z);
    a[i] = s;
  }
  return a;
}
vf int_to_float_rounded(vu a, bool is_signed, int mode) {
  HostRounding r(mode);
  vf f{};
  for (int i = 0; i < VL; i++) {
    volatile i64 x = is_signed ? (i64)(i32)a[i] : (i64)a[i];
    volatile float y = (float)x;
    f[i] = y;
  }
  return f;
}
V2 darith_rounded(DArith op, V2 a, V2 b, V2 c, int mode) {
  HostRounding r(mode);
  for (int i = 0; i < VL; i++) {
    volatile double x = get_double(a, i), y = get_double(b, i), z = get_double(c, i);
    volatile double v = dvalue(op, x, y, z);
    set_double(a, i, v);
  }
  return a;
}
vf wide_to_float(V2 a, bool is_signed, int mode) {
  HostRounding r(mode);
  vf f{};
  for (int i = 0; i < VL; i++) {
    volatile u64 x = a.lo[i] | (u64)a.hi[i] << 32;
    volatile float y = is_signed ? (float)(i64)x : (float)x;
    f[i] = y;
  }
  return f;
}
vu f2h_rounded(vf x, int mode) {
  vu out{};
  for (int i = 0; i < VL; i++) {
    u32 u = f2u(x[i]), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) {
      out[i] = 0x7fff;
      continue;
    }
    if (a == 0x7f800000) {
      out[i] = sign | 0x7c00;
      continue;
    }
    bool up =
        (mode == RM_RP && !sign) || (mode == RM_RM && sign);  // magnitude rounds up, else down
    i32 e = (i32)(a >> 23) - 127;
    u32 man = (a & 0x7fffff) | (a >> 23 ? 0x800000 : 0), h, rest;
    if (e > 15) {
      out[i] = sign | (up ? 0x7c00 : 0x7bff);
      continue;
    }
    u32 shift = e >= -14 ? 13 : e < -26 ? 31 : (u32)(13 - 14 - e);
    h = shift > 24 ? 0 : man >> shift;
    rest = shift > 24 ? man : man & ((1u << shift) - 1);
    if (e >= -14) h += (u32)(e + 14) << 10;  // the hidden bit adds the missing one
    out[i] = sign | (h + (up && rest ? 1 : 0));
  }
  return out;
}

void mufu_lanes(int f, const u32* a, u32* d, u32 m) {
  const double turn = 6.283185307179586476925;
  FORL(m) {
    float x = u2f((a[l] & 0x7f800000) == 0 ? a[l] & 0x80000000 : a[l]), r;
    switch (f) {
      case kRcp:
        r = 1.0f / x;
        break;
      case kRsq:
        r = (float)(1.0 / sqrt((double)x));
        break;
      case kLg2:
        r = log2f(x);
        break;
      case kSin:
        r = (float)sin(turn * (double)x);
        break;
      case kCos:
        r = (float)cos(turn * (double)x);
        break;
      case kSqrt:
        r = sqrtf(x);
        break;
      case kTanh:
        r = tanhf(x);
        break;
      default:
        r = exp2f(x);
        break;
    }
    u32 u = f2u(r);
    if ((u & 0x7f800000) == 0) u &= 0x80000000;
    d[l] = r != r ? 0x7fffffff : u;
  }
}

u32 shfl(int mode, const u32* a, const u32* b, const u32* cc, u32* out, u32 m) {
  u32 pred = 0;
  FORL(m) {
    u32 by = b[l] & 31, clamp = cc[l] & 31, seg = cc[l] >> 8 & 31;
    u32 maxl = (l & seg) | (clamp & ~seg), minl = l & seg;
    i32 j;
    bool ok;
    switch (mode) {
      case kIdx:
        j = (i32)(minl | (by & ~seg));
        ok = j <= (i32)maxl;
        break;
      case kUp:
        j = (i32)l - (i32)by;
        ok = j >= (i32)maxl;
        break;
      case kDown:
        j = (i32)(l + by);
        ok = j <= (i32)maxl;
        break;
      default:
        j = (i32)(l ^ by);
        ok = j <= (i32)maxl;
        break;
    }
    out[l] = a[(ok ? j : (i32)l) & 31];
    if (ok) pred |= 1u << l;
  }
  return pred;
}
