// The state-space recurrence of Mamba-2. Formula: kernels/ssd-inl.h, ops/ssd.h.
#pragma once

#include "cuda/kernels/arguments.h"
#include "cuda/kernels/recurrent.cuh"
#include "cuda/kernels/rows.cuh"

namespace edgeh2o::cuda {

// One row of the state: decays, is written to and read.
EH2O_DEVICE void step_ssd(float& state, float& sum, float decay, float x, uint32_t write, uint32_t read) {
  state = multiply_add(float_of_bits(write), x, decay * state);
  sum = multiply_add(float_of_bits(read), state, sum);
}

static_assert(kSsdColumns * kSsdGroups == kRowThreads);

// A block has kSsdColumns columns of a head's state. The sums do not depend on where calls begin.
EH2O_KERNEL(ssd, SsdArguments, kRowThreads) {
  EH2O_SHARED_MEMORY;
  SsdShared& shared = *reinterpret_cast<SsdShared*>(shared_memory);
  const uint32_t t = static_cast<uint32_t>(thread_index()), column = t % kSsdColumns, group = t / kSsdColumns;
  const uint32_t slice = static_cast<uint32_t>(block_x()), head = static_cast<uint32_t>(block_y());
  const uint32_t first_column = head * a.head_dim + slice * kSsdColumns, inner_dim = a.n_heads * a.head_dim;
  const float* const x = a.rows + first_column;
  const float* const writes = a.rows + inner_dim + head / (a.n_heads / a.n_groups) * a.state_dim;
  const float* const reads = writes + a.n_groups * a.state_dim;
  float* const out = a.out + first_column;
  float* const kept = a.state + static_cast<size_t>(first_column / kSsdColumns) * a.state_dim * kSsdColumns;
  for (uint32_t tile = 0; tile < a.state_dim; tile += kSsdTile) {
    const uint32_t left = a.state_dim - tile, n_tile = left < kSsdTile ? left : kSsdTile;
    const uint32_t n_groups = n_tile / kSsdRows;
    const bool has_rows = group < n_groups;
    float* const own = kept + static_cast<size_t>(tile + group * kSsdRows) * kSsdColumns + column;
    float state[kSsdRows] = {};
    EH2O_UNROLL
    for (int i = 0; i < kSsdRows; ++i) {
      if (has_rows) state[i] = own[i * kSsdColumns];
    }
    for (uint32_t begin = 0; begin < a.n_rows; begin += kSsdTokens) {
      const uint32_t n = a.n_rows - begin < kSsdTokens ? a.n_rows - begin : kSsdTokens;
      for (uint32_t i = t / kSsdTileWords; i < n; i += kRowThreads / kSsdTileWords) {
        const uint32_t word = t % kSsdTileWords;
        const size_t at = static_cast<size_t>(begin + i) * a.stride + tile + 4 * word;
        if (4 * word >= n_tile) continue;
        shared.writes[i][word] = load_constant16(writes + at);
        shared.reads[i][word] = load_constant16(reads + at);
      }
      for (uint32_t i = group; i < n; i += kSsdGroups) {
        shared.x[i][column] = x[static_cast<size_t>(begin + i) * a.stride + column];
      }
      if (t < n) {
        const float rate =
            softplus(a.rates[static_cast<size_t>(begin + t) * a.rate_stride + head] + a.biases[head]);
        shared.rates[t] = rate;
        shared.decays[t] = exponential(a.a[head] * rate);
      }
      sync_block();
      for (uint32_t i = 0; i < n && has_rows; ++i) {
        const float input = shared.x[i][column] * shared.rates[i], decay = shared.decays[i];
        float sum = 0.0f;
        EH2O_UNROLL
        for (int j = 0; j < kSsdRows / 4; ++j) {
          const Words4 write = shared.writes[i][group * (kSsdRows / 4) + j];
          const Words4 read = shared.reads[i][group * (kSsdRows / 4) + j];
          step_ssd(state[4 * j], sum, decay, input, write.x, read.x);
          step_ssd(state[4 * j + 1], sum, decay, input, write.y, read.y);
          step_ssd(state[4 * j + 2], sum, decay, input, write.z, read.z);
          step_ssd(state[4 * j + 3], sum, decay, input, write.w, read.w);
        }
        shared.sums[i][group][column] = sum;
      }
      sync_block();
      // Of what others may write by now it reads nothing: only sums, which they do not before the next
      // barrier.
      for (uint32_t i = group; i < n; i += kSsdGroups) {
        const size_t row = begin + i;
        float* const to = out + row * inner_dim + column;
        float total = tile == 0 ? a.skips[head] * x[row * a.stride + column] : *to;
        for (uint32_t g = 0; g < n_groups; ++g) total += shared.sums[i][g][column];
        *to = total;
      }
    }
    EH2O_UNROLL
    for (int i = 0; i < kSsdRows; ++i) {
      if (has_rows) own[i * kSsdColumns] = state[i];
    }
  }
}

}  // namespace edgeh2o::cuda
