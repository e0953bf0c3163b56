// What one layer is: its mixer (what lets tokens see each other) and its feed-forward network.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/attention_sizes.h"
#include "ops/convolution.h"
#include "ops/recurrence.h"
#include "ops/rows.h"

namespace edgeh2o {

// Attention, or a short causal convolution between two gates (LFM2), or a gated delta net (Qwen3-Next), or
// the state-space recurrence of Mamba-2, also beside attention (Falcon-H1), or the selective scan of Mamba-1
// (Jamba), or the time mix of RWKV-7 or RWKV-6, or none (Nemotron-H).
enum class MixerKind : uint8_t {
  kAttention,
  kShortConv,
  kDeltaNet,
  kMamba2,
  kAttentionMamba2,
  kMamba1,
  kRwkv7,
  kRwkv6,
  kNone
};
// How a router's logits become shares: by a softmax over all experts, or each by a sigmoid of its own.
enum class ExpertGate : uint8_t { kSoftmax, kSigmoid };
// What multiplies the output of attention: a function of numbers that the query projection makes beside its
// queries, one per output (Qwen3.5), or that a matrix of its own makes, one per output or one per head.
enum class OutputGate : uint8_t { kNone, kOfQueries, kPerOutput, kPerHead };
// A layer without a mixer or without a feed-forward network has the other. One whose input is shifted has
// that of the token before in it, as in RWKV, where a layer may have a gated one too.
enum class FfnKind : uint8_t { kGated, kExperts, kShifted, kNone };
// The last three are of networks without a gate.
enum class Activation : uint8_t { kSilu, kGeluTanh, kSiluClamped, kRelu, kReluSquared, kUngatedGelu, kXielu };

// Where a residual branch (mixer, feed-forward) is normalised: its input, its output, or both, or else the
// residual stream once it was added (BERT); or nowhere, where what it reads is mixed of normed streams
// (model/stream_mix.h).
enum class NormPlacement : uint8_t { kPre, kPost, kBoth, kSum, kNone };

// RMS norm of queries and keys: of every head, all by the same weights or each by its own, or of the whole
// projection; or LayerNorm of the latter.
enum class QkNorm : uint8_t { kNone, kHead, kOwnHead, kProjection, kLayer };

// Multi-head latent attention (DeepSeek-V2): keys and values of all heads are products of one row per token,
// which is what is cached: a normed latent vector, then a rotated part that the keys of all heads share. Both
// products are moved to the other side of attention: queries are brought to the latent space, and what comes
// out of it to values. So attention has one KV head, whose rows are keys and values.
struct LatentHeads {
  size_t rank = 0;       // of the latent vector; 0: none, attention is of the plain kind
  size_t q_rank = 0;     // of a normed vector that queries are made of; 0: they are made of the input
  size_t nope_dim = 0;   // of a query, without the part that is rotated
  size_t rope_dim = 0;   // of that part
  size_t value_dim = 0;  // of a head

  bool is_none() const { return rank == 0; }
  size_t row_dim() const { return rank + rope_dim; }
  size_t head_dim() const { return nope_dim + rope_dim; }
};

// Of a network with a gate: what goes into the activation is at most `gate`, and what it multiplies between
// -up and up; 0: no limit.
struct GateLimits {
  float gate = 0.0f, up = 0.0f;

  bool any() const { return gate > 0.0f || up > 0.0f; }
};

struct LayerSpec {
  MixerKind mixer = MixerKind::kAttention;
  AttentionHeads heads;
  LatentHeads latent;
  // Positions that a query sees, its own included, up to it; 0: all. Where attention is not causal, as many
  // to either side of its own.
  size_t window = 0;
  // Of these, those from the last multiple of the width on: queries of a chunk of so many see that alone.
  bool is_chunked = false;
  size_t rope = 0;    // of DecoderConfig::ropes
  size_t lender = 0;  // the layer of the other model, where heads.are_lent
  QkNorm qk_norm = QkNorm::kNone;
  bool qk_norm_after_rope = false;
  bool has_latent_key_norm = false;  // RMS norm of the part of latent keys that is rotated, before it is
  bool has_plain_qk_norm = false;    // of heads: the norm has no weights
  bool has_sinks = false;            // a logit per head that takes a part of every softmax and has no value
  bool norms_values = false;         // RMS norm of every head of the values, without weights
  float value_scale = 1.0f;          // factor of the values
  // A query at position p is multiplied by
  // 1 + temperature_scale * ln(1 + floor((p + temperature_offset) / temperature_period)).
  float temperature_scale = 0.0f;
  size_t temperature_offset = 0;
  size_t temperature_period = 0;  // 0: none

