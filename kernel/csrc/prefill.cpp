// torch.ops._vllm_fa2_C.sm70_prefill_attention: checks, then one launch of src/prefill.cu.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "contract.h"
#include "driver.h"
#include "prefill_args.h"

namespace sm70 {
namespace {

using torch::stable::Tensor;

constexpr double kLog2e = 1.4426950408889634;

// For divisions by `d` on the device (common/paging.cuh).
unsigned division_magic(int d) {
  return d == 1 ? 0u : static_cast<unsigned>((1ull << 32) / static_cast<unsigned>(d) + 1);
}

void prefill_attention(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                       Tensor seq_lens, Tensor query_start_loc, Tensor /*workspace*/,
                       int64_t max_query_len, int64_t max_seq_len, double softmax_scale,
                       double k_scale, double v_scale, KvDtypeName kv_name) {
  const KvDtype kv = kv_name.value;
  const Contract c = check_contract(out, q, k_cache, v_cache, block_table, seq_lens,
                                    query_start_loc, max_query_len, max_seq_len, softmax_scale,
                                    k_scale, v_scale, kv, kPrefillMaxGroup);
  if (c.requests == 0 || c.tokens == 0) return;

  PrefillArgs a;
  a.q = q.data_ptr();
  a.k = static_cast<const unsigned char*>(k_cache.data_ptr());
  a.v = static_cast<const unsigned char*>(v_cache.data_ptr());
  a.block_table = static_cast<const int*>(block_table.data_ptr());
  a.seq_lens = static_cast<const int*>(seq_lens.data_ptr());
  a.query_start_loc = static_cast<const int*>(query_start_loc.data_ptr());
  a.out = out.mutable_data_ptr();
  a.q_token_stride = c.q_token_stride;
  a.q_head_stride = c.q_head_stride;
  a.out_token_stride = c.out_token_stride;
  a.out_head_stride = c.out_head_stride;
  a.k_page_stride = c.k_page_stride;
  a.v_page_stride = c.v_page_stride;
  a.k_head_stride = c.k_head_stride;
  a.v_head_stride = c.v_head_stride;
  a.table_stride = c.table_stride;
  a.k_token_stride = c.k_token_stride;
  a.v_token_stride = c.v_token_stride;
  a.num_pages = c.num_pages;
  a.groups_per_page = c.page_size / 16;
  a.page_magic = division_magic(a.groups_per_page);
  a.group = c.group;
  a.group_magic = division_magic(c.group);
  a.requests = c.requests;
  a.tokens = c.tokens;
  a.max_seq_len = static_cast<int>(max_seq_len);
  a.max_query_len = static_cast<int>(max_query_len);
  a.qk_scale = static_cast<float>(softmax_scale * k_scale * converted_unit(kv) * kLog2e);
  a.out_scale = static_cast<float>(v_scale * converted_unit(kv));

  // Each request rounds its rows up to whole tiles, so this bounds the tiles of any batch; the CTAs
  // in excess leave at once. The device alone knows the query lengths.
  const long long rows = static_cast<long long>(c.tokens) * c.group;
  const long long tiles = rows / prefill_rows(c.head_dim) + c.requests;
  STD_TORCH_CHECK(tiles < (1ll << 31) && c.kv_heads < 65536, "q has ", c.tokens, " tokens and ",
                  c.q_heads, " heads: too many for one launch");
  const std::string cubin =
      "prefill_d" + std::to_string(c.head_dim) + "_" + std::string(cubin_suffix(kv));
  void* args[] = {&a};
  launch(get_kernel(c.device, cubin.c_str(), "prefill_attention"),
         {static_cast<unsigned>(tiles), static_cast<unsigned>(c.kv_heads), 1},
         {kPrefillThreads, 1, 1}, prefill_shared_bytes(c.head_dim), current_stream(c.device), args);
}

}  // namespace
}  // namespace sm70

STABLE_TORCH_LIBRARY_FRAGMENT(_vllm_fa2_C, m) {
  m.def(
      "sm70_prefill_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, "
      "Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor(b!) workspace, "
      "int max_query_len, int max_seq_len, float softmax_scale, float k_scale, float v_scale, "
      "str kv_dtype) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_vllm_fa2_C, CUDA, m) {
  m.impl("sm70_prefill_attention", TORCH_BOX(&sm70::prefill_attention));
}
