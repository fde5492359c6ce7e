// The value warps: O = P V.
//
// Warp w has dims 64 w .. 64 w + 63 of all tokens: 6 x 2 accumulator tiles of 8 x 8, 96 registers.
// V is the B operand (row-major): a lane holds four consecutive dims of one token, again one word
// of E4M3, so V comes from global memory straight into the registers that convert and multiply
// it. Eight bytes per lane and token, 64 tokens (4 KB per warp) ahead. The order of columns is a
// mere relabelling of output dims. One 128-bit load of P feeds four mma.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "long_fold.cuh"
#include "long_shared.cuh"

namespace sm70 {

// Normalises O of a leaf; folds it into the block so far, if this leaf does not begin one; puts it
// where it goes on: into the workspace if it ends a result. `row`: of the lane's first value in a
// row tile. Two copies, because a branch around every fold would keep the conversions of one row
// tile from running behind the sums of the one before.
template <bool Folds>
__device__ __forceinline__ void finish_leaf(const LongShared& sh, const float (&acc)[6][2][8],
                                            int parity, int row, uint4* block, uint4* result,
                                            bool last) {
#pragma unroll
  for (int j = 0; j < 6; j++) {
    uint4 so_far[2];
    if (Folds) so_far[0] = block[j * 64], so_far[1] = block[j * 64 + 32];
    const float* scale = sh.leaf_scale[parity] + row + j * 8;
    const u32* before = sh.weight_before[parity] + row + j * 8;
    const u32* leaf = sh.weight_leaf[parity] + row + j * 8;
    const float s0 = scale[0], s1 = scale[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float (&o)[8] = acc[j][n];
      uint4 x = make_uint4(pack_halves(o[0] * s0, o[1] * s0), pack_halves(o[2] * s1, o[3] * s1),
                           pack_halves(o[4] * s0, o[5] * s0), pack_halves(o[6] * s1, o[7] * s1));
      if (Folds) {
        x.x = fold_halves(so_far[n].x, x.x, before[0], leaf[0]);
        x.y = fold_halves(so_far[n].y, x.y, before[2], leaf[2]);
        x.z = fold_halves(so_far[n].z, x.z, before[0], leaf[0]);
        x.w = fold_halves(so_far[n].w, x.w, before[2], leaf[2]);
      }
      if (last) {
        result[(j * 2 + n) * 32] = x;
      } else {
        block[(j * 2 + n) * 32] = x;
      }
    }
  }
}

__device__ __forceinline__ void value_run(const LongArgs& args, LongShared& sh, const LongRun& run,
                                          int begin_tile, int groups, const u8* values, int thread,
                                          int head_slot) {
  const Lane lane(thread);
  const int warp = thread >> 5 & 3;
  const LongRequest& request = run.request;
  const int tiles = (groups + kLongTileGroups - 1) / kLongTileGroups;
  // Position t of a group of four tokens holds token 0 2 1 3: the order in which P is stored.
  const int token = (lane.t & 1) * 2 + (lane.t >> 1);
  const u8* lane_values =
      values + token * args.v_token_stride + 64 * warp + (lane.quadpair * 2 + lane.g) * 8;
  const u32 lane_probs = shared_address(sh.prob[0]) + lane.operand_row() * 16;

  float acc[6][2][8];
  auto clear = [&] {  // not a product with 0: a NaN of one request must not reach the next
#pragma unroll
    for (int j = 0; j < 6; j++)
#pragma unroll
      for (int i = 0; i < 16; i++) acc[j][i >> 3][i & 7] = 0;
  };
  clear();

  uint2 v[4][4];  // the next four groups of 16 tokens
  auto load = [&](uint2(&to)[4], int group) {
    if (group < groups) {
      const u8* p = lane_values + static_cast<size_t>(sh.value_offset[group]) * 8;
#pragma unroll
      for (int j = 0; j < 4; j++) to[j] = load_stream64(p), p += 4 * args.v_token_stride;
    }
  };
  uint4 p[6];  // P of the next 8 tokens: a ring, as Q in the score warps
  auto fragment = [&](int j, u32 step) {
    return load_shared128(step + (j / 3) * kProbHalfPitch + (j % 3) * 128);
  };
  auto multiply = [&](const uint2(&values16)[4], u32 probs, bool tile_ends) {  // 16 tokens
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint2 x0 = E4M3::quad(values16[2 * s].x), y0 = E4M3::quad(values16[2 * s].y);
      const uint2 x1 = E4M3::quad(values16[2 * s + 1].x), y1 = E4M3::quad(values16[2 * s + 1].y);
#pragma unroll
      for (int j = 0; j < 6; j++) {
        mma_row_row(acc[j][0], p[j].x, p[j].y, x0.x, x0.y);
        mma_row_row(acc[j][1], p[j].x, p[j].y, y0.x, y0.y);
        mma_row_row(acc[j][0], p[j].z, p[j].w, x1.x, x1.y);
        mma_row_row(acc[j][1], p[j].z, p[j].w, y1.x, y1.y);
        if (s == 0 || !tile_ends) p[j] = fragment(j, probs + (s + 1) * kProbStepPitch);
      }
    }
  };

#pragma unroll
  for (int i = 0; i < 4; i++) load(v[i], i);
  int leaf = run.first;
  int leaf_end = request.leaf_begin(leaf + 1) - begin_tile;

