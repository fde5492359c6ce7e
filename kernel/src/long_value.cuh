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
#pragma unroll
  for (int j = 0; j < 6; j++)
#pragma unroll
    for (int i = 0; i < 16; i++) acc[j][i >> 3][i & 7] = 0;

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
  bool leaf_begins = true;

  for (int tile = 0, group = 0; tile < tiles; tile++, group += kLongTileGroups) {
    const int buffer = tile & 1;
    barrier_sync_pair<kBarrierProbFull, kLongThreads>(buffer);
    if (leaf_begins || sh.raised[buffer]) {
      const int id = opaque(lane.id);
      const float* factor = sh.factor[buffer] + (id >> 4) * 4 + (id & 1);
#pragma unroll
      for (int j = 0; j < 6; j++) {
        const float f0 = factor[j * 8], f1 = factor[j * 8 + 2];
#pragma unroll
        for (int i = 0; i < 16; i++) {
          float& o = acc[j][i >> 3][i & 7];
          // Not a product at the start: a NaN of one request must not reach the next.
          o = leaf_begins ? 0.0f : o * (i & 2 ? f1 : f0);
        }
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

    leaf_begins = tile + 1 == leaf_end;
    if (leaf_begins) {  // the leaf is complete: normalise it, fold it, write what is finished
      const LeafFate fate = leaf_fate(leaf, run.first, run.last);
      const int parity = leaf & 1;
      barrier_sync_pair<kBarrierWeights, kLongThreads>(parity);
      const int id = opaque(lane.id), w = opaque(warp);
      const int row = (id >> 4) * 4 + (id & 1);  // and row + 2
      uint4* out = static_cast<uint4*>(args.partial_out) +
                   (static_cast<size_t>(head_slot + fate.slot) * kLongFragments + w * 12) * 32 + id;
      uint4* block = reinterpret_cast<uint4*>(sh.block_out) + w * 12 * 32 + id;
#pragma unroll
      for (int j = 0; j < 6; j++) {
        const float s0 = sh.leaf_scale[parity][row + j * 8];
        const float s1 = sh.leaf_scale[parity][row + j * 8 + 2];
        float before0 = 0, before1 = 0, leaf0 = 0, leaf1 = 0;
        if (!fate.first) {
          before0 = sh.weight_before[parity][row + j * 8];
          before1 = sh.weight_before[parity][row + j * 8 + 2];
          leaf0 = sh.weight_leaf[parity][row + j * 8];
          leaf1 = sh.weight_leaf[parity][row + j * 8 + 2];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float (&o)[8] = acc[j][n];
          uint4 x =
              make_uint4(pack_halves(o[0] * s0, o[1] * s0), pack_halves(o[2] * s1, o[3] * s1),
                         pack_halves(o[4] * s0, o[5] * s0), pack_halves(o[6] * s1, o[7] * s1));
          if (!fate.first) {
            const uint4 b = block[(j * 2 + n) * 32];
            x.x = fold_halves(b.x, x.x, before0, leaf0);
            x.y = fold_halves(b.y, x.y, before1, leaf1);
            x.z = fold_halves(b.z, x.z, before0, leaf0);
            x.w = fold_halves(b.w, x.w, before1, leaf1);
          }
          if (fate.last) {
            out[(j * 2 + n) * 32] = x;
          } else {
            block[(j * 2 + n) * 32] = x;
          }
        }
      }
      leaf++;
      leaf_end = request.leaf_begin(leaf + 1) - begin_tile;
    }
    if (tile + 2 < tiles) barrier_arrive_pair<kBarrierProbFree, kLongThreads>(buffer);
  }
}

}  // namespace sm70
