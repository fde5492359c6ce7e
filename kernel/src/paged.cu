// Ordinary request-major paged attention for sm_70: 1..16 query tokens per request, split-KV.
//
// One CTA has one request, one KV head, one chunk of at most 64 query rows (row = query token *
// group + head of the group) and one split: a run of whole 128-token units of the request. It
// reads each K and V element of its split once. paged_join then adds the splits of a row.
//
// A tile is kTokens tokens. Eight warps share it three times:
//   QK       S^T = K Q^T. Warp w owns its tokens, all dims: K comes from global memory straight
//            into the registers that convert and multiply it. The quadpairs of a warp have
//            different dims of the same tokens; shuffles add them; S goes to shared memory.
//   softmax  Warp w owns row w of every eight. Running maximum and sum stay in registers; P (FP16)
//            and the factor of the old output go to shared memory.
//   PV       O = P V. Warp w owns 32 dims (and, for D < 256, a part of the tokens): again V comes
//            straight from global memory into the registers that multiply it.
// K of the next tile is asked for right after QK, V one ring ahead inside PV, so memory is busy
// while the tensor cores run. The arithmetic of a row is the same for any number of row tiles and
// any neighbours: the same bits whatever else is in the batch.
//
// Compile with -DHEAD_DIM={64,128,256} -DKV={FP16,E4M3,E5M2}.
#include "common/fp8.cuh"
#include "common/memory.cuh"
#include "common/mma.cuh"
#include "common/paging.cuh"
#include "paged_args.h"

namespace sm70 {

constexpr int kWarps = kPagedThreads / 32;
constexpr float kNoMaximum = -1e30f;  // finite: a fully masked tile gives 2^-inf = 0, never NaN

template <int D, class Kv, int RowTiles>
struct Shape {
  static constexpr int kTokens = paged_tile_tokens(D, Kv::kBytes);
  static constexpr int kWarpTokens = kTokens / kWarps;  // of a warp in QK
  static constexpr int kTokenTiles = kWarpTokens / 8;   // M tiles of a warp in QK: 1 or 2
  static constexpr int kTileGroups = kTokens / 16;
  static constexpr int kChunks = D / 32;                    // 32 dims: 8 for each quadpair
  static constexpr int kPassTiles = RowTiles <= 2 ? 1 : 2;  // row tiles of a pass over K
  static constexpr int kDimWarps = D / 32;                  // warps side by side in PV
  static constexpr int kTokenParts = kWarps / kDimWarps;    // warps that share dims in PV
  static constexpr int kPvTokens = kTokens / kTokenParts;   // of a warp in PV
  // V in registers: 16 of them, 8 with two row tiles (two CTAs share an SM there as well).
  static constexpr int kMostRing = (RowTiles == 2 ? 32 : 64) / Kv::kBytes;
  static constexpr int kRing = kPvTokens < kMostRing ? kPvTokens : kMostRing;
  static constexpr int kSoftmaxTokens = kTokens / 32;  // of a lane
  static constexpr int kSoftmaxRows = RowTiles == 6 ? 3 : RowTiles < 4 ? RowTiles : 4;
  // Shared memory. S pitch = 8 mod 32 words: stores of S are two-way conflicted at worst; P pitch
  // = 16 mod 128 bytes: eight rows of 16 bytes hit different banks.
  static constexpr int kScorePitch = kTokens + 8;       // floats
  static constexpr int kProbPitch = (kTokens + 8) * 2;  // bytes
  static constexpr int kQueryOffset = 0;
  static constexpr int kScoreOffset = kQueryOffset + RowTiles * 8 * D * 2;
  static constexpr int kProbOffset = kScoreOffset + RowTiles * 8 * kScorePitch * 4;
  static constexpr int kFactorOffset = kProbOffset + RowTiles * 8 * kProbPitch;
  static constexpr int kPlaceOffset = kFactorOffset + RowTiles * 8 * 4;
  static constexpr int kPlaceSlots = 4;  // tiles whose groups are looked up
  static_assert(kPlaceOffset + kPlaceSlots * kTileGroups * 16 ==
                paged_shared_bytes(D, Kv::kBytes, RowTiles));
};

// Dims of a chunk of 32 that a quadpair has, in the order in which QK multiplies them: two quads.
template <class Kv>
__device__ __forceinline__ int query_quad_dim(int quadpair, int quad) {
  return Kv::kBytes == 1 ? quadpair * 8 + quad * 4 : quad * 16 + quadpair * 4;
}

// Q in fragment order: 16 bytes (two quads) of lane l for chunk c and row tile j at
// ((c * RowTiles + j) * 32 + l) * 16. Rows past the end are zero. Fetched early, stored late: the
// cache bytes are asked for in between.
template <int D, class Kv, int RowTiles>
struct QueryStage {
  static constexpr int kEntries = D / 32 * RowTiles * 32;
  static constexpr int kPerThread = (kEntries + kPagedThreads - 1) / kPagedThreads;
  uint2 quads[kPerThread][2];

