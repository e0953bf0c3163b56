#include "cuda/device.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace edgeh2o::cuda {
namespace {

constexpr size_t kPieceAlignment = 256;
constexpr size_t kMostSharedBytes = 99 * 1024;  // of a block on every device from 8.6 on

CUdeviceptr address_of(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

int Device::count() {
  const Driver& driver = Driver::get();
  int n = 0;
  driver.check(driver.cuDeviceGetCount(&n), "counting devices");
  return n;
}

Device::Device(int ordinal) : driver_(Driver::get()) {
  const int n = count();
  if (ordinal < 0 || ordinal >= n) {
    throw DeviceError(kCudaInvalidDevice, "there is no device cuda:" + std::to_string(ordinal) + ", only " +
                                              std::to_string(n) + " of them, from cuda:0 on");
  }
  driver_.check(driver_.cuDeviceGet(&device_, ordinal), "opening it");
  driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "opening its context");
  try {
    enter();
    driver_.check(driver_.cuStreamCreate(&stream_, kStreamNonBlocking), "making a stream");
    n_processors_ = static_cast<size_t>(attribute(kAttributeProcessors));
  } catch (...) {
    driver_.cuDevicePrimaryCtxRelease_v2(device_);
    throw;
  }
}

Device::~Device() {
  if (driver_.cuCtxSetCurrent(context_) == kCudaSuccess) {
    driver_.cuStreamDestroy_v2(stream_);
    if (module_) driver_.cuModuleUnload(module_);
  }
  driver_.cuDevicePrimaryCtxRelease_v2(device_);
}

int Device::attribute(int which) const {
  int value = 0;
  driver_.check(driver_.cuDeviceGetAttribute(&value, which, device_), "asking what it is");
  return value;
}

DeviceProperties Device::properties() const {
  enter();
  DeviceProperties p;
  char name[128] = {};
  driver_.check(driver_.cuDeviceGetName(name, sizeof(name) - 1, device_), "asking for its name");
  p.name = name;
  driver_.check(driver_.cuDriverGetVersion(&p.driver_version), "asking for the driver's version");
  p.major = attribute(kAttributeComputeMajor);
  p.minor = attribute(kAttributeComputeMinor);
  p.n_processors = attribute(kAttributeProcessors);
  p.clock_hz = 1e3 * attribute(kAttributeClockRate);
  p.is_integrated = attribute(kAttributeIntegrated) != 0;
  driver_.check(driver_.cuMemGetInfo_v2(&p.free_bytes, &p.total_bytes), "asking for its memory");
  return p;
}

void Device::load_image(const std::string& image) {
  enter();
  const CUresult result = driver_.cuModuleLoadData(&module_, image.c_str());
  if (result == kCudaUnsupportedPtx || result == kCudaNoBinaryForGpu) {
    module_ = nullptr;
    throw DeviceError(result,
                      "the NVIDIA driver is too old for the kernels in this package; update it, or use "
                      "--device cpu");
  }
  driver_.check(result, "loading the kernels");
}

void Device::launch_bytes(const char* kernel, void* arguments, size_t grid_x, size_t grid_y, size_t grid_z,
                          size_t n_threads, size_t shared_bytes) {
  enter();
  const auto [found, is_new] = kernels_.try_emplace(kernel);
  Kernel& entry = found->second;
  if (is_new)
    driver_.check(driver_.cuModuleGetFunction(&entry.function, module_, kernel), "finding a kernel");
  if (shared_bytes > entry.shared_bytes) {
    const auto size = static_cast<int>(std::min(shared_bytes, kMostSharedBytes));
    driver_.check(driver_.cuFuncSetAttribute(entry.function, kFunctionMaxDynamicSharedBytes, size),
                  "asking for shared memory");
    entry.shared_bytes = static_cast<size_t>(size);
  }
  const auto u = [](size_t n) { return static_cast<unsigned>(n); };
  void* pointers[] = {arguments};
  driver_.check(driver_.cuLaunchKernel(entry.function, u(grid_x), u(grid_y), u(grid_z), u(n_threads), 1, 1,
                                       u(shared_bytes), stream_, pointers, nullptr),
                "running a kernel");
}

void Device::upload(void* to, const void* from, size_t n_bytes) {
  enter();
  driver_.check(driver_.cuMemcpyHtoDAsync_v2(address_of(to), from, n_bytes, stream_), "copying to it");
}

void Device::download(void* to, const void* from, size_t n_bytes) {
  enter();
  driver_.check(driver_.cuMemcpyDtoHAsync_v2(to, address_of(from), n_bytes, stream_), "copying from it");
}

void Device::wait() {
  enter();
  driver_.check(driver_.cuStreamSynchronize(stream_), "computing");
}

void Device::begin_recording() {
  enter();
  driver_.check(driver_.cuStreamBeginCapture_v2(stream_, kCaptureThreadLocal), "recording");
}

void Device::discard_recording() noexcept {
  CUgraph graph = nullptr;
  if (driver_.cuStreamEndCapture(stream_, &graph) == kCudaSuccess) driver_.cuGraphDestroy(graph);
}

DeviceGraph Device::end_recording() {
  CUgraph graph = nullptr;
  driver_.check(driver_.cuStreamEndCapture(stream_, &graph), "recording");
  DeviceGraph result;
  const CUresult error = driver_.cuGraphInstantiateWithFlags(&result.graph_, graph, 0);
  driver_.cuGraphDestroy(graph);
  driver_.check(error, "making a graph");
  result.device_ = this;
  return result;
}

void Device::replay(const DeviceGraph& graph) {
  enter();
  driver_.check(driver_.cuGraphLaunch(graph.graph_, stream_), "running a graph");
}

void Device::release_graph(CUgraphExec graph) noexcept {
  if (driver_.cuCtxSetCurrent(context_) == kCudaSuccess) driver_.cuGraphExecDestroy(graph);
}

DeviceGraph::~DeviceGraph() {
  if (device_ != nullptr) device_->release_graph(graph_);
}

DeviceGraph& DeviceGraph::operator=(DeviceGraph&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(graph_, other.graph_);
  return *this;
}

void* Device::allocate(size_t n_bytes) {
  enter();
  CUdeviceptr pointer = 0;
  driver_.check(driver_.cuMemAlloc_v2(&pointer, n_bytes), "allocating");
  return reinterpret_cast<void*>(pointer);
}

// What was asked for may still use the memory: after an exception nobody has waited.
void Device::release(void* memory) noexcept {
  if (driver_.cuCtxSetCurrent(context_) != kCudaSuccess) return;
  driver_.cuStreamSynchronize(stream_);
  driver_.cuMemFree_v2(address_of(memory));
}

void* Device::allocate_pinned(size_t n_bytes) {
  enter();
  void* pointer = nullptr;
  driver_.check(driver_.cuMemHostAlloc(&pointer, n_bytes, 0), "allocating memory of the host");
  return pointer;
}

void Device::release_pinned(void* memory) noexcept {
  if (driver_.cuCtxSetCurrent(context_) != kCudaSuccess) return;
  driver_.cuStreamSynchronize(stream_);
  driver_.cuMemFreeHost(memory);
}

DeviceBuffer::DeviceBuffer(Device& device, size_t n_bytes, bool is_pinned)
    : device_(&device), n_bytes_(n_bytes), is_pinned_(is_pinned) {
  if (n_bytes > 0) data_ = is_pinned ? device.allocate_pinned(n_bytes) : device.allocate(n_bytes);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  is_pinned_ ? device_->release_pinned(data_) : device_->release(data_);
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(n_bytes_, other.n_bytes_);
  std::swap(is_pinned_, other.is_pinned_);
  return *this;
}

void* DevicePool::take(size_t n_bytes) {
  n_bytes = (n_bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  auto block =
      std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& each) { return each.n_left >= n_bytes; });
  if (block == blocks_.end()) {
    const size_t wanted = std::max(n_bytes, std::min(block_bytes_, n_expected_));
    blocks_.push_back({DeviceBuffer(device_, wanted), wanted});
    n_bytes_ += wanted;
    block = std::prev(blocks_.end());
  }
  uint8_t* const piece = block->memory.as<uint8_t>() + block->memory.size() - block->n_left;
  block->n_left -= n_bytes;
  n_expected_ -= std::min(n_expected_, n_bytes);
  return piece;
}

}  // namespace edgeh2o::cuda
