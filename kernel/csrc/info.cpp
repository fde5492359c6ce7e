// What the extension says of itself, and the op that loads its kernels ahead of graph capture.
#include <torch/csrc/stable/library.h>

#include "cubins.h"
#include "driver.h"

// One JSON object: abi, source_sha256, archs, long_batch_capacity, kernels.  Plain C, so that the
// wrapper reads it before it trusts anything else in the library.
extern "C" __attribute__((visibility("default"))) const char* vllm_sm70_info() {
  return sm70::kInfoJson;
}

namespace {
int64_t preload(int64_t device) { return sm70::preload(static_cast<int>(device)); }
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(_vllm_fa2_C, m) { m.def("sm70_preload(int device) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(_vllm_fa2_C, CompositeExplicitAutograd, m) {
  m.impl("sm70_preload", TORCH_BOX(&preload));
}
