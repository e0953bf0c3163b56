#include "sparse/page_bounds.h"

#include <algorithm>

#include "base/check.h"

namespace edgeh2o {

void PageBounds::take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_pages) {
  shape_ = shape;
  slots_ = arena.take<Slot>(shape.n_slots());
  bounds_ = arena.take<float>(shape.max_layer_slots * kBlockPages * 2 * shape.max_key_dim);
  row_ = arena.take<float>(shape.max_layer_slots * std::max(shape.max_key_dim, kBlockPages));
  for (size_t i = 0; i < has_pages.size(); ++i) {
    Slot slot;
    if (has_pages[i]) {
      slot.blocks = arena.take<uint8_t>(max_blocks(shape) * 2 * shape.slots[i].key_dim * kKvBlockBytes);
    }
    if (slots_) slots_[i] = slot;
  }
}

void PageBounds::begin_prompt() {
  for (size_t i = 0; i < shape_.n_slots(); ++i) slots_[i].n_blocks = 0;
}

void PageBounds::extend(size_t slot, const SelectionInput& input) {
  Slot& state = slots_[slot];
  EH2O_DASSERT(state.blocks != nullptr);
  while ((state.n_blocks + 1) * block_size() <= input.chunk.begin) add_block(state, slot, input, nullptr);
}

void PageBounds::rebuild(size_t slot, const SelectionInput& input, const int32_t* positions, size_t n_rows) {
  Slot& state = slots_[slot];
  EH2O_DASSERT(state.blocks != nullptr);
  state.n_blocks = 0;
  while ((state.n_blocks + 1) * block_size() <= n_rows) add_block(state, slot, input, positions);
}

void PageBounds::add_block(Slot& slot, size_t slot_idx, const SelectionInput& input,
                           const int32_t* positions) const {
  const KvRows& keys = input.past_keys;
  const size_t dim = keys.head_dim, width = 2 * dim, kv_head = shape_.slots[slot_idx].index;
  float *bounds = bounds_ + kv_head * kBlockPages * 2 * shape_.max_key_dim,
        *row = row_ + kv_head * std::max(shape_.max_key_dim, kBlockPages);
  for (size_t page = 0; page < kBlockPages; ++page) {
    float *upper = bounds + page * width, *lower = upper + dim;
    for (size_t i = 0; i < page_size_; ++i) {
      const size_t idx = (slot.n_blocks * kBlockPages + page) * page_size_ + i;
      std::fill_n(row, dim, 0.0f);
      const size_t position = positions ? static_cast<size_t>(positions[idx]) : idx;
      input.add_kv_rows(keys.type, row, keys.row(position), nullptr, 1, dim);
      for (size_t d = 0; d < dim; ++d) {
        upper[d] = i == 0 ? row[d] : std::max(upper[d], row[d]);
        lower[d] = i == 0 ? row[d] : std::min(lower[d], row[d]);
      }
    }
  }
  uint8_t* out = slot.blocks + slot.n_blocks * width * kKvBlockBytes;
  for (size_t channel = 0; channel < width; ++channel, out += kKvBlockBytes) {
    for (size_t page = 0; page < kBlockPages; ++page) row[page] = bounds[page * width + channel];
    input.page_kernels->store_row(CacheType::kQ8_0, out, row, kBlockPages);
  }
  ++slot.n_blocks;
}

}  // namespace edgeh2o
