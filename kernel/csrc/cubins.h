// The cubins that the build embeds; the table itself is generated (v100_build/library.py).
#pragma once

#include <cstddef>

namespace sm70 {

struct Cubin {
  const char* name;            // as in kernel/kernels.toml
  int arch;                    // 70, 80, 90
  const unsigned char* image;  // an ELF file
  const char* const* entries;  // null-terminated list of entry points
};

extern const Cubin kCubins[];
extern const size_t kCubinCount;

// What vllm_sm70_info() returns: one JSON object, generated beside the table.
extern const char kInfoJson[];

}  // namespace sm70