  for (int tile = 0, group = 0; tile < tiles; tile++, group += kLongTileGroups) {
    const int buffer = tile & 1;
    barrier_sync_pair<kBarrierProbFull, kLongThreads>(buffer);
    if (sh.raised[buffer]) {
      const int id = opaque(lane.id);
      const float* factor = sh.factor[buffer] + (id >> 4) * 4 + (id & 1);
#pragma unroll
      for (int j = 0; j < 6; j++) {
        const float f0 = factor[j * 8], f1 = factor[j * 8 + 2];
#pragma unroll
        for (int i = 0; i < 16; i++) acc[j][i >> 3][i & 7] *= i & 2 ? f1 : f0;
      }
    }
    u32 probs = lane_probs + buffer * kProbBytes;
#pragma unroll
    for (int j = 0; j < 6; j++) p[j] = fragment(j, probs);
    if (group + kLongTileGroups <= groups) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        multiply(v[i], probs + i * 2 * kProbStepPitch, i == 3);
        load(v[i], group + kLongTileGroups + i);
      }
    } else {  // the last tile of the request
#pragma unroll 1
      for (int i = group; i < groups; i++) {
        multiply(v[0], probs, false);
        probs += 2 * kProbStepPitch;
#pragma unroll
        for (int j = 0; j < 4; j++) v[0][j] = v[1][j], v[1][j] = v[2][j], v[2][j] = v[3][j];
      }
    }

    // Before a leaf is finished, so that the score warps go on meanwhile. They cannot come around
    // to this parity of leaf_scale and the weights: a leaf has two tiles at least, and P two
    // buffers.
    if (tile + 2 < tiles) barrier_arrive_pair<kBarrierProbFree, kLongThreads>(buffer);
    if (tile + 1 == leaf_end) {
      const LeafFate fate = leaf_fate(leaf, run.first, run.last);
      const int parity = leaf & 1;
      barrier_sync_pair<kBarrierWeights, kLongThreads>(parity);
      const int id = opaque(lane.id), w = opaque(warp);
      const int row = (id >> 4) * 4 + (id & 1);  // and row + 2
      uint4* result = static_cast<uint4*>(args.partial_out) +
                      (static_cast<size_t>(head_slot + fate.slot) * kLongFragments + w * 12) * 32 +
                      id;
      uint4* block = reinterpret_cast<uint4*>(sh.block_out) + w * 12 * 32 + id;
      if (fate.first) {
        finish_leaf<false>(sh, acc, parity, row, block, result, fate.last);
      } else {
        finish_leaf<true>(sh, acc, parity, row, block, result, fate.last);
      }
      clear();
      leaf++;
      leaf_end = request.leaf_begin(leaf + 1) - begin_tile;
    }
  }
}

}  // namespace sm70