  float qkv_limit = 0.0f;  // queries, keys and values are clamped to +- this; 0: they are not
  // BitNet: what attention gives, and what the activation, is normed before the next product, and the seven
  // matrices may have a factor each.
  bool has_sub_norms = false;
  // Talkie: the norms of queries and keys have no weights, but heads of queries a factor each behind them,
  // and so have the output matrices of attention and network; a multiple of the embedding is added behind the
  // layer.
  bool has_head_gains = false;
  bool has_joint_bias = false;  // the biases of queries, keys and values are one vector
  OutputGate output_gate = OutputGate::kNone;
  HeadGate head_gate = HeadGate::kSigmoid;  // of kPerHead; others are sigmoids

  size_t n_conv_taps = 0;          // tokens that a convolution sees, its own included
  DeltaHeads delta;                // of a delta net, which has a convolution too
  bool has_delta_sigmoid = false;  // what comes out of it is multiplied by sigmoids, else by SiLU
  SsdHeads ssd;                    // of Mamba-2, which has one too
  ScanSizes scan;                  // of Mamba-1 likewise
  WkvHeads wkv;                    // of RWKV, whose mixer looks back by one token, and a shifted network too

  FfnKind ffn = FfnKind::kGated;
  Activation activation = Activation::kSilu;
  Xielu xielu;  // of kXielu
  // Of the gate what lies so many standard deviations above its mean goes into the activation (Gemma 3n);
  // minus infinity: all of it.
  float gate_cutoff = -std::numeric_limits<float>::infinity();
  GateLimits limits, shared_limits;  // of the network, or of experts, and of the shared expert
  size_t ffn_dim = 0;
  // Every token goes through n_experts_used of n_experts feed-forward networks; 0 for kGated.
  size_t n_experts = 0, n_experts_used = 0;
  bool normalises_experts = true;  // the shares of a token's experts add up to 1
  float expert_scale = 1.0f;       // factor of the shares
  // A token's experts are of so many of the groups of neighbours, those whose two best ones are the best.
  size_t n_expert_groups = 1, n_expert_groups_used = 1;
  ExpertGate expert_gate = ExpertGate::kSoftmax;
  bool has_expert_bias = false;       // numbers that count in the choice of experts, not in their shares
  bool scales_expert_inputs = false;  // an expert's share is a factor of its input, not of its output
  bool routes_by_input = false;  // the router reads what the layer gets, before its mixer, without a norm
  // Width of the expert that every token goes through beside its own; 0: none. Its gate is a number per
  // token, the sigmoid of a product with its input.
  size_t shared_ffn_dim = 0;
  bool has_shared_gate = false;
  float experts_scale = 1.0f;  // factor of what all experts give together, with the shared one
  // Grove MoE: so many neighbours among the experts share another one, adjugate to them, of this width, which
  // a token goes through with the sum of their shares, times the scale; a width of 0: none.
  size_t n_adjugate_sharers = 1, adjugate_ffn_dim = 0;
  float adjugate_scale = 1.0f;
  size_t n_adjugates() const { return adjugate_ffn_dim > 0 ? n_experts / n_adjugate_sharers : 0; }
  // Gemma 4: the experts, the shared one and the router have norms of their own at their inputs, the former
  // two also at their outputs, and experts a factor each.
  bool has_expert_norms = false;

  NormPlacement norm_placement = NormPlacement::kPre;
  // Of kSum: behind the norm of the sum of attention the layer's input is added again, and the stream normed
  // again.
  bool has_second_norm = false;
  bool has_mixer_norm = true;  // where inputs are normed; else the mixer's is not
  // Whether the norm of the mixer's input is that of the feed-forward network's too.
  bool shares_norm() const { return is_parallel && !has_parallel_norm; }
  bool is_parallel = false;        // the feed-forward network has the normed input of the mixer
  bool has_parallel_norm = false;  // or, beside the mixer too, the input of the mixer by a norm of its own
  float residual_scale = 1.0f;     // factor of what a branch adds to the residual stream

  // N-grams are looked up before the layer, and convolved over so many tokens before: numbers of a row.
  size_t history_rows = 0, history_dim = 0;

  // LAuReL (Menghani et al. 2024): a product of two matrices of this rank beside the mixer; 0: none.
  size_t laurel_rank = 0;
  size_t token_input_dim = 0;     // width of the layer's own input per token; 0: none
  bool has_output_scale = false;  // the residual stream is multiplied by a number behind the layer,
  float output_scale = 1.0f;      // or by this one, which no tensor says

