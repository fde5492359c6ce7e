// What the host passes to the ordinary paged kernels, and the split policy, in one place.
//
// Included by paged.cu (device, NVRTC) and csrc/paged.cpp (host): plain types only.
#pragma once

#ifdef __CUDACC_RTC__
#define SM70_BOTH __host__ __device__ __forceinline__
#else
#define SM70_BOTH inline
#endif

namespace sm70 {

constexpr int kPagedThreads = 256;
constexpr int kPagedJoinThreads = 256;
constexpr int kPagedMaxRows = 64;         // query rows of a CTA: more rows take more CTAs
constexpr int kPagedMaxQueryTokens = 16;  // of a request
constexpr int kPagedMaxGroup = 16;        // query heads of a KV head
constexpr int kPagedSplitUnit = 128;      // tokens: a split is a whole number of these
constexpr int kPagedMinUnits = 2;         // of a split, so that a partial result costs little
// Splits of one request, over all its KV heads and row chunks: CTAs for a V100's 80 SMs, where two
// CTAs fit an SM up to kPagedNarrowRows query rows and one above that.
constexpr int kPagedTargetCtas = 160;
constexpr int kPagedTargetWideCtas = 80;
constexpr int kPagedNarrowRows = 16;

struct PagedArgs {
  const void* q;           // halves
  const unsigned char* k;  // cache bytes
  const unsigned char* v;
  const int* block_table;
  const int* seq_lens;
  const int* query_start_loc;
  void* out;            // halves
  void* partial_out;    // halves [request][KV head][row_splits][D], chunk order (paged.cu)
  void* partial_stats;  // float2 [request][KV head][row_splits]: maximum (log2), sum
  long long q_token_stride, q_head_stride;      // halves
  long long out_token_stride, out_head_stride;  // halves
  long long k_page_stride, v_page_stride;       // bytes
  long long table_stride;                       // entries
  int k_token_stride, k_head_stride;            // bytes
  int v_token_stride, v_head_stride;            // bytes
  int num_pages, table_width;
  int groups_per_page;  // page size / 16
  unsigned page_magic;  // see common/paging.cuh
  int kv_heads, group;  // group: query heads of a KV head
  int max_seq_len, max_query_len;
  int row_splits;   // room per request and KV head in the partial buffers
  float qk_scale;   // softmax scale * K descale * unit of the type * log2(e)
  float out_scale;  // V descale * unit of the type
};

SM70_BOTH int paged_ceil_div(int a, int b) { return (a + b - 1) / b; }

// How a request is split depends on its own length, its own query tokens and the geometry of the
// layer: never on the rest of the batch or on the GPU.
struct PagedSplit {
  int units;  // split units of one split
  int splits;
};

SM70_BOTH int paged_max_splits(int query_tokens, int group, int kv_heads) {
  const int rows = query_tokens * group;
  const int ctas = rows <= kPagedNarrowRows ? kPagedTargetCtas : kPagedTargetWideCtas;
  const int target = ctas / (kv_heads * paged_ceil_div(rows, kPagedMaxRows));
  return target > 1 ? target : 1;
}

SM70_BOTH PagedSplit paged_split_of(int seq_len, int query_tokens, int group, int kv_heads) {
  const int units = paged_ceil_div(seq_len, kPagedSplitUnit);
  const int wanted = paged_ceil_div(units, paged_max_splits(query_tokens, group, kv_heads));
  PagedSplit split;
  split.units = wanted > kPagedMinUnits ? wanted : kPagedMinUnits;
  split.splits = paged_ceil_div(units, split.units);
  return split;
}

// Most splits of any request up to max_seq_len with this many query tokens: not those of the
// longest one, for 321 units make 107 splits of 3 and 320 make 160 of 2.
SM70_BOTH int paged_split_bound(int max_seq_len, int query_tokens, int group, int kv_heads) {
  const int units = paged_ceil_div(max_seq_len, kPagedSplitUnit);
  const int by_size = paged_ceil_div(units, kPagedMinUnits);
  const int target = paged_max_splits(query_tokens, group, kv_heads);
  return target < by_size ? target : by_size;
}

// Rows times splits that one request and KV head may fill in the partial buffers.
SM70_BOTH int paged_row_splits(int max_seq_len, int max_query_len, int group, int kv_heads) {
  int most = 0;
  for (int n = 1; n <= max_query_len; n++) {
    const int rows = n * group * paged_split_bound(max_seq_len, n, group, kv_heads);
    most = rows > most ? rows : most;
  }
  return most;
}

// Factor of the division by groups_per_page (see common/paging.cuh).
SM70_BOTH unsigned page_magic(int groups_per_page) {
  return groups_per_page == 1
             ? 0
             : static_cast<unsigned>((1ULL << 32) / static_cast<unsigned>(groups_per_page)) + 1;
}

// Tokens of a tile, and dynamic shared memory of a CTA (Shape in paged.cu asserts that it agrees).
SM70_BOTH constexpr int paged_tile_tokens(int head_dim, int element_bytes) {
  return head_dim * element_bytes > 256 ? 64 : 128;
}
SM70_BOTH constexpr int paged_shared_bytes(int head_dim, int element_bytes, int row_tiles) {
  const int tokens = paged_tile_tokens(head_dim, element_bytes);
  const int queries = row_tiles * 8 * head_dim * 2;
  const int scores = row_tiles * 8 * (tokens + 8) * 4;
  const int probabilities = row_tiles * 8 * (tokens + 8) * 2;
  const int factors = row_tiles * 8 * 4;
  const int places = 4 * (tokens / 16) * 16;
  return queries + scores + probabilities + factors + places;
}

}  // namespace sm70
