// How a logical batch splits into chunks: absolute positions, the last chunk may be shorter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

struct ChunkPlan {
  size_t first_position = 0;
  size_t n_tokens = 0;
  size_t chunk_size = 0;

  size_t n_chunks() const { return ceil_div(n_tokens, chunk_size); }
  PositionRange chunk(size_t chunk_idx) const {
    const size_t begin = chunk_idx * chunk_size;
    return {first_position + begin, first_position + std::min(begin + chunk_size, n_tokens)};
  }
};

// Parts of n queries from `position` on, none of which lies in two chunks of `width` positions: calls f with
// the first query of every part, how many it has, and where its chunk starts.
template <typename F>
void for_each_chunk(size_t position, size_t n, size_t width, const F& f) {
  for (size_t begin = 0; begin < n;) {
    const size_t start = (position + begin) / width * width;
    const size_t count = std::min(n - begin, start + width - (position + begin));
    f(begin, count, start);
    begin += count;
  }
}

// Query-key pairs of one head when queries [first, first + n) see everything before them and themselves, or
// the last `window` positions of it if that is not 0.
inline uint64_t causal_pairs(size_t first, size_t n, size_t window) {
  const auto pairs_before = [window](uint64_t end) {
    if (window == 0 || end <= window) return end * (end + 1) / 2;
    return window * (window + uint64_t{1}) / 2 + (end - window) * window;
  };
  return pairs_before(first + n) - pairs_before(first);
}

// The same of n queries that are all there are, which see as many positions behind theirs.
inline uint64_t symmetric_pairs(size_t n, size_t window) { return 2 * causal_pairs(0, n, window) - n; }

}  // namespace edgeh2o
