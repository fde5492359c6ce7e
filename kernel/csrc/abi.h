// The number that ties the Python wrapper to the extension: raise it whenever an op's schema, a
// workspace layout or the meaning of an argument changes.  The wrapper
// (kernel/python/sm70_attention/library.py) refuses a library that reports another one.
#pragma once

namespace sm70 {
constexpr int kAbi = 1;

// Requests that one launch of the long kernel admits.  Reported, so that a library that admits
// fewer is never handed a larger batch.
constexpr int kLongBatchCapacity = 16;
}  // namespace sm70
