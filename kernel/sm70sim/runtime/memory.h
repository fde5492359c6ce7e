// Global, shared, local and constant memory: bounds, alignment and (when tracked)
// initialisation are checked for every lane; a traced run records sectors and wavefronts.
#pragma once
#include "races.h"
#include "vec.h"

#define FORL(m) for (u32 mm_ = (m), l; mm_ && ((l = (u32)__builtin_ctz(mm_)), 1); mm_ &= mm_ - 1)

// Windows of the generic address space
constexpr u64 kSharedWindow = 0x7f8000000000ull, kLocalWindow = 0x7f8100000000ull;

// ---- trace records (trace.cpp)
void trace_global(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, u32 bytes);
void trace_shared(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, u32 bytes, bool generic);
void trace_local(Ctx& c, Warp& w, u32 idx, u32 m, u32 bytes, bool generic);
INL bool in_shared_window(u64 a) { return a >> 32 == kSharedWindow >> 32; }
INL bool in_local_window(u64 a) { return a >> 32 == kLocalWindow >> 32; }
INL void trace_access(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, u32 bytes, char space) {
  if (likely(!c.tracing)) return;
  u64 first = ad[__builtin_ctz(m)];
  if (space == 's')
    trace_shared(c, w, idx, m, ad, bytes, false);
  else if (space == 'l')
    trace_local(c, w, idx, m, bytes, false);
  else if (space == 'x' && in_shared_window(first))
    trace_shared(c, w, idx, m, ad, bytes, true);
  else if (space == 'x' && in_local_window(first))
    trace_local(c, w, idx, m, bytes, true);
  else
    trace_global(c, w, idx, m, ad, bytes);
}

// ---- addresses to host pointers, with the shadow byte of the first byte (NULL: not tracked)
struct Ref {
  u8 *p, *init;
};
INL Ref global_ref(Ctx& c, u32 idx, u32 lane, u64 a, u32 n) {
  u64 o = a - c.gbase;
  if (unlikely(o > c.gsize || o + n > c.gsize))
    fault_at(idx, lane, "global address out of range", a);
  if (unlikely(a & (n - 1))) fault_at(idx, lane, "misaligned global address", a);
  return {c.gmem + o, c.p->ginit ? c.p->ginit + o : nullptr};
}
INL Ref shared_ref(Ctx& c, Warp& w, u32 idx, u32 lane, u32 a, u32 n) {
  if (unlikely((u64)a + n > c.smem_bytes)) fault_at(idx, lane, "shared address out of range", a);
  if (unlikely(a & (n - 1))) fault_at(idx, lane, "misaligned shared address", a);
  return {w.cta->smem + a, w.cta->smem_init ? w.cta->smem_init + a : nullptr};
}
INL Ref local_ref(Ctx& c, Warp& w, u32 idx, u32 lane, u32 a, u32 n) {
  if (unlikely((u64)a + n > c.local_bytes)) fault_at(idx, lane, "local address out of range", a);
  if (unlikely(a & (n - 1))) fault_at(idx, lane, "misaligned local address", a);
  size_t o = (size_t)lane * c.local_bytes + a;
  return {w.local + o, w.local_init ? w.local_init + o : nullptr};
}
template <char SPACE>
INL Ref ref(Ctx& c, Warp& w, u32 idx, u32 lane, u64 a, u32 n) {
  if (SPACE == 's') return shared_ref(c, w, idx, lane, (u32)a, n);
  if (SPACE == 'l') return local_ref(c, w, idx, lane, (u32)a, n);
  if (SPACE == 'x' && in_shared_window(a)) return shared_ref(c, w, idx, lane, (u32)a, n);
  if (SPACE == 'x' && in_local_window(a)) return local_ref(c, w, idx, lane, (u32)a, n);
  return global_ref(c, idx, lane, a, n);
}
INL void check_init(const Ref& r, u32 idx, u32 lane, u64 a, u32 n, char space) {
  if (likely(!r.init)) return;
  for (u32 i = 0; i < n; i++)
    if (!r.init[i])
      fault_at(idx, lane,
               space == 's'   ? "uninitialised read of shared address"
               : space == 'l' ? "uninitialised read of local address"
                              : "uninitialised read of address",
               a + i);
}

template <char SPACE>
INL void check_race(Warp& w, u32 idx, u32 lane, u64 a, u32 n, Races::Kind kind) {
  if (SPACE != 's' && SPACE != 'x') return;
  if (likely(!w.cta->races) || (SPACE == 'x' && !in_shared_window(a))) return;
  w.cta->races->access(w, idx, lane, (u32)a, n, kind);
}

// ---- loads and stores of W bytes a lane; register -1 is RZ
template <int W, bool SIGNED>
INL void to_register(Row* R, int rd, u32 l, const u8* p) {
  if (W == 1)
    R[rd][l] = SIGNED ? (u32)(i32)(i8)*p : *p;
  else if (W == 2) {
    u16 v;
    memcpy(&v, p, 2);
    R[rd][l] = SIGNED ? (u32)(i32)(i16)v : v;
  } else
    for (int k = 0; k < W / 4; k++) memcpy(&R[rd + k][l], p + 4 * k, 4);
}
template <int W>
INL void from_register(Row* R, int rs, u32 l, u8* p) {
  if (rs < 0) {
    memset(p, 0, W);
    return;
  }
  if (W == 1)
    *p = (u8)R[rs][l];
  else if (W == 2) {
    u16 v = (u16)R[rs][l];
    memcpy(p, &v, 2);
  } else
    for (int k = 0; k < W / 4; k++) memcpy(p + 4 * k, &R[rs + k][l], 4);
}
template <char SPACE, int W, bool SIGNED>
NOINL void load(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, int rd) {
  trace_access(c, w, idx, m, ad, W, SPACE);
  FORL(m) {
    Ref r = ref<SPACE>(c, w, idx, l, ad[l], W);
    check_init(r, idx, l, ad[l], W, SPACE);
    check_race<SPACE>(w, idx, l, ad[l], W, Races::kRead);
    if (rd >= 0) to_register<W, SIGNED>(w.R, rd, l, r.p);
  }
}
template <char SPACE, int W>
NOINL void store(Ctx& c, Warp& w, u32 idx, u32 m, const u64* ad, int rs) {
  trace_access(c, w, idx, m, ad, W, SPACE);
  FORL(m) {
    Ref r = ref<SPACE>(c, w, idx, l, ad[l], W);
    check_race<SPACE>(w, idx, l, ad[l], W, Races::kWrite);
    if (unlikely(r.init)) memset(r.init, 1, W);
    from_register<W>(w.R, rs, l, r.p);
  }
}
