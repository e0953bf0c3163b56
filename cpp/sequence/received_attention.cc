#include "sequence/received_attention.h"

#include <algorithm>

namespace edgeh2o {
namespace {

constexpr float kDecay = 0.9f;  // at every eviction

}  // namespace

ReceivedAttention::ReceivedAttention(size_t n_kv_heads, size_t max_context)
    : n_kv_heads_(n_kv_heads),
      max_context_(max_context),
      values_(std::make_unique<float[]>(2 * n_kv_heads * max_context)) {}

KeySums ReceivedAttention::begin_queries(size_t n_rows, size_t n_queries) {
  for (size_t head = 0; head < n_kv_heads_ && n_rows_ < n_rows; ++head) {
    std::fill(sums(head) + n_rows_, sums(head) + n_rows, 0.0f);
    std::fill(births(head) + n_rows_, births(head) + n_rows, n_queries_);
  }
  n_rows_ = std::max(n_rows_, n_rows);
  n_queries_ += static_cast<float>(n_queries);
  return {values_.get(), 2 * max_context_};
}

void ReceivedAttention::read_means(size_t kv_head, size_t n_rows, float* out) const {
  const float *sum = sums(kv_head), *birth = births(kv_head);
  for (size_t row = 0; row < n_rows; ++row) {
    out[row] = row < n_rows_ ? sum[row] / std::max(n_queries_ - birth[row], 1.0f) : 0.0f;
  }
}

void ReceivedAttention::drop(const int32_t* dropped, size_t n_dropped, size_t n_rows) {
  begin_queries(n_rows, 0);
  for (size_t head = 0; head < n_kv_heads_; ++head, dropped += n_dropped) {
    float *sum = sums(head), *birth = births(head);
    size_t next = 0, kept = 0;
    for (size_t row = 0; row < n_rows; ++row) {
      if (next < n_dropped && static_cast<size_t>(dropped[next]) == row) {
        ++next;
        continue;
      }
      sum[kept] = kDecay * sum[row];
      birth[kept++] = kDecay * birth[row];
    }
  }
  n_queries_ *= kDecay;
  n_rows_ = n_rows - n_dropped;
}

}  // namespace edgeh2o
