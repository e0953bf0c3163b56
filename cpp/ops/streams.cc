#include "ops/streams.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

void add_products(float* factors, const float* modes, Span<const float> weights) {
  const size_t n = weights.size / kStreams;
  for (size_t m = 0; m < kStreams; ++m) {
    for (size_t i = 0; i < n; ++i) factors[i] += modes[m] * weights[m * n + i];
  }
}

}  // namespace

void predict_streams(const KernelTable& table, const Streams& streams, MatView<const float> modes,
                     Span<const float> weights, MatView<float> x) {
  parallel_for(streams.n, [&](size_t i, size_t) {
    float factors[kStreams * kStreams] = {};
    add_products(factors, modes.row(i), weights);
    float* const first = streams.stream(0).row(i);
    table.predict_streams_f32(first, streams.dim, factors, streams.dim);
    std::memcpy(x.row(i), first, streams.dim * sizeof(float));
  });
}

void correct_streams(const KernelTable& table, const Streams& streams, MatView<const float> modes,
                     Span<const float> weights, Span<const float> scale, MatView<float> x) {
  parallel_for(streams.n, [&](size_t i, size_t) {
    float factors[kStreams];
    std::fill(factors, factors + kStreams, 1.0f);
    add_products(factors, modes.row(i), weights);
    float* const first = streams.stream(0).row(i);
    table.correct_streams_f32(first, streams.dim, x.row(i), factors, streams.dim);
    table.multiply_f32(x.row(i), first, scale.data, streams.dim);
  });
}

void match_sizes(const KernelTable& table, MatView<float> x, MatView<const float> like) {
  parallel_for(x.rows, [&](size_t i, size_t) { table.match_size_f32(x.row(i), like.row(i), x.cols); });
}

}  // namespace edgeh2o
