// Landmarks: every page of past positions that a memory set does not hold completely is stood for by one
// synthetic row, the mean key and mean value of the n positions left out, with ln(n) added to its logit: the
// mass of n equal keys. Their number is bounded: in a long past, neighbours of one size become one page, the
// oldest first, so that recent pages are the finer ones.
//
// Keys of a page are not equal, and exp is convex: logits of variance s^2 around their mean have the mass of
// n exp(s^2 / 2) equal ones if they are normal, and less without the largest, which the memory set has. So a
// part of s^2 / 2 is added too. s^2 = scale^2 sum_d E[q_d^2] Var[k_d], over some queries of the chunk and,
// within pages, over all keys of a head: one number for all of its pages does as well as one for each.
#pragma once

#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class Landmarks {
 public:
  // page_size 0: no landmarks. Pages grow once the past is longer than n_fine positions; 0: never. spread:
  // the part of s^2 / 2 that counts.
  Landmarks(size_t page_size, size_t n_fine, float spread)
      : page_size_(page_size), n_fine_(n_fine), spread_(spread) {}

  size_t max_rows(const PolicyShape& shape) const;
  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_landmarks);
  void begin_prompt();

  // Rows for the pages that lie before the chunk as a whole. Valid until the next layer's first call.
  SyntheticRows summarise(size_t slot, const SelectionInput& input, const MemorySet& memory);

 private:
  struct Page {
    int32_t end;  // one past its last position; it begins where the page before it ends
    int32_t row;  // of page_sums
  };
  struct Slot {
    float* page_sums =
        nullptr;               // [max_rows][key_dim + value_dim] sums of the keys and of the values of a page
    Page* pages = nullptr;     // [max_rows], oldest first
    float* scatter = nullptr;  // [key_dim] squared distances of keys from the mean of their page, added up
    size_t n_pages = 0;        // that have their sums, unless whoever asks takes means
  };

  int32_t join_pages(Slot& slot, size_t width) const;
  void add_pages(Slot& slot, const SelectionInput& input) const;
  void add_scatter(Slot& slot, const SelectionInput& input, size_t begin, const float* sums) const;
  float count_spread(const Slot& slot, const SelectionInput& input) const;

  // So many rows hold pages of 2^32 positions and always have two neighbours of one size.
  static constexpr size_t kMinRows = 32;

  size_t page_size_, n_fine_;
  float spread_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // The slots of one layer run in parallel.
  float *k_ = nullptr, *v_ = nullptr;  // [max_layer_slots][max_rows][max_key_dim], [...][max_value_dim]
  float* biases_ = nullptr;            // [max_layer_slots][max_rows]
  PositionRange* means_ = nullptr;     // likewise
};

}  // namespace edgeh2o
