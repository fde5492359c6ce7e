// Atomic operations: lanes one after the other, results written when all are done.
#pragma once
#include "float.h"
#include "memory.h"

template <class T>
INL T atomic_source(const Row* R, int r, u32 l) {
  if (r < 0) return 0;
  return sizeof(T) == 8 ? (T)(R[r][l] | (u64)R[r + 1][l] << 32) : (T)R[r][l];
}
// new = op(old, v, compare); rd: register for the old value; rv, rc: sources (-1: RZ or none)
template <char SPACE, class T, class Op>
INL void atomic(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, int rd, int rv, int rc, Op op) {
  trace_access(c, w, idx, m, ad, sizeof(T), SPACE);
  T result[32];
  FORL(m) {
    Ref r = ref<SPACE>(c, w, idx, l, ad[l], sizeof(T));
    check_init(r, idx, l, ad[l], sizeof(T), SPACE);
    check_race<SPACE>(w, idx, l, ad[l], sizeof(T), Races::kAtomic);
    T old;
    memcpy(&old, r.p, sizeof old);
    T next = op(old, atomic_source<T>(w.R, rv, l), atomic_source<T>(w.R, rc, l));
    memcpy(r.p, &next, sizeof next);
    result[l] = old;
  }
  if (rd < 0) return;
  FORL(m) {
    w.R[rd][l] = (u32)result[l];
    if (sizeof(T) == 8) w.R[rd + 1][l] = (u32)((u64)result[l] >> 32);
  }
}
INL u32 add_float(u32 a, u32 b) { return f2u(u2f(a) + u2f(b)); }
INL u64 add_double(u64 a, u64 b) {
  return d2u(u2d((u32)a, (u32)(a >> 32)) + u2d((u32)b, (u32)(b >> 32)));
}
INL u32 add_half2(u32 a, u32 b) {
  vu x = splat(a), y = splat(b);
  return pack(f2h(h2f(x) + h2f(y)), f2h(h2f(x >> 16) + h2f(y >> 16)))[0];
}
