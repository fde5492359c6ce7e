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
constexpr int kPagedMaxRows = 64;         // query rows of a CTA: more rows take more CTAs
constexpr int kPagedMaxQueryTokens = 16;  // of a request
constexpr int kPagedMaxGroup = 16;        // query heads of a KV head
constexpr int kPagedSplitUnit = 128;      // tokens: a split is a whole number of these
constexpr int kPagedMinUnits = 2;         // of a split, so that a partial result costs little
constexpr int kPagedTargetCtas = 160;     // of one request: two on each of a V100's 80 SMs

struct PagedArgs {
  const void* q;             // halves
  const unsigned char* k;    // cache bytes
  const unsigned char* v;
  const int* block_table;
  const int* seq_lens;
  const int* query_start_loc;
  void* out;                 // halves
  void* partial_out;         // halves [request][KV head][row_splits][D], chunk order (paged.cu)
  void* partial_stats;       // float2 [request][KV head][row_splits]: maximum (log2), sum
  long long q_token_stride, q_head_stride;      // halves
  long long out_token_stride, out_head_stride;  // halves
  long long k_page_stride, v_page_stride;       // bytes
  long long table_stride;                       // entries
  int k_token_stride, k_head_stride;            // bytes
  int v_token_stride, v_head_stride;            // bytes
  int num_pages, table_width;
  int groups_per_page;       // page size / 16
  unsigned page_magic;       // see common/paging.cuh
  int kv_heads, group;       // group: query heads of a KV head
  int max_seq_len, max_query_len;
  int row_splits;            // room per request and KV head in the partial buffers
  float qk_scale;            // softmax scale * K descale * unit of the type * log2(e)
  float out_scale;           // V descale * unit of the type
};

SM70_BOTH int paged_ceil_div(int a, int b) { return (a + b - 1) / b; }

// How a request is split depends on its own length, its own query tokens and the geometry of the
// layer: never on the rest of the batch or on the GPU.
struct PagedSplit {
  int units;   // split units of one split
  int splits;
};

SM70_BOTH int paged_max_splits(int query_tokens, int group, int kv_heads) {
  const int chunks = paged_ceil_div(query_tokens * group, kPagedMaxRows);
  const int target = kPagedTargetCtas / (kv_heads * chunks);
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

}  // namespace sm70