  __device__ __forceinline__ void fetch(const PagedArgs& a, int first_token, int kv_head,
                                        int first_row, int rows) {
#pragma unroll
    for (int n = 0; n < kPerThread; n++) {
      const int i = threadIdx.x + n * kPagedThreads;
      const Lane lane(i);
      const int row = (i >> 5) % RowTiles * 8 + lane.operand_row();
      const int chunk = (i >> 5) / RowTiles;
      quads[n][0] = quads[n][1] = make_uint2(0, 0);
      if (i < kEntries && row < rows) {
        const int token = (first_row + row) / a.group;
        const int head = kv_head * a.group + (first_row + row) - token * a.group;
        const __half* q = static_cast<const __half*>(a.q) +
                          (first_token + token) * a.q_token_stride + head * a.q_head_stride +
                          chunk * 32;
#pragma unroll
        for (int m = 0; m < 2; m++)
          quads[n][m] = *reinterpret_cast<const uint2*>(q + query_quad_dim<Kv>(lane.quadpair, m));
      }
    }
  }

  __device__ __forceinline__ void store(char* shared) const {
#pragma unroll
    for (int n = 0; n < kPerThread; n++) {
      const int i = threadIdx.x + n * kPagedThreads;
      uint2 x[2] = {quads[n][0], quads[n][1]};
#pragma unroll
      for (int m = 0; m < 2; m++)
        if (Kv::kEvenOddQuads)
          x[m] = make_uint2(__byte_perm(quads[n][m].x, quads[n][m].y, 0x5410),
                            __byte_perm(quads[n][m].x, quads[n][m].y, 0x7632));
      if (i < kEntries)
        *reinterpret_cast<uint4*>(shared + i * 16) = make_uint4(x[0].x, x[0].y, x[1].x, x[1].y);
    }
  }
};

// Byte offsets of the groups of 16 tokens of a tile: x = K, y = V.
__device__ __forceinline__ void look_up_group(const PagedArgs& a, ulonglong2* place, int entry,
                                              int row) {
  const long long page = safe_page(entry, a.num_pages);
  place->x = page * a.k_page_stride + static_cast<long long>(row) * a.k_token_stride;
  place->y = page * a.v_page_stride + static_cast<long long>(row) * a.v_token_stride;
}

template <int D, class Kv, int RowTiles>
__device__ __forceinline__ void paged_split(const PagedArgs& a) {
  using S = Shape<D, Kv, RowTiles>;
  extern __shared__ __align__(128) char shared[];
  const int request = blockIdx.z, split = blockIdx.y;
  // Only the widest instantiation is launched with several chunks of rows.
  const int chunk = RowTiles * 8 == kPagedMaxRows ? blockIdx.x / a.kv_heads : 0;
  const int kv_head = blockIdx.x - chunk * a.kv_heads;
  const int first_token = a.query_start_loc[request];
  const int query_tokens = a.query_start_loc[request + 1] - first_token;
  const int seq_len = a.seq_lens[request];
  if (query_tokens <= 0 || query_tokens > a.max_query_len) return;
  if (seq_len <= 0 || seq_len > a.max_seq_len) return;
  const int first_row = chunk * kPagedMaxRows;
  const int rows = min(query_tokens * a.group - first_row, kPagedMaxRows);
  const PagedSplit plan = paged_split_of(seq_len, query_tokens, a.group, a.kv_heads);
  if (rows <= 0 || split >= plan.splits) return;

  const int begin = split * plan.units * kPagedSplitUnit;
  const int end = min(begin + plan.units * kPagedSplitUnit, seq_len);
  const int tiles = paged_ceil_div(end - begin, S::kTokens);
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // volatile: read once, not in the loops
  const Lane lane(thread);
  const int warp = thread >> 5;
  const PageShape pages = {a.groups_per_page, a.page_magic};

  // Block-table entry of a group of a tile; groups past the end of the request are not looked up.
  const int* table = a.block_table + request * a.table_stride;
  auto table_entry = [&](int tile, int group) {
    const int position = begin + tile * S::kTokens + group * 16;
    const GroupPlace place = place_group(position >> 4, pages);
    return position < end && place.column < a.table_width ? table[place.column] : 0;
  };
  ulonglong2* places = reinterpret_cast<ulonglong2*>(shared + S::kPlaceOffset);
  auto store_place = [&](int tile, int group, int entry) {
    const int position = begin + tile * S::kTokens + group * 16;
    look_up_group(a, &places[(tile & (S::kPlaceSlots - 1)) * S::kTileGroups + group], entry,
                  place_group(position >> 4, pages).row);
  };
  QueryStage<D, Kv, RowTiles> queries;
  queries.fetch(a, first_token, kv_head, first_row, rows);
  if (thread < 2 * S::kTileGroups) {
    const int tile = thread / S::kTileGroups, group = thread % S::kTileGroups;
    store_place(tile, group, table_entry(tile, group));
  }
  __syncthreads();

  // ---- K: this warp's tokens. With two token tiles the odd quadpairs take them in reverse order,
  // and with two row tiles a pass the quadpairs of an upper half take those in reverse order:
  // what a lane keeps after the shuffles is then always in the first register set.
  constexpr int kKLoads = D * Kv::kBytes / 32;  // 8-byte loads of a token by a lane
  const int swap_low = lane.quadpair & 1, swap_high = lane.quadpair >> 1;
  uint2 k[S::kTokenTiles][kKLoads];
  auto load_keys = [&](int tile) {
    const unsigned char* k_head = a.k + static_cast<long long>(opaque(kv_head)) * a.k_head_stride;
    const Lane lane(opaque(thread));
    const int token = (thread >> 5) * S::kWarpTokens;  // in the tile
    const u64 place = places[(tile & (S::kPlaceSlots - 1)) * S::kTileGroups + (token >> 4)].x;
#pragma unroll
    for (int u = 0; u < S::kTokenTiles; u++) {
      const int mine =
          (token & 15) + (S::kTokenTiles == 2 ? (u ^ swap_low) * 8 : 0) + lane.operand_row();
      const bool live = begin + tile * S::kTokens + (token & ~15) + mine < end;
      const unsigned char* p = k_head + place + mine * a.k_token_stride + lane.quadpair * 8;
#pragma unroll
      for (int i = 0; i < kKLoads; i++) k[u][i] = load_stream64_if(live, p + i * 32);
    }
  };

  // ---- V: a quad of one token for each lane, kRing tokens ahead.
  constexpr int kVLoads = S::kRing / 4;
  constexpr int kRings = S::kPvTokens / S::kRing;  // of a tile
  const int dim_warp = warp % S::kDimWarps, token_part = warp / S::kDimWarps;
  uint2 v[kVLoads];  // FP8 uses .x only
  const unsigned char* v_lane = a.v + static_cast<long long>(kv_head) * a.v_head_stride +
                                (dim_warp * 32 + lane.quadpair * 8 + lane.g * 4) * Kv::kBytes +
                                lane.t * a.v_token_stride;
  constexpr int kGroupLoads = 4;  // of a group of 16 tokens
  const long long v_step = 4LL * a.v_token_stride;
  auto load_group = [&](int tile, int ring, int group) {
    const int token = token_part * S::kPvTokens + ring * S::kRing + group * 16;  // in the tile
    const u64 place = places[(tile & (S::kPlaceSlots - 1)) * S::kTileGroups + (token >> 4)].y;
    const unsigned char* p = v_lane + place;
    const int left = end - (begin + tile * S::kTokens + token + lane.t);
#pragma unroll
    for (int i = 0; i < kGroupLoads; i++) {
      if (Kv::kBytes == 1)
        v[group * kGroupLoads + i].x = load_stream32_if(i * 4 < left, p);
      else
        v[group * kGroupLoads + i] = load_stream64_if(i * 4 < left, p);
      p += v_step;
    }
  };

  load_keys(0);
#pragma unroll
  for (int g = 0; g < kVLoads / kGroupLoads; g++) load_group(0, 0, g);
  queries.store(shared + S::kQueryOffset);
  __syncthreads();

  const u32 query_base = shared_address(shared + S::kQueryOffset) + lane.id * 16;
  float* scores = reinterpret_cast<float*>(shared + S::kScoreOffset);
  const u32 prob_base = shared_address(shared + S::kProbOffset) +
                        lane.operand_row() * S::kProbPitch + token_part * S::kPvTokens * 2;
  float* factors = reinterpret_cast<float*>(shared + S::kFactorOffset);
  const int row_tiles = paged_ceil_div(rows, 8);

  float maximum[RowTiles], sum[RowTiles];
  float out[RowTiles][8];
#pragma unroll
  for (int j = 0; j < RowTiles; j++) {
    maximum[j] = kNoMaximum;
    sum[j] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) out[j][i] = 0;
  }

#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    // ---- QK
#pragma unroll 1
    for (int pass = 0; pass < row_tiles; pass += S::kPassTiles) {
      float acc[S::kPassTiles][S::kTokenTiles][8];
#pragma unroll
      for (int j = 0; j < S::kPassTiles; j++)
#pragma unroll
        for (int u = 0; u < S::kTokenTiles; u++)
#pragma unroll
          for (int i = 0; i < 8; i++) acc[j][u][i] = 0;
      const int row_swap = S::kPassTiles == 2 ? (S::kTokenTiles == 2 ? swap_high : swap_low) : 0;
      u32 q_address[S::kPassTiles];
      uint4 q[S::kPassTiles];
#pragma unroll
      for (int j = 0; j < S::kPassTiles; j++) {
        q_address[j] = query_base + (pass + (j ^ row_swap)) * 512;
        q[j] = load_shared128(q_address[j]);
      }
#pragma unroll
      for (int c = 0; c < S::kChunks; c++) {
        uint2 quad0[S::kTokenTiles], quad1[S::kTokenTiles];
#pragma unroll
        for (int u = 0; u < S::kTokenTiles; u++) {
          if constexpr (Kv::kBytes == 1) {
            quad0[u] = Kv::quad(k[u][c].x);
            quad1[u] = Kv::quad(k[u][c].y);
          } else {
            quad0[u] = k[u][2 * c];
            quad1[u] = k[u][2 * c + 1];
          }
        }
#pragma unroll
        for (int j = 0; j < S::kPassTiles; j++) {
#pragma unroll
          for (int u = 0; u < S::kTokenTiles; u++)
            mma_row_col(acc[j][u], quad0[u].x, quad0[u].y, q[j].x, q[j].y);
#pragma unroll
          for (int u = 0; u < S::kTokenTiles; u++)
            mma_row_col(acc[j][u], quad1[u].x, quad1[u].y, q[j].z, q[j].w);
          if (c + 1 < S::kChunks) q[j] = load_shared128(q_address[j] + (c + 1) * RowTiles * 512);
        }
      }
      // Add the dims of the four quadpairs. First between quadpairs 2n and 2n+1, then the rest.
      constexpr bool kTokenExchange = S::kTokenTiles == 2;
      constexpr bool kRowExchange = S::kPassTiles == 2;
      float mine[S::kPassTiles][8];
#pragma unroll
      for (int j = 0; j < S::kPassTiles; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if constexpr (kTokenExchange)
            mine[j][i] = acc[j][0][i] + __shfl_xor_sync(~0u, acc[j][1][i], 4);
          else if constexpr (!kRowExchange)
            mine[j][i] = acc[j][0][i] + __shfl_xor_sync(~0u, acc[j][0][i], 4);
          else if (j == 0)
            mine[0][i] = acc[0][0][i] + __shfl_xor_sync(~0u, acc[1][0][i], 4);
        }
#pragma unroll
      for (int i = 0; i < 8; i++)
        mine[0][i] += __shfl_xor_sync(~0u, mine[kTokenExchange && kRowExchange ? 1 : 0][i], 8);
      // Lanes that differ only in quadpair bits that exchanged nothing hold the same values.
      const bool writes = (kTokenExchange || kRowExchange || !swap_low) &&
                          ((kTokenExchange && kRowExchange) || !swap_high);
      if (writes) {
        float* s = scores + (pass + row_swap) * 8 * S::kScorePitch + warp * S::kWarpTokens +
                   (kTokenExchange ? swap_low * 8 : 0);
#pragma unroll
        for (int i = 0; i < 8; i++)
          s[lane.acc_column(i) * S::kScorePitch + lane.acc_row(i)] = mine[0][i];
      }
    }
    if (tile + 1 < tiles) load_keys(tile + 1);
    __syncthreads();

