// What the kernel of the gated delta rule works on.
#pragma once

#include <cstddef>

namespace edgeh2o {

// Columns of a state that lie together. Columns do not depend on each other: 32 of them with 128 rows are
// 16 KB, which stay in a level-1 cache from token to token.
inline constexpr size_t kDeltaColumns = 32;

// Tokens that go through a state together, and the fewest for which that can be: the kernel that does it
// takes fewer one by one.
inline constexpr size_t kDeltaTokens = 32, kLeastDeltaTokens = 8;

inline constexpr size_t kMaxDeltaKeyDim = 512;  // of queries and keys
inline constexpr size_t kMostDeltaKeys = 16;    // that are transposed together, of any ISA

// Floats of its scratch.
constexpr size_t delta_scratch_size(size_t key_dim, bool decays_by_row) {
  const size_t of_rows = (2 * kDeltaTokens + kMostDeltaKeys + 2) * key_dim;
  return kDeltaTokens * (key_dim + 2 * kDeltaTokens + kDeltaColumns) + (decays_by_row ? of_rows : 0);
}

// kDeltaColumns columns of one head's values, for n_tokens. Strides are between tokens, in elements.
struct DeltaSlice {
  size_t n_tokens, key_dim;  // an even number, at most kMaxDeltaKeyDim; in chunks a multiple of kDeltaColumns
  const float *q, *k;        // [n_tokens][key_dim]
  size_t qk_stride;
  const float* v;  // [n_tokens][kDeltaColumns]
  size_t v_stride;
  bool decays_by_row;   // rows of the state decay by themselves
  const float* decays;  // [n_tokens], then [n_tokens][key_dim]; 0 to 1
  size_t decay_stride;
  const float* rates;  // [n_tokens]
  size_t rate_stride;
  float* state;  // [key_dim][kDeltaColumns]
  float* out;    // [n_tokens][kDeltaColumns]
  size_t out_stride;
};

}  // namespace edgeh2o
