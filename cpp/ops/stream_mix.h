// Residual streams of a token that are mixed before every branch (model/stream_mix.h), in parallel over
// tokens, of which each has its streams side by side.
#pragma once

#include <cstddef>

#include "base/mat_view.h"
#include "isa/kernel_table.h"

namespace edgeh2o {

// out = the RMS norm of every group of `size` columns, by weights of all groups; both [n][weight.size].
void norm_groups(const KernelTable& table, MatView<const float> rows, size_t size, Span<const float> weight,
                 float eps, MatView<float> out);

// silu(scale * x) of every number, in place.
void scaled_silu(const KernelTable& table, MatView<float> rows, float scale);

// x [n][dim] = the mean of streams [n][n_streams * dim] times the sigmoids of gates; changes the streams.
void mean_of_gated(const KernelTable& table, MatView<float> streams, MatView<const float> gates,
                   MatView<float> x);

// Every stream gets x times 2 sigmoid(share / n_streams) added; shares [n][n_streams].
void share_out(MatView<float> streams, MatView<const float> x, MatView<const float> shares);

// Where queries, [n][n_streams * dim], get values [n][dim] times a gate of each stream: the sigmoid of the
// root of its product with keys over the root of dim, with the product's sign (its size is 1e-6 at least).
void gate_values(const KernelTable& table, MatView<const float> keys, MatView<const float> values,
                 MatView<float> queries);

}  // namespace edgeh2o
