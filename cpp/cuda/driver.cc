#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

namespace edgeh2o::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::string describe(const Driver& driver, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  if (driver.cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr) name = "unknown error";
  if (driver.cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) text = "";
  std::string line = std::string(name) + " (" + std::to_string(result) + ")";
  return *text ? line + ": " + text : line;
}

Driver open_driver() {
  const char* named = std::getenv("EDGEH2O_LIBCUDA");
  const std::string path = named && *named ? named : kLibrary;
  // Not closed: a driver does not survive that.
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
#ifdef __APPLE__
    if (path == kLibrary) throw DeviceError(0, "there is no NVIDIA driver for Macs; use --device cpu");
#endif
    throw DeviceError(
        0, "there is no NVIDIA driver (" + path + " cannot be loaded); install it, or use --device cpu");
  }
  Driver driver;
#define EH2O_LOAD(name, parameters)                                                             \
  driver.name = reinterpret_cast<CUresult(*) parameters>(dlsym(library, #name));                \
  if (driver.name == nullptr) {                                                                 \
    throw DeviceError(0, path + " has no " #name                                                \
                                ": the NVIDIA driver is too old; install that of CUDA 11.4 or " \
                                "later, or use --device cpu");                                  \
  }
  EH2O_DRIVER_FUNCTIONS(EH2O_LOAD)
#undef EH2O_LOAD
  const CUresult result = driver.cuInit(0);
  if (result == kCudaNoDevice) throw DeviceError(result, "the NVIDIA driver finds no GPU; use --device cpu");
  if (result != kCudaSuccess) {
    throw DeviceError(result, "the NVIDIA driver cannot be started: " + describe(driver, result) +
                                  "; restart the machine, or use --device cpu");
  }
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static std::mutex mutex;
  static Driver* driver = nullptr;  // one that failed to load is tried again
  const std::lock_guard<std::mutex> lock(mutex);
  if (driver == nullptr) driver = new Driver(open_driver());
  return *driver;
}

void Driver::check(CUresult result, const char* doing) const {
  if (result == kCudaSuccess) [[likely]]
    return;
  if (result == kCudaOutOfMemory) {
    throw DeviceError(result, std::string("the GPU has no memory left while ") + doing +
                                  "; use a smaller context (-c), end other programs that use it, or use "
                                  "--device cpu");
  }
  throw DeviceError(result, std::string("the GPU failed while ") + doing + ": " + describe(*this, result) +
                                "; what it held is lost: start anew, or use --device cpu");
}

}  // namespace edgeh2o::cuda
