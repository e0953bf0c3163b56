#include "sparse/sparse_policy.h"

#include <algorithm>

#include "base/check.h"

namespace edgeh2o {

void PolicyShape::add_layer(size_t n_layer_slots, const SlotShape& slot) {
  const size_t layer = n_layers(), first_kv_slot = slots.empty() ? 0 : slots.back().kv_slot + 1;
  first_slots.push_back(n_slots());
  for (size_t i = 0; i < n_layer_slots; ++i) {
    slots.push_back({layer, i, slot.group_size, slot.key_dim, slot.value_dim, slot.n_sharing,
                     first_kv_slot + i / slot.n_sharing});
  }
  max_layer_slots = std::max(max_layer_slots, n_layer_slots);
  max_key_dim = std::max(max_key_dim, slot.key_dim);
  max_value_dim = std::max(max_value_dim, slot.value_dim);
}

PolicyShape PolicyShape::of_kv_heads() const {
  PolicyShape result;
  result.max_context = max_context;
  result.chunk_size = chunk_size;
  for (size_t layer = 0; layer < n_layers(); ++layer) {
    const size_t n = n_slots(layer);
    SlotShape slot = n > 0 ? slots[first_slots[layer]] : SlotShape{};
    const size_t n_kv_heads = n / slot.n_sharing;
    slot.group_size *= slot.n_sharing;
    slot.n_sharing = 1;
    result.add_layer(n_kv_heads, slot);
  }
  return result;
}

bool MemorySet::is_valid(size_t end) const {
  if (positions == nullptr) return range.begin <= range.end && range.end <= end;
  for (size_t i = 0; i < n_listed; ++i) {
    const int64_t previous = i > 0 ? positions[i - 1] : -1;
    if (positions[i] <= previous || static_cast<size_t>(positions[i]) >= end) return false;
  }
  return true;
}

void check_positions(Span<const int32_t> positions, size_t end) {
  int64_t previous = -1;
  for (const int32_t position : positions) {
    EH2O_CHECK(position > previous && static_cast<size_t>(position) < end, "position ", position, " after ",
               previous, ": positions must ascend and lie before the chunk at ", end);
    previous = position;
  }
}

void SparsePolicy::begin_session(const PolicyShape& shape) {
  EH2O_CHECK(!is_taken_, "this policy (", describe(), ") already serves another session; make one for each");
  allocate(shape);
  shape_ = shape;
  is_taken_ = true;
  begin_prompt();
}

void SparsePolicy::set_budgets(const std::vector<size_t>&, const std::vector<size_t>&) {
  throw_invalid("this policy (", describe(), ") has no budgets");
}

void SparsePolicy::save(size_t, ByteWriter&) const {
  throw_invalid("this policy (", describe(), ") cannot be saved");
}

void SparsePolicy::load(size_t, ByteReader&) {
  throw_invalid("this policy (", describe(), ") cannot be loaded");
}

}  // namespace edgeh2o
