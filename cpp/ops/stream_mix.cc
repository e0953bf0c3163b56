#include "ops/stream_mix.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Of a key and a query.
float gate_of(const float* key, const float* query, size_t dim) {
  double sum = 0.0;
  for (size_t i = 0; i < dim; ++i) sum += static_cast<double>(key[i]) * static_cast<double>(query[i]);
  const auto product = static_cast<float>(sum / std::sqrt(static_cast<double>(dim)));
  if (product == 0.0f) return 0.5f;
  return logistic(std::copysign(std::sqrt(std::max(std::abs(product), 1e-6f)), product));
}

}  // namespace

void norm_groups(const KernelTable& table, MatView<const float> rows, size_t size, Span<const float> weight,
                 float eps, MatView<float> out) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    for (size_t column = 0; column < weight.size; column += size) {
      table.rms_norm_f32(out.row(i) + column, rows.row(i) + column, weight.data + column, size, eps);
    }
  });
}

void scaled_silu(const KernelTable& table, MatView<float> rows, float scale) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    float* row = rows.row(i);
    table.scale_f32(row, row, scale, rows.cols);
    table.gate_f32(row, row, row, rows.cols);
  });
}

void mean_of_gated(const KernelTable& table, MatView<float> streams, MatView<const float> gates,
                   MatView<float> x) {
  const size_t dim = x.cols, n_streams = streams.cols / dim;
  parallel_for(x.rows, [&](size_t i, size_t) {
    float* gated = streams.row(i);
    table.gate_f32(gated, gates.row(i), gated, streams.cols);
    for (size_t k = 1; k < n_streams; ++k) table.add_f32(gated, gated + k * dim, dim);
    table.scale_f32(x.row(i), gated, 1.0f / static_cast<float>(n_streams), dim);
  });
}

void share_out(MatView<float> streams, MatView<const float> x, MatView<const float> shares) {
  const size_t dim = x.cols, n_streams = shares.cols;
  parallel_for(x.rows, [&](size_t i, size_t) {
    const float* own = shares.row(i);
    for (size_t k = 0; k < n_streams; ++k) {
      const float factor = 2.0f * logistic(own[k] / static_cast<float>(n_streams));
      float* stream = streams.row(i) + k * dim;
      const float* row = x.row(i);
      for (size_t c = 0; c < dim; ++c) stream[c] += factor * row[c];
    }
  });
}

void gate_values(const KernelTable& table, MatView<const float> keys, MatView<const float> values,
                 MatView<float> queries) {
  const size_t dim = values.cols;
  parallel_for(values.rows, [&](size_t i, size_t) {
    for (size_t column = 0; column < queries.cols; column += dim) {
      float* query = queries.row(i) + column;
      table.scale_f32(query, values.row(i), gate_of(keys.row(i) + column, query, dim), dim);
    }
  });
}

}  // namespace edgeh2o
