#include "ops/error_sample.h"

#include <algorithm>
#include <cmath>

namespace edgeh2o {
namespace {

// Multiples of the golden ratio, less their integers, are spread evenly however many there are.
double offset_of(size_t turn) {
  const double multiple = 0.6180339887498949 * static_cast<double>(turn);
  return multiple - std::floor(multiple);
}

size_t query_bytes(const AttentionPlan& plan) {
  return round_up(kMaxDecodeTokens * plan.shape.heads.q_dim() * sizeof(float), kAlignment);
}

size_t row_bytes(const AttentionPlan& plan) {
  return query_bytes(plan) +
         round_up(kMaxDecodeTokens * plan.shape.heads.out_dim() * sizeof(float), kAlignment);
}

}  // namespace

ErrorSample::ErrorSample(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads)
    : plan_(plan),
      q_(reinterpret_cast<float*>(scratch)),
      out_(reinterpret_cast<float*>(scratch + query_bytes(plan))),
      attention_(plan, scratch + row_bytes(plan), n_threads) {}

size_t ErrorSample::scratch_bytes(const AttentionPlan& plan, size_t n_threads) {
  return row_bytes(plan) + DecodeAttention::scratch_bytes(plan, n_threads);
}

AttentionError ErrorSample::measure(MatView<const float> q, const LayerKv& kv, size_t first_position,
                                    MatView<const float> out, size_t n_dense, size_t n_rows, size_t turn) {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t first_chunk = plan_.shape.longest_chunk();
  const size_t begin = first_chunk - std::min(first_chunk, first_position);
  const size_t end = q.rows - std::min(n_dense, q.rows);
  AttentionError error;
  if (begin >= end) return error;
  const size_t n_sampled = std::min(n_rows, end - begin);
  const double step = static_cast<double>(end - begin) / static_cast<double>(n_sampled);
  const auto row_of = [&](size_t i) {
    const double place = step * (static_cast<double>(i) + offset_of(turn));
    return std::min(begin + static_cast<size_t>(place), end - 1);
  };
  for (size_t first = 0; first < n_sampled; first += kMaxDecodeTokens) {
    const size_t n = std::min(kMaxDecodeTokens, n_sampled - first);
    const MatView<float> queries{q_, n, heads.q_dim(), heads.q_dim()};
    const MatView<float> dense{out_, n, heads.out_dim(), heads.out_dim()};
    for (size_t i = 0; i < n; ++i) {
      const size_t row = row_of(first + i), position = first_position + row;
      std::copy_n(q.row(row), heads.q_dim(), queries.row(i));
      for (size_t head = 0; head < heads.n_kv_heads; ++head) {
        attention_.set_memory(i, head, MemorySet::all_of({0, position}), position, kv);
      }
    }
    attention_.run({q_, n, heads.q_dim(), heads.q_dim()}, kv, dense);
    for (size_t i = 0; i < n; ++i) {
      const float *sparse = out.row(row_of(first + i)), *exact = dense.row(i);
      for (size_t column = 0; column < heads.out_dim(); ++column) {
        const double value = exact[column], difference = sparse[column] - value;
        error.difference += difference * difference;
        error.dense += value * value;
      }
    }
  }
  return error;
}

}  // namespace edgeh2o
