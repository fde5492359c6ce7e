// What the kernel must know of an element type of the KV cache: its size and its way to FP16.
#pragma once

#include "device.cuh"

namespace prefill {

// Eight bytes of the cache become FP16 in an order that is the same in every eight dims:
// `expand` gives dims kOrder[0..3] in x and y, 4 + kOrder[0..3] in z and w (FP16: x and y alone).
// Values come out divided by kScale, which the caller folds into a scale that it applies anyway.
struct E4M3 {
  static constexpr int kBytes = 1;
  static constexpr float kScale = 256.f;  // exponent bias 15 against 7
  static constexpr bool kPairsApart = true;  // order 0 2 1 3
  // Sign and exponent.mantissa go to their places in the two halves of a word: 7 integer
  // operations for four values, subnormals included.  The two NaN codes read as +-480: the cache
  // writer saturates, and a test would cost a sixth of the conversion.
  static __device__ __forceinline__ uint2 four(u32 w) {
    u32 v = w << 8;
    return make_uint2(((v >> 1) & 0x3f803f80u) | (v & 0x80008000u),
                      ((w >> 1) & 0x3f803f80u) | (w & 0x80008000u));
  }
};

struct E5M2 {
  static constexpr int kBytes = 1;
  static constexpr float kScale = 1.f;
  static constexpr bool kPairsApart = true;
  // E5M2 is the upper byte of FP16: infinities and NaN stay what they are.
  static __device__ __forceinline__ uint2 four(u32 w) {
    return make_uint2((w << 8) & 0xff00ff00u, w & 0xff00ff00u);
  }
};

struct FP16 {
  static constexpr int kBytes = 2;
  static constexpr float kScale = 1.f;
  static constexpr bool kPairsApart = false;
};

}  // namespace prefill
