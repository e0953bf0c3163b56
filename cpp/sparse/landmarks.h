// Landmarks: every page of past positions that a memory set does not hold completely is stood for by one
// synthetic row, the mean key and mean value of the n positions left out, with ln(n) added to its logit: the
// mass of n equal keys. Which pages there are: see PageSums.
//
// Keys of a page are not equal, and exp is convex: logits of variance s^2 around their mean have the mass of
// n exp(s^2 / 2) equal ones if they are normal, and less without the largest, which the memory set has. So a
// part of s^2 / 2 is added too. s^2 = scale^2 sum_d E[q_d^2] Var[k_d], over some queries of the chunk and,
// within pages, over all keys of a head: one number for all of its pages does as well as one for each.
#pragma once

#include "base/arena.h"
#include "sparse/page_sums.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class Landmarks {
 public:
  // spread: the part of s^2 / 2 that counts; sums must have the scatter for more than 0.
  Landmarks(PageSums& sums, float spread) : sums_(sums), spread_(spread) {}

  size_t max_rows(const PolicyShape& shape) const { return sums_.max_rows(shape); }
  // Of rows that are being made; slots may be those of query heads.
  void take_buffers(Arena& arena, const PolicyShape& shape);

  // Rows for the pages that lie before the chunk as a whole. Valid until the next layer's first call.
  SyntheticRows summarise(size_t slot, const SelectionInput& input, const MemorySet& memory);

 private:
  float count_spread(const PageSums::Slot& pages, const SelectionInput& input) const;

  PageSums& sums_;
  float spread_;
  PolicyShape shape_;
  // The slots of one layer run in parallel.
  float *k_ = nullptr, *v_ = nullptr;  // [max_layer_slots][max_rows][max_key_dim], [...][max_value_dim]
  float* biases_ = nullptr;            // [max_layer_slots][max_rows]
  PositionRange* means_ = nullptr;     // likewise
};

}  // namespace edgeh2o
