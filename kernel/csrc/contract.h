// The contract that every attention op of this extension has with its caller, checked before a
// launch. The Python wrapper (sm70_attention/checks.py) says more; this repeats what would let a
// bad argument reach a kernel.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <string>

namespace sm70 {

enum class KvDtype { kFp16, kE4m3, kE5m2 };

// The op argument `str kv_dtype`. Not std::string: torch 2.10's conversion to it leaks a string at
// every call, and an eager server makes several calls a layer and step.
struct KvDtypeName {
  KvDtype value;
};

inline KvDtype parse_kv_dtype(const std::string& name) {
  if (name == "fp16") return KvDtype::kFp16;
  if (name == "fp8_e4m3") return KvDtype::kE4m3;
  if (name == "fp8_e5m2") return KvDtype::kE5m2;
  STD_TORCH_CHECK(false, "kv_dtype is \"", name, "\"; expected fp16, fp8_e4m3 or fp8_e5m2");
}

inline int element_bytes(KvDtype kv) { return kv == KvDtype::kFp16 ? 2 : 1; }
inline const char* cubin_suffix(KvDtype kv) {
  return kv == KvDtype::kFp16 ? "fp16" : kv == KvDtype::kE4m3 ? "e4m3" : "e5m2";
}
// What a converted half must be multiplied by (src/common/fp8.cuh).
inline double converted_unit(KvDtype kv) { return kv == KvDtype::kE4m3 ? 256.0 : 1.0; }

// Shapes and strides of a checked call. Strides of q and out are halves, of the caches bytes.
struct Contract {
  int device, tokens, q_heads, kv_heads, group, head_dim;
  int num_pages, page_size, requests, table_width;
  long long q_token_stride, q_head_stride, out_token_stride, out_head_stride;
  long long k_page_stride, v_page_stride, table_stride;
  int k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

namespace contract {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void aligned(const char* name, long long bytes, int multiple) {
  STD_TORCH_CHECK(bytes % multiple == 0, name, " is at or steps by ", bytes,
                  " bytes; expected a multiple of ", multiple);
}

inline void on_device(const char* name, const Tensor& t, int device) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device() == device, name, " is not on the CUDA device of q");
}

// [tokens, heads, D] halves, last dimension contiguous, the rest in steps of 8 bytes.
inline void rows(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Half, name, " must be float16");
  STD_TORCH_CHECK(t.dim() == 3, name, " has ", t.dim(), " dimensions; expected [tokens, heads, D]");
  STD_TORCH_CHECK(t.stride(2) == 1, name, " has a last dimension of stride ", t.stride(2),
                  "; expected 1");
  aligned(name, reinterpret_cast<long long>(t.data_ptr()), 8);
  aligned(name, t.stride(0) * 2, 8);
  aligned(name, t.stride(1) * 2, 8);
}

inline int narrow(const char* name, long long value) {
  STD_TORCH_CHECK(value >= 0 && value <= 0x7fffffffLL, name, " is ", value,
                  "; expected 0 to 2^31 - 1");
  return static_cast<int>(value);
}

// [pages, page size, KV heads, D], last dimension contiguous, the rest in steps of 8 bytes.
inline void cache(const char* name, const Tensor& t, KvDtype kv) {
  const ScalarType wanted = kv == KvDtype::kFp16 ? ScalarType::Half : ScalarType::Byte;
  STD_TORCH_CHECK(t.scalar_type() == wanted, name, " must be ",
                  kv == KvDtype::kFp16 ? "float16" : "uint8", " for this kv_dtype");
  STD_TORCH_CHECK(t.dim() == 4, name, " has ", t.dim(),
                  " dimensions; expected [pages, page size, KV heads, D]");
  STD_TORCH_CHECK(t.stride(3) == 1, name, " has a last dimension of stride ", t.stride(3),
                  "; expected 1");
  aligned(name, reinterpret_cast<long long>(t.data_ptr()), 8);
  for (int i = 0; i < 3; ++i) aligned(name, t.stride(i) * element_bytes(kv), 8);
  // Kernels multiply it with a token's place in a group of 16, in 32 bits.
  STD_TORCH_CHECK(t.stride(1) * element_bytes(kv) < (1 << 27), name, " has tokens ",
                  t.stride(1) * element_bytes(kv), " bytes apart; at most 2^27");
}

inline void indices(const char* name, const Tensor& t, int dims) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, " must be int32");
  STD_TORCH_CHECK(t.dim() == dims, name, " has ", t.dim(), " dimensions; expected ", dims);
  STD_TORCH_CHECK(t.size(dims - 1) <= 1 || t.stride(dims - 1) == 1, name,
                  " has a last dimension that is not contiguous");
}

inline void scale(const char* name, double value) {
  STD_TORCH_CHECK(std::isfinite(value) && value > 0, name, " is ", value,
                  "; expected a finite number above 0");
}

}  // namespace contract

