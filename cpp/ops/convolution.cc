#include "ops/convolution.h"

#include <algorithm>
#include <cstring>

#include "base/arena.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kChannels = 512;  // of a task: the rows that it looks back on stay in the cache

// The inputs of the n_taps tokens up to row i: rows of `inputs`, or of the state before them.
void find_taps(MatView<const float> inputs, const float* state, size_t n_taps, size_t i, const float** taps) {
  for (size_t j = 0; j < n_taps; ++j) {
    const size_t row = i + j;  // counted from the beginning of the state
    taps[j] = row < n_taps - 1 ? state + row * inputs.cols : inputs.row(row - (n_taps - 1));
  }
}

// The state after so many tokens. Rows move towards the front only.
void keep_inputs(MatView<const float> inputs, size_t n_taps, float* state, size_t column, size_t n) {
  for (size_t j = 0; j + 1 < n_taps; ++j) {
    const size_t row = inputs.rows + j;
    const float* from = row < n_taps - 1 ? state + row * inputs.cols : inputs.row(row - (n_taps - 1));
    std::memcpy(state + j * inputs.cols + column, from + column, n * sizeof(float));
  }
}

}  // namespace

void short_conv(const KernelTable& table, MatView<float> bcy, const float* weights, size_t n_taps,
                float* state, MatView<float> out) {
  const size_t dim = out.cols;
  const MatView<const float> inputs{bcy.data, bcy.rows, dim, bcy.stride};
  parallel_for(ceil_div(dim, kChannels), [&](size_t task, size_t) {
    const size_t column = task * kChannels, n = std::min(kChannels, dim - column);
    const float* taps[kMaxConvTaps];
    for (size_t i = 0; i < bcy.rows; ++i) {
      float *b = bcy.row(i) + column, *result = out.row(i) + column;
      const float *c = b + dim, *y = c + dim;
      table.multiply_f32(b, b, y, n);
      find_taps(inputs, state, n_taps, i, taps);
      for (size_t j = 0; j < n_taps; ++j) taps[j] += column;
      table.convolve_f32(result, taps, weights + column, dim, n_taps, n);
      table.multiply_f32(result, result, c, n);
    }
    keep_inputs(inputs, n_taps, state, column, n);
  });
}

}  // namespace edgeh2o
