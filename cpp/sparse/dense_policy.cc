#include "sparse/dense_policy.h"

#include <algorithm>

namespace edgeh2o {

void DensePolicy::begin_prompt() { std::fill(n_past_.begin(), n_past_.end(), 0); }

MemorySet DensePolicy::select_memory(size_t slot, const SelectionInput& input) {
  n_past_[slot] = input.chunk.begin;
  return memory(slot);
}

}  // namespace edgeh2o
