// The selective scan of Mamba-1 over the channels of a layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/state_step.h"

namespace edgeh2o {

// RMS norms of what steps are made of, of what writes to the state and of what reads it.
enum class ScanNorms : uint8_t { kNone, kPlain, kWeighted };

struct ScanSizes {
  size_t n_channels = 0;
  size_t state_dim = 0;  // of a channel
  size_t step_rank = 0;  // of what the channels' steps are made of
  ScanNorms norms = ScanNorms::kWeighted;

  bool is_none() const { return n_channels == 0; }
  size_t n_state() const { return n_channels * state_dim; }
  size_t bc_dim() const { return 2 * state_dim; }
  // What is made of the channels: of the steps, what writes to the state and what reads it.
  size_t projected_dim() const { return step_rank + bc_dim(); }
  void check() const;  // throws std::invalid_argument
};

// x and steps [n][n_channels]; bc [n][2 * state_dim], what writes to the state and what reads it, of all
// channels; out [n][n_channels]. a [n_channels / kScanChannels][state_dim][kScanChannels], skips
// [n_channels], or null for 0. The state, which lies as a does, goes from the token before them to the last.
void selective_scan(const KernelTable& table, const ScanSizes& sizes, MatView<const float> x,
                    MatView<const float> steps, MatView<const float> bc, const float* a, const float* skips,
                    StateStep state, MatView<float> out);

}  // namespace edgeh2o
