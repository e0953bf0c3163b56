#include "sparse/landmarks.h"

#include <algorithm>
#include <cmath>

namespace edgeh2o {

void Landmarks::take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_landmarks) {
  const size_t n_rows = max_rows(shape), dim = shape.head_dim;
  shape_ = shape;
  slots_ = arena.take<Slot>(shape.n_slots());
  k_ = arena.take<float>(shape.n_kv_heads * n_rows * dim);
  v_ = arena.take<float>(shape.n_kv_heads * n_rows * dim);
  biases_ = arena.take<float>(shape.n_kv_heads * n_rows);
  for (size_t i = 0; i < has_landmarks.size(); ++i) {
    Slot slot;
    if (has_landmarks[i]) slot.page_sums = arena.take<float>(n_rows * 2 * dim);
    if (slots_) slots_[i] = slot;
  }
}

void Landmarks::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) slots_[i].n_pages = 0;
}

SyntheticRows Landmarks::summarise(size_t slot, const SelectionInput& input, const MemorySet& memory) {
  if (page_size_ == 0) return {};
  Slot& state = slots_[slot];
  const size_t dim = shape_.head_dim, n_pages = input.chunk.begin / page_size_;
  const KvRows& keys = input.past_keys;
  const KvRows& values = input.past_values;
  for (size_t& page = state.n_pages; page < n_pages; ++page) {
    float* sums = state.page_sums + page * 2 * dim;
    std::fill_n(sums, 2 * dim, 0.0f);
    input.add_kv_rows(keys.type, sums, keys.row(page * page_size_), nullptr, page_size_, dim);
    input.add_kv_rows(values.type, sums + dim, values.row(page * page_size_), nullptr, page_size_, dim);
  }

  const size_t kv_head = slot % shape_.n_kv_heads, n_rows = max_rows(shape_);
  SyntheticRows rows{k_ + kv_head * n_rows * dim, v_ + kv_head * n_rows * dim, biases_ + kv_head * n_rows, 0};
  float *k = k_ + kv_head * n_rows * dim, *v = v_ + kv_head * n_rows * dim,
        *biases = biases_ + kv_head * n_rows;
  const int32_t *member = memory.positions, *end = memory.positions + memory.n_listed;
  for (size_t page = 0; page < n_pages; ++page) {
    const int32_t* first = member;
    while (member < end && static_cast<size_t>(*member) < (page + 1) * page_size_) ++member;
    const auto n_members = static_cast<size_t>(member - first);
    if (n_members == page_size_) continue;
    const float n_left = static_cast<float>(page_size_ - n_members);
    const auto subtract_members = [&](float* mean, const KvRows& cached, const float* sums) {
      std::fill_n(mean, dim, 0.0f);
      input.add_kv_rows(cached.type, mean, cached.data, first, n_members, dim);
      for (size_t i = 0; i < dim; ++i) mean[i] = (sums[i] - mean[i]) / n_left;
    };
    const float* sums = state.page_sums + page * 2 * dim;
    subtract_members(k + rows.count * dim, keys, sums);
    subtract_members(v + rows.count * dim, values, sums + dim);
    biases[rows.count++] = std::log(n_left);
  }
  return rows;
}

}  // namespace edgeh2o
