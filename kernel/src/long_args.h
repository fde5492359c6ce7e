// What the host passes to the long kernels, how a request is split, and the size of a workspace.
//
// Included by long.cu (device, NVRTC) and csrc/long.cpp (host): plain types only.
// kernel/python/sm70_attention/long.py repeats the constants of the workspace;
// tests/kernel/test_long_policy.py holds the two together.
#pragma once

#ifdef __CUDACC_RTC__
#define SM70_LONG_BOTH __host__ __device__ __forceinline__
#else
#define SM70_LONG_BOTH inline
#endif

namespace sm70 {

constexpr int kLongHeadDim = 256;
constexpr int kLongGroup = 6;                             // query heads of a KV head
constexpr int kLongQueryTokens = 8;                       // of a request, at most
constexpr int kLongRows = kLongGroup * kLongQueryTokens;  // 48 query rows: row = token * 6 + head
constexpr int kLongRequests = 16;                         // of a launch, at most
constexpr int kLongMaxContext = 262144;

constexpr int kLongThreads = 256;
constexpr int kLongCtas = 80;  // per KV head: the SMs of a V100, on any GPU
// The join: CTAs of a request and KV head, their threads, and for how many requests times KV heads
// the CTAs of the first form are on the SMs all at once (two an SM).
constexpr int kLongFragments = 48;  // of a partial O, 512 bytes each
constexpr int kLongJoinFewThreads = 320;
constexpr int kLongJoinManyCtas = kLongFragments, kLongJoinManyThreads = kLongJoinFewThreads;
constexpr int kLongJoinFewMost = 3;

// A tile is 64 tokens. A *leaf* is a run of tiles with its own maximum and sum; kLongBlock leaves
// in a row are a *block*. Leaves are even parts of the request, so blocks are too: four requests
// of one length make 80 blocks, one per SM.
constexpr int kLongTileTokens = 64;
constexpr int kLongGroupTokens = 16;  // tokens that surely share a page
constexpr int kLongTileGroups = kLongTileTokens / kLongGroupTokens;
constexpr int kLongBlock = 4;
constexpr int kLongLeaves = 80;
constexpr int kLongMinLeafTiles = 3;  // even parts of at least two tiles: long_value.cuh needs them
constexpr int kLongMaxLeafTiles = 26;  // a longer request has twice as many leaves

SM70_LONG_BOTH int long_tiles(int len) { return (len + kLongTileTokens - 1) / kLongTileTokens; }

// Leaves of a request: depends on its own length only, hence so do the bits of the result.
SM70_LONG_BOTH int long_leaves(int tiles) {
  const int most = tiles <= kLongLeaves * kLongMaxLeafTiles ? kLongLeaves : 2 * kLongLeaves;
  const int wanted = (tiles + kLongMinLeafTiles - 1) / kLongMinLeafTiles;
  return wanted < most ? wanted : most;
}

constexpr int kLongSharedBytes = 91520;  // dynamic, of the split kernel: sizeof(LongShared)

// The workspace holds, for every request and KV head, a slot for every leaf: O as halves in
// fragment order, (maximum, sum) of each row in FP32, and how many leaves the slot holds.
constexpr int kLongPartialBytes = kLongRows * kLongHeadDim * 2;
constexpr int kLongStatsBytes = kLongRows * 8;
constexpr int kLongSlotBytes = kLongPartialBytes + kLongStatsBytes + 4;

// Slots of a request and KV head: as many as leaves, in whole blocks.
SM70_LONG_BOTH int long_slots(int max_len) {
  const int leaves = long_leaves(long_tiles(max_len));
  return (leaves + kLongBlock - 1) / kLongBlock * kLongBlock;
}

struct LongArgs {
  const void* q;           // halves [tokens, heads, 256]
  const unsigned char* k;  // E4M3
  const unsigned char* v;
  const int* block_table;
  const int* seq_lens;
  const int* query_start_loc;
  void* out;            // halves
  void* partial_out;    // [request][KV head][slot][fragment][lane] of 16 bytes
  void* partial_stats;  // float2 [request][KV head][slot][row]: maximum (log2), sum
  int* partial_leaves;  // [request][KV head][slot]: leaves that the slot holds, or 0
  long long q_token_stride, q_head_stride;      // halves; multiples of 8
  long long out_token_stride, out_head_stride;  // halves
  long long k_page_stride, v_page_stride;       // bytes; multiples of 8 (K: of 16 in long_k16)
  long long table_stride;                       // entries
  int k_token_stride, k_head_stride;            // bytes
  int v_token_stride, v_head_stride;            // bytes
  int num_pages;
  int groups_per_page;  // page size / 16
  unsigned page_magic;  // see common/paging.cuh
  int requests;
  int max_len;      // longer requests are left out; never past the block table's width
  int slots;        // per request and KV head
  float qk_scale;   // softmax scale * K descale * 256 * log2(e)
  float out_scale;  // V descale * 256
};

}  // namespace sm70
