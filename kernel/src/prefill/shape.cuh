// The tile of a CTA, who does what in it, and where things lie in shared memory.
#pragma once

#include "cache_type.cuh"

namespace prefill {

// Everything that a launch is told.  Cache strides are bytes, query and output strides elements.
struct Args {
  const __half* q;
  const u8* k;
  const u8* v;
  const int* block_table;
  const int* seq_lens;
  const int* query_start;
  __half* out;
  long long k_page, v_page;
  long long k_head, v_head;
  long long q_token, out_token;
  long long q_head, out_head;
  int k_token, v_token;
  int table_row;         // entries of a row of the block table
  int page_groups;       // 16-token groups of a page
  u32 page_magic;        // division by page_groups
  int group;             // query heads that share a KV head
  u32 group_magic;       // division by group
  int requests;
  int max_len;           // longer requests are left out: the caller's contract is broken
  float score_scale;     // softmax_scale * k_scale * kScale * log2(e)
  float value_scale;     // v_scale * kScale
};

// A CTA has kRows rows, a row being one query head of one token, and walks over the positions that
// they see in steps of kStep tokens.  Warps 0-3 compute scores and probabilities, kRows / 4 rows
// each; warps 4-7 multiply by V, kPvRows rows x 64 dims each.
template <int kHeadDim, class Cache_>
struct Shape {
  using Cache = Cache_;
  static constexpr int kD = kHeadDim;
  static constexpr int kStep = 32;
  static constexpr int kRows = kD == 256 ? 64 : 128;
  static constexpr int kQkTiles = kRows / 32;         // row tiles of 8 of a score warp
  static constexpr int kQkChunks = kD / 32;           // 8-dim chunks of K of a quadpair (a quarter of D)
  static constexpr int kPvDimGroups = kD / 64;
  static constexpr int kPvRows = kRows * kPvDimGroups / 4;
  static constexpr int kPvTiles = kPvRows / 8;

  // A row of K in shared memory is FP16.  Bytes of one buffer of K and of P; both have two.
  static constexpr int kKRow = kD * 2;
  static constexpr int kKBytes = kStep * kKRow;
  static constexpr int kPTile = 128;                   // 8 rows x 8 tokens
  static constexpr int kPGroup = kRows / 8 * kPTile;   // 8 tokens of all rows
  static constexpr int kPBytes = kStep / 8 * kPGroup;

  static constexpr int kSmemK = 0;
  static constexpr int kSmemP = kSmemK + 2 * kKBytes;
  static constexpr int kSmemFactor = kSmemP + 2 * kPBytes;   // 2 x kRows floats
  static constexpr int kSmemFlag = kSmemFactor + 2 * kRows * 4;  // 2 x 4 words, one a score warp
  static constexpr int kSmemInverse = kSmemFlag + 32;        // kRows floats
  static constexpr int kSmemBytes = kSmemInverse + kRows * 4;
};

// Named barriers.  P buffer b: full kFull + b, empty kEmpty + b; kScore is among the score warps.
enum Barrier { kScore = 1, kFull = 2, kEmpty = 4 };

// The place of 16-byte chunk `chunk` of K row `row`: such that the eight lanes of a quarter-warp
// (four tokens x two quadpairs when read, eight chunks of one row when written) use all banks.
template <int kD>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  if (kD == 256) return chunk ^ (row & 3) ^ ((chunk >> 1) & 4);
  if (kD == 128) return chunk ^ (row & 3);
  return chunk ^ (row & 1) ^ ((row & 2) << 1);
}

// What a CTA works on.
struct Tile {
  int first_row;    // of the request's rows (token * group + head)
  int rows;         // rows of the request
  int first_token;  // of the request, in q and out
  int past;         // positions before its first query token: token i sees positions <= past + i
  int len;          // positions of the request
  int steps;        // steps of kStep positions that any row of the tile sees
  int full_steps;   // the first ones, which every row sees whole
  const int* pages;
};

}  // namespace prefill
