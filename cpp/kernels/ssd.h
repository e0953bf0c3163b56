// What the kernel of the recurrence of Mamba-2 works on.
#pragma once

#include <cstddef>

namespace edgeh2o {

// Columns of a state that lie together. Columns do not depend on each other.
inline constexpr size_t kSsdColumns = 16;
// What the number of a state's rows is a multiple of: kernels hold up to so many in registers.
inline constexpr size_t kSsdRows = 16;

// kSsdColumns columns of one head, for n_tokens. Strides are between tokens, in elements.
struct SsdSlice {
  size_t n_tokens, state_dim;
  const float* x;               // [n_tokens][kSsdColumns]
  const float *b, *c;           // [n_tokens][state_dim]: what writes to the state and what reads it
  size_t stride;                // of these three
  const float *decays, *rates;  // [n_tokens]
  size_t gate_stride;
  float skip;    // how much of x goes to out directly
  float* state;  // [state_dim][kSsdColumns]
  float* out;    // [n_tokens][kSsdColumns], not x
  size_t out_stride;
};

}  // namespace edgeh2o
