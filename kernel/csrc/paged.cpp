// torch.ops._vllm_fa2_C.sm70_paged_attention: checks, then two launches of src/paged.cu.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "contract.h"
#include "driver.h"
#include "paged_args.h"

namespace sm70 {
namespace {

using torch::stable::Tensor;

constexpr double kLog2e = 1.4426950408889634;

// The instantiation with the fewest row tiles of eight query rows that hold `rows`.
int row_tiles_for(int rows) {
  for (int tiles : {1, 2, 4, 6}) {
    if (rows <= tiles * 8) return tiles;
  }
  return kPagedMaxRows / 8;
}

void paged_attention(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                     Tensor seq_lens, Tensor query_start_loc, Tensor workspace,
                     int64_t max_query_len, int64_t max_seq_len, double softmax_scale,
                     double k_scale, double v_scale, KvDtypeName kv_name) {
  const KvDtype kv = kv_name.value;
  const Contract c = check_contract(out, q, k_cache, v_cache, block_table, seq_lens,
                                    query_start_loc, max_query_len, max_seq_len, softmax_scale,
                                    k_scale, v_scale, kv, kPagedMaxGroup);
  STD_TORCH_CHECK(max_query_len <= kPagedMaxQueryTokens, "max_query_len is ", max_query_len,
                  "; sm70_paged_attention takes 1 to ", kPagedMaxQueryTokens,
                  " query tokens a request: use sm70_prefill_attention");
  if (c.requests == 0 || c.tokens == 0) return;
  const int queries = static_cast<int>(max_query_len), context = static_cast<int>(max_seq_len);
  const int row_splits = paged_row_splits(context, queries, c.group, c.kv_heads);
  const long long rows = static_cast<long long>(c.requests) * c.kv_heads * row_splits;
  const long long out_bytes = rows * c.head_dim * 2;
  unsigned char* base = check_workspace(workspace, c.device, out_bytes + rows * 8);

  PagedArgs a;
  a.q = q.data_ptr();
  a.k = static_cast<const unsigned char*>(k_cache.data_ptr());
  a.v = static_cast<const unsigned char*>(v_cache.data_ptr());
  a.block_table = static_cast<const int*>(block_table.data_ptr());
  a.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  a.query_start_loc = static_cast<const int*>(query_start_loc.data_ptr());
  a.out = out.mutable_data_ptr();
  a.partial_out = base;
  a.partial_stats = base + out_bytes;
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
  a.table_width = c.table_width;
  a.groups_per_page = c.page_size / 16;
  a.page_magic = page_magic(a.groups_per_page);
  a.kv_heads = c.kv_heads;
  a.group = c.group;
  a.max_seq_len = context;
  a.max_query_len = queries;
  a.row_splits = row_splits;
  a.qk_scale = static_cast<float>(softmax_scale * k_scale * converted_unit(kv) * kLog2e);
  a.out_scale = static_cast<float>(v_scale * converted_unit(kv));

  const std::string cubin =
      "paged_d" + std::to_string(c.head_dim) + "_" + std::string(cubin_suffix(kv));
  const int row_tiles = row_tiles_for(queries * c.group);
  const std::string entry = "paged_split_t" + std::to_string(row_tiles);
  const unsigned chunks = paged_ceil_div(queries * c.group, kPagedMaxRows);
  // Requests with fewer query tokens may have more splits: the grid has those of a single one.
  const unsigned splits = paged_split_bound(context, 1, c.group, c.kv_heads);
  const unsigned requests = c.requests;
  const unsigned shared = paged_shared_bytes(c.head_dim, element_bytes(kv), row_tiles);
  void* stream = current_stream(c.device);
  void* args[] = {&a};
  launch(get_kernel(c.device, cubin.c_str(), entry.c_str()),
         {chunks * static_cast<unsigned>(c.kv_heads), splits, requests}, {kPagedThreads, 1, 1},
         shared, stream, args);
  launch(get_kernel(c.device, cubin.c_str(), "paged_join"),
         {static_cast<unsigned>(queries * c.group), static_cast<unsigned>(c.kv_heads), requests},
         {kPagedJoinThreads, 1, 1}, 0, stream, args);
}

}  // namespace
}  // namespace sm70

STABLE_TORCH_LIBRARY_FRAGMENT(_vllm_fa2_C, m) {
  m.def(
      "sm70_paged_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor(b!) workspace, "
      "int max_query_len, int max_seq_len, float softmax_scale, float k_scale, float v_scale, "
      "str kv_dtype) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_vllm_fa2_C, CUDA, m) {
  m.impl("sm70_paged_attention", TORCH_BOX(&sm70::paged_attention));
}
