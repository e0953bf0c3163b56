// The gated delta rule over the heads of a layer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/state_step.h"

namespace edgeh2o {

struct DeltaHeads {
  size_t n_key_heads = 0, n_value_heads = 0;
  size_t head_dim = 0;  // of queries, keys and values
  // Value heads of a key head are neighbours; else value head h has key head h % n_key_heads.
  bool are_grouped = false;
  // Kimi Delta Attention: every row of a state decays by itself, and every value head has a key head of its
  // own; else a head decays as a whole.
  bool decays_by_row = false;
  float log_floor = 0.0f;  // below 0: rows decay to the exponential of this at the least
  // Of the vectors that decays of rows and the gates of what comes out are made of; 0: they are made of a
  // layer's input.
  size_t gate_rank = 0;

  bool is_none() const { return n_value_heads == 0; }
  size_t key_dim() const { return n_key_heads * head_dim; }
  size_t value_dim() const { return n_value_heads * head_dim; }
  size_t conv_dim() const { return 2 * key_dim() + value_dim(); }
  size_t n_decays() const { return decays_by_row ? value_dim() : n_value_heads; }
  size_t n_state() const { return n_value_heads * head_dim * head_dim; }
  size_t key_head(size_t value_head) const {
    return are_grouped ? value_head / (n_value_heads / n_key_heads) : value_head % n_key_heads;
  }
  void check() const;  // throws std::invalid_argument
};

// In place, of the products of a layer's input with two matrices: rates [n][n_value_heads] become their
// sigmoid, decays [n][n_value_heads] exp(a * softplus(decay + bias)). a, biases: [n_value_heads].
void find_gates(MatView<float> rates, MatView<float> decays, const float* a, const float* biases);

// The same of decays by row, [n][n_value_heads * head_dim], of which there are as many biases: the
// exponential of log_floor * sigmoid(a * (decay + bias)), or of a * softplus(decay + bias) without a floor.
void find_row_gates(const KernelTable& table, const DeltaHeads& heads, MatView<float> rates,
                    MatView<float> decays, const float* a, const float* biases);

// Bytes of scratch that delta_net needs per thread, aligned.
size_t delta_scratch_bytes(const DeltaHeads& heads);

// qkv [n][conv_dim]: queries, keys, values; out [n][value_dim]. The state [n_state] goes from the token
// before them to the last: [value_head][head_dim / kDeltaColumns][head_dim][kDeltaColumns]. Tokens go through
// it in chunks of kDeltaTokens, so that the same n tokens have the same bits in calls that begin at multiples
// of it. decays: n_decays() of every token.
// scratch: num_threads() x delta_scratch_bytes; null: tokens go one by one, however many there are.
void delta_net(const KernelTable& table, const DeltaHeads& heads, MatView<const float> qkv,
               MatView<const float> rates, MatView<const float> decays, StateStep state, MatView<float> out,
               uint8_t* scratch);

}  // namespace edgeh2o
