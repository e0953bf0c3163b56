// What the keys of one layer received of the attention of the queries that were looked at: generated tokens,
// and the last ones of every prefill call. An eviction goes by it.
#pragma once

#include <cstddef>
#include <memory>

#include "ops/decode_attention.h"

namespace edgeh2o {

class ReceivedAttention {
 public:
  ReceivedAttention(size_t n_kv_heads, size_t max_context);
  static size_t bytes(size_t n_kv_heads, size_t max_context) {
    return 2 * n_kv_heads * max_context * sizeof(float);
  }

  // n_queries more, which see n_rows rows or the first of them; gives what their weights are added to. Rows
  // that no call named before have received nothing.
  KeySums begin_queries(size_t n_rows, size_t n_queries);

  // Forgets rows from n_rows on.
  void rewind(size_t n_rows) { n_rows_ = n_rows < n_rows_ ? n_rows : n_rows_; }

  // out[n_rows]: what a KV head's rows received per query that could see them.
  void read_means(size_t kv_head, size_t n_rows, float* out) const;

  // Closes the gaps that the dropped rows [n_heads][n_dropped], ascending, leave; what is older then counts
  // for less than what comes. n_rows: those before.
  void drop(const int32_t* dropped, size_t n_dropped, size_t n_rows);

 private:
  float* sums(size_t kv_head) const { return values_.get() + 2 * kv_head * max_context_; }
  float* births(size_t kv_head) const { return sums(kv_head) + max_context_; }

  size_t n_kv_heads_, max_context_;
  std::unique_ptr<float[]> values_;  // [n_kv_heads][2][max_context]: sums, and n_queries_ when a row came
  float n_queries_ = 0.0f;           // decayed
  size_t n_rows_ = 0;                // named so far
};

}  // namespace edgeh2o
