#include "sparse/page_recall.h"

#include <algorithm>
#include <numeric>

namespace edgeh2o {

size_t PageRecall::max_pages(const PolicyShape& shape) const {
  return std::min(shape.max_context / kPageSize, most_pages());
}

// The limit, and what sinks and local window lack of whole pages.
size_t PageRecall::capacity(const PolicyShape& shape) const {
  size_t page_size = kPageSize;
  while (most_pages() * page_size < shape.max_context) page_size *= 2;
  return std::min(max_past_ + 2 * page_size, shape.max_context);
}

void PageRecall::take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_recall) {
  shape_ = shape;
  slots_ = arena.take<Slot>(shape.n_slots());
  const bool is_any = std::find(has_recall.begin(), has_recall.end(), true) != has_recall.end();
  const size_t n_pages = is_any ? max_pages(shape) : 0;
  scores_ = arena.take<float>(shape.max_layer_slots * n_pages);
  pages_ = arena.take<int32_t>(shape.max_layer_slots * n_pages);
  row_ = arena.take<float>(shape.max_layer_slots * shape.max_key_dim);
  for (size_t i = 0; i < has_recall.size(); ++i) {
    Slot slot;
    if (has_recall[i]) {
      slot.bounds = arena.take<float>(n_pages * 2 * shape.slots[i].key_dim);
      slot.positions = arena.take<int32_t>(capacity(shape));
    }
    if (slots_) slots_[i] = slot;
  }
}

void PageRecall::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) slots_[i].n_pages = 0, slots_[i].page_size = kPageSize;
}

// Makes one page of every two.
void PageRecall::join_pages(Slot& slot, size_t key_dim) const {
  const size_t width = 2 * key_dim;
  slot.n_pages /= 2;
  slot.page_size *= 2;
  for (size_t page = 0; page < slot.n_pages; ++page) {
    const float *first = slot.bounds + 2 * page * width, *second = first + width;
    float* joined = slot.bounds + page * width;
    for (size_t d = 0; d < key_dim; ++d) joined[d] = std::max(first[d], second[d]);
    for (size_t d = key_dim; d < width; ++d) joined[d] = std::min(first[d], second[d]);
  }
}

// Bounds of the pages that the past has filled since the last call.
void PageRecall::add_pages(Slot& slot, size_t index, const SelectionInput& input) const {
  const KvRows& keys = input.past_keys;
  const size_t dim = keys.head_dim, n_most = max_pages(shape_);
  float* row = row_ + index * shape_.max_key_dim;
  while ((slot.n_pages + 1) * slot.page_size <= input.chunk.begin) {
    if (slot.n_pages == n_most) {
      join_pages(slot, dim);
      continue;
    }
    float *largest = slot.bounds + slot.n_pages * 2 * dim, *smallest = largest + dim;
    for (size_t i = 0; i < slot.page_size; ++i) {
      std::fill_n(row, dim, 0.0f);
      input.add_kv_rows(keys.type, row, keys.row(slot.n_pages * slot.page_size + i), nullptr, 1, dim);
      for (size_t d = 0; d < dim; ++d) {
        largest[d] = i == 0 ? row[d] : std::max(largest[d], row[d]);
        smallest[d] = i == 0 ? row[d] : std::min(smallest[d], row[d]);
      }
    }
    ++slot.n_pages;
  }
}

// Puts the n_room best of `pages`, in ascending order, at the front of pages_; returns their number.
size_t PageRecall::choose_pages(Slot& slot, size_t index, const SelectionInput& input, PositionRange pages,
                                size_t n_room) const {
  const size_t n_most = max_pages(shape_);
  float* scores = scores_ + index * n_most;
  int32_t* chosen = pages_ + index * n_most;
  std::iota(chosen, chosen + pages.size(), static_cast<int32_t>(pages.begin));
  if (n_room >= pages.size()) return pages.size();
  input.page_scorer->score(index, input.queries, slot.bounds + pages.begin * 2 * input.past_keys.head_dim,
                           pages.size(), scores);
  const auto is_better = [&](int32_t a, int32_t b) {
    const float score_a = scores[static_cast<size_t>(a) - pages.begin],
                score_b = scores[static_cast<size_t>(b) - pages.begin];
    return score_a > score_b || (!(score_b > score_a) && a < b);
  };
  std::nth_element(chosen, chosen + n_room, chosen + pages.size(), is_better);
  std::sort(chosen, chosen + n_room);
  return n_room;
}

MemorySet PageRecall::select(size_t slot_idx, const SelectionInput& input, size_t n_sinks, size_t n_local) {
  Slot& slot = slots_[slot_idx];
  const size_t index = shape_.slots[slot_idx].index, n_past = input.chunk.begin;
  add_pages(slot, index, input);
  const size_t page_size = slot.page_size;
  // Sinks and local window are whole pages too, within a quarter and half of the limit.
  const size_t local_page = (n_past - std::min(n_local, max_past_ / 2)) / page_size;
  const size_t n_sink_pages = std::min(ceil_div(std::min(n_sinks, max_past_ / 4), page_size), local_page);
  const size_t n_forced = n_sink_pages * page_size + n_past - local_page * page_size;
  const size_t n_room = (max_past_ - std::min(max_past_, n_forced)) / page_size;
  const size_t n_chosen = choose_pages(slot, index, input, {n_sink_pages, local_page}, n_room);

  int32_t* next = slot.positions;
  const auto append = [&next](size_t begin, size_t end) {
    while (begin < end) *next++ = static_cast<int32_t>(begin++);
  };
  append(0, n_sink_pages * page_size);
  for (size_t i = 0; i < n_chosen; ++i) {
    const auto page = static_cast<size_t>(pages_[index * max_pages(shape_) + i]);
    append(page * page_size, (page + 1) * page_size);
  }
  append(local_page * page_size, n_past);
  return MemorySet::list(slot.positions, static_cast<size_t>(next - slot.positions));
}

}  // namespace edgeh2o
