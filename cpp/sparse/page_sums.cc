#include "sparse/page_sums.h"

#include <algorithm>

#include "base/check.h"

namespace edgeh2o {

size_t PageSums::max_rows(const PolicyShape& shape) const {
  if (page_size_ == 0) return 0;
  const size_t n_pages = shape.max_context / page_size_;
  return n_fine_ == 0 ? n_pages : std::min(n_pages, std::max(n_fine_ / page_size_, kMinRows));
}

void PageSums::take_buffers(Arena& arena, const PolicyShape& kv_shape, const std::vector<bool>& has_pages) {
  const size_t n_rows = max_rows(kv_shape);
  shape_ = kv_shape;
  slots_ = arena.take<Slot>(kv_shape.n_slots());
  for (size_t i = 0; i < has_pages.size(); ++i) {
    Slot slot;
    if (has_pages[i]) {
      slot.sums = arena.take<float>(n_rows * (kv_shape.slots[i].key_dim + kv_shape.slots[i].value_dim));
      slot.pages = arena.take<Page>(n_rows);
      if (has_scatter_) slot.scatter = arena.take<float>(kv_shape.slots[i].key_dim);
    }
    if (slots_) slots_[i] = slot;
  }
  if (slots_) locks_ = std::make_unique<std::mutex[]>(kv_shape.max_layer_slots);
}

void PageSums::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) slots_[i].n_pages = 0;
}

// Makes one page of the oldest two neighbours of the smallest size that neighbours share; returns the row
// that is free then.
int32_t PageSums::join_pages(Slot& slot, size_t width) const {
  Page* pages = slot.pages;
  size_t joined = 0;
  int32_t size = INT32_MAX;
  for (size_t i = 0; i + 1 < slot.n_pages; ++i) {
    const int32_t begin = i == 0 ? 0 : pages[i - 1].end, own = pages[i].end - begin;
    if (own < size && pages[i + 1].end - pages[i].end == own) joined = i, size = own;
  }
  EH2O_DASSERT(size < INT32_MAX);
  const int32_t kept = pages[joined].row, freed = pages[joined + 1].row;
  float* sums = slot.sums + static_cast<size_t>(kept) * width;
  const float* added = slot.sums + static_cast<size_t>(freed) * width;
  for (size_t i = 0; i < width; ++i) sums[i] += added[i];
  std::copy(pages + joined + 1, pages + slot.n_pages, pages + joined);
  pages[joined].row = kept;
  --slot.n_pages;
  return freed;
}

// Sums of the pages that the past has filled since the last call.
void PageSums::add_pages(Slot& slot, const SelectionInput& input) const {
  const KvRows &keys = input.past_keys, &values = input.past_values;
  const size_t n_rows = max_rows(shape_), width = input.takes_means ? 0 : keys.head_dim + values.head_dim;
  size_t begin = slot.n_pages == 0 ? 0 : static_cast<size_t>(slot.pages[slot.n_pages - 1].end);
  if (slot.scatter && slot.n_pages == 0) std::fill_n(slot.scatter, keys.head_dim, 0.0f);
  for (; begin + page_size_ <= input.chunk.begin; begin += page_size_) {
    const int32_t row = slot.n_pages < n_rows ? static_cast<int32_t>(slot.n_pages) : join_pages(slot, width);
    if (!input.takes_means) {
      float* sums = slot.sums + static_cast<size_t>(row) * width;
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
void PageSums::add_scatter(Slot& slot, const SelectionInput& input, size_t begin, const float* sums) const {
  if (slot.scatter == nullptr || input.add_kv_squares == nullptr) return;
  const KvRows& keys = input.past_keys;
  input.add_kv_squares(keys.type, slot.scatter, keys.row(begin), page_size_, keys.head_dim);
  const float inverse = 1.0f / static_cast<float>(page_size_);
  for (size_t d = 0; d < keys.head_dim; ++d) slot.scatter[d] -= sums[d] * sums[d] * inverse;
}

const PageSums::Slot& PageSums::extend(size_t kv_slot, const SelectionInput& input) {
  Slot& slot = slots_[kv_slot];
  const std::lock_guard<std::mutex> lock(locks_[shape_.slots[kv_slot].index]);
  add_pages(slot, input);
  return slot;
}

}  // namespace edgeh2o
