// What the kernel of the recurrence of Mamba-1 works on.
#pragma once

#include <cstddef>

namespace edgeh2o {

// Channels whose states lie together. Channels do not depend on each other.
inline constexpr size_t kScanChannels = 16;
// What the number of a channel's states is a multiple of: kernels hold up to so many in registers.
inline constexpr size_t kScanRows = 16;

// kScanChannels channels, for n_tokens. Strides are between tokens, in elements.
struct ScanSlice {
  size_t n_tokens, state_dim;
  const float* x;  // [n_tokens][kScanChannels]
  size_t x_stride;
  const float* steps;  // [n_tokens][kScanChannels]: rates are softplus of these
  size_t step_stride;
  const float *b, *c;  // [n_tokens][state_dim]: what writes to the state and what reads it
  size_t bc_stride;
  const float* a;      // [state_dim][kScanChannels]
  const float* skips;  // [kScanChannels]: how much of x goes to out directly; null: nothing
  float* state;        // [state_dim][kScanChannels]
  float* out;          // [n_tokens][kScanChannels], not x and not steps
  size_t out_stride;
};

}  // namespace edgeh2o
