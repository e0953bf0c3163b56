// Everything that a kernel needs of a GPU, twice: as instructions for the device, compiled by NVRTC, and for
// the host, where tests run the same kernels (cuda/host). Kernels use nothing else, so that one source serves
// both. Fused multiply-adds are written out: neither compiler may make its own, and both get the same bits.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using size_t = unsigned long;
#else
#include <cstddef>
#include <cstdint>
#endif

namespace edgeh2o::cuda {

inline constexpr int kWarpSize = 32;

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

struct alignas(8) Words2 {
  uint32_t x, y;
};

}  // namespace edgeh2o::cuda

#ifdef __CUDACC_RTC__
#include "cuda/kernels/warp_device.h"
#else
#include "cuda/host/warp_host.h"
#endif

namespace edgeh2o::cuda {

EH2O_DEVICE float shuffle_xor(float value, int mask) {
  return float_of_bits(shuffle_xor(bits_of_float(value), mask));
}

// Sums and maxima over the lanes whose numbers differ in the low bits: n_lanes = 2, 4, ..., 32.
template <int kLanes>
EH2O_DEVICE float reduce_add(float value) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

template <int kLanes>
EH2O_DEVICE float reduce_max(float value) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  return value;
}

// Half i of two.
EH2O_DEVICE float half_of(uint32_t halves, int i) {
  return f32_from_f16(static_cast<uint16_t>(halves >> (16 * i) & 0xffffu));
}

EH2O_DEVICE float smaller(float a, float b) { return -larger(-a, -b); }
EH2O_DEVICE float exponential(float x) { return exp2_fast(x * 1.44269504f); }

}  // namespace edgeh2o::cuda
