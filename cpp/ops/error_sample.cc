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

size_t out_bytes(const AttentionPlan& plan) {
  return round_up(kMaxDecodeTokens * plan.shape.heads.out_dim() * sizeof(float), kAlignment);
}

size_t row_bytes(const AttentionPlan& plan) { return query_bytes(plan) + 2 * out_bytes(plan); }

}  // namespace

void AttentionError::add_row(const float* sparse, const float* exact, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double value = exact[i], missing = sparse[i] - value;
    difference += missing * missing;
    dense += value * value;
  }
}

void AttentionError::subtract_row(const float* rounded, const float* exact, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double error = rounded[i] - static_cast<double>(exact[i]);
    difference -= error * error;
  }
}

SampledRows::SampledRows(const AttentionPlan& plan, size_t n_tokens, size_t first_position, size_t n_dense,
                         size_t n_rows, size_t turn)
    : begin_(plan.shape.longest_chunk() - std::min(plan.shape.longest_chunk(), first_position)),
      end_(n_tokens - std::min(n_dense, n_tokens)),
      n_(begin_ < end_ ? std::min(n_rows, end_ - begin_) : 0),
      offset_(offset_of(turn)) {}

size_t SampledRows::operator[](size_t i) const {
  const double step = static_cast<double>(end_ - begin_) / static_cast<double>(n_);
  const double place = step * (static_cast<double>(i) + offset_);
  return std::min(begin_ + static_cast<size_t>(place), end_ - 1);
}

ErrorSample::ErrorSample(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads)
    : plan_(plan),
      q_(reinterpret_cast<float*>(scratch)),
      out_(reinterpret_cast<float*>(scratch + query_bytes(plan))),
      rounded_out_(reinterpret_cast<float*>(scratch + query_bytes(plan) + out_bytes(plan))),
      attention_(plan, scratch + row_bytes(plan), n_threads),
      rounded_(plan, kMaxDecodeTokens, scratch + row_bytes(plan), n_threads) {}

size_t ErrorSample::scratch_bytes(const AttentionPlan& plan, size_t n_threads) {
  const size_t rounded =
      plan.sizes.integers.are_bytes() ? RoundedRows::scratch_bytes(plan, kMaxDecodeTokens, n_threads) : 0;
  return row_bytes(plan) + std::max(DecodeAttention::scratch_bytes(plan, n_threads), rounded);
}

// Rows from `first` on, as many as one call takes: their queries in q_, exact outputs in out_. Their number.
size_t ErrorSample::attend_exactly(MatView<const float> q, const LayerKv& kv, size_t first_position,
                                   const SampledRows& rows, size_t first) {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t n = std::min(kMaxDecodeTokens, rows.size() - first);
  for (size_t i = 0; i < n; ++i) {
    const size_t row = rows[first + i], position = first_position + row;
    std::copy_n(q.row(row), heads.q_dim(), q_ + i * heads.q_dim());
    for (size_t head = 0; head < heads.n_kv_heads; ++head) {
      attention_.set_memory(i, head, MemorySet::all_of({0, position}), position, kv);
    }
  }
  attention_.run({q_, n, heads.q_dim(), heads.q_dim()}, kv, {out_, n, heads.out_dim(), heads.out_dim()});
  return n;
}

void ErrorSample::measure(MatView<const float> q, const LayerKv& kv, size_t first_position,
                          MatView<const float> out, const SampledRows& rows, AttentionError* errors) {
  const size_t out_dim = plan_.shape.heads.out_dim();
  const size_t width = plan_.shape.set_heads() * plan_.shape.heads.value_dim;
  for (size_t first = 0, n = 0; first < rows.size(); first += n) {
    n = attend_exactly(q, kv, first_position, rows, first);
    for (size_t i = 0; i < n; ++i) {
      const float *const sparse = out.row(rows[first + i]), *const exact = out_ + i * out_dim;
      for (size_t set = 0; set < plan_.shape.n_sets(); ++set) {
        errors[set].add_row(sparse + set * width, exact + set * width, width);
      }
    }
  }
}

void ErrorSample::subtract_rounding(MatView<const float> q, const LayerKv& kv, size_t first_position,
                                    const SampledRows& rows, AttentionError* errors) {
  const size_t q_dim = plan_.shape.heads.q_dim(), out_dim = plan_.shape.heads.out_dim();
  const size_t width = plan_.shape.set_heads() * plan_.shape.heads.value_dim;
  const bool are_there = rows.size() <= kMaxDecodeTokens;  // since `measure`
  for (size_t first = 0, n = 0; first < rows.size(); first += n) {
    n = are_there ? rows.size() : attend_exactly(q, kv, first_position, rows, first);
    size_t positions[kMaxDecodeTokens];
    for (size_t i = 0; i < n; ++i) positions[i] = first_position + rows[first + i];
    rounded_.run({q_, n, q_dim, q_dim}, positions, kv, {rounded_out_, n, out_dim, out_dim});
    for (size_t i = 0; i < n; ++i) {
      const float *const rounded = rounded_out_ + i * out_dim, *const exact = out_ + i * out_dim;
      for (size_t set = 0; set < plan_.shape.n_sets(); ++set) {
        errors[set].subtract_row(rounded + set * width, exact + set * width, width);
      }
    }
  }
}

}  // namespace edgeh2o
