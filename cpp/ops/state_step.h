// Where a recurrence finds its numbers, and where it leaves them.
#pragma once

#include <cstddef>

namespace edgeh2o {

struct StateStep {
  const float* before;
  float* after;  // the same, or apart from them

  StateStep at(size_t offset) const { return {before + offset, after + offset}; }
};

}  // namespace edgeh2o
