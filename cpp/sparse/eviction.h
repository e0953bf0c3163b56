// Which rows of a full context go, by what their keys received of the attention of later queries: H2O's
// eviction (Zhang et al. 2023), in batches, with the sinks of StreamingLLM (Xiao et al. 2023).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mat_view.h"

namespace edgeh2o {

struct EvictionInput {
  Span<const float> scores;   // of every position: mean weight over the queries that saw it, >= 0
  size_t n_dropped = 0;       // positions to drop, fewer than there are
  uint64_t* ranks = nullptr;  // [scores.size] of the rule's own
};

// Positions that stay whatever they score: the first ones and the latest ones, the latter at most half of
// what stays.
inline constexpr size_t kEvictionSinks = 4, kEvictionWindow = 256;

// Writes the n_dropped positions with the lowest scores to `dropped`, ascending; of equal ones the later go.
void drop_lowest(const EvictionInput& input, int32_t* dropped);

}  // namespace edgeh2o
