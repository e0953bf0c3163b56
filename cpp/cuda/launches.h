// What the files of the layer loop fill arguments of kernels with.
#pragma once

#include "base/arena.h"
#include "cuda/device.h"

namespace edgeh2o::cuda {

inline constexpr size_t kThreads = 128;      // of most kernels
inline constexpr size_t kSmallShared = 256;  // what they add up in

inline uint32_t u32(size_t n) { return static_cast<uint32_t>(n); }

inline QuantisedRows rows_of(const DeviceBuffer& q, const DeviceBuffer& d, size_t depth) {
  return {q.as<int8_t>(), d.as<float>(), u32(round_up(depth, kTileDepth))};
}

// Of blocks of delta_rule: 32 columns of the state, keys and queries of two tokens, sums.
inline size_t delta_shared_bytes(size_t head_dim) { return (head_dim * 36 + 3 * kThreads) * sizeof(float); }

}  // namespace edgeh2o::cuda
