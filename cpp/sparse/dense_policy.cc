#include "sparse/dense_policy.h"

#include <algorithm>

#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

const PolicyRegistration kDenseRegistration("dense", {}, [](PolicyOptions&) -> std::shared_ptr<SparsePolicy> {
  return std::make_shared<DensePolicy>();
});

}  // namespace

void DensePolicy::begin_prompt() { std::fill(n_past_.begin(), n_past_.end(), 0); }

MemorySet DensePolicy::select_memory(size_t slot, const SelectionInput& input) {
  n_past_[slot] = input.chunk.begin;
  return memory(slot);
}

}  // namespace edgeh2o
