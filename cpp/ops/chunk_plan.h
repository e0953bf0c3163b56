// How a logical batch splits into chunks: absolute positions, the last chunk may be shorter.
#pragma once

#include <algorithm>
#include <cstddef>

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

}  // namespace edgeh2o
