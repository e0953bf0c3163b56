// One GPU: its context, memory, a stream, and the kernels of an image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

struct DeviceProperties {
  std::string name;
  int driver_version = 0;    // 12060: CUDA 12.6
  int major = 0, minor = 0;  // compute capability
  int n_processors = 0;
  double clock_hz = 0.0;       // the highest
  bool is_integrated = false;  // shares the memory of the CPU
  size_t total_bytes = 0, free_bytes = 0;
};

class Device;

// What was asked of a device, recorded to be run again.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&& other) noexcept { *this = std::move(other); }
  DeviceGraph& operator=(DeviceGraph&& other) noexcept;
  explicit operator bool() const { return graph_ != nullptr; }

 private:
  friend class Device;
  Device* device_ = nullptr;
  CUgraphExec graph_ = nullptr;
};

// Functions throw DeviceError. One thread at a time; any thread may.
class Device {
 public:
  static int count();
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceProperties properties() const;

  // The kernels, from the bytes of a cubin or the text of PTX.
  void load_image(const std::string& image);

  // Runs a kernel after all that was asked for before. The arguments are copied.
  template <typename Arguments>
  void launch(const char* kernel, const Arguments& arguments, size_t grid_x, size_t grid_y, size_t grid_z,
              size_t n_threads, size_t shared_bytes) {
    Arguments copy = arguments;
    launch_bytes(kernel, &copy, grid_x, grid_y, grid_z, n_threads, shared_bytes);
  }

  size_t n_processors() const { return n_processors_; }

  // From pinned memory, which stays as it is until wait() returns.
  void upload(void* to, const void* from, size_t n_bytes);
  void download(void* to, const void* from, size_t n_bytes);
  void wait();

  // Records the kernels and copies that f asks for instead of running them: only kernels that have run
  // before, as loading one may wait.
  template <typename F>
  DeviceGraph record(const F& f) {
    begin_recording();
    try {
      f();
    } catch (...) {
      discard_recording();
      throw;
    }
    return end_recording();
  }
  void replay(const DeviceGraph& graph);
  void release_graph(CUgraphExec graph) noexcept;

  void* allocate(size_t n_bytes);
  void release(void* memory) noexcept;
  void* allocate_pinned(size_t n_bytes);
  void release_pinned(void* memory) noexcept;

 private:
  struct Kernel {
    CUfunction function = nullptr;
    size_t shared_bytes = 48 * 1024;  // allowed so far
  };

  void enter() const { driver_.check(driver_.cuCtxSetCurrent(context_), "selecting it"); }
  void launch_bytes(const char* kernel, void* arguments, size_t grid_x, size_t grid_y, size_t grid_z,
                    size_t n_threads, size_t shared_bytes);
  int attribute(int which) const;
  void begin_recording();
  void discard_recording() noexcept;
  DeviceGraph end_recording();

  const Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUmodule module_ = nullptr;
  size_t n_processors_ = 0;
  std::unordered_map<std::string, Kernel> kernels_;
};

// Memory of a device, or pinned memory of the host, for one owner.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, size_t n_bytes, bool is_pinned = false);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return n_bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t n_bytes_ = 0;
  bool is_pinned_ = false;
};

// Hands out pieces of blocks of at most block_bytes, so that memory in pieces serves too; a larger piece is a
// block of its own.
class DevicePool {
 public:
  static constexpr size_t kBlockBytes = size_t{256} << 20;

  explicit DevicePool(Device& device, size_t block_bytes = kBlockBytes)
      : device_(device), block_bytes_(block_bytes) {}
  // Says how much is to come, so that the last block is no larger than needed.
  void expect(size_t n_bytes) { n_expected_ = n_bytes; }
  void* take(size_t n_bytes);
  size_t block_bytes() const { return block_bytes_; }
  size_t n_bytes() const { return n_bytes_; }

 private:
  struct Block {
    DeviceBuffer memory;
    size_t n_left;
  };

  Device& device_;
  size_t block_bytes_;
  std::vector<Block> blocks_;
  size_t n_expected_ = 0, n_bytes_ = 0;
};

}  // namespace edgeh2o::cuda
