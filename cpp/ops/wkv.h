// The time mixes of RWKV-7 and RWKV-6 over the heads of a layer: their recurrences, and what is made of
// products before and behind them.
#pragma once

#include <cstddef>
#include <vector>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/state_step.h"

namespace edgeh2o {

struct WkvHeads {
  size_t n_heads = 0, head_dim = 0;
  // Heads of keys and values, each of as many neighbours of those of queries and decays.
  size_t n_kv_heads = 0;
  // Of the vectors between two matrices that decays, rates, shares of the first layer's values and gates are
  // made of. A value_rank of 0: it is the first layer; a gate_rank of 0: there are no gates.
  size_t decay_rank = 0, rate_rank = 0, value_rank = 0, gate_rank = 0;
  // Of those that five shares of the token before are made of, and with them it is RWKV-6, which has no ranks
  // beside this and that of decays; 0: RWKV-7.
  size_t shift_rank = 0;
  // What comes out of a head is normed. RWKV-7 may do without; RWKV-6 without such norms is gated linear
  // attention (Yang et al. 2024, as QRWKV6 has it): queries read the state with the token's own value in it,
  // and over the root of head_dim, a row of the state takes of a key what it has decayed by, and gates are
  // sigmoids.
  bool norms_heads = true;

  bool is_rwkv6() const { return shift_rank > 0; }
  bool is_linear() const { return is_rwkv6() && !norms_heads; }
  bool is_none() const { return n_heads == 0; }
  size_t dim() const { return n_heads * head_dim; }
  size_t kv_dim() const { return n_kv_heads * head_dim; }
  size_t n_state() const { return dim() * head_dim; }
  // Of a token what changes the state: decays, keys, values, and, of RWKV-7, directions and removals.
  size_t row_dim() const { return (is_rwkv6() ? 2 : 4) * dim() + kv_dim(); }
  size_t widest_rank() const;
  // Of a token what the mixer makes of its input, with what reads the state, a gate and what they are made
  // of.
  size_t mixed_dim() const {
    return row_dim() + 5 * dim() + (is_rwkv6() ? 5 * shift_rank + decay_rank + n_heads : widest_rank());
  }
  void check() const;  // throws std::invalid_argument
};

// Every row of x but the first has the one before it subtracted from that: out[i] = x[i - 1] - x[i],
// [n][dim]. The state [dim] is the row before the first, and then the last.
void shift_rows(MatView<const float> x, StateStep state, MatView<float> out);

// out = x + shares * differences, elementwise; shares [cols]. out may be either.
void mix_rows(MatView<const float> x, MatView<const float> differences, const float* shares,
              MatView<float> out);

// The same with shares of every row, added to those of all; out has the former before.
void mix_rows_by(MatView<const float> x, MatView<const float> differences, const float* shares,
                 MatView<float> out);

// 1 / (1 + exp(-(x + biases))) in place, biases [cols] or null; ones: at least as many as there are columns.
void sigmoid_rows(const KernelTable& table, MatView<float> rows, const float* biases, const float* ones);

// values += shares * (first - values), elementwise; changes shares.
void mix_values(MatView<float> values, MatView<const float> first, MatView<const float> shares);

// What the recurrence takes of a token, side by side; all [n][dim].
struct WkvRows {
  MatView<float> decays, keys, values, directions, removals, queries;
};

// Vectors of the layer's weights [dim].
struct WkvVectors {
  const float *decays, *directions, *keys;
};

// Of decays before their bias, of keys and, in removals, of rates: decays exp(-exp(-1/2) * sigmoid(decays +
// biases)); directions keys * factors, of length 1 in every head; removals directions * rates; and keys * (1
// + (rates - 1) * factors).
void finish_rows(const KernelTable& table, const WkvHeads& heads, const WkvVectors& vectors,
                 const WkvRows& rows);

// rows [n][row_dim], and queries [n][dim] of the same stride; out [n][dim]. The state [n_state] goes from the
// token before them to the last: [head][head_dim / kWkvColumns][head_dim][kWkvColumns].
void wkv(const KernelTable& table, const WkvHeads& heads, MatView<const float> rows, const float* queries,
         StateStep state, MatView<float> out);

// What comes out, [n][dim]: a LayerNorm of every head, plus what a token's query reads of its own key and
// value, by weights [dim]; times the gate. Norms and gates are where the layer has them.
struct WkvOutput {
  const float *norm, *norm_bias, *bonus;
};
void finish_heads(const KernelTable& table, const WkvHeads& heads, const WkvOutput& weights,
                  const WkvRows& rows, MatView<const float> gate, MatView<float> out);

// The same of RWKV-6. What the recurrence takes of a token: [n][dim], values [n][kv_dim], and [n][n_heads]
// what reads of its own value.
struct Wkv6Rows {
  MatView<float> decays, keys, values, queries, own;

  // Where keys are before every head has its own: behind the place of those that come before them.
  MatView<float> shared_keys() const {
    return {keys.data + keys.cols - values.cols, keys.rows, values.cols, keys.stride};
  }
};

// decays exp(-exp(decays + biases)); own: of every head the product of keys and queries by weights [dim].
void finish_rows6(const KernelTable& table, const WkvHeads& heads, const float* biases, const float* bonus,
                  const Wkv6Rows& rows);

// Of linear attention, with the same decays: keys are shared_keys times 1 - decays; own the products of keys
// and queries; queries are multiplied by decays, as they read the state before a token, and by them and own
// the state behind it is read.
void finish_linear_rows(const KernelTable& table, const WkvHeads& heads, const float* biases,
                        const Wkv6Rows& rows);

// rows [n][row_dim]; queries [n][dim] and own [n][n_heads] of the same stride.
void wkv6(const KernelTable& table, const WkvHeads& heads, MatView<const float> rows, const float* queries,
          const float* own, StateStep state, MatView<float> out);

// A LayerNorm of every head, times the SiLU of the gate; of linear attention the sigmoid of the gate alone.
void finish_heads6(const KernelTable& table, const WkvHeads& heads, const float* norm, const float* norm_bias,
                   MatView<const float> gate, MatView<float> out);

}  // namespace edgeh2o