    // ---- softmax: this warp has row `warp` of every row tile, a lane kSoftmaxTokens tokens
    bool rescale = false;
    const int here = opaque(thread), lane_id = here & 31, softmax_warp = here >> 5;
    int next_entry = 0;
    if (here < S::kTileGroups) next_entry = table_entry(tile + 2, here);
    const int tile_begin = begin + tile * S::kTokens;
    const bool masked = tile_begin + S::kTokens > seq_len - query_tokens + 1;
    // Several rows at a time, so that their shuffles overlap. Row tiles that the request does not
    // have get P = 0 in the first tile, which stays.
#pragma unroll
    for (int j0 = 0; j0 < RowTiles; j0 += S::kSoftmaxRows) {
      if (j0 >= row_tiles && tile > 0) break;
      float x[S::kSoftmaxRows][S::kSoftmaxTokens], top[S::kSoftmaxRows];
#pragma unroll
      for (int n = 0; n < S::kSoftmaxRows; n++) {
        const int row = (j0 + n) * 8 + softmax_warp;
        const float* s = scores + row * S::kScorePitch + lane_id * S::kSoftmaxTokens;
#pragma unroll
        for (int i = 0; i < S::kSoftmaxTokens; i++) x[n][i] = -__int_as_float(0x7f800000);
        if (j0 + n < row_tiles) {
          if constexpr (S::kSoftmaxTokens == 4) {
            const float4 y = *reinterpret_cast<const float4*>(s);
            x[n][0] = y.x, x[n][1] = y.y, x[n][2] = y.z, x[n][3] = y.w;
          } else {
            const float2 y = *reinterpret_cast<const float2*>(s);
            x[n][0] = y.x, x[n][1] = y.y;
          }
        }
      }
      if (masked) {
        const int position = tile_begin + lane_id * S::kSoftmaxTokens;
#pragma unroll
        for (int n = 0; n < S::kSoftmaxRows; n++) {
          const int row = first_row + (j0 + n) * 8 + softmax_warp;
          const int last = min(seq_len - query_tokens + row / a.group, seq_len - 1);
#pragma unroll
          for (int i = 0; i < S::kSoftmaxTokens; i++)
            if (position + i > last) x[n][i] = -__int_as_float(0x7f800000);
        }
      }
#pragma unroll
      for (int n = 0; n < S::kSoftmaxRows; n++) {
        top[n] = x[n][0];
#pragma unroll
        for (int i = 1; i < S::kSoftmaxTokens; i++) top[n] = fmaxf(top[n], x[n][i]);
      }
#pragma unroll
      for (int d = 16; d; d >>= 1) {
        float other[S::kSoftmaxRows];
#pragma unroll
        for (int n = 0; n < S::kSoftmaxRows; n++) other[n] = __shfl_xor_sync(~0u, top[n], d);
#pragma unroll
        for (int n = 0; n < S::kSoftmaxRows; n++) top[n] = fmaxf(top[n], other[n]);
      }
#pragma unroll
      for (int n = 0; n < S::kSoftmaxRows; n++) {
        const int j = j0 + n, row = j * 8 + softmax_warp;
        const float now = fmaxf(maximum[j], top[n] * a.qk_scale);
        const float factor = exp2_fast(maximum[j] - now);
        maximum[j] = now;
        rescale |= factor != 1.0f;
        float total = 0;
#pragma unroll
        for (int i = 0; i < S::kSoftmaxTokens; i++) {
          x[n][i] = exp2_fast(fmaf(x[n][i], a.qk_scale, -now));
          total += x[n][i];
        }
        sum[j] = fmaf(sum[j], factor, total);
        char* p = shared + S::kProbOffset + row * S::kProbPitch + lane_id * S::kSoftmaxTokens * 2;
        if constexpr (S::kSoftmaxTokens == 4)
          *reinterpret_cast<uint2*>(p) =
              make_uint2(pack_halves(x[n][0], x[n][1]), pack_halves(x[n][2], x[n][3]));
        else
          *reinterpret_cast<u32*>(p) = pack_halves(x[n][0], x[n][1]);
        if (lane_id == 0) factors[row] = factor;
      }
    }
    if (here < S::kTileGroups) store_place(tile + 2, here, next_entry);
    rescale = __syncthreads_or(rescale);

