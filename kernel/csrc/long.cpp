// torch.ops._vllm_fa2_C.sm70_long_attention: checks, then two launches of src/long.cu.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "abi.h"
#include "contract.h"
#include "driver.h"
#include "long_args.h"

namespace sm70 {
namespace {

using torch::stable::Tensor;

constexpr double kLog2e = 1.4426950408889634;
static_assert(kLongBatchCapacity == kLongRequests, "what the library reports is what it admits");

// The kernel keeps the place of 16 tokens as a 32-bit count of 8 bytes from the cache's address.
constexpr long long kReach = 8LL << 32;

void check_reach(const char* name, long long pages, long long page_stride) {
  STD_TORCH_CHECK(page_stride >= 0 && pages * page_stride <= kReach, name, " spans ",
                  pages * page_stride, " bytes; at most ", kReach);
}

void long_attention(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                    Tensor seq_lens, Tensor query_start_loc, Tensor workspace, int64_t max_seq_len,
                    double softmax_scale, double k_scale, double v_scale) {
  const Contract c = check_contract(out, q, k_cache, v_cache, block_table, seq_lens,
                                    query_start_loc, kLongQueryTokens, max_seq_len, softmax_scale,
                                    k_scale, v_scale, KvDtype::kE4m3, kLongGroup);
  STD_TORCH_CHECK(c.head_dim == kLongHeadDim && c.group == kLongGroup, "head dimension ",
                  c.head_dim, " with groups of ", c.group, " query heads; expected ", kLongHeadDim,
                  " and ", kLongGroup, ": use sm70_paged_attention");
  STD_TORCH_CHECK(c.requests <= kLongRequests, c.requests, " requests; at most ", kLongRequests);
  STD_TORCH_CHECK(max_seq_len <= kLongMaxContext, "max_seq_len is ", max_seq_len, "; at most ",
                  kLongMaxContext);
  STD_TORCH_CHECK(c.kv_heads < 65536, c.kv_heads, " KV heads; at most 65535");
  contract::aligned("q", reinterpret_cast<long long>(q.data_ptr()), 16);
  contract::aligned("q", c.q_token_stride * 2, 16);
  contract::aligned("q", c.q_head_stride * 2, 16);
  check_reach("k_cache", c.num_pages, c.k_page_stride);
  check_reach("v_cache", c.num_pages, c.v_page_stride);
  if (c.requests == 0 || c.tokens == 0) return;

  LongArgs a;
  a.slots = long_slots(static_cast<int>(max_seq_len));
  const long long slots = static_cast<long long>(c.requests) * c.kv_heads * a.slots;
  unsigned char* base = check_workspace(workspace, c.device, slots * kLongSlotBytes);
  a.q = q.data_ptr();
  a.k = static_cast<const unsigned char*>(k_cache.data_ptr());
  a.v = static_cast<const unsigned char*>(v_cache.data_ptr());
  a.block_table = static_cast<const int*>(block_table.data_ptr());
  a.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  a.query_start_loc = static_cast<const int*>(query_start_loc.data_ptr());
  a.out = out.mutable_data_ptr();
  a.partial_out = base;
  a.partial_stats = base + slots * kLongPartialBytes;
  a.partial_leaves = reinterpret_cast<int*>(base + slots * (kLongPartialBytes + kLongStatsBytes));
  a.q_token_stride = c.q_token_stride;
  a.q_head_stride = c.q_head_stride;
  a.out_token_stride = c.out_token_stride;
  a.out_head_stride = c.out_head_stride;
  a.k_page_stride = c.k_page_stride;
  a.v_page_stride = c.v_page_stride;
  a.table_stride = c.table_stride;
  a.k_token_stride = c.k_token_stride;
  a.k_head_stride = c.k_head_stride;
  a.v_token_stride = c.v_token_stride;
  a.v_head_stride = c.v_head_stride;
  a.num_pages = c.num_pages;
  a.groups_per_page = c.page_size / kLongGroupTokens;
  a.page_magic =
      a.groups_per_page == 1
          ? 0u
          : static_cast<unsigned>((1ULL << 32) / static_cast<unsigned>(a.groups_per_page)) + 1u;
  a.requests = c.requests;
  a.max_len = static_cast<int>(max_seq_len);
  const double unit = converted_unit(KvDtype::kE4m3);
  a.qk_scale = static_cast<float>(softmax_scale * k_scale * unit * kLog2e);
  a.out_scale = static_cast<float>(v_scale * unit);

  const long long key_steps =
      reinterpret_cast<long long>(a.k) | a.k_page_stride | a.k_token_stride | a.k_head_stride;
  const char* cubin = key_steps % 16 == 0 ? "long_k16" : "long_k8";
  const unsigned heads = c.kv_heads, requests = c.requests;
  void* stream = current_stream(c.device);
  void* args[] = {&a};
  launch(get_kernel(c.device, cubin, "long_split"), {kLongCtas, 1, heads}, {kLongThreads, 1, 1},
         kLongSharedBytes, stream, args);
  if (c.requests * c.kv_heads <= kLongJoinFewMost) {
    launch(get_kernel(c.device, cubin, "long_join_few"), {kLongFragments, requests, heads},
           {kLongJoinFewThreads, 1, 1}, 0, stream, args);
  } else {
    launch(get_kernel(c.device, cubin, "long_join_many"), {kLongJoinManyCtas, requests, heads},
           {kLongJoinManyThreads, 1, 1}, 0, stream, args);
  }
}

}  // namespace
}  // namespace sm70

STABLE_TORCH_LIBRARY_FRAGMENT(_vllm_fa2_C, m) {
  m.def(
      "sm70_long_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor(b!) workspace, "
      "int max_seq_len, float softmax_scale, float k_scale, float v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_vllm_fa2_C, CUDA, m) {
  m.impl("sm70_long_attention", TORCH_BOX(&sm70::long_attention));
}
