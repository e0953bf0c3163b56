// The state-space recurrence of Mamba-2 over the heads of a layer.
#pragma once

#include <cstddef>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/state_step.h"

namespace edgeh2o {

struct SsdHeads {
  size_t n_heads = 0, head_dim = 0;
  // Neighbouring heads, as many in each group, share what writes to the state and what reads it.
  size_t n_groups = 0;
  size_t state_dim = 0;  // rows of a head's state
  // Rates, what writes to the state and what reads it are made of the channels behind the convolution, rates
  // by way of so many numbers (PLaMo 2); 0: all are made of the layer's input.
  size_t step_rank = 0;

  bool is_none() const { return n_heads == 0; }
  size_t inner_dim() const { return n_heads * head_dim; }
  size_t group_state_dim() const { return n_groups * state_dim; }
  // What goes into the recurrence beside rates and decays.
  size_t row_dim() const { return inner_dim() + 2 * group_state_dim(); }
  size_t conv_dim() const { return step_rank > 0 ? inner_dim() : row_dim(); }
  size_t n_state() const { return inner_dim() * state_dim; }
  // What is made of the layer's input: a gate, inputs of the convolution, rates.
  size_t in_dim() const { return inner_dim() + conv_dim() + (step_rank > 0 ? 0 : n_heads); }
  size_t projected_dim() const { return 2 * group_state_dim() + step_rank; }
  // All that is computed of a token.
  size_t mixed_dim() const { return inner_dim() + row_dim() + step_rank + 2 * n_heads; }
  void check() const;  // throws std::invalid_argument
};

// rates [n][n_heads] in place become softplus(rate + bias), decays [n][n_heads] exp(a * rate) of these. a,
// biases: [n_heads].
void find_rates(MatView<float> rates, MatView<float> decays, const float* a, const float* biases);

// rows [n][row_dim]: x of the heads, what writes to the state and what reads it, of all groups; out
// [n][inner_dim]; skips [n_heads], or null for 0. The state [n_state] goes from the token before them to the
// last: [head][head_dim / kSsdColumns][state_dim][kSsdColumns].
void ssd(const KernelTable& table, const SsdHeads& heads, MatView<const float> rows,
         MatView<const float> rates, MatView<const float> decays, const float* skips, StateStep state,
         MatView<float> out);

}  // namespace edgeh2o
