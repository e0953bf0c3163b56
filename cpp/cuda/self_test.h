// Whether a device computes what the CPU does: a driver or an image that does not fit may answer wrongly.
#pragma once

#include <string>

#include "cuda/device.h"

namespace edgeh2o::cuda {

// Rounds rows to 8 bits and multiplies them with a matrix of Q8_0 and one of Q4_1, by both kernels of
// products. The empty string, or what differs. Throws DeviceError.
std::string run_self_test(Device& device);

}  // namespace edgeh2o::cuda
