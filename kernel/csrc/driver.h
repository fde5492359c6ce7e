// Finds, loads and launches the embedded cubins through the CUDA driver API.
//
// libcuda.so.1 is opened at the first launch and not before, so that the extension imports, and
// registers its ops, on a machine with no GPU and no driver.
#pragma once

#include <cstddef>

namespace sm70 {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// One entry point of one cubin, loaded into the primary context of one device.
struct Kernel {
  void* function = nullptr;  // CUfunction
  void* context = nullptr;   // CUcontext
  const char* entry = "";
  unsigned max_dynamic_smem = 0;  // bytes; the device's opt-in limit less the static part
};

// The kernel `entry` of the cubin named `cubin` (kernel/kernels.toml) for CUDA device `device`.
// Loads the module on first use, under a lock; later calls are a map lookup.  The cubin taken is
// the newest one of the device's own major architecture (machine code does not cross majors).
// Throws std::runtime_error that says which architectures the library holds when none fits.
const Kernel& get_kernel(int device, const char* cubin, const char* entry);

// Loads every embedded kernel that fits `device`, so that nothing is loaded during graph capture.
// Returns how many there are.
int preload(int device);

// Queues a launch on `stream` (a CUstream).  `args` are pointers to the arguments in order.
// Throws std::runtime_error with the driver's words and the launch's shape on failure.
void launch(const Kernel& kernel, Dim3 grid, Dim3 block, unsigned dynamic_smem, void* stream,
            void** args);

// Multiprocessors of `device`.
int sm_count(int device);

// The stream that PyTorch is using on `device`, as a CUstream.
void* current_stream(int device);

}  // namespace sm70
