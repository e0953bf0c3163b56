// What one layer is: its mixer (what lets tokens see each other) and its feed-forward network.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/attention_sizes.h"

namespace edgeh2o {

enum class MixerKind : uint8_t { kAttention };
enum class FfnKind : uint8_t { kGated, kExperts };
enum class Activation : uint8_t { kSilu, kGeluTanh, kSiluClamped };

// Where a residual branch (mixer, feed-forward) is normalised: its input, its output, or both.
enum class NormPlacement : uint8_t { kPre, kPost, kBoth };

// RMS norm of queries and keys: of every head, or of the whole projection.
enum class QkNorm : uint8_t { kNone, kHead, kProjection };

struct LayerSpec {
  MixerKind mixer = MixerKind::kAttention;
  AttentionHeads heads;
  size_t window = 0;  // positions that a query sees, its own included; 0: all
  size_t rope = 0;    // of DecoderConfig::ropes
  QkNorm qk_norm = QkNorm::kNone;
  bool qk_norm_after_rope = false;
  bool has_sinks = false;     // a logit per head that takes a part of every softmax and has no value
  bool norms_values = false;  // RMS norm of every head of the values, without weights
  // A query at position p is multiplied by 1 + temperature_scale * ln(1 + floor(p / temperature_period)).
  float temperature_scale = 0.0f;
  size_t temperature_period = 0;  // 0: none

  FfnKind ffn = FfnKind::kGated;
  Activation activation = Activation::kSilu;
  size_t ffn_dim = 0;
  // Every token goes through n_experts_used of n_experts feed-forward networks; 0 for kGated.
  size_t n_experts = 0, n_experts_used = 0;
  bool normalises_experts = true;  // the shares of a token's experts add up to 1
  // Width of the expert that every token goes through beside its own; 0: none. Its gate is a number per
  // token, the sigmoid of a product with its input.
  size_t shared_ffn_dim = 0;
  bool has_shared_gate = false;

  NormPlacement norm_placement = NormPlacement::kPre;
  float residual_scale = 1.0f;  // factor of what a branch adds to the residual stream

  size_t token_input_dim = 0;     // width of the layer's own input per token; 0: none
  bool has_output_scale = false;  // the residual stream is multiplied by a number behind the layer

  bool has_pre_norm() const { return norm_placement != NormPlacement::kPost; }
  bool has_post_norm() const { return norm_placement != NormPlacement::kPre; }
  size_t qkv_dim() const { return heads.q_dim() + heads.k_dim() + heads.v_dim(); }
};

}  // namespace edgeh2o
