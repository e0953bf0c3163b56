// Causal convolutions of a few tokens, every channel by itself.
#pragma once

#include <cstddef>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/state_step.h"

namespace edgeh2o {

inline constexpr size_t kMaxConvTaps = 16;

// Rows of b, c and y side by side [n][3 * dim]: u = b * y, out [n][dim] = c * conv(u), where conv of token t
// is the sum over j < n_taps of weights[j] * u[t - (n_taps - 1) + j]. weights [n_taps][dim]. The state
// [n_taps - 1][dim] is u of the tokens before, the latest last, and then of those here. b becomes u.
void short_conv(const KernelTable& table, MatView<float> bcy, const float* weights, size_t n_taps,
                StateStep state, MatView<float> out);

// silu(conv(rows) + biases) in place, with weights and state as above; biases [dim] may be null.
void convolve_silu(const KernelTable& table, MatView<float> rows, const float* weights, size_t n_taps,
                   StateStep state, const float* biases = nullptr);

// out += silu(conv(inputs)), both [n][dim], where conv of token t is the sum over j < n_taps of weights[j] *
// inputs[t - (n_taps - 1 - j) * dilation]. weights [n_taps][dim]; the state is as above, of the last
// (n_taps - 1) * dilation tokens.
void add_dilated_silu(const KernelTable& table, MatView<const float> inputs, const float* weights,
                      size_t n_taps, size_t dilation, StateStep state, MatView<float> out);

// What the state becomes by inputs [n][dim] alone.
void keep_inputs(MatView<const float> inputs, size_t n_taps, StateStep state);

}  // namespace edgeh2o
