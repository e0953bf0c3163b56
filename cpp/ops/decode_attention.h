// Attention of one query per head to a range of cached positions, all of them or a window. Every KV head's
// rows are read once for all query heads of its group, in ranges of fixed length whose results are merged in
// order: the result does not depend on the number of threads.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"

namespace edgeh2o {

class DecodeAttention {
 public:
  explicit DecodeAttention(const AttentionShape& shape)
      : n_kv_heads_(shape.n_kv_heads),
        group_size_(shape.group_size()),
        head_dim_(shape.head_dim),
        max_context_(shape.max_context),
        scale_(shape.scale * kLog2E),
        soft_cap_(shape.soft_cap * kLog2E) {}

  void take_scratch(Arena& arena, const KernelTable& table, size_t n_threads);

  // q, out: [n_heads * head_dim]; keys: the positions of kv that are read, the query's own among them.
  void run(const KernelTable& table, const float* q, const LayerKv& kv, PositionRange keys, float* out) const;

 private:
  AttentionTile range_result(size_t kv_head, size_t range_idx) const;

  size_t n_kv_heads_, group_size_, head_dim_, max_context_;
  float scale_, soft_cap_;  // in base 2
  size_t o_stride_ = 0;
  float* q_ = nullptr;        // [n_heads * head_dim] scaled
  float* weights_ = nullptr;  // [n_threads][group_size][range length]
  float* results_ = nullptr;  // [n_kv_heads][ranges]: m and l [group_size], o [group_size][o_stride]
  float* merged_ = nullptr;   // [n_kv_heads][4][group_size]: m, l, factors
};

}  // namespace edgeh2o
