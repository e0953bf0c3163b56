// Bounds of the keys of every page of a prompt: what a single query needs to know which pages may hold large
// logits. q . k <= sum_i max(q_i upper_i, q_i lower_i) for every key of the page (Quest, Tang et al. 2024).
//
// Blocks of kBlockPages pages: for every channel the pages' maxima, then for every channel their minima, each
// as one block of q8_0: [2 * key_dim][kKvBlockBytes]. Channel by channel, a query multiplies whole vectors of
// pages, and what it does not look at is not fetched. Bounds are rounded to the nearest of 255 levels, so
// that they order pages; a logit may exceed its bound by half a level per channel.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class PageBounds {
 public:
  static constexpr size_t kBlockPages = kKvBlock;

  explicit PageBounds(size_t page_size) : page_size_(page_size) {}

  size_t page_size() const { return page_size_; }
  size_t block_size() const { return kBlockPages * page_size_; }  // positions of a block
  size_t max_blocks(const PolicyShape& shape) const { return shape.max_context / block_size(); }

  // has_pages[slot]: the slot may be extended.
  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_pages);
  void begin_prompt();

  // Bounds of the blocks that the prompt has filled since the last call; those before stay.
  void extend(size_t slot, const SelectionInput& input);
  // Bounds of blocks of the rows at `positions`, in this order, or of the first n_rows if that is null.
  void rebuild(size_t slot, const SelectionInput& input, const int32_t* positions, size_t n_rows);

  size_t n_blocks(size_t slot) const { return slots_[slot].n_blocks; }
  // Of all blocks, as far as n_channels are looked at.
  size_t n_bytes(size_t slot, size_t n_channels) const { return n_blocks(slot) * n_channels * kKvBlockBytes; }
  const uint8_t* block(size_t slot, size_t block_idx) const {
    return slots_[slot].blocks + block_idx * 2 * shape_.slots[slot].key_dim * kKvBlockBytes;
  }

 private:
  struct Slot {
    uint8_t* blocks = nullptr;  // [max_blocks][2 * key_dim][kKvBlockBytes]
    size_t n_blocks = 0;        // that have their bounds
  };

  void add_block(Slot& slot, size_t slot_idx, const SelectionInput& input, const int32_t* positions) const;

  size_t page_size_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // The slots of one layer run in parallel.
  float* bounds_ = nullptr;  // [max_layer_slots][kBlockPages][2 * max_key_dim]
  float* row_ = nullptr;     // [max_layer_slots][max(max_key_dim, kBlockPages)]
};

}  // namespace edgeh2o
