// Full attention of one query per head to all cached positions. Every KV head's rows are read once for all
// query heads of its group, in ranges of fixed length whose results are merged in order: the result does not
// depend on the number of threads.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "isa/kernel_table.h"

namespace edgeh2o {

class DecodeAttention {
 public:
  DecodeAttention(size_t n_heads, size_t n_kv_heads, size_t head_dim, size_t max_context, float scale)
      : n_kv_heads_(n_kv_heads),
        group_size_(n_heads / n_kv_heads),
        head_dim_(head_dim),
        max_context_(max_context),
        scale_(scale * kLog2E) {}

  void take_scratch(Arena& arena, const KernelTable& table, size_t n_threads);

  // q, out: [n_heads * head_dim]; n_keys: positions [0, n_keys) of kv are read, the query's own among them.
  void run(const KernelTable& table, const float* q, const LayerKv& kv, size_t n_keys, float* out) const;

 private:
  AttentionTile range_result(size_t kv_head, size_t range_idx) const;

  size_t n_kv_heads_, group_size_, head_dim_, max_context_;
  float scale_;  // in base 2
  size_t o_stride_ = 0;
  float* q_ = nullptr;        // [n_heads * head_dim] scaled
  float* weights_ = nullptr;  // [n_threads][group_size][range length]
  float* results_ = nullptr;  // [n_kv_heads][ranges]: m and l [group_size], o [group_size][o_stride]
  float* merged_ = nullptr;   // [n_kv_heads][4][group_size]: m, l, factors
};

}  // namespace edgeh2o
