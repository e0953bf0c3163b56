// A libcuda.so.1 that runs the kernels on the CPU: the host device of the tests. What the driver may put off
// (copies from pinned memory, kernels) it does as late as it may, when the stream is waited for, so that who
// does not wait gets caught. Images of kernels are taken for good unread: the kernels are compiled in.
//
// Environment: EDGEH2O_HOST_DEVICE_LOG=FILE appends a line per call; _SEED=N sets what runs in which order;
// _FAIL=FUNCTION[@N]=ERROR makes the Nth call of a function and all later ones fail (first: 1); _MEMORY=BYTES
// limits the memory; _SKIP=KERNEL leaves a kernel out, as a device that is broken might.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver_api.h"
#include "cuda/kernels/attend.cuh"
#include "cuda/kernels/attend_tiles.cuh"
#include "cuda/kernels/gemm.cuh"
#include "cuda/kernels/list.h"
#include "cuda/kernels/multiply.cuh"
#include "cuda/kernels/recurrent.cuh"
#include "cuda/kernels/rows.cuh"
#include "cuda/kernels/selection.cuh"
#include "cuda/kernels/ssd.cuh"

namespace edgeh2o::cuda {

struct FunctionOfDriver {
  size_t argument_bytes;
  std::function<std::function<void()>(const void*)> bind;  // copies the arguments
  int most_shared_bytes = 48 * 1024;
};
struct ModuleOfDriver {};
struct ContextOfDriver {};
using Work = std::function<CUresult()>;
struct GraphOfDriver {
  std::vector<Work> work;
};
struct GraphExecOfDriver {
  std::vector<Work> work;
};
struct StreamOfDriver {
  int number;
  std::deque<Work> work;
  GraphOfDriver* recording = nullptr;

  void push(Work next) {
    if (recording) {
      recording->work.push_back(std::move(next));
    } else {
      work.push_back(std::move(next));
    }
  }
};

namespace {

template <typename Arguments>
FunctionOfDriver function_of(void (*kernel)(Arguments)) {
  return {sizeof(Arguments), [kernel](const void* bytes) {
            Arguments arguments;
            std::memcpy(&arguments, bytes, sizeof(arguments));
            return [kernel, arguments] { kernel(arguments); };
          }};
}

struct Driver {
  std::mutex mutex;
  std::map<std::string, FunctionOfDriver> functions = {
#define EH2O_ENTRY(name, Arguments) {#name, function_of<Arguments>(&name)},
      EH2O_CUDA_KERNELS(EH2O_ENTRY)
#undef EH2O_ENTRY
  };
  std::map<uintptr_t, size_t> device_memory, pinned_memory;
  std::map<std::string, int> n_calls;
  size_t n_bytes = 0, most_bytes = size_t{8} << 30;
  uint64_t seed = 1;
  CUresult lost = kCudaSuccess;  // what a kernel did wrong stays, as on a device
  std::string message;
  ModuleOfDriver module;
  ContextOfDriver context;
  host::Block block;

  Driver() {
    if (const char* text = std::getenv("EDGEH2O_HOST_DEVICE_SEED")) seed = std::strtoull(text, nullptr, 10);
    if (const char* text = std::getenv("EDGEH2O_HOST_DEVICE_MEMORY"))
      most_bytes = std::strtoull(text, nullptr, 10);
  }
};

Driver& driver() {
  static Driver* const it = new Driver;  // not destroyed: those who still use it may end later
  return *it;
}

// Counts and logs a call; what it is to fail with.
CUresult begin(const char* name, const std::string& detail = "") {
  Driver& d = driver();
  const int n = ++d.n_calls[name];
  if (const char* path = std::getenv("EDGEH2O_HOST_DEVICE_LOG")) {
    if (std::FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s %s\n", name, detail.c_str());
      std::fclose(file);
    }
  }
  const char* fail = std::getenv("EDGEH2O_HOST_DEVICE_FAIL");
  if (fail == nullptr) return d.lost;
  const std::string text(fail);
  const size_t at = text.find('@'), equals = text.rfind('=');
  if (equals == std::string::npos || text.substr(0, std::min(at, equals)) != name) return d.lost;
  const int first = at == std::string::npos ? 1 : std::atoi(text.c_str() + at + 1);
  if (n < first) return d.lost;
  const CUresult error = std::atoi(text.c_str() + equals + 1);
  if (error >= kCudaIllegalAddress && error < kCudaSystemNotReady) d.lost = error;
  return error;
}

bool lies_in(const std::map<uintptr_t, size_t>& memory, const void* p, size_t n_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  auto block = memory.upper_bound(address);
  if (block == memory.begin()) return false;
  --block;
  return address - block->first <= block->second && n_bytes <= block->second - (address - block->first);
}

void* allocate(std::map<uintptr_t, size_t>& memory, size_t n_bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, n_bytes) != 0) return nullptr;
  std::memset(p, 0xff, n_bytes);  // NaN
  memory[reinterpret_cast<uintptr_t>(p)] = n_bytes;
  return p;
}

