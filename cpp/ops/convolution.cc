#include "ops/convolution.h"

#include <algorithm>
#include <cstring>

#include "base/arena.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kChannels = 512;  // of a task: the rows that it looks back on stay in the cache

// Row `index` of the n_taps - 1 rows of the state and the inputs behind them.
const float* input_at(MatView<const float> inputs, const float* state, size_t n_taps, size_t index) {
  return index < n_taps - 1 ? state + index * inputs.cols : inputs.row(index - (n_taps - 1));
}

// What token i sees, from `column` on.
void find_taps(MatView<const float> inputs, const float* state, size_t n_taps, size_t i, size_t column,
               const float** taps) {
  for (size_t j = 0; j < n_taps; ++j) taps[j] = input_at(inputs, state, n_taps, i + j) + column;
}

// Of n channels from `column` on; where the states are one, rows of it move towards the front only.
void keep_channels(MatView<const float> inputs, size_t n_taps, StateStep state, size_t column, size_t n) {
  for (size_t j = 0; j + 1 < n_taps; ++j) {
    const float* input = input_at(inputs, state.before, n_taps, inputs.rows + j) + column;
    std::memmove(state.after + j * inputs.cols + column, input, n * sizeof(float));
  }
}

}  // namespace

void short_conv(const KernelTable& table, MatView<float> bcy, const float* weights, size_t n_taps,
                StateStep state, MatView<float> out) {
  const size_t dim = out.cols;
  const MatView<const float> inputs{bcy.data, bcy.rows, dim, bcy.stride};
  parallel_for(ceil_div(dim, kChannels), [&](size_t task, size_t) {
    const size_t column = task * kChannels, n = std::min(kChannels, dim - column);
    const float* taps[kMaxConvTaps];
    for (size_t i = 0; i < bcy.rows; ++i) {
      float *b = bcy.row(i) + column, *result = out.row(i) + column;
      const float *c = b + dim, *y = c + dim;
      table.multiply_f32(b, b, y, n);
      find_taps(inputs, state.before, n_taps, i, column, taps);
      table.convolve_f32(result, taps, weights + column, dim, n_taps, n);
      table.multiply_f32(result, result, c, n);
    }
    keep_channels(inputs, n_taps, state, column, n);
  });
}

void convolve_silu(const KernelTable& table, MatView<float> rows, const float* weights, size_t n_taps,
                   StateStep state, const float* biases) {
  const MatView<const float> inputs{rows.data, rows.rows, rows.cols, rows.stride};
  parallel_for(ceil_div(rows.cols, kChannels), [&](size_t task, size_t) {
    const size_t column = task * kChannels, n = std::min(kChannels, rows.cols - column);
    const float* taps[kMaxConvTaps];
    float kept[kMaxConvTaps - 1][kChannels];  // the state after the rows, which are overwritten
    for (size_t j = 0; j + 1 < n_taps; ++j) {
      const float* input = input_at(inputs, state.before, n_taps, rows.rows + j) + column;
      std::memcpy(kept[j], input, n * sizeof(float));
    }
    // The last row first: those before it are still what they were.
    for (size_t i = rows.rows; i-- > 0;) {
      find_taps(inputs, state.before, n_taps, i, column, taps);
      float* row = rows.row(i) + column;
      table.convolve_f32(row, taps, weights + column, rows.cols, n_taps, n);
      if (biases) table.add_f32(row, biases + column, n);
      table.gate_f32(row, row, row, n);
    }
    for (size_t j = 0; j + 1 < n_taps; ++j) {
      std::memcpy(state.after + j * rows.cols + column, kept[j], n * sizeof(float));
    }
  });
}

void add_dilated_silu(const KernelTable& table, MatView<const float> inputs, const float* weights,
                      size_t n_taps, size_t dilation, StateStep state, MatView<float> out) {
  const size_t n_seen = (n_taps - 1) * dilation + 1;  // rows, the token's own included
  parallel_for(ceil_div(inputs.cols, kChannels), [&](size_t task, size_t) {
    const size_t column = task * kChannels, n = std::min(kChannels, inputs.cols - column);
    const float* taps[kMaxConvTaps];
    float sums[kChannels];
    for (size_t i = 0; i < inputs.rows; ++i) {
      for (size_t j = 0; j < n_taps; ++j) {
        taps[j] = input_at(inputs, state.before, n_seen, i + j * dilation) + column;
      }
      table.convolve_f32(sums, taps, weights + column, inputs.cols, n_taps, n);
      table.gate_f32(sums, sums, sums, n);
      table.add_f32(out.row(i) + column, sums, n);
    }
    keep_channels(inputs, n_seen, state, column, n);
  });
}

void keep_inputs(MatView<const float> inputs, size_t n_taps, StateStep state) {
  keep_channels(inputs, n_taps, state, 0, inputs.cols);
}

}  // namespace edgeh2o