    // ---- PV
    if (rescale) {
#pragma unroll
      for (int j = 0; j < RowTiles; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) out[j][i] *= factors[j * 8 + lane.acc_row(i)];
    }
#pragma unroll 1
    for (int ring = 0; ring < kRings; ring++) {
      const bool last_ring = ring + 1 == kRings;
      const int next_tile = last_ring ? tile + 1 : tile, next_ring = last_ring ? 0 : ring + 1;
      uint4 p[RowTiles];
#pragma unroll
      for (int j = 0; j < RowTiles; j++)
        p[j] = load_shared128(prob_base + j * 8 * S::kProbPitch + ring * S::kRing * 2);
#pragma unroll
      for (int i = 0; i < kVLoads; i += 2) {
        uint2 v0, v1;
        if constexpr (Kv::kBytes == 1) {
          v0 = Kv::quad(v[i].x);
          v1 = Kv::quad(v[i + 1].x);
        } else {
          v0 = v[i];
          v1 = v[i + 1];
        }
#pragma unroll
        for (int j = 0; j < RowTiles; j++) {
          mma_row_row(out[j], p[j].x, p[j].y, v0.x, v0.y);
          mma_row_row(out[j], p[j].z, p[j].w, v1.x, v1.y);
          if (i + 2 < kVLoads)
            p[j] = load_shared128(prob_base + j * 8 * S::kProbPitch +
                                  (ring * S::kRing + (i + 2) * 4) * 2);
        }
        if (i % kGroupLoads == kGroupLoads - 2) load_group(next_tile, next_ring, i / kGroupLoads);
      }
    }
  }

  // ---- the split is complete: sums over lanes, then 1 / sum to the owners of the output
  const int last_thread = opaque(thread);
  const Lane own(last_thread);
  const int own_warp = last_thread >> 5, own_dims = own_warp % S::kDimWarps;
  const int own_part = own_warp / S::kDimWarps;
  const long long slot = (static_cast<long long>(request) * a.kv_heads + kv_head) * a.row_splits +
                         static_cast<long long>(split) * query_tokens * a.group + first_row;
  __syncthreads();  // the last factors have been read
