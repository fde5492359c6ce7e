// Finds, loads and launches the embedded cubins (see driver.h).
#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cubins.h"

namespace sm70 {
namespace {

// The driver's entry points, by their exported (versioned) names.
struct Driver {
  CUresult (*GetErrorString)(CUresult, const char**);
  CUresult (*Init)(unsigned);
  CUresult (*DeviceGet)(CUdevice*, int);
  CUresult (*DeviceGetAttribute)(int*, CUdevice_attribute, CUdevice);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*CtxGetCurrent)(CUcontext*);
  CUresult (*ModuleLoadData)(CUmodule*, const void*);
  CUresult (*ModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*FuncGetAttribute)(int*, CUfunction_attribute, CUfunction);
  CUresult (*FuncSetAttribute)(CUfunction, CUfunction_attribute, int);
  CUresult (*LaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, CUstream, void**, void**);
};

template <typename F>
void resolve(void* library, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(library, name));
  if (out == nullptr) {
    throw std::runtime_error(std::string("libcuda.so.1 has no ") + name +
                             "; install an NVIDIA driver that supports CUDA 12");
  }
}

const Driver& driver() {
  static const Driver table = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw std::runtime_error(std::string("no CUDA driver: libcuda.so.1 does not load (") +
                               dlerror() +
                               "); SM70 attention kernels need an NVIDIA GPU and its driver");
    }
    Driver d{};
    resolve(library, "cuGetErrorString", d.GetErrorString);
    resolve(library, "cuInit", d.Init);
    resolve(library, "cuDeviceGet", d.DeviceGet);
    resolve(library, "cuDeviceGetAttribute", d.DeviceGetAttribute);
    resolve(library, "cuDevicePrimaryCtxRetain", d.DevicePrimaryCtxRetain);
    resolve(library, "cuCtxPushCurrent_v2", d.CtxPushCurrent);
    resolve(library, "cuCtxPopCurrent_v2", d.CtxPopCurrent);
    resolve(library, "cuCtxGetCurrent", d.CtxGetCurrent);
    resolve(library, "cuModuleLoadData", d.ModuleLoadData);
    resolve(library, "cuModuleGetFunction", d.ModuleGetFunction);
    resolve(library, "cuFuncGetAttribute", d.FuncGetAttribute);
    resolve(library, "cuFuncSetAttribute", d.FuncSetAttribute);
    resolve(library, "cuLaunchKernel", d.LaunchKernel);
    return d;
  }();
  return table;
}

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().GetErrorString(result, &text);
  throw std::runtime_error(what + ": " + (text ? text : "unknown CUDA error") + " (CUresult " +
                           std::to_string(static_cast<int>(result)) + ")");
}

// Makes a context current for a scope, and only where it is not current already.
class ContextScope {
 public:
  explicit ContextScope(CUcontext wanted) {
    CUcontext current = nullptr;
    check(driver().CtxGetCurrent(&current), "cuCtxGetCurrent");
    pushed_ = current != wanted;
    if (pushed_) check(driver().CtxPushCurrent(wanted), "cuCtxPushCurrent");
  }
  ~ContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) driver().CtxPopCurrent(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

// The modules and kernels of one device.
struct Device {
  CUdevice handle = 0;
  CUcontext context = nullptr;
  int arch = 0;
  int sm_count = 0;
  int max_smem_optin = 0;
  std::map<const Cubin*, CUmodule> modules;
  std::map<std::pair<std::string, std::string>, Kernel> kernels;
};

std::mutex g_lock;  // guards the map below and everything in it
std::map<int, Device> g_devices;

int attribute(CUdevice handle, CUdevice_attribute which) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
  return value;
}

