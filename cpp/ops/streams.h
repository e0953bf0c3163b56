// The residual streams of AltUp (Baykal et al. 2023), in parallel over tokens.
#pragma once

#include <cstddef>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "kernels/streams.h"

namespace edgeh2o {

// Of n tokens, those of one side by side: [n][kStreams][dim].
struct Streams {
  float* data = nullptr;
  size_t n = 0, dim = 0;

  size_t token_size() const { return kStreams * dim; }
  MatView<float> stream(size_t k) const { return {data + k * dim, n, dim, token_size()}; }
  Streams rows_from(size_t first, size_t count) const { return {data + first * token_size(), count, dim}; }
};

// Factors of one token are products with its `modes`, [n][kStreams]: sum over m of mode m times weights[m].

// Stream k gets the sum over j of factor (k, j) times stream j, of what they were before, added;
// weights [kStreams][kStreams * kStreams]. x is stream 0 then.
void predict_streams(const KernelTable& table, const Streams& streams, MatView<const float> modes,
                     Span<const float> weights, MatView<float> x);

// Stream k gets x - stream 0 added, times 1 + factor k; weights [kStreams][kStreams]. x is stream 0 times
// scale [dim] then.
void correct_streams(const KernelTable& table, const Streams& streams, MatView<const float> modes,
                     Span<const float> weights, Span<const float> scale, MatView<float> x);

// Every row of x gets the root mean square of that of `like`.
void match_sizes(const KernelTable& table, MatView<float> x, MatView<const float> like);

}  // namespace edgeh2o