#pragma unroll
  for (int j = 0; j < RowTiles; j++) {
    float total = sum[j];
#pragma unroll
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
    const int row = j * 8 + own_warp;
    if (own.id == 0) {
      factors[row] = total == 0.0f ? 0.0f : __fdividef(a.out_scale, total);
      if (row < rows)
        static_cast<float2*>(a.partial_stats)[slot + row] = make_float2(maximum[j], total);
    }
  }
  // Parts of the tokens that other warps summed: added in the order of the parts.
  float* exchange = scores + (own_dims * RowTiles * 8) * 32 + own.id;
#pragma unroll 1
  for (int part = 1; part < S::kTokenParts; part++) {
    if (own_part == part) {
#pragma unroll
      for (int j = 0; j < RowTiles; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) exchange[(j * 8 + i) * 32] = out[j][i];
    }
    __syncthreads();
    if (own_part == 0) {
#pragma unroll
      for (int j = 0; j < RowTiles; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) out[j][i] += exchange[(j * 8 + i) * 32];
    }
    __syncthreads();
  }
  if (S::kTokenParts == 1) __syncthreads();
  if (own_part != 0) return;
  // Partial rows in chunk order: the eight dims of a quadpair as C registers 0 1 4 5 of the lanes
  // with (t & 2) = 0, then of those with (t & 2) = 2; paged_join puts them right.
  __half* partial = static_cast<__half*>(a.partial_out) + slot * D + own_dims * 32 +
                    own.quadpair * 8 + (own.t & 2) * 2;
