// Attention sinks: a logit per query head that takes a part of every softmax and has no value (Xiao et al.
// 2023; gpt-oss).
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/attention_tile.h"

namespace edgeh2o {

// The state of rows that have read nothing but the sinks [group_size] of their heads.
inline void begin_with_sinks(const SoftmaxRows& state, const float* sinks, size_t n_rows, size_t group_size,
                             size_t value_dim) {
  for (size_t row = 0; row < n_rows; ++row) {
    state.m[row] = sinks[row % group_size] * kLog2E;
    state.l[row] = 1.0f;
  }
  for (size_t query = 0; query < n_rows / group_size; ++query) {
    std::fill_n(state.o + query * state.o_stride, group_size * value_dim, 0.0f);
  }
}

}  // namespace edgeh2o
