// Shape and constants of a decoder-only transformer.
#pragma once

#include <cstddef>
#include <vector>

namespace edgeh2o {

struct DecoderConfig {
  size_t n_layers = 0;
  size_t model_dim = 0;
  size_t n_heads = 0;
  size_t n_kv_heads = 0;
  size_t head_dim = 0;
  size_t ffn_dim = 0;
  size_t vocab_size = 0;
  float norm_eps = 0.0f;
  std::vector<float> rope_inv_freq;  // [rotary_dim / 2] radians per position, any scaling applied
  float rope_attention_factor = 1.0f;
  float attention_scale = 0.0f;
  float embedding_scale = 1.0f;
  float logit_scale = 1.0f;
  bool tied_embeddings = false;

  size_t q_dim() const { return n_heads * head_dim; }
  size_t kv_dim() const { return n_kv_heads * head_dim; }
  void check() const;  // throws std::invalid_argument
};

}  // namespace edgeh2o
