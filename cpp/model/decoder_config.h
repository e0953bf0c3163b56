// Shape and constants of a decoder-only transformer: everything in which model families differ.
#pragma once

#include <cstddef>
#include <vector>

namespace edgeh2o {

enum class Activation { kSilu, kGeluTanh };

// Where a residual branch (attention, feed-forward) is normalised: its input, its output, or both.
enum class NormPlacement { kPre, kPost, kBoth };

// RMS norm of queries and keys before the rotary embedding: of every head, or of the whole projection.
enum class QkNorm { kNone, kHead, kProjection };

struct RopeConfig {
  std::vector<float> inv_freq;  // [rotary_dim / 2] radians per position, any scaling applied
  float attention_factor = 1.0f;
  size_t n_pairs() const { return inv_freq.size(); }
};

struct DecoderConfig {
  size_t n_layers = 0;
  size_t model_dim = 0;
  size_t n_heads = 0;
  size_t n_kv_heads = 0;
  size_t head_dim = 0;
  size_t ffn_dim = 0;
  // Mixture of experts: every token goes through n_experts_used of n_experts feed-forward networks. 0: one
  // network for all.
  size_t n_experts = 0;
  size_t n_experts_used = 0;
  size_t vocab_size = 0;
  float norm_eps = 0.0f;
  NormPlacement norm_placement = NormPlacement::kPre;
  QkNorm qk_norm = QkNorm::kNone;
  Activation activation = Activation::kSilu;

  RopeConfig rope;
  RopeConfig sliding_rope;  // of layers with a sliding window; empty: the same
  RopeConfig
      long_rope;  // instead of `rope` if a session holds more than long_rope_after positions; empty: never
  size_t long_rope_after = 0;

  size_t sliding_window = 0;         // positions that a query of a sliding layer sees, its own included
  std::vector<bool> sliding_layers;  // [n_layers], or empty: no layer has a window

  float attention_scale = 0.0f;
  float embedding_scale = 1.0f;
  float residual_scale = 1.0f;  // factor of what a branch adds to the residual stream
  float logit_scale = 1.0f;
  float attention_soft_cap = 0.0f;  // of attention logits; 0: none
  float logit_soft_cap = 0.0f;      // of the output; 0: none
  bool tied_embeddings = false;

  size_t q_dim() const { return n_heads * head_dim; }
  size_t kv_dim() const { return n_kv_heads * head_dim; }
  bool has_pre_norm() const { return norm_placement != NormPlacement::kPost; }
  bool has_post_norm() const { return norm_placement != NormPlacement::kPre; }
  size_t window(size_t layer) const {
    return !sliding_layers.empty() && sliding_layers[layer] ? sliding_window : 0;
  }
  bool has_sliding_rope() const { return !sliding_rope.inv_freq.empty(); }
  const RopeConfig& rope_of_context(size_t max_context) const {
    return !long_rope.inv_freq.empty() && max_context > long_rope_after ? long_rope : rope;
  }
  void check() const;  // throws std::invalid_argument
};

}  // namespace edgeh2o
