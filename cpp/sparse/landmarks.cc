#include "sparse/landmarks.h"

#include <algorithm>
#include <cmath>

namespace edgeh2o {
namespace {

// Every so-manieth query of a chunk shows how large queries are.
constexpr size_t kQueryStep = 16;
// More is no estimate any more.
constexpr float kMaxSpread = 3.0f;
// Keys and queries of so many dimensions are looked at together.
constexpr size_t kDims = 64;

}  // namespace

void Landmarks::take_buffers(Arena& arena, const PolicyShape& shape) {
  const size_t n_rows = shape.max_layer_slots * max_rows(shape);
  shape_ = shape;
  k_ = arena.take<float>(n_rows * shape.max_key_dim);
  v_ = arena.take<float>(n_rows * shape.max_value_dim);
  biases_ = arena.take<float>(n_rows);
  means_ = arena.take<PositionRange>(n_rows);
}

// spread_ s^2 / 2.
float Landmarks::count_spread(const PageSums::Slot& slot, const SelectionInput& input) const {
  if (spread_ == 0.0f || input.scale == 0.0f || slot.n_pages == 0) return 0.0f;
  const size_t key_dim = input.past_keys.head_dim, n_heads = input.queries.cols / key_dim;
  float sum = 0.0f, squares[kDims];
  size_t n_queries = 0;
  for (size_t dim = 0; dim < key_dim; dim += kDims) {
    const size_t n = std::min(kDims, key_dim - dim);
    std::fill_n(squares, n, 0.0f);
    n_queries = 0;
    for (size_t row = 0; row < input.queries.rows; row += kQueryStep) {
      for (size_t head = 0; head < n_heads; ++head, ++n_queries) {
        const float* q = input.queries.row(row) + head * key_dim + dim;
        for (size_t d = 0; d < n; ++d) squares[d] += q[d] * q[d];
      }
    }
    for (size_t d = 0; d < n; ++d) sum += squares[d] * std::max(0.0f, slot.scatter[dim + d]);
  }
  const auto n_keys = static_cast<float>(slot.pages[slot.n_pages - 1].end);
  const float variance = input.scale * input.scale * sum / (static_cast<float>(n_queries) * n_keys);
  return std::min(kMaxSpread, 0.5f * spread_ * variance);
}

SyntheticRows Landmarks::summarise(size_t slot, const SelectionInput& input, const MemorySet& memory) {
  if (sums_.page_size() == 0) return {};
  const PageSums::Slot& state = sums_.extend(shape_.slots[slot].kv_slot, input);

  const SlotShape& head = shape_.slots[slot];
  const size_t first_row = head.index * max_rows(shape_);
  float *k = k_ + first_row * shape_.max_key_dim, *v = v_ + first_row * shape_.max_value_dim,
        *biases = biases_ + first_row;
  PositionRange* const means = means_ + first_row;
  SyntheticRows rows;
  rows.biases = biases;
  if (input.takes_means) {
    rows.means = means;
  } else {
    rows.k = k, rows.v = v;
  }
  const float spread = count_spread(state, input);
  const int32_t *member = memory.positions, *end = memory.positions + memory.n_listed;
  for (size_t i = 0; i < state.n_pages; ++i) {
    const PageSums::Page& page = state.pages[i];
    const int32_t *first = member, page_begin = i == 0 ? 0 : state.pages[i - 1].end;
    while (member < end && *member < page.end) ++member;
    const auto n_members = static_cast<size_t>(member - first),
               n_positions = static_cast<size_t>(page.end - page_begin);
    if (n_members == n_positions) continue;
    const float n_left = static_cast<float>(n_positions - n_members);
    if (input.takes_means) {
      means[rows.count] = {static_cast<size_t>(page_begin), static_cast<size_t>(page.end)};
      biases[rows.count++] = std::log(n_left);
      continue;
    }
    const auto subtract_members = [&](float* mean, const KvRows& cached, const float* sums) {
      std::fill_n(mean, cached.head_dim, 0.0f);
      input.add_kv_rows(cached.type, mean, cached.data, first, n_members, cached.head_dim);
      for (size_t d = 0; d < cached.head_dim; ++d) mean[d] = (sums[d] - mean[d]) / n_left;
    };
    const float* sums = state.sums + static_cast<size_t>(page.row) * (head.key_dim + head.value_dim);
    subtract_members(k + rows.count * head.key_dim, input.past_keys, sums);
    subtract_members(v + rows.count * head.value_dim, input.past_values, sums + head.key_dim);
    biases[rows.count++] = std::log(n_left) + spread;
  }
  return rows;
}

}  // namespace edgeh2o