#pragma unroll
  for (int j = 0; j < RowTiles; j++)
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      const int row = j * 8 + own.acc_row(h);
      const float scale = factors[row];
      if (row < rows)
        *reinterpret_cast<uint2*>(partial + static_cast<long long>(row) * D) =
            make_uint2(pack_halves(out[j][h] * scale, out[j][h + 1] * scale),
                       pack_halves(out[j][h + 4] * scale, out[j][h + 5] * scale));
    }
}

// Adds the splits of one query row; a CTA has one row of one KV head of one request. D / 8 lanes
// hold a row (16 bytes each), so that the threads read several splits at a time; their sums are
// added in a fixed order.
template <int D, class Kv>
__device__ __forceinline__ void paged_join_row(const PagedArgs& a) {
  constexpr int kRowLanes = D / 8, kParts = kPagedJoinThreads / kRowLanes;
  __shared__ float weights[kPagedTargetCtas];
  __shared__ float sums[kParts][D];
  const int row = blockIdx.x, kv_head = blockIdx.y, request = blockIdx.z, thread = threadIdx.x;
  const int first_token = a.query_start_loc[request];
  const int query_tokens = a.query_start_loc[request + 1] - first_token;
  const int seq_len = a.seq_lens[request];
  if (query_tokens <= 0 || query_tokens > a.max_query_len) return;
  if (seq_len <= 0 || seq_len > a.max_seq_len) return;
  const int rows = query_tokens * a.group;
  if (row >= rows) return;
  const int splits = paged_split_of(seq_len, query_tokens, a.group, a.kv_heads).splits;
  const long long slot =
      (static_cast<long long>(request) * a.kv_heads + kv_head) * a.row_splits + row;
  const float2* stats = static_cast<const float2*>(a.partial_stats) + slot;

  // Every warp computes the row's maximum and sum; the first writes the weights.
  float top = kNoMaximum;
  for (int s = thread & 31; s < splits; s += 32)
    top = fmaxf(top, stats[static_cast<long long>(s) * rows].x);
#pragma unroll
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  float total = 0;
  for (int s = thread & 31; s < splits; s += 32) {
    const float2 stat = stats[static_cast<long long>(s) * rows];
    const float weight = stat.y * exp2_fast(stat.x - top);
    total += weight;
    if (thread < 32) weights[s] = weight;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  __syncthreads();

  const int part = thread / kRowLanes, chunk = thread % kRowLanes;
  const uint4* partial = reinterpret_cast<const uint4*>(static_cast<const __half*>(a.partial_out) +
                                                        slot * D + chunk * 8);
  float acc[8] = {};
#pragma unroll 8
  for (int s = part; s < splits; s += kParts) {
    const uint4 x = partial[static_cast<long long>(s) * rows * (D / 8)];
    const float weight = weights[s] * inverse;
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      acc[2 * i] = fmaf(y.x, weight, acc[2 * i]);
      acc[2 * i + 1] = fmaf(y.y, weight, acc[2 * i + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sums[part][chunk * 8 + i] = acc[i];
  __syncthreads();
  const int token = row / a.group;
  __half* out = static_cast<__half*>(a.out) + (first_token + token) * a.out_token_stride +
                (kv_head * a.group + row - token * a.group) * a.out_head_stride;
  for (int dim = thread; dim < D; dim += kPagedJoinThreads) {
    // Where chunk order keeps dim: C column n = quad * 4 + position in the quad; register
    // (n & 4) + (n & 1) of the lanes with (t & 2) = (n & 2).
    const int n = (dim & 4) + (Kv::kEvenOddQuads ? (dim & 1) * 2 + (dim >> 1 & 1) : dim & 3);
    const int at = (dim & ~7) + (n & 2) * 2 + (n >> 2) * 2 + (n & 1);
    float x = 0;
#pragma unroll
    for (int p = 0; p < kParts; p++) x += sums[p][at];
    out[dim] = __float2half(x);
  }
}

}  // namespace sm70

#define PAGED_SPLIT(ROW_TILES, MIN_CTAS)                                      \
  extern "C" __global__ void __launch_bounds__(sm70::kPagedThreads, MIN_CTAS) \
      paged_split_t##ROW_TILES(const __grid_constant__ sm70::PagedArgs a) {   \
    sm70::paged_split<HEAD_DIM, sm70::KV, ROW_TILES>(a);                      \
  }

// Row tiles of 8 query rows: 1, 2, 4, 6, 8.
PAGED_SPLIT(1, 2)
PAGED_SPLIT(2, 2)
PAGED_SPLIT(4, 1)
PAGED_SPLIT(6, 1)
PAGED_SPLIT(8, 1)

extern "C" __global__ void __launch_bounds__(sm70::kPagedJoinThreads)
    paged_join(const __grid_constant__ sm70::PagedArgs a) {
  sm70::paged_join_row<HEAD_DIM, sm70::KV>(a);
}
