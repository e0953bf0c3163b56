// Recurrent layers: convolutions of a few tokens, and the gated delta rule (that of Mamba-2 is in ssd.cuh).
// Formulas: ops/convolution.h, ops/delta_net.h, kernels/delta_net-inl.h.
#pragma once

#include "cuda/kernels/arguments.h"
#include "cuda/kernels/rows.cuh"

namespace edgeh2o::cuda {

// Input `index` of a channel: of the tokens before, which the state holds, then of the rows.
EH2O_DEVICE float convolution_input(const ConvolveArguments& a, uint32_t index, uint32_t channel) {
  if (index < a.n_taps - 1) return a.state[static_cast<size_t>(index) * a.channels + channel];
  const size_t at = static_cast<size_t>(index - (a.n_taps - 1)) * a.stride + channel;
  return a.factor ? a.x[at] * a.factor[at] : a.x[at];
}

EH2O_KERNEL(convolve_rows, ConvolveArguments, kRowThreads) {
  const uint32_t channel = static_cast<uint32_t>(block_x() * kRowThreads + thread_index());
  const uint32_t row = static_cast<uint32_t>(block_y());
  if (channel >= a.channels) return;
  float sum = a.biases ? a.biases[channel] : 0.0f;
  for (uint32_t j = 0; j < a.n_taps; ++j) {
    const float weight = a.weights[static_cast<size_t>(j) * a.channels + channel];
    sum = multiply_add(convolution_input(a, row + j, channel), weight, sum);
  }
  const float gated = a.gate ? sum * a.gate[static_cast<size_t>(row) * a.stride + channel] : silu(sum);
  a.out[static_cast<size_t>(row) * a.channels + channel] = gated;
}

// A launch of its own: other blocks of convolve_rows may still read what this writes.
EH2O_KERNEL(keep_inputs, ConvolveArguments, kRowThreads) {
  const uint32_t channel = static_cast<uint32_t>(block_x() * kRowThreads + thread_index());
  if (channel >= a.channels) return;
  // Inputs move towards the front only.
  for (uint32_t j = 0; j + 1 < a.n_taps; ++j) {
    a.state[static_cast<size_t>(j) * a.channels + channel] = convolution_input(a, a.n_rows + j, channel);
  }
}

// ln(1 + x) for x in [0, 1], as 2 atanh(x / (2 + x)): as exact as x for small ones.
EH2O_DEVICE float log_of_one_plus(float x) {
  const float s = divide(x, 2.0f + x), square = s * s;
  float sum = 1.0f / 15.0f;
  sum = multiply_add(sum, square, 1.0f / 13.0f);
  sum = multiply_add(sum, square, 1.0f / 11.0f);
  sum = multiply_add(sum, square, 1.0f / 9.0f);
  sum = multiply_add(sum, square, 1.0f / 7.0f);
  sum = multiply_add(sum, square, 1.0f / 5.0f);
  sum = multiply_add(sum, square, 1.0f / 3.0f);
  return 2.0f * s * multiply_add(sum, square, 1.0f);
}

EH2O_DEVICE float softplus(float x) { return larger(x, 0.0f) + log_of_one_plus(exponential(-magnitude(x))); }

EH2O_KERNEL(delta_gates, DeltaGateArguments, kRowThreads) {
  const uint32_t i = static_cast<uint32_t>(block_x() * kRowThreads + thread_index());
  if (i >= a.n_rows * a.n_heads) return;
  const uint32_t head = i % a.n_heads;
  float* const rate = a.gates + static_cast<size_t>(i / a.n_heads) * 2 * a.n_heads + head;
  float* const decay = rate + a.n_heads;
  *rate = divide(1.0f, 1.0f + exponential(-*rate));
  *decay = exponential(a.a[head] * softplus(*decay + a.biases[head]));
}

// A block has 32 columns of a value head's state, which stay in shared memory from token to token; a thread
// has a column of every kRowWarps-th row, which no other thread touches.
EH2O_KERNEL(delta_rule, DeltaArguments, kRowThreads) {
  EH2O_SHARED_MEMORY;
  const uint32_t t = static_cast<uint32_t>(thread_index()), lane = t % kWarpSize, warp = t / kWarpSize;
  const uint32_t dim = a.head_dim, slice = static_cast<uint32_t>(block_x()),
                 head = static_cast<uint32_t>(block_y());
  const uint32_t key_head = a.are_grouped ? head / (a.n_value_heads / a.n_key_heads) : head % a.n_key_heads;
  float* const state = reinterpret_cast<float*>(shared_memory);  // [dim][32]
  float* const key_rows = state + dim * kWarpSize;               // [2][dim]: of every other token
  float* const query_rows = key_rows + 2 * dim;                  // [2][dim]
  float* const sums = query_rows + 2 * dim;                      // [3][kRowWarps][32]
  const size_t n_state = static_cast<size_t>(dim) * kWarpSize;
  float* const kept = a.state + (static_cast<size_t>(head) * (dim / kWarpSize) + slice) * n_state;
  for (uint32_t i = t; i < n_state; i += kRowThreads) state[i] = kept[i];
  for (uint32_t row = 0; row < a.n_rows; ++row) {
    const float* const heads = a.qkv + static_cast<size_t>(row) * a.stride;
    const float *q = heads + key_head * dim, *k = q + a.n_key_heads * dim;
    float *const key = key_rows + row % 2 * dim, *const query = query_rows + row % 2 * dim;
    for (uint32_t i = t; i < dim; i += kRowThreads) key[i] = k[i], query[i] = q[i];
    sync_block();
    float by_k = 0.0f, by_q = 0.0f, q_by_k = 0.0f;
    for (uint32_t i = warp; i < dim; i += kRowWarps) {
      const float value = state[i * kWarpSize + lane];
      by_k = multiply_add(value, key[i], by_k);
      by_q = multiply_add(value, query[i], by_q);
      q_by_k = multiply_add(query[i], key[i], q_by_k);
    }
    float* const own = sums + warp * kWarpSize + lane;
    own[0] = by_k, own[kRowThreads] = by_q, own[2 * kRowThreads] = q_by_k;
    sync_block();
    by_k = by_q = q_by_k = 0.0f;
    for (uint32_t w = 0; w < kRowWarps; ++w) {
      const float* const part = sums + w * kWarpSize + lane;
      by_k += part[0], by_q += part[kRowThreads], q_by_k += part[2 * kRowThreads];
    }
    const float* const gates = a.gates + static_cast<size_t>(row) * 2 * a.n_value_heads + head;
    const float rate = gates[0], decay = gates[a.n_value_heads];
    const uint32_t column = head * dim + slice * kWarpSize + lane;
    const float d = rate * (heads[2 * a.n_key_heads * dim + column] - decay * by_k);
    if (warp == 0) {
      a.out[static_cast<size_t>(row) * a.n_value_heads * dim + column] =
          multiply_add(q_by_k, d, decay * by_q);
    }
    for (uint32_t i = warp; i < dim; i += kRowWarps) {
      float* const value = state + i * kWarpSize + lane;
      *value = multiply_add(key[i], d, decay * *value);
    }
  }
  for (uint32_t i = t; i < n_state; i += kRowThreads) kept[i] = state[i];
}

}  // namespace edgeh2o::cuda
