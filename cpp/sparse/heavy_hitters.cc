#include "sparse/heavy_hitters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "base/check.h"

namespace edgeh2o {

void HeavyHitters::take_buffers(Arena& arena, const PolicyShape& shape,
                                const std::vector<size_t>& capacities) {
  EH2O_DASSERT(capacities.size() == shape.n_slots());
  shape_ = shape;
  slots_ = arena.take<Slot>(shape.n_slots());
  ranks_ = arena.take<uint64_t>(shape.max_layer_slots * 2 * shape.max_context);
  value_rows_ = arena.take<float>(shape.max_layer_slots * shape.max_value_dim);
  for (size_t i = 0; i < capacities.size(); ++i) {
    Slot slot;
    if (capacities[i] > 0) {
      slot.capacity = slot.most = capacities[i];
      slot.sums = arena.take<float>(shape.max_context);
      slot.ages = rule_.is_mean ? arena.take<float>(shape.max_context) : nullptr;
      slot.memory = arena.take<int32_t>(capacities[i]);
    }
    if (slots_) slots_[i] = slot;
  }
}

void HeavyHitters::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) {
    Slot& slot = slots_[i];
    if (slot.n_scored > 0) {
      std::memset(slot.sums, 0, slot.n_scored * sizeof(float));
      if (slot.ages) std::memset(slot.ages, 0, slot.n_scored * sizeof(float));
    }
    slot.n_memory = slot.chunk_begin = slot.n_scored = 0;
  }
}

void HeavyHitters::set_capacity(size_t slot, size_t capacity) {
  Slot& state = slots_[slot];
  EH2O_CHECK(capacity <= state.most, "a budget of ", capacity, " is more than the ", state.most,
             " that there is room for");
  state.capacity = capacity;
  state.n_memory = state.chunk_begin = 0;
}

float HeavyHitters::score(const Slot& slot, size_t position) const {
  const float sum = slot.sums[position];
  return slot.ages ? sum / std::max(slot.ages[position], kMinAge) : sum;
}

// Orders by score, then by lower position, and holds the position. Scores are sums of weights, never
// negative, so that their bits order like their values; NaN from a broken model keeps the order total.
uint64_t HeavyHitters::rank(size_t slot, size_t position, const SelectionInput& input) const {
  float value = score(slots_[slot], position);
  if (rule_.by_values) {
    const size_t dim = shape_.slots[slot].value_dim;
    float* row = value_rows_ + shape_.slots[slot].index * shape_.max_value_dim;
    std::fill_n(row, dim, 0.0f);
    input.add_kv_rows(input.past_values.type, row, input.past_values.row(position), nullptr, 1, dim);
    float norm = 0.0f;
    for (size_t i = 0; i < dim; ++i) norm += row[i] * row[i];
    value *= std::sqrt(norm);
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return uint64_t{bits} << 32 | ~static_cast<uint32_t>(position);
}

MemorySet HeavyHitters::select(size_t slot, const SelectionInput& input, const Forced& forced) {
  Slot& state = slots_[slot];
  state.n_memory = choose(slot, input, forced, state.capacity, state.memory);
  state.chunk_begin = input.chunk.begin;
  return memory(slot);
}

MemorySet HeavyHitters::peek(size_t slot, const SelectionInput& input, const Forced& forced, size_t capacity,
                             int32_t* out) const {
  return MemorySet::list(out, choose(slot, input, forced, capacity, out));
}

// Writes the positions to `out`, which may be the memory set before: candidates are noted first.
size_t HeavyHitters::choose(size_t slot, const SelectionInput& input, const Forced& forced, size_t capacity,
                            int32_t* out) const {
  const Slot& state = slots_[slot];
  EH2O_DASSERT(forced.n_sinks + forced.n_local <= capacity);
  const size_t chunk_begin = input.chunk.begin;
  const size_t local_begin = chunk_begin - std::min(forced.n_local, chunk_begin);
  const size_t sinks_end = std::min(forced.n_sinks, local_begin);
  const size_t n_room = capacity - sinks_end - (chunk_begin - local_begin);

  // In ascending order: the old memory lies before the chunk that read it.
  uint64_t* ranks = ranks_ + shape_.slots[slot].index * 2 * shape_.max_context;
  size_t n_candidates = 0;
  for (size_t i = 0; i < state.n_memory; ++i) {
    const auto position = static_cast<size_t>(state.memory[i]);
    if (position >= sinks_end && position < local_begin) ranks[n_candidates++] = rank(slot, position, input);
  }
  for (size_t position = std::max(state.chunk_begin, sinks_end); position < local_begin; ++position) {
    ranks[n_candidates++] = rank(slot, position, input);
  }
  uint64_t lowest = 0;  // rank that is kept
  if (n_room > 0 && n_room < n_candidates) {
    uint64_t* by_rank = ranks + shape_.max_context;
    std::copy_n(ranks, n_candidates, by_rank);
    std::nth_element(by_rank, by_rank + n_room - 1, by_rank + n_candidates, std::greater<>());
    lowest = by_rank[n_room - 1];
  }

  int32_t* next = out;
  const auto keep_range = [&next](size_t begin, size_t end) {
    for (size_t position = begin; position < end; ++position) *next++ = static_cast<int32_t>(position);
  };
  keep_range(0, sinks_end);
  for (size_t i = 0; n_room > 0 && i < n_candidates; ++i) {
    if (ranks[i] >= lowest) *next++ = static_cast<int32_t>(~static_cast<uint32_t>(ranks[i]));
  }
  keep_range(local_begin, chunk_begin);
  EH2O_DASSERT(next <= out + capacity);
  return static_cast<size_t>(next - out);
}

void HeavyHitters::observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) {
  EH2O_DASSERT(sums.size == chunk.size());
  Slot& state = slots_[slot];
  std::copy_n(sums.data, sums.size, state.sums + chunk.begin);
  for (size_t i = 0; state.ages && i < sums.size; ++i) {
    state.ages[chunk.begin + i] = static_cast<float>(chunk.size() - i);
  }
  state.n_scored = chunk.end;
}

