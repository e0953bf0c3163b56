// What the kernels of the recurrences of RWKV-7 and RWKV-6 work on.
#pragma once

#include <cstddef>

namespace edgeh2o {

// Columns of a state that lie together. Columns do not depend on each other.
inline constexpr size_t kWkvColumns = 16;

// kWkvColumns columns of one head, for n_tokens. `stride` is between tokens, in elements, of all but out.
struct WkvSlice {
  size_t n_tokens, key_dim;  // a multiple of kWkvColumns
  const float* decays;       // [n_tokens][key_dim], 0 to 1
  const float* keys;         // [n_tokens][key_dim] what writes values to the state
  const float* values;       // [n_tokens][kWkvColumns]
  const float* directions;   // [n_tokens][key_dim] along which something is taken from the state,
  const float* removals;     // [n_tokens][key_dim] and where
  const float* queries;      // [n_tokens][key_dim] what reads it
  size_t stride;
  float* state;  // [key_dim][kWkvColumns]
  float* out;    // [n_tokens][kWkvColumns]
  size_t out_stride;
};

// The same of RWKV-6, whose queries read what was there before the token, and of the token itself `own` times
// its values.
struct Wkv6Slice {
  size_t n_tokens, key_dim;  // a multiple of kWkvColumns
  const float* decays;       // [n_tokens][key_dim], 0 to 1
  const float* keys;         // [n_tokens][key_dim]
  const float* values;       // [n_tokens][kWkvColumns]
  const float* queries;      // [n_tokens][key_dim]
  size_t stride;
  const float* own;  // [n_tokens]
  size_t own_stride;
  float* state;  // [key_dim][kWkvColumns], of the token before the first; then of the last
  float* out;    // [n_tokens][kWkvColumns]
  size_t out_stride;
};

}  // namespace edgeh2o
