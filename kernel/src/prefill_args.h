// What the host passes to the prefill kernel, and the shape of its tiles, in one place.
//
// Included by prefill.cu (device, NVRTC) and csrc/prefill.cpp (host): plain types only.
#pragma once

#ifdef __CUDACC_RTC__
#define SM70_BOTH __host__ __device__ __forceinline__
#else
#define SM70_BOTH inline
#endif

namespace sm70 {

constexpr int kPrefillThreads = 256;
constexpr int kPrefillMaxGroup = 16;  // query heads of a KV head
constexpr int kPrefillStep = 32;      // positions that a CTA takes at a time

// Rows of a CTA: a row is one query head of one token.
SM70_BOTH constexpr int prefill_rows(int head_dim) { return head_dim == 256 ? 64 : 128; }

// Dynamic shared memory, bytes: K and P twice; per row two factors and one inverse; flags.
SM70_BOTH constexpr int prefill_shared_bytes(int head_dim) {
  return 2 * kPrefillStep * (head_dim + prefill_rows(head_dim)) * 2 + 32 +
         3 * prefill_rows(head_dim) * 4;
}

struct PrefillArgs {
  const void* q;           // halves
  const unsigned char* k;  // cache bytes
  const unsigned char* v;
  const int* block_table;
  const int* seq_lens;
  const int* query_start_loc;
  void* out;                                    // halves
  long long q_token_stride, q_head_stride;      // halves
  long long out_token_stride, out_head_stride;  // halves
  long long k_page_stride, v_page_stride;       // bytes
  long long k_head_stride, v_head_stride;       // bytes
  long long table_stride;                       // entries
  int k_token_stride, v_token_stride;           // bytes
  int num_pages;
  int groups_per_page;             // page size / 16
  unsigned page_magic;             // see common/paging.cuh
  int group;                       // query heads of a KV head
  unsigned group_magic;            // division by group, alike
  int requests, tokens;            // tokens: rows of q
  int max_seq_len, max_query_len;  // longer requests write nothing: the caller broke its contract
  float qk_scale;                  // softmax scale * K descale * unit of the type * log2(e)
  float out_scale;                 // V descale * unit of the type
};

}  // namespace sm70
