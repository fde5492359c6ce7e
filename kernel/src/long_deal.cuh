// Which leaves a CTA works on.
//
// The tiles of all requests, in order, are one line. CTA c of 80 gets the part from c/80 to
// (c + 1)/80 of it, each cut moved to the nearest leaf, or to the nearest block when one is close.
// So every CTA has the same number of tokens to within a leaf, for any mixture of lengths. Where
// the cuts fall has no influence on the bits: a leaf is computed the same way by any CTA, and
// leaves are folded in the same order by a CTA that has the whole block and by the join.
#pragma once
#include "common/memory.cuh"
#include "long_args.h"

namespace sm70 {

// A request as the kernels need it. leaves is 0 when it takes no part.
struct LongRequest {
  int len, first_token, tokens;  // first_token, tokens: of its queries
  int tiles, leaves;
  u32 leaf_magic;  // 2^32 / leaves + 1: division by multiplication

  // First tile of a leaf; leaf `leaves` begins where the request ends.
  __device__ __forceinline__ int leaf_begin(int leaf) const {
    return leaf >= leaves ? tiles : static_cast<int>(__umulhi(tiles * leaf, leaf_magic));
  }
};

// Reads the request; one with no query token, more than eight, no length, or a length above the
// contract takes no part: nothing of it is read and its output rows are left as they are.
__device__ __forceinline__ LongRequest read_request(const LongArgs& args, int index) {
  const bool exists = index < args.requests;
  const int at = exists ? index : 0;  // no branch: the loads go out together
  LongRequest r;
  r.first_token = args.query_start_loc[at];
  r.tokens = args.query_start_loc[at + 1] - r.first_token;
  r.len = args.seq_lens[at];
  const bool live = exists & (r.tokens >= 1) & (r.tokens <= kLongQueryTokens) & (r.len >= 1) &
                    (r.len <= args.max_len);
  r.tiles = live ? long_tiles(r.len) : 0;
  r.leaves = long_leaves(r.tiles);
  r.leaf_magic = r.leaves > 1 ? 0xffffffffu / r.leaves + 1 : 0;
  return r;
}

// A run: leaves [first, last) of one request, all of one CTA. Three words of four in shared memory.
struct LongRun {
  int index, first, last;
  LongRequest request;
};
constexpr int kRunWords = 12;

__device__ __forceinline__ LongRun load_run(const int* runs, int i) {
  const int4* p = reinterpret_cast<const int4*>(runs + i * kRunWords);
  const int4 a = p[0], b = p[1], c = p[2];
  return {a.x, a.y, a.z, {a.w, b.x, b.y, b.z, b.w, static_cast<u32>(c.x)}};
}

// Fills `runs` with the runs of CTA `cta`, in order; returns how many. For one whole warp: lane b
// looks after request b.
__device__ __forceinline__ int deal_runs(const LongArgs& args, int cta, int* runs) {
  const int lane = threadIdx.x & 31;
  const LongRequest r = read_request(args, lane);
  int end = r.tiles;  // of this request on the line of all tiles
#pragma unroll
  for (int d = 1; d < kLongRequests; d <<= 1) {
    const int before = __shfl_up_sync(~0u, end, d);
    if (lane >= d) end += before;
  }
  const int total = __shfl_sync(~0u, end, kLongRequests - 1);
  const int start = end - r.tiles;
  const float leaves_per_tile = __fdividef(r.leaves, max(r.tiles, 1));
  const int close = total / (kLongCtas * 16);  // a block this near, in tiles, is worth moving to

  auto cut = [&](int part) {  // leaves of this request before the cut
    const int at = total * part / kLongCtas - start;
    const float leaf = at * leaves_per_tile;
    const int block =
        min(static_cast<int>(leaf * (1.0f / kLongBlock) + 0.5f) * kLongBlock, r.leaves);
    const int nearest =
        abs(r.leaf_begin(block) - at) <= close ? block : static_cast<int>(leaf + 0.5f);
    return at <= 0 ? 0 : at >= r.tiles ? r.leaves : nearest;
  };
  const int first = cut(cta), last = cut(cta + 1);
  const u32 having = __ballot_sync(~0u, last > first);
  if (last > first) {
    int4* p = reinterpret_cast<int4*>(runs + __popc(having & ((1u << lane) - 1)) * kRunWords);
    p[0] = make_int4(lane, first, last, r.len);
    p[1] = make_int4(r.first_token, r.tokens, r.tiles, r.leaves);
    p[2] = make_int4(static_cast<int>(r.leaf_magic), 0, 0, 0);
  }
  return __popc(having);
}

}  // namespace sm70
