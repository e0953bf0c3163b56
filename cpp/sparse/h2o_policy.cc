#include "sparse/h2o_policy.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/check.h"

namespace edgeh2o {

H2OPolicy::H2OPolicy(size_t n_local, size_t n_heavy) : n_local_(n_local), n_heavy_(n_heavy) {
  EH2O_CHECK(n_local + n_heavy > 0, "h2o needs local + heavy >= 1, got 0 + 0; use the dense policy instead");
}

std::string H2OPolicy::describe() const {
  return "h2o, local " + std::to_string(n_local_) + ", heavy " + std::to_string(n_heavy_);
}

size_t H2OPolicy::memory_capacity(const PolicyShape& shape) const {
  return std::min(std::min(n_local_, shape.max_context) + std::min(n_heavy_, shape.max_context),
                  shape.max_context);
}

PolicyNeeds H2OPolicy::needs(const PolicyShape& shape) const {
  PolicyNeeds needs;
  needs.column_sums = ColumnSums::kPerPart;
  needs.max_scored_memory = memory_capacity(shape);
  return needs;
}

void H2OPolicy::take_buffers(Arena& arena, const PolicyShape& shape) {
  slots_ = arena.take<SlotState>(shape.n_slots());
  scores_ = arena.take<float>(shape.n_slots() * shape.max_context);
  memory_ = arena.take<int32_t>(shape.n_slots() * memory_capacity(shape));
  candidates_ = arena.take<uint64_t>(shape.n_kv_heads * shape.max_context);
}

size_t H2OPolicy::state_bytes(const PolicyShape& shape) const {
  Arena arena;
  H2OPolicy(n_local_, n_heavy_).take_buffers(arena, shape);
  return arena.used();
}

void H2OPolicy::allocate(const PolicyShape& shape) {
  Arena arena;
  take_buffers(arena, shape);
  arena.allocate();
  take_buffers(arena, shape);
  arena_ = std::move(arena);
}

void H2OPolicy::begin_prompt() {
  for (size_t slot = 0; slot < shape().n_slots(); ++slot) {
    std::memset(scores_ + slot * shape().max_context, 0, slots_[slot].n_scored * sizeof(float));
    slots_[slot] = SlotState{};
  }
}

// Orders by score, then by lower position. Scores are sums of weights, never negative, so that their bits
// order like their values; NaN from a broken model keeps the order total.
uint64_t H2OPolicy::rank(size_t slot, size_t position) const {
  uint32_t score_bits;
  std::memcpy(&score_bits, scores_ + slot * shape().max_context + position, sizeof(score_bits));
  return uint64_t{score_bits} << 32 | ~static_cast<uint32_t>(position);
}

MemorySet H2OPolicy::select_memory(size_t slot, const SelectionInput& input) {
  SlotState& state = slots_[slot];
  int32_t* memory = memory_ + slot * memory_capacity(shape());
  uint64_t* candidates = candidates_ + slot % shape().n_kv_heads * shape().max_context;
  const size_t chunk_begin = input.chunk.begin;
  const size_t local_begin = chunk_begin - std::min(n_local_, chunk_begin);

  // Both parts are ascending and disjoint: the old memory lies before the chunk that read it.
  const size_t n_old = static_cast<size_t>(
      std::lower_bound(memory, memory + state.n_memory, static_cast<int32_t>(local_begin)) - memory);
  const size_t n_recent = local_begin > state.chunk_begin ? local_begin - state.chunk_begin : 0;
  const size_t n_candidates = n_old + n_recent, n_heavy = std::min(n_heavy_, n_candidates);

  uint64_t lowest_rank = 0;  // of the heavy hitters
  if (n_heavy < n_candidates && n_heavy > 0) {
    for (size_t i = 0; i < n_old; ++i) candidates[i] = rank(slot, static_cast<size_t>(memory[i]));
    for (size_t i = 0; i < n_recent; ++i) candidates[n_old + i] = rank(slot, state.chunk_begin + i);
    uint64_t* nth = candidates + n_heavy - 1;
    std::nth_element(candidates, nth, candidates + n_candidates, std::greater<>());
    lowest_rank = *nth;
  }

  size_t n_memory = 0;
  const auto keep_if_heavy = [&](size_t position) {
    if (n_heavy > 0 && rank(slot, position) >= lowest_rank)
      memory[n_memory++] = static_cast<int32_t>(position);
  };
  for (size_t i = 0; i < n_old; ++i)
    keep_if_heavy(static_cast<size_t>(memory[i]));  // n_memory <= i: in place
  for (size_t i = 0; i < n_recent; ++i) keep_if_heavy(state.chunk_begin + i);
  for (size_t position = local_begin; position < chunk_begin; ++position) {
    memory[n_memory++] = static_cast<int32_t>(position);
  }
  EH2O_DASSERT(n_memory <= memory_capacity(shape()));
  state.n_memory = n_memory;
  state.chunk_begin = chunk_begin;
  return MemorySet::list(memory, n_memory);
}

void H2OPolicy::observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) {
  EH2O_DASSERT(sums.size == chunk.size());
  float* scores = scores_ + slot * shape().max_context + chunk.begin;
  for (size_t i = 0; i < sums.size; ++i) scores[i] += sums[i];
  slots_[slot].n_scored = chunk.end;
}

void H2OPolicy::observe_memory(size_t slot, PositionRange, const MemorySet& memory, Span<const float> sums) {
  float* scores = scores_ + slot * shape().max_context;
  for (size_t i = 0; i < sums.size; ++i) scores[memory.positions[i]] += sums[i];
}

MemorySet H2OPolicy::memory(size_t slot) const {
  return MemorySet::list(memory_ + slot * memory_capacity(shape()), slots_[slot].n_memory);
}

Span<const float> H2OPolicy::scores(size_t slot) const {
  return {scores_ + slot * shape().max_context, shape().max_context};
}

}  // namespace edgeh2o
