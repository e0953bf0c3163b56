#include "sparse/landmarks.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace edgeh2o {
namespace {

// Every so-manieth query of a chunk shows how large queries are.
constexpr size_t kQueryStep = 16;
// More is no estimate any more.
constexpr float kMaxSpread = 3.0f;
// Keys and queries of so many dimensions are looked at together.
constexpr size_t kDims = 64;

}  // namespace

size_t Landmarks::max_rows(const PolicyShape& shape) const {
  if (page_size_ == 0) return 0;
  const size_t n_pages = shape.max_context / page_size_;
  return n_fine_ == 0 ? n_pages : std::min(n_pages, std::max(n_fine_ / page_size_, kMinRows));
}

void Landmarks::take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_landmarks) {
  const size_t n_rows = max_rows(shape);
  shape_ = shape;
  slots_ = arena.take<Slot>(shape.n_slots());
  k_ = arena.take<float>(shape.max_layer_slots * n_rows * shape.max_key_dim);
  v_ = arena.take<float>(shape.max_layer_slots * n_rows * shape.max_value_dim);
  biases_ = arena.take<float>(shape.max_layer_slots * n_rows);
  means_ = arena.take<PositionRange>(shape.max_layer_slots * n_rows);
  for (size_t i = 0; i < has_landmarks.size(); ++i) {
    Slot slot;
    if (has_landmarks[i]) {
      slot.page_sums = arena.take<float>(n_rows * (shape.slots[i].key_dim + shape.slots[i].value_dim));
      slot.pages = arena.take<Page>(n_rows);
      if (spread_ > 0.0f) slot.scatter = arena.take<float>(shape.slots[i].key_dim);
    }
    if (slots_) slots_[i] = slot;
  }
}

void Landmarks::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) slots_[i].n_pages = 0;
}

// Makes one page of the oldest two neighbours of the smallest size that neighbours share; returns the row
// that is free then.
int32_t Landmarks::join_pages(Slot& slot, size_t width) const {
  Page* pages = slot.pages;
  size_t joined = 0;
  int32_t size = INT32_MAX;
  for (size_t i = 0; i + 1 < slot.n_pages; ++i) {
    const int32_t begin = i == 0 ? 0 : pages[i - 1].end, own = pages[i].end - begin;
    if (own < size && pages[i + 1].end - pages[i].end == own) joined = i, size = own;
  }
  EH2O_DASSERT(size < INT32_MAX);
  const int32_t kept = pages[joined].row, freed = pages[joined + 1].row;
  float* sums = slot.page_sums + static_cast<size_t>(kept) * width;
  const float* added = slot.page_sums + static_cast<size_t>(freed) * width;
  for (size_t i = 0; i < width; ++i) sums[i] += added[i];
  std::copy(pages + joined + 1, pages + slot.n_pages, pages + joined);
  pages[joined].row = kept;
  --slot.n_pages;
  return freed;
}

// Sums of the pages that the past has filled since the last call.
void Landmarks::add_pages(Slot& slot, const SelectionInput& input) const {
  const KvRows &keys = input.past_keys, &values = input.past_values;
  const size_t n_rows = max_rows(shape_), width = input.takes_means ? 0 : keys.head_dim + values.head_dim;
  size_t begin = slot.n_pages == 0 ? 0 : static_cast<size_t>(slot.pages[slot.n_pages - 1].end);
  if (slot.scatter && slot.n_pages == 0) std::fill_n(slot.scatter, keys.head_dim, 0.0f);
  for (; begin + page_size_ <= input.chunk.begin; begin += page_size_) {
    const int32_t row = slot.n_pages < n_rows ? static_cast<int32_t>(slot.n_pages) : join_pages(slot, width);
    if (!input.takes_means) {
      float* sums = slot.page_sums + static_cast<size_t>(row) * width;
      std::fill_n(sums, width, 0.0f);
      input.add_kv_rows(keys.type, sums, keys.row(begin), nullptr, page_size_, keys.head_dim);
      input.add_kv_rows(values.type, sums + keys.head_dim, values.row(begin), nullptr, page_size_,
                        values.head_dim);
      add_scatter(slot, input, begin, sums);
    }
    slot.pages[slot.n_pages++] = {static_cast<int32_t>(begin + page_size_), row};
  }
}

// Of the page that begins at `begin`, whose keys add up to sums.
void Landmarks::add_scatter(Slot& slot, const SelectionInput& input, size_t begin, const float* sums) const {
  if (slot.scatter == nullptr || input.scale == 0.0f) return;
  const KvRows& keys = input.past_keys;
  input.add_kv_squares(keys.type, slot.scatter, keys.row(begin), page_size_, keys.head_dim);
  const float inverse = 1.0f / static_cast<float>(page_size_);
  for (size_t d = 0; d < keys.head_dim; ++d) slot.scatter[d] -= sums[d] * sums[d] * inverse;
}

// spread_ s^2 / 2.
float Landmarks::count_spread(const Slot& slot, const SelectionInput& input) const {
  if (slot.scatter == nullptr || input.scale == 0.0f || slot.n_pages == 0) return 0.0f;
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
  if (page_size_ == 0) return {};
  Slot& state = slots_[slot];
  add_pages(state, input);

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
    const Page& page = state.pages[i];
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
    const float* sums = state.page_sums + static_cast<size_t>(page.row) * (head.key_dim + head.value_dim);
    subtract_members(k + rows.count * head.key_dim, input.past_keys, sums);
    subtract_members(v + rows.count * head.value_dim, input.past_values, sums + head.key_dim);
    biases[rows.count++] = std::log(n_left) + spread;
  }
  return rows;
}

}  // namespace edgeh2o
