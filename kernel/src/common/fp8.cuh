// KV element types: how a 32-bit word (or two) of cache bytes becomes tensor-core halves.
//
// Every type converts four consecutive elements ("a quad") to two 32-bit registers of packed
// halves, with integer instructions only: there is no multiply, and no FP8 conversion on Volta.
//   E4M3  halves are exactly value / 256 (subnormals included); order is elements 0 2 | 1 3.
//         The missing 2^8 belongs into the softmax scale (K) and into the output scale (V).
//         The NaN bytes 0x7f / 0xff come out as +-480 / 256: every byte converts to a finite half.
//   E5M2  halves are exactly the value, NaN and infinity included; order 0 1 | 2 3.
//   FP16  as stored; order 0 1 | 2 3.
// The E4M3 order costs nothing: permute D of Q alike for QK, and relabel output columns for PV.
#pragma once
#include "common/memory.cuh"

namespace sm70 {

struct E4M3 {
  static constexpr int kBytes = 1;
  static constexpr float kUnit = 256.0f;       // a stored half times this is the value
  static constexpr bool kEvenOddQuads = true;  // order of a converted quad: 0 2 1 3
  static constexpr bool kAlwaysFinite = true;  // stale bytes never convert to NaN or infinity
  // sign | exponent and mantissa one bit lower: 4 exponent bits of bias 7 read under bias 15.
  static __device__ __forceinline__ uint2 quad(u32 word) {
    const u32 even = word << 8;
    return make_uint2(((even >> 1) & 0x3f803f80u) | (even & 0x80008000u),
                      ((word >> 1) & 0x3f803f80u) | (word & 0x80008000u));
  }
};

struct E5M2 {
  static constexpr int kBytes = 1;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kEvenOddQuads = false;
  static constexpr bool kAlwaysFinite = false;
  // An E5M2 byte is the upper byte of the half.
  static __device__ __forceinline__ uint2 quad(u32 word) {
    return make_uint2(__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424));
  }
};

struct FP16 {
  static constexpr int kBytes = 2;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kEvenOddQuads = false;
  static constexpr bool kAlwaysFinite = false;
};

// Element of a quad that sits at position i of the converted order.
template <class Kv>
__host__ __device__ constexpr int quad_element(int i) {
  return Kv::kEvenOddQuads ? ((i & 1) << 1 | (i >> 1)) : i;
}

}  // namespace sm70