void HeavyHitters::observe_memory(size_t slot, PositionRange chunk, Span<const float> sums) {
  Slot& state = slots_[slot];
  EH2O_DASSERT(sums.size == state.n_memory);
  for (size_t i = 0; i < sums.size; ++i) {
    float& sum = state.sums[state.memory[i]];
    sum = rule_.decay * sum + sums[i];
    if (state.ages) {
      float& age = state.ages[state.memory[i]];
      age = rule_.decay * age + static_cast<float>(chunk.size());
    }
  }
}

void HeavyHitters::observe_sample(size_t slot, size_t n_queries, size_t most, Span<const float> sums) {
  Slot& state = slots_[slot];
  const float n = static_cast<float>(n_queries), kept = 1.0f - n / static_cast<float>(most);
  for (size_t i = 0; i < sums.size; ++i) {
    state.sums[i] = kept * state.sums[i] + sums[i];
    if (state.ages) state.ages[i] = kept * state.ages[i] + n;
  }
  state.n_scored = sums.size;
}

void HeavyHitters::restart(size_t slot, Span<const float> scores) {
  Slot& state = slots_[slot];
  for (size_t i = 0; i < scores.size; ++i) state.sums[i] = kMinAge * scores[i];
  if (state.ages) std::fill_n(state.ages, scores.size, kMinAge);
  state.n_scored = scores.size;
}

void HeavyHitters::save(ByteWriter& out) const {
  for (size_t i = 0; i < shape_.n_slots(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.capacity == 0) continue;
    for (const size_t count : {slot.n_memory, slot.chunk_begin, slot.n_scored}) out.put<uint64_t>(count);
    out.put_array(slot.memory, slot.n_memory);
    out.put_array(slot.sums, slot.n_scored);
    if (slot.ages) out.put_array(slot.ages, slot.n_scored);
  }
}

void HeavyHitters::load(size_t n_tokens, ByteReader& in) {
  for (size_t i = 0; i < shape_.n_slots(); ++i) {
    Slot& slot = slots_[i];
    if (slot.capacity == 0) continue;
    const size_t n_memory = in.take_at_most<uint64_t>(slot.capacity, "the size of a memory set");
    slot.chunk_begin = in.take_at_most<uint64_t>(n_tokens, "the begin of a chunk");
    slot.n_scored = in.take_at_most<uint64_t>(n_tokens, "the number of scores");
    in.take_array(slot.memory, n_memory);
    check_positions({slot.memory, n_memory}, slot.chunk_begin);
    slot.n_memory = n_memory;
    for (float* values : {slot.sums, slot.ages}) {
      if (values == nullptr) continue;
      in.take_array(values, slot.n_scored);
      const bool are_sums = std::all_of(values, values + slot.n_scored,
                                        [](float value) { return std::isfinite(value) && value >= 0.0f; });
      EH2O_CHECK(are_sums, "a score is not a finite number >= 0");
    }
  }
}

MemorySet HeavyHitters::memory(size_t slot) const {
  return MemorySet::list(slots_[slot].memory, slots_[slot].n_memory);
}

std::vector<float> HeavyHitters::scores(size_t slot) const {
  std::vector<float> result(shape_.max_context);
  for (size_t i = 0; i < result.size(); ++i) result[i] = score(slots_[slot], i);
  return result;
}

}  // namespace edgeh2o
