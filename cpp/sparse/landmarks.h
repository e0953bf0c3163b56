// Landmarks: every page of past positions that a memory set does not hold completely is stood for by one
// synthetic row, the mean key and mean value of the n positions left out, with ln(n) added to its logit: the
// mass of n equal keys.
#pragma once

#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class Landmarks {
 public:
  // page_size 0: no landmarks.
  explicit Landmarks(size_t page_size) : page_size_(page_size) {}

  size_t max_rows(const PolicyShape& shape) const {
    return page_size_ == 0 ? 0 : shape.max_context / page_size_;
  }
  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_landmarks);
  void begin_prompt();

  // Rows for the pages that lie before the chunk as a whole. Valid until the next layer's first call.
  SyntheticRows summarise(size_t slot, const SelectionInput& input, const MemorySet& memory);

 private:
  struct Slot {
    float* page_sums = nullptr;  // [max_rows][2][head_dim] sums of the keys and of the values of a page
    size_t n_pages = 0;          // that have their sums
  };

  size_t page_size_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // The slots of one layer run in parallel.
  float *k_ = nullptr, *v_ = nullptr;  // [n_kv_heads][max_rows][head_dim]
  float* biases_ = nullptr;            // [n_kv_heads][max_rows]
};

}  // namespace edgeh2o