// In the log.
std::string of(CUstream stream) { return " stream " + std::to_string(stream->number); }

CUresult drain(StreamOfDriver& stream) {
  Driver& d = driver();
  while (!stream.work.empty()) {
    const auto work = std::move(stream.work.front());
    stream.work.pop_front();
    if (d.lost == kCudaSuccess) d.lost = work();
  }
  return d.lost;
}

CUresult lose(const std::string& message) {
  driver().message = message;
  std::fprintf(stderr, "host device: %s\n", message.c_str());
  return kCudaLaunchFailed;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) CUresult
#define BEGIN(...)                                        \
  const std::lock_guard<std::mutex> lock(driver().mutex); \
  if (const CUresult error = begin(__func__, std::string{__VA_ARGS__})) return error

EXPORT cuInit(unsigned) {
  BEGIN();
  return kCudaSuccess;
}
EXPORT cuDriverGetVersion(int* version) {
  BEGIN();
  *version = 12060;
  return kCudaSuccess;
}
EXPORT cuDeviceGetCount(int* count) {
  BEGIN();
  *count = 1;
  return kCudaSuccess;
}
EXPORT cuDeviceGet(CUdevice* device, int ordinal) {
  BEGIN();
  *device = ordinal;
  return ordinal == 0 ? kCudaSuccess : kCudaInvalidDevice;
}
EXPORT cuDeviceGetName(char* name, int n_bytes, CUdevice) {
  BEGIN();
  std::snprintf(name, static_cast<size_t>(n_bytes), "host device (emulated)");
  return kCudaSuccess;
}
EXPORT cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  BEGIN();
  const std::map<int, int> values = {
      {kAttributeClockRate, 1'000'000}, {kAttributeProcessors, 8},
      {kAttributeIntegrated, 0},        {kAttributeComputeMajor, 8},
      {kAttributeComputeMinor, 7},      {kAttributeSharedMemoryOptIn, 163 * 1024}};
  *value = values.at(attribute);
  return kCudaSuccess;
}
EXPORT cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  BEGIN();
  *context = &driver().context;
  return kCudaSuccess;
}
EXPORT cuDevicePrimaryCtxRelease_v2(CUdevice) {
  BEGIN();
  return kCudaSuccess;
}
EXPORT cuCtxSetCurrent(CUcontext) { return kCudaSuccess; }
EXPORT cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN();
  *free = driver().most_bytes - driver().n_bytes;
  *total = driver().most_bytes;
  return kCudaSuccess;
}
EXPORT cuMemAlloc_v2(CUdeviceptr* pointer, size_t n_bytes) {
  BEGIN(std::to_string(n_bytes));
  Driver& d = driver();
  if (n_bytes == 0) return 1;
  if (n_bytes > d.most_bytes - d.n_bytes) return kCudaOutOfMemory;
  void* p = allocate(d.device_memory, n_bytes);
  if (p == nullptr) return kCudaOutOfMemory;
  d.n_bytes += n_bytes;
  *pointer = reinterpret_cast<CUdeviceptr>(p);
  return kCudaSuccess;
}
EXPORT cuMemFree_v2(CUdeviceptr pointer) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  Driver& d = driver();
  const auto found = d.device_memory.find(pointer);
  begin(__func__, found == d.device_memory.end() ? "unknown" : std::to_string(found->second));
  if (found == d.device_memory.end()) return 1;
  d.n_bytes -= found->second;
  d.device_memory.erase(found);
  std::free(reinterpret_cast<void*>(pointer));
  return kCudaSuccess;
}
EXPORT cuMemHostAlloc(void** pointer, size_t n_bytes, unsigned) {
  BEGIN(std::to_string(n_bytes));
  *pointer = allocate(driver().pinned_memory, n_bytes);
  return *pointer ? kCudaSuccess : kCudaOutOfMemory;
}
EXPORT cuMemFreeHost(void* pointer) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  begin(__func__);
  if (driver().pinned_memory.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) return 1;
  std::free(pointer);
  return kCudaSuccess;
}
EXPORT cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n_bytes, CUstream stream) {
  BEGIN(std::to_string(n_bytes) + of(stream));
  Driver& d = driver();
  if (!lies_in(d.device_memory, reinterpret_cast<void*>(to), n_bytes)) return kCudaIllegalAddress;
  if (lies_in(d.pinned_memory, from, n_bytes)) {
    stream->push([=] {
      std::memcpy(reinterpret_cast<void*>(to), from, n_bytes);
      return kCudaSuccess;
    });
    return kCudaSuccess;
  }
  if (stream->recording) return kCudaCaptureUnsupported;  // the memory may be gone
  std::string bytes(static_cast<const char*>(from), n_bytes);
  stream->push([to, bytes = std::move(bytes)] {
    std::memcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size());
    return kCudaSuccess;
  });
  return kCudaSuccess;
}
EXPORT cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n_bytes, CUstream stream) {
  BEGIN(std::to_string(n_bytes) + of(stream));
  if (!lies_in(driver().device_memory, reinterpret_cast<void*>(from), n_bytes)) return kCudaIllegalAddress;
  stream->push([=] {
    std::memcpy(to, reinterpret_cast<const void*>(from), n_bytes);
    return kCudaSuccess;
  });
  return kCudaSuccess;
}
EXPORT cuStreamCreate(CUstream* stream, unsigned) {
  BEGIN();
  *stream = new StreamOfDriver{driver().n_calls[__func__], {}};
  return kCudaSuccess;
}
EXPORT cuStreamDestroy_v2(CUstream stream) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  begin(__func__);
  drain(*stream);
  delete stream;
  return kCudaSuccess;
}
EXPORT cuStreamSynchronize(CUstream stream) {
  BEGIN(of(stream));
  return stream->recording ? kCudaCaptureUnsupported : drain(*stream);
}
EXPORT cuStreamBeginCapture_v2(CUstream stream, int) {
  BEGIN(of(stream));
  if (stream->recording) return kCudaCaptureUnsupported;
  stream->recording = new GraphOfDriver;
  return kCudaSuccess;
}
EXPORT cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  BEGIN(of(stream));
  *graph = std::exchange(stream->recording, nullptr);
  return *graph ? kCudaSuccess : kCudaCaptureUnsupported;
}
EXPORT cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  BEGIN();
  *exec = new GraphExecOfDriver{graph->work};
  return kCudaSuccess;
}
EXPORT cuGraphDestroy(CUgraph graph) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  begin(__func__);
  delete graph;
  return kCudaSuccess;
}
EXPORT cuGraphExecDestroy(CUgraphExec exec) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  begin(__func__);
  delete exec;
  return kCudaSuccess;
}
EXPORT cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  BEGIN(std::to_string(exec->work.size()) + of(stream));
  for (const Work& work : exec->work) stream->push(work);
  return kCudaSuccess;
}
EXPORT cuModuleLoadData(CUmodule* module, const void* image) {
  const bool is_elf = std::memcmp(image,
                                  "\x7f"
                                  "ELF",
                                  4) == 0;
  BEGIN(is_elf ? "cubin" : "ptx");
  *module = &driver().module;
  return kCudaSuccess;
}
EXPORT cuModuleUnload(CUmodule) {
  BEGIN();
  return kCudaSuccess;
}
EXPORT cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  BEGIN(name);
  const auto found = driver().functions.find(name);
  if (found == driver().functions.end()) return kCudaNotFound;
  *function = &found->second;
  return kCudaSuccess;
}
EXPORT cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  BEGIN(std::to_string(value));
  if (attribute != kFunctionMaxDynamicSharedBytes || value > 163 * 1024) return 1;
  function->most_shared_bytes = value;
  return kCudaSuccess;
}
EXPORT cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                      CUstream stream, void** arguments, void**) {
  const host::Grid grid{grid_x, grid_y, grid_z};
  Driver& d = driver();
  std::string name = "?";
  for (const auto& [key, value] : d.functions) {
    if (&value == function) name = key;
  }
  std::string detail = name;
  for (const unsigned n : {grid_x, grid_y, grid_z, block_x, shared_bytes}) detail += " " + std::to_string(n);
  BEGIN(detail + of(stream));
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_y > 65535 || grid_z > 65535) return 1;
  const char* const skipped = std::getenv("EDGEH2O_HOST_DEVICE_SKIP");
  if (skipped != nullptr && name == skipped) return kCudaSuccess;
  if (block_y != 1 || block_z != 1 || shared_bytes > static_cast<unsigned>(function->most_shared_bytes))
    return 1;
  stream->push([&d, name, grid, block_x, shared_bytes, kernel = function->bind(arguments[0])] {
    const std::string error = d.block.run(kernel, grid, block_x, shared_bytes, ++d.seed);
    return error.empty() ? kCudaSuccess : lose(name + ": " + error);
  });
  return kCudaSuccess;
}
EXPORT cuGetErrorName(CUresult error, const char** text) {
  const std::map<int, const char*> names = {{1, "CUDA_ERROR_INVALID_VALUE"},
                                            {kCudaOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                            {kCudaNoDevice, "CUDA_ERROR_NO_DEVICE"},
                                            {kCudaInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                            {kCudaNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                            {kCudaUnsupportedPtx, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
                                            {kCudaNotFound, "CUDA_ERROR_NOT_FOUND"},
                                            {kCudaIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                            {kCudaLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto found = names.find(error);
  if (found == names.end()) return 1;
  *text = found->second;
  return kCudaSuccess;
}
EXPORT cuGetErrorString(CUresult error, const char** text) {
  *text = error == kCudaLaunchFailed ? driver().message.c_str() : "as its name says";
  return kCudaSuccess;
}

// For tests: bytes that a kernel takes, 0 for one that is not there.
extern "C" __attribute__((visibility("default"))) size_t edgeh2o_argument_bytes(const char* name) {
  const auto found = driver().functions.find(name);
  return found == driver().functions.end() ? 0 : found->second.argument_bytes;
}

}  // namespace edgeh2o::cuda