// Checks all arguments that the attention ops share; max_group is the op's own bound.
inline Contract check_contract(const torch::stable::Tensor& out, const torch::stable::Tensor& q,
                               const torch::stable::Tensor& k_cache,
                               const torch::stable::Tensor& v_cache,
                               const torch::stable::Tensor& block_table,
                               const torch::stable::Tensor& seq_lens,
                               const torch::stable::Tensor& query_start_loc, int64_t max_query_len,
                               int64_t max_seq_len, double softmax_scale, double k_scale,
                               double v_scale, KvDtype kv, int max_group) {
  using namespace contract;
  rows("q", q);
  rows("out", out);
  cache("k_cache", k_cache, kv);
  cache("v_cache", v_cache, kv);
  indices("block_table", block_table, 2);
  indices("seq_lens", seq_lens, 1);
  indices("query_start_loc", query_start_loc, 1);
  scale("softmax_scale", softmax_scale);
  scale("k_scale", k_scale);
  scale("v_scale", v_scale);
  Contract c;
  STD_TORCH_CHECK(q.is_cuda(), "q is not on a CUDA device");
  c.device = q.get_device();
  on_device("out", out, c.device);
  on_device("k_cache", k_cache, c.device);
  on_device("v_cache", v_cache, c.device);
  on_device("block_table", block_table, c.device);
  on_device("seq_lens", seq_lens, c.device);
  on_device("query_start_loc", query_start_loc, c.device);
  c.tokens = narrow("the token count", q.size(0));
  c.q_heads = narrow("the head count", q.size(1));
  c.head_dim = narrow("the head dimension", q.size(2));
  for (int i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(out.size(i) == q.size(i), "out and q differ in dimension ", i, ": ",
                    out.size(i), " against ", q.size(i));
  }
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(k_cache.size(i) == v_cache.size(i), "k_cache and v_cache differ in dimension ",
                    i, ": ", k_cache.size(i), " against ", v_cache.size(i));
  }
  c.num_pages = narrow("the page count", k_cache.size(0));
  c.page_size = narrow("the page size", k_cache.size(1));
  c.kv_heads = narrow("the KV head count", k_cache.size(2));
  STD_TORCH_CHECK(k_cache.size(3) == c.head_dim, "k_cache has head dimension ", k_cache.size(3),
                  " and q ", c.head_dim);
  STD_TORCH_CHECK(c.head_dim == 64 || c.head_dim == 128 || c.head_dim == 256,
                  "the head dimension is ", c.head_dim, "; expected 64, 128 or 256");
  STD_TORCH_CHECK(c.num_pages > 0, "k_cache has no pages");
  STD_TORCH_CHECK(c.page_size > 0 && c.page_size % 16 == 0 && c.page_size < (1 << 20),
                  "the page size is ", c.page_size, "; expected a multiple of 16 below 2^20");
  STD_TORCH_CHECK(c.kv_heads > 0 && c.q_heads > 0 && c.q_heads % c.kv_heads == 0, c.q_heads,
                  " query heads over ", c.kv_heads, " KV heads: not a whole group");
  c.group = c.q_heads / c.kv_heads;
  STD_TORCH_CHECK(c.group <= max_group, "a group of ", c.group, " query heads; at most ",
                  max_group);
  c.requests = narrow("the request count", seq_lens.size(0));
  STD_TORCH_CHECK(c.requests < 65536, c.requests, " requests; at most 65535");
  STD_TORCH_CHECK(block_table.size(0) >= c.requests, "block_table has ", block_table.size(0),
                  " rows for ", c.requests, " requests");
  STD_TORCH_CHECK(query_start_loc.size(0) == c.requests + 1, "query_start_loc has ",
                  query_start_loc.size(0), " entries; expected requests + 1 = ", c.requests + 1);
  STD_TORCH_CHECK(max_query_len >= 1, "max_query_len is ", max_query_len, "; expected 1 or more");
  STD_TORCH_CHECK(max_seq_len >= 1 && max_seq_len <= (1 << 20), "max_seq_len is ", max_seq_len,
                  "; expected 1 to 2^20");
  c.table_width = narrow("the block table's width", block_table.size(1));
  STD_TORCH_CHECK(static_cast<long long>(c.table_width) * c.page_size >= max_seq_len,
                  "block_table has ", c.table_width, " columns of ", c.page_size,
                  "-token pages; too narrow for max_seq_len ", max_seq_len);
  const int bytes = element_bytes(kv);
  c.q_token_stride = q.stride(0);
  c.q_head_stride = q.stride(1);
  c.out_token_stride = out.stride(0);
  c.out_head_stride = out.stride(1);
  c.k_page_stride = k_cache.stride(0) * bytes;
  c.v_page_stride = v_cache.stride(0) * bytes;
  c.table_stride = block_table.stride(0);
  c.k_token_stride = narrow("k_cache's token stride", k_cache.stride(1) * bytes);
  c.v_token_stride = narrow("v_cache's token stride", v_cache.stride(1) * bytes);
  c.k_head_stride = narrow("k_cache's head stride", k_cache.stride(2) * bytes);
  c.v_head_stride = narrow("v_cache's head stride", v_cache.stride(2) * bytes);
  return c;
}

// Room in bytes of a contiguous uint8 workspace, aligned for vector access.
inline unsigned char* check_workspace(const torch::stable::Tensor& workspace, int device,
                                      long long needed) {
  contract::on_device("workspace", workspace, device);
  const long long have = workspace.numel() * static_cast<long long>(workspace.element_size());
  STD_TORCH_CHECK(workspace.is_contiguous() && have >= needed, "workspace has ", have,
                  " contiguous bytes; this call needs ", needed);
  auto* base = static_cast<unsigned char*>(workspace.mutable_data_ptr());
  contract::aligned("workspace", reinterpret_cast<long long>(base), 16);
  return base;
}

}  // namespace sm70

// Lets TORCH_BOX unbox `str kv_dtype` into a KvDtypeName.
namespace torch::stable::detail {
template <>
struct ToImpl<sm70::KvDtypeName> {
  static sm70::KvDtypeName call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    const std::string name(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return {sm70::parse_kv_dtype(name)};
  }
};
}  // namespace torch::stable::detail