Device& device_locked(int index) {
  auto found = g_devices.find(index);
  if (found != g_devices.end()) return found->second;
  check(driver().Init(0), "cuInit");
  Device d;
  check(driver().DeviceGet(&d.handle, index), "CUDA device " + std::to_string(index));
  check(driver().DevicePrimaryCtxRetain(&d.context, d.handle), "cuDevicePrimaryCtxRetain");
  d.arch = 10 * attribute(d.handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
           attribute(d.handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  d.sm_count = attribute(d.handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  d.max_smem_optin = attribute(d.handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return g_devices.emplace(index, std::move(d)).first->second;
}

bool fits(const Cubin& cubin, int arch) {
  return cubin.arch / 10 == arch / 10 && cubin.arch <= arch;
}

const Cubin& find_cubin(const std::string& name, int arch) {
  const Cubin* best = nullptr;
  std::string have;
  for (size_t i = 0; i < kCubinCount; ++i) {
    const Cubin& c = kCubins[i];
    if (name != c.name) continue;
    have += (have.empty() ? "sm_" : ", sm_") + std::to_string(c.arch);
    if (fits(c, arch) && (best == nullptr || c.arch > best->arch)) best = &c;
  }
  if (best != nullptr) return *best;
  if (have.empty()) {
    throw std::runtime_error("this _vllm_fa2_C has no kernel named " + name +
                             "; it was built from another kernel/kernels.toml: rebuild it");
  }
  throw std::runtime_error("this _vllm_fa2_C has " + name + " for " + have +
                           " only, and the device is sm_" + std::to_string(arch) +
                           "; a validation build (make build VALIDATION=1) adds sm_80 and sm_90");
}

const Kernel& kernel_locked(Device& d, const Cubin& cubin, const char* entry) {
  const auto key = std::make_pair(std::string(cubin.name), std::string(entry));
  auto found = d.kernels.find(key);
  if (found != d.kernels.end()) return found->second;
  ContextScope scope(d.context);
  const std::string what = key.first + "/" + key.second;
  auto module = d.modules.find(&cubin);
  if (module == d.modules.end()) {
    CUmodule loaded = nullptr;
    check(driver().ModuleLoadData(&loaded, cubin.image), "loading cubin " + key.first);
    module = d.modules.emplace(&cubin, loaded).first;
  }
  CUfunction function = nullptr;
  check(driver().ModuleGetFunction(&function, module->second, entry), "finding kernel " + what);
  int static_smem = 0;
  check(driver().FuncGetAttribute(&static_smem, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
        "attributes of " + what);
  Kernel k;
  k.function = function;
  k.context = d.context;
  k.max_dynamic_smem = static_cast<unsigned>(d.max_smem_optin - static_smem);
  // Opt in once to all that the device gives: a kernel's own launch asks for what it needs.
  check(driver().FuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  static_cast<int>(k.max_dynamic_smem)),
        "shared memory of " + what);
  auto stored = d.kernels.emplace(key, k).first;
  stored->second.entry = stored->first.second.c_str();
  return stored->second;
}

}  // namespace

const Kernel& get_kernel(int device, const char* cubin, const char* entry) {
  std::lock_guard<std::mutex> hold(g_lock);
  Device& d = device_locked(device);
  auto found = d.kernels.find({cubin, entry});
  if (found != d.kernels.end()) return found->second;
  return kernel_locked(d, find_cubin(cubin, d.arch), entry);
}

int preload(int device) {
  std::lock_guard<std::mutex> hold(g_lock);
  Device& d = device_locked(device);
  int count = 0;
  for (size_t i = 0; i < kCubinCount; ++i) {
    if (!fits(kCubins[i], d.arch) || &find_cubin(kCubins[i].name, d.arch) != &kCubins[i]) continue;
    for (const char* const* entry = kCubins[i].entries; *entry != nullptr; ++entry, ++count) {
      kernel_locked(d, kCubins[i], *entry);
    }
  }
  return count;
}

void launch(const Kernel& kernel, Dim3 grid, Dim3 block, unsigned dynamic_smem, void* stream,
            void** args) {
  if (dynamic_smem > kernel.max_dynamic_smem) {
    throw std::runtime_error(std::string(kernel.entry) + " needs " + std::to_string(dynamic_smem) +
                             " bytes of dynamic shared memory and the device gives " +
                             std::to_string(kernel.max_dynamic_smem));
  }
  ContextScope scope(static_cast<CUcontext>(kernel.context));
  const CUresult result = driver().LaunchKernel(
      static_cast<CUfunction>(kernel.function), grid.x, grid.y, grid.z, block.x, block.y, block.z,
      dynamic_smem, static_cast<CUstream>(stream), args, nullptr);
  if (result == CUDA_SUCCESS) return;
  auto dim = [](Dim3 d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
  };
  check(result, std::string("launching ") + kernel.entry + " with grid " + dim(grid) + ", block " +
                    dim(block) + ", " + std::to_string(dynamic_smem) + " bytes of shared memory");
}

int sm_count(int device) {
  std::lock_guard<std::mutex> hold(g_lock);
  return device_locked(device).sm_count;
}

void* current_stream(int device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("PyTorch has no CUDA stream on device " + std::to_string(device));
  }
  return stream;
}

}  // namespace sm70
