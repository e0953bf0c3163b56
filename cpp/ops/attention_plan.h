// What is known of a layer's attention before a call.
#pragma once

#include <vector>

#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// What the attention of layers of one shape under one policy needs to know: all sizes, made once.
struct AttentionPlan {
  // Throws std::invalid_argument for a precision that the table has not got.
  AttentionPlan(const KernelTable& table, const AttentionShape& shape, const PolicyNeeds& needs);

  // Scratch of a call with so many threads.
  size_t scratch_bytes(size_t n_threads) const;

  // Whether the last token of every prompt reads all that it may see, whatever was scored and chosen before,
  // and no generated token asks for the scores. Queries to another layer's keys that are sampled are there
  // only where all rows attend.
  bool ends_dense(size_t window) const {
    if (window > 0) return true;
    return (needs.n_sampled_queries == 0 || shape.heads.has_own_kv()) &&
           (needs.reads_all || (needs.n_dense_tail > 0 && !needs.ends_by_scores));
  }

  const KernelTable& table;
  const AttentionKernels& kernels;
  AttentionShape shape;
  PolicyNeeds needs;
  AttentionSizes sizes;
  std::vector<float> slopes;  // [n_heads] as AttentionTile has them, or none
};

}  // namespace edgeh2o
