// NVIDIA's driver, opened when a device is asked for and not before: nothing is linked, and where there is no
// driver everything else works.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/driver_api.h"

namespace edgeh2o::cuda {

// What keeps a device from being used: no driver, no device, no memory, a failure. `code` is that of the
// driver, 0 if it did not say.
class DeviceError : public std::runtime_error {
 public:
  DeviceError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

struct Driver {
#define EH2O_MEMBER(name, parameters) CUresult(*name) parameters;
  EH2O_DRIVER_FUNCTIONS(EH2O_MEMBER)
#undef EH2O_MEMBER

  // Loaded and initialised at the first call. EDGEH2O_LIBCUDA names another library than libcuda.so.1, such
  // as the host device of the tests. Throws DeviceError.
  static const Driver& get();

  // Throws DeviceError for all but success; `doing` ends "the GPU failed while ...".
  void check(CUresult result, const char* doing) const;
};

}  // namespace edgeh2o::cuda
