// The tile of a CTA, who does what in it, and where things lie in shared memory.
#pragma once
#include "common/barrier.cuh"
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "prefill/device.cuh"
#include "prefill_args.h"

namespace sm70 {

// A CTA has kRows rows, a row being one query head of one token, and walks over the positions that
// they see in steps of kStep tokens. Warps 0-3 compute scores and probabilities, kRows / 4 rows
// each; warps 4-7 multiply by V, kValueRows rows x 64 dims each.
template <int D, class Kv_>
struct PrefillShape {
  using Kv = Kv_;
  static constexpr int kD = D;
  static constexpr int kStep = kPrefillStep;
  static constexpr int kRows = prefill_rows(D);
  static constexpr int kScoreTiles = kRows / 32;  // row tiles of 8 of a score warp
  static constexpr int kScoreChunks = D / 32;     // 8-dim chunks of a quadpair: a quarter of D
  static constexpr int kDimGroups = D / 64;       // value warps side by side in D
  static constexpr int kValueRows = kRows * kDimGroups / 4;
  static constexpr int kValueTiles = kValueRows / 8;

  // K rows in shared memory are FP16. There are two buffers of K and two of P.
  static constexpr int kKeyRow = D * 2;
  static constexpr int kKeyBytes = kStep * kKeyRow;
  static constexpr int kProbTile = 128;                     // 8 rows x 8 tokens
  static constexpr int kProbGroup = kRows / 8 * kProbTile;  // 8 tokens of all rows
  static constexpr int kProbBytes = kStep / 8 * kProbGroup;

  static constexpr int kKeyOffset = 0;
  static constexpr int kProbOffset = kKeyOffset + 2 * kKeyBytes;
  static constexpr int kFlagOffset = kProbOffset + 2 * kProbBytes;  // 2 x 4 words, by score warp
  static constexpr int kFactorOffset = kFlagOffset + 32;            // 2 x kRows floats
  static constexpr int kInverseOffset = kFactorOffset + 2 * kRows * 4;  // kRows floats
  static_assert(kInverseOffset + kRows * 4 == prefill_shared_bytes(D), "host and device differ");
};

// Named barriers. P buffer b: full kFull + b, empty kEmpty + b; kScore is among the score warps;
// kSums: 1 / the sums of the rows are written.
enum PrefillBarrier { kScore = 1, kFull = 2, kEmpty = 4, kSums = 6 };

// The place of 16-byte chunk `chunk` of K row `row`: such that the eight lanes of a quarter-warp
// (four tokens x two quadpairs when read, eight chunks of one row when written) use all banks.
template <int D>
__device__ __forceinline__ int key_chunk(int row, int chunk) {
  if (D == 256) return chunk ^ (row & 3) ^ (chunk >> 1 & 4);
  if (D == 128) return chunk ^ (row & 3);
  return chunk ^ (row & 1) ^ (row & 2) << 1;
}

// What a CTA works on.
struct PrefillTile {
  int first_row;     // of the request's rows (token * group + head)
  int rows;          // rows of the request
  int first_token;   // of the request, in q and out
  int past;          // positions before its first query token: token i sees positions <= past + i
  int len;           // positions of the request
  int steps;         // steps of kStep positions that any row of the tile sees
  int full_steps;    // the first ones, which every row sees whole
  const int* table;  // row of the block table
};

}  // namespace sm70