  bool has_pre_norm() const {
    return norm_placement == NormPlacement::kPre || norm_placement == NormPlacement::kBoth;
  }
  bool has_post_norm() const {
    return norm_placement == NormPlacement::kPost || norm_placement == NormPlacement::kBoth;
  }
  bool looks_up_ngrams() const { return history_rows > 0; }
  bool has_mixer() const { return mixer != MixerKind::kNone; }
  bool has_ffn() const { return ffn != FfnKind::kNone; }
  bool has_gate() const {
    return activation != Activation::kReluSquared && activation != Activation::kUngatedGelu &&
           activation != Activation::kXielu;
  }
  bool limits_gates() const { return limits.any() || shared_limits.any(); }
  bool cuts_gate() const { return gate_cutoff > -std::numeric_limits<float>::infinity(); }
  bool attends() const { return mixer == MixerKind::kAttention || mixer == MixerKind::kAttentionMamba2; }
  bool has_ssd() const { return mixer == MixerKind::kMamba2 || mixer == MixerKind::kAttentionMamba2; }
  bool is_rwkv() const { return mixer == MixerKind::kRwkv7 || mixer == MixerKind::kRwkv6; }
  // Whether tokens that come later depend on the layer: it stores keys and values or has a recurrent state.
  bool keeps_tokens() const { return has_mixer() && (mixer != MixerKind::kAttention || heads.has_own_kv()); }
  // What the layer keeps of the tokens before beside keys and values.
  Recurrence recurrence(size_t model_dim) const {
    if (mixer == MixerKind::kShortConv) return {{}, {}, {}, model_dim, n_conv_taps};
    if (mixer == MixerKind::kDeltaNet) {
      return {delta, {}, {}, delta.conv_dim(), n_conv_taps, {}, history_rows, history_dim};
    }
    if (mixer == MixerKind::kMamba1) return {{}, {}, scan, scan.n_channels, n_conv_taps};
    if (is_rwkv()) {
      const size_t n_shifted = ffn == FfnKind::kShifted ? 2 : 1;
      return {{}, {}, {}, n_shifted * model_dim, n_conv_taps, wkv};
    }
    return has_ssd() ? Recurrence{{}, ssd, {}, ssd.conv_dim(), n_conv_taps} : Recurrence{};
  }
  bool has_output_gate() const { return output_gate != OutputGate::kNone; }
  bool has_gate_matrix() const { return has_output_gate() && output_gate != OutputGate::kOfQueries; }
  size_t gate_dim() const {
    if (!has_output_gate()) return 0;
    return output_gate == OutputGate::kPerHead ? heads.n_heads : heads.q_dim();
  }
  // Rows of the query projection before the queries.
  size_t q_gate_dim() const { return output_gate == OutputGate::kOfQueries ? gate_dim() : 0; }
  // What a layer with attention makes of its input.
  size_t qkv_dim() const { return gate_dim() + heads.q_dim() + heads.cached_dim() + heads.index.row_dim(); }
  // What latent attention has between its products, for so many rows at a time: the vectors that queries are
  // made of and queries before they are brought to the latent space, or values behind it.
  size_t inner_dim() const {
    if (latent.is_none()) return 0;
    const size_t q_dim = latent.q_rank + heads.n_heads * latent.head_dim();
    const size_t out_dim = heads.n_heads * latent.value_dim;
    return q_dim > out_dim ? q_dim : out_dim;
  }
  // What a recurrent layer makes of its input, for so many rows at a time, and what comes out.
  size_t mixed_dim(size_t model_dim) const {
    if (mixer == MixerKind::kShortConv) return 3 * model_dim;
    if (has_ssd()) return ssd.mixed_dim();
    if (mixer == MixerKind::kMamba1) return 3 * scan.n_channels + scan.projected_dim();
    if (is_rwkv()) return wkv.mixed_dim();
    return delta.conv_dim() + delta.value_dim() + delta.n_value_heads + delta.n_decays() +
           2 * delta.gate_rank;
  }
  // The widest vector that a recurrent layer has between two products.
  size_t vector_dim() const {
    return std::max({delta.gate_rank, ssd.step_rank, scan.step_rank, wkv.widest_rank()});
  }
  size_t mixer_out_dim(size_t model_dim) const {
    if (mixer == MixerKind::kShortConv) return model_dim;
    return std::max({heads.out_dim(), delta.value_dim(), ssd.inner_dim(), scan.n_channels, wkv.dim()});
  }
};

}  // namespace edgeh2o
