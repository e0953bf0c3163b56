// The choice of a single query among the pages of a prompt: the first page, and those with the highest
// bounds of their logits, maximum over the query heads of the group. What follows the last block of pages,
// and all that was generated, is read too. Sums over the heads of normalised scores would let heads that look
// everywhere outvote the one that looks something up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "sparse/page_bounds.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// The n_kept highest of n scores, of equal ones the first; NaN counts as the highest.
class BestScores {
 public:
  // scratch: [2][n], used as long as this.
  BestScores(const float* scores, size_t n, size_t n_kept, uint32_t* scratch);

  // f(i) for those that are kept, in ascending order.
  template <typename F>
  void for_each(const F& f) const {
    std::for_each(kept_, kept_ + n_kept_, f);
  }

 private:
  const uint32_t* kept_;  // [n_kept], ascending
  size_t n_kept_;
};

class PageChoice {
 public:
  // n_pages of page_size positions, both at least 1; everything is read where the prompt has fewer than
  // least_pages.
  PageChoice(size_t page_size, size_t n_pages, size_t least_pages)
      : bounds_(page_size), n_kept_(n_pages), least_(least_pages) {}

  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_pages);
  void begin_prompt() { bounds_.begin_prompt(); }

  // As the hooks of SparsePolicy with these names, for slots that have pages.
  void end_prompt(size_t slot, const SelectionInput& input) { bounds_.extend(slot, input); }
  bool prepare_decode(size_t slot, const SelectionInput& input);
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts);
  MemorySet select_decode(size_t slot, const SelectionInput& input);
  size_t choice_bytes(size_t slot) const {
    return is_worth(slot) ? bounds_.n_bytes(slot, 2 * shape_.slots[slot].key_dim) : 0;
  }

 private:
  bool is_worth(size_t slot) const { return bounds_.n_blocks(slot) * PageBounds::kBlockPages >= least_; }
  size_t max_pages() const { return bounds_.max_blocks(shape_) * PageBounds::kBlockPages; }
  float* queries(size_t kv_head) const { return queries_ + kv_head * 2 * max_query_dim_; }
  float* scores(size_t kv_head) const { return scores_ + kv_head * max_group_ * max_pages(); }

  PageBounds bounds_;
  size_t n_kept_, least_;
  PolicyShape shape_;
  size_t max_group_ = 0, max_query_dim_ = 0;  // of the query heads of a KV head
  // The slots of one layer run in parallel: [max_layer_slots] each.
  float* queries_ = nullptr;      // [group_size][2 * key_dim] what is positive, then what is negative
  float* scores_ = nullptr;       // [group_size][max_pages]
  uint32_t* keys_ = nullptr;      // [2][max_pages] scratch of BestScores
  int32_t* positions_ = nullptr;  // [max_context]
};

}  // namespace edgeh2o
