#include "model/decoder_config.h"

#include <algorithm>

#include "base/check.h"
#include "ops/experts.h"

namespace edgeh2o {
namespace {

void check_latent(const LayerSpec& layer, const RopeConfig& rope) {
  const LatentHeads& latent = layer.latent;
  EH2O_CHECK(layer.heads.n_kv_heads == 1 && layer.heads.values_are_keys && layer.heads.has_own_kv() &&
                 layer.heads.key_dim == latent.row_dim(),
             "latent attention has one KV head, whose rows are keys and values of ", latent.row_dim(),
             " dimensions");
  EH2O_CHECK(latent.nope_dim > 0 && latent.value_dim > 0 && latent.rope_dim == 2 * rope.n_pairs(),
             "heads of latent attention have ", latent.nope_dim, " + ", latent.rope_dim,
             " dimensions, of which ", 2 * rope.n_pairs(), " are rotated, and values of ", latent.value_dim);
  EH2O_CHECK(layer.qk_norm == QkNorm::kNone && !layer.norms_values, "latent attention with norms of heads");
  EH2O_CHECK(!layer.has_output_gate() || layer.output_gate == OutputGate::kPerHead,
             "latent attention may have a gate of every head, and no other");
  const IndexHeads& index = layer.heads.index;
  EH2O_CHECK(!index.has_own() || (latent.q_rank > 0 && index.key_dim >= latent.rope_dim),
             "an indexer with keys of ", index.key_dim, " dimensions, of which ", latent.rope_dim,
             " are rotated, needs q_rank > 0");
}

void check_attention(const DecoderConfig& config, const LayerSpec& layer) {
  layer.heads.check();
  EH2O_CHECK(!layer.has_output_gate() || layer.output_gate == OutputGate::kPerHead ||
                 layer.heads.key_dim == layer.heads.value_dim,
             "a gate of the output needs keys and values of one size");
  EH2O_CHECK(layer.rope < config.ropes.size(), "a layer asks for RoPE table ", layer.rope, " of ",
             config.ropes.size());
  const RopeConfig& rope = config.ropes[layer.rope];
  const IndexHeads& index = layer.heads.index;
  EH2O_CHECK(
      index.is_none() || (layer.latent.is_none() == index.scores_blocks() && layer.window == 0 &&
                          !layer.has_sinks && layer.heads.has_own_kv()),
      "an indexer chooses for latent attention without a window, or one of blocks for plain attention");
  EH2O_CHECK(!index.scores_blocks() || index.key_dim >= 2 * rope.n_pairs(), "an indexer with keys of ",
             index.key_dim, " dimensions, of which ", 2 * rope.n_pairs(), " are rotated");
  if (!layer.latent.is_none()) check_latent(layer, rope);
  EH2O_CHECK(2 * rope.n_pairs() <= layer.heads.key_dim, "rope_inv_freq has ", rope.n_pairs(),
             " entries, more than half of head_dim = ", layer.heads.key_dim);
  EH2O_CHECK(!layer.has_latent_key_norm || !layer.latent.is_none(),
             "a norm of latent keys that there are not");
  EH2O_CHECK(layer.value_scale > 0.0f && (layer.value_scale == 1.0f || layer.latent.is_none()),
             "value_scale = ", layer.value_scale, " is of plain attention, and positive");
  EH2O_CHECK(!layer.is_chunked || layer.window > 0, "chunks of a window that there is not");
  EH2O_CHECK(!layer.heads.are_lent ||
                 (config.joins(HiddenJoin::kPlain) && layer.mixer == MixerKind::kAttention &&
                  layer.latent.is_none() && layer.window != 1 && !layer.is_chunked && !layer.is_parallel &&
                  !layer.has_sinks && layer.temperature_period == 0 && layer.heads.kv_distance == 0),
             "only what drafts reads keys and values of another model, by plain attention");
  EH2O_CHECK(layer.qk_norm != QkNorm::kOwnHead || layer.heads.has_own_kv(),
             "heads with norms of their own, and keys of another layer");
  EH2O_CHECK(!layer.has_plain_qk_norm || (layer.qk_norm == QkNorm::kHead && !layer.has_head_gains),
             "norms of heads without weights that there are not");
  EH2O_CHECK(
      layer.temperature_scale >= 0.0f && (layer.temperature_scale > 0.0f) == (layer.temperature_period > 0),
      "temperature_scale = ", layer.temperature_scale,
      " with temperature_period = ", layer.temperature_period);
}

void check_layer(const DecoderConfig& config, const LayerSpec& layer) {
  EH2O_CHECK(layer.has_ffn() == (layer.ffn_dim > 0), "ffn_dim = ", layer.ffn_dim,
             layer.has_ffn() ? " must be positive" : " without a feed-forward network");
  EH2O_CHECK(layer.has_mixer() || layer.has_ffn(), "a layer has neither a mixer nor a feed-forward network");
  EH2O_CHECK(layer.attends() || layer.heads.is_none(), "a layer has heads, but no attention");
  if (layer.attends()) check_attention(config, layer);
  if (layer.mixer == MixerKind::kDeltaNet) layer.delta.check();
  EH2O_CHECK(layer.has_ssd() != layer.ssd.is_none(), "a layer has heads of Mamba-2, but no such mixer");
  if (layer.has_ssd()) {
    layer.ssd.check();
    EH2O_CHECK(layer.heads.has_own_kv(), "a recurrent layer has keys and values of its own");
    EH2O_CHECK(layer.ssd.step_rank == 0 || layer.mixer == MixerKind::kMamba2,
               "rates that are made behind a convolution, beside attention");
  }
  EH2O_CHECK((layer.mixer == MixerKind::kMamba1) != layer.scan.is_none(),
             "a layer has channels of Mamba, but no such mixer");
  if (!layer.scan.is_none()) layer.scan.check();
  const bool is_shifted = layer.ffn == FfnKind::kShifted;
  EH2O_CHECK(layer.is_rwkv() != layer.wkv.is_none() && (layer.is_rwkv() || !is_shifted) &&
                 (layer.mixer == MixerKind::kRwkv6) == layer.wkv.is_rwkv6(),
             "RWKV has heads, and may have a network that looks back, and no other layer has");
  if (!layer.wkv.is_none()) {
    layer.wkv.check();
    EH2O_CHECK(layer.wkv.dim() == config.model_dim && layer.n_conv_taps == 2 && !config.has_two_states &&
                   (layer.wkv.is_rwkv6() || (layer.wkv.value_rank == 0) == (&layer == &config.layers[0])),
               "RWKV has heads as wide as the model, and the values of its first layer in others");
    EH2O_CHECK(is_shifted ? config.centres_norms && layer.wkv.norms_heads &&
                                (layer.wkv.is_rwkv6() || layer.wkv.gate_rank > 0) &&
                                layer.activation == Activation::kReluSquared
                          : layer.ffn == FfnKind::kGated && layer.has_gate() && !config.centres_norms &&
                                !config.has_streams,
               "RWKV has LayerNorm and a network that looks back, or RMS norms and a network with a gate");
  }
  if (layer.has_mixer() && layer.mixer != MixerKind::kAttention) {
    EH2O_CHECK(layer.n_conv_taps >= 2 && layer.n_conv_taps <= kMaxConvTaps,
               "n_conv_taps = ", layer.n_conv_taps, " must be between 2 and ", kMaxConvTaps);
  }
  const bool has_experts = layer.ffn == FfnKind::kExperts;
  EH2O_CHECK(layer.n_experts_used <= layer.n_experts && (layer.n_experts_used > 0) == has_experts,
             "n_experts_used = ", layer.n_experts_used, " of n_experts = ", layer.n_experts);
  EH2O_CHECK(layer.n_expert_groups <= kMaxExpertGroups, layer.n_expert_groups, " groups of experts; at most ",
             kMaxExpertGroups, " are supported");
  EH2O_CHECK(layer.n_expert_groups_used > 0 && layer.n_expert_groups_used <= layer.n_expert_groups &&
                 (layer.n_expert_groups == 1 || layer.n_experts % layer.n_expert_groups == 0),
             layer.n_expert_groups_used, " of ", layer.n_expert_groups, " groups of ", layer.n_experts,
             " experts");
  EH2O_CHECK(layer.n_experts_used * layer.n_expert_groups <= layer.n_experts * layer.n_expert_groups_used,
             layer.n_experts_used, " experts of a token are more than ", layer.n_expert_groups_used, " of ",
             layer.n_expert_groups, " groups have");
  EH2O_CHECK(!layer.is_parallel || (layer.mixer == MixerKind::kAttention && layer.has_ffn() &&
                                    layer.norm_placement == NormPlacement::kPre && layer.latent.is_none() &&
                                    !layer.has_expert_norms && !layer.routes_by_input),
             "only a plain network, or plain experts, go beside plain attention");
  EH2O_CHECK(layer.experts_scale == 1.0f || (has_experts && !layer.has_post_norm()),
             "a factor of experts that are not there, or are normed behind it");
  EH2O_CHECK(layer.is_parallel || !layer.has_parallel_norm, "a norm of a network beside nothing");
  EH2O_CHECK((layer.qkv_limit == 0.0f && !layer.has_joint_bias) ||
                 (layer.mixer == MixerKind::kAttention && layer.latent.is_none() && layer.gate_dim() == 0 &&
                  layer.heads.has_own_kv()),
             "limits and joint biases of queries, keys and values are of plain attention");
  EH2O_CHECK(!layer.has_sub_norms ||
                 (layer.mixer == MixerKind::kAttention && layer.ffn == FfnKind::kGated && layer.has_gate() &&
                  layer.heads.has_own_kv() && layer.latent.is_none() && !layer.has_output_gate() &&
                  !layer.is_parallel && !config.centres_norms && !config.has_norm_biases),
             "norms behind attention and activations are of plain attention and plain networks");
  EH2O_CHECK(layer.output_scale == 1.0f || (!layer.has_output_scale && !config.has_streams),
             "two factors of the residual stream behind a layer");
  EH2O_CHECK(layer.qkv_limit >= 0.0f, "qkv_limit = ", layer.qkv_limit);
  EH2O_CHECK(config.has_norm_weights || config.centres_norms || layer.has_head_gains || config.has_two_states,
             "RMS norms without weights");
  EH2O_CHECK(!layer.has_head_gains ||
                 (layer.mixer == MixerKind::kAttention && layer.ffn == FfnKind::kGated &&
                  layer.norm_placement == NormPlacement::kPre && layer.qk_norm == QkNorm::kHead &&
                  layer.qk_norm_after_rope && layer.latent.is_none() && layer.heads.has_own_kv() &&
                  !layer.is_parallel && !layer.has_sub_norms && !config.centres_norms),
             "gains of heads are of plain attention whose heads are normed behind the rotary embedding");
  EH2O_CHECK(
      !config.centres_norms || ((layer.mixer == MixerKind::kAttention || layer.is_rwkv()) &&
                                layer.has_ffn() && !layer.has_expert_norms && !layer.has_post_norm() &&
                                (layer.qk_norm == QkNorm::kNone || layer.qk_norm == QkNorm::kLayer) &&
                                !layer.norms_values && layer.latent.is_none() && layer.token_input_dim == 0),
      "LayerNorm is of the inputs of plain attention, RWKV, and plain networks or experts");
  EH2O_CHECK(
      !config.has_norm_biases ||
          (layer.mixer == MixerKind::kAttention && layer.ffn != FfnKind::kNone &&
           layer.norm_placement == NormPlacement::kPre && !layer.has_expert_norms && layer.latent.is_none()),
      "norms with biases are of the inputs of plain attention and of networks");
  EH2O_CHECK(layer.token_input_dim == config.token_input_dim(),
             "layers differ in the width of their inputs per token");
  EH2O_CHECK(
      (layer.laurel_rank == 0 && !config.has_streams) ||
          (layer.mixer == MixerKind::kAttention && layer.ffn == FfnKind::kGated && layer.latent.is_none() &&
           layer.has_pre_norm() && !layer.is_parallel && !layer.has_output_scale &&
           !layer.has_output_gate() && !config.centres_norms && !config.has_norm_biases),
      "LAuReL and several residual streams go with plain attention and plain networks");
  for (const GateLimits& limits : {layer.limits, layer.shared_limits}) {
    EH2O_CHECK(!limits.any() || (limits.gate > 0.0f && limits.up > 0.0f && layer.has_gate()), "limits of ",
               limits.gate, " and ", limits.up, " of a gate that is not there, or of half of it");
  }
  EH2O_CHECK(!layer.cuts_gate() || (layer.has_gate() && layer.ffn == FfnKind::kGated && layer.ffn_dim > 1),
             "a cutoff of a gate that is not there");
  EH2O_CHECK(!layer.scales_expert_inputs || (has_experts && !layer.has_expert_norms),
             "only the inputs of a plain mixture of experts are scaled");
  EH2O_CHECK(!layer.routes_by_input || (has_experts && !layer.has_expert_norms && !config.has_streams),
             "only a plain mixture of experts is chosen by the input of its layer");
  EH2O_CHECK(config.post_norm_eps == 0.0f ||
                 (layer.has_post_norm() && layer.mixer == MixerKind::kAttention && !has_experts),
             "post_norm_eps = ", config.post_norm_eps,
             " is of norms behind plain attention and plain networks");
  EH2O_CHECK(layer.adjugate_ffn_dim == 0 ||
                 (has_experts && layer.has_gate() && layer.n_adjugate_sharers > 0 &&
                  layer.n_experts % layer.n_adjugate_sharers == 0 && !layer.limits_gates() &&
                  !layer.has_expert_norms && !layer.scales_expert_inputs),
             "an expert is shared by ", layer.n_adjugate_sharers, " of ", layer.n_experts,
             " of a plain mixture");
  EH2O_CHECK(layer.shared_ffn_dim == 0 || has_experts, "a shared expert without experts");
  EH2O_CHECK(
      layer.norm_placement != NormPlacement::kSum ||
          (config.centres_norms && layer.mixer == MixerKind::kAttention &&
           (layer.ffn == FfnKind::kGated || has_experts) && !layer.routes_by_input &&
           !layer.has_output_gate() && layer.laurel_rank == 0),
      "norms of the residual stream are LayerNorm, behind plain attention and plain networks or experts");
  EH2O_CHECK(!layer.has_second_norm ||
                 (layer.norm_placement == NormPlacement::kSum && layer.qkv_dim() >= config.model_dim),
             "a second norm behind attention of another kind");
  EH2O_CHECK(layer.qk_norm != QkNorm::kLayer ||
                 (config.centres_norms && layer.heads.has_own_kv() && layer.heads.index.is_none()),
             "LayerNorm of queries and keys is of models that have no other, and of plain attention");
  EH2O_CHECK(layer.has_mixer_norm || (layer.has_pre_norm() && !layer.shares_norm()),
             "a norm of the mixer's input is left out where there is none, or another's is the same");
  EH2O_CHECK(layer.heads.is_causal == config.is_causal(), "some layers are causal and others are not");
  EH2O_CHECK(
      layer.heads.is_causal || (layer.mixer == MixerKind::kAttention && layer.heads.has_own_kv() &&
                                !layer.is_chunked && layer.latent.is_none() && layer.temperature_period == 0),
      "only plain attention to keys of the layer's own reads what is behind a token");
  EH2O_CHECK(
      layer.heads.max_alibi_bias == 0.0f || (layer.mixer == MixerKind::kAttention && layer.latent.is_none() &&
                                             !layer.heads.are_lent && !config.reads_hidden),
      "a bias by distance (ALiBi) is of plain attention");
  EH2O_CHECK((layer.norm_placement == NormPlacement::kNone) == config.mixes_streams(),
             "streams that are mixed have the norms of a layer");
  EH2O_CHECK(
      !config.mixes_streams() ||
          ((layer.mixer == MixerKind::kAttention || layer.mixer == MixerKind::kDeltaNet) && layer.has_ffn() &&
           layer.latent.is_none() && !layer.is_parallel && !layer.has_expert_norms && !layer.has_sub_norms &&
           !layer.has_head_gains && !layer.routes_by_input && layer.laurel_rank == 0 &&
           layer.residual_scale == 1.0f && layer.experts_scale == 1.0f && !layer.has_output_scale &&
           layer.output_scale == 1.0f && layer.heads.has_own_kv()),
      "streams are mixed before plain attention, delta nets, plain networks and plain experts");
  EH2O_CHECK(!layer.has_delta_sigmoid || layer.mixer == MixerKind::kDeltaNet,
             "a gate of a delta net that is not there");
  const size_t n_seen = config.ngrams.is_none() ? 0 : config.ngrams.history_rows();
  EH2O_CHECK(!layer.looks_up_ngrams() ||
                 (layer.mixer == MixerKind::kDeltaNet && &layer == &config.layers[config.ngrams.layer] &&
                  layer.history_rows == n_seen && layer.history_dim == config.streams_dim()),
             "n-grams are looked up before one delta net, and convolved over ", n_seen, " rows of ",
             config.streams_dim(), " numbers, not ", layer.history_rows, " of ", layer.history_dim);
  EH2O_CHECK(layer.shared_ffn_dim > 0 || !layer.has_shared_gate, "a gate without a shared expert");
  EH2O_CHECK(layer.shared_ffn_dim > 0 || !layer.has_expert_norms, "norms of experts without a shared one");
}

void check_streams(const DecoderConfig& config) {
  if (config.mixes_streams()) {
    EH2O_CHECK(config.n_streams >= 2 && config.n_streams <= kMaxMixedStreams && config.stream_rank > 0 &&
                   config.stream_rank <= kMaxStreamRank,
               config.n_streams, " streams, mixed by vectors of ", config.stream_rank, " numbers");
    EH2O_CHECK(!config.has_streams && config.passes.empty() && !config.has_two_states &&
                   !config.reads_hidden && !config.centres_norms && !config.has_norm_biases &&
                   config.has_norm_weights && config.token_input_dim() == 0,
               "streams that are mixed go with RMS norms, and layers that are gone through once");
  }
  const NgramConfig& ngrams = config.ngrams;
  if (ngrams.is_none()) return;
  EH2O_CHECK(config.mixes_streams() && ngrams.layer < config.n_layers() &&
                 config.layers[ngrams.layer].looks_up_ngrams(),
             "n-grams are looked up in layer ", ngrams.layer, " of ", config.n_layers(),
             ", for streams that are mixed");
  EH2O_CHECK(ngrams.n_tokens >= 2 && ngrams.n_tokens <= kMaxNgramTokens && ngrams.n_heads_per_size > 0 &&
                 ngrams.n_heads_per_size <= kMaxNgramHeads && ngrams.n_heads() <= kMaxNgramHeads,
             "n-grams of up to ", ngrams.n_tokens, " tokens, with ", ngrams.n_heads_per_size,
             " rows for every number of tokens");
  EH2O_CHECK(ngrams.n_taps >= 2 && ngrams.n_taps <= kMaxConvTaps, "n-grams are convolved over ",
             ngrams.n_taps, " tokens; it must be between 2 and ", kMaxConvTaps);
  EH2O_CHECK(ngrams.row_dim > 0 && ngrams.row_dim * ngrams.n_heads() == config.model_dim, ngrams.n_heads(),
             " rows of ", ngrams.row_dim, " numbers are as wide as the model");
  EH2O_CHECK(ngrams.factors.size() == ngrams.n_tokens && ngrams.offsets.size() == ngrams.n_heads() &&
                 ngrams.sizes.size() == ngrams.n_heads(),
             "n-grams have a factor per token, and an offset and a size per row");
  for (size_t h = 0; h < ngrams.n_heads(); ++h) {
    EH2O_CHECK(ngrams.sizes[h] > 0 && ngrams.offsets[h] < ngrams.n_rows &&
                   ngrams.sizes[h] <= ngrams.n_rows - ngrams.offsets[h],
               "rows ", ngrams.offsets[h], " + ", ngrams.sizes[h], " are outside a table of ", ngrams.n_rows);
  }
}

}  // namespace

std::vector<LayerKeeps> DecoderConfig::keeps() const {
  std::vector<LayerKeeps> result;
  for (const LayerSpec& layer : layers) {
    const size_t chunk = layer.is_chunked ? layer.window : 0;
    result.push_back({layer.heads, layer.recurrence(model_dim), layer.window > 0, chunk});
  }
  return result;
}

size_t DecoderConfig::n_storing_layers() const {
  size_t n = layers.size();
  while (n > 1 && !layers[n - 1].keeps_tokens()) --n;
  return n;
}

size_t DecoderConfig::n_own_layers() const {
  if (passes.empty()) return layers.size();
  return pass_layers() * (1 + *std::max_element(passes.begin(), passes.end()));
}

size_t DecoderConfig::own_layer(size_t layer) const {
  if (passes.empty()) return layer;
  return pass_layers() * passes[layer / pass_layers()] + layer % pass_layers();
}

size_t DecoderConfig::first_use(size_t own_layer) const {
  if (passes.empty()) return own_layer;
  const auto first = std::find(passes.begin(), passes.end(), own_layer / pass_layers());
  return pass_layers() * static_cast<size_t>(first - passes.begin()) + own_layer % pass_layers();
}

void DecoderConfig::check() const {
  EH2O_CHECK(!layers.empty() && model_dim > 0 && vocab_size > 0,
             "decoder sizes must be positive: n_layers=", layers.size(), ", model_dim=", model_dim,
             ", vocab_size=", vocab_size);
  EH2O_CHECK((token_input_rows > 0) == (token_input_dim() > 0), "token_input_rows = ", token_input_rows,
             " with token_input_dim = ", token_input_dim());
  EH2O_CHECK(post_norm_eps >= 0.0f, "post_norm_eps = ", post_norm_eps);
  EH2O_CHECK(
      !norms_embeddings || (!has_streams && token_input_dim() == 0 && n_positions == 0 && !reads_hidden),
      "normed embeddings go into the first layer and nothing else");
  EH2O_CHECK(n_guessed <= vocab_size && (n_guessed == 0 || reads_hidden), "logits of ", n_guessed, " of ",
             vocab_size, " tokens");
  EH2O_CHECK(!reads_hidden || (!has_streams && !has_output_bias),
             "a layer that guesses tokens ahead has one "
             "residual stream, and no biases of logits");
  EH2O_CHECK(reads_hidden || (hidden_dim == 0 && features_dim == 0), "hidden rows that nothing reads");
  EH2O_CHECK(!joins(HiddenJoin::kNormed) || (hidden_dim == 0 && features_dim == 0),
             "rows that are joined normed are as wide as the model");
  EH2O_CHECK(
      !joins(HiddenJoin::kPlain) || std::all_of(layers.begin(), layers.end(),
                                                [](const LayerSpec& layer) { return layer.heads.are_lent; }),
      "what joins a hidden row as it is keeps no keys and values of its own");
  EH2O_CHECK(!joins(HiddenJoin::kCached) ||
                 (features_dim > 0 && hidden_dim == 0 && !centres_norms && !has_embedding_norm &&
                  !norms_embeddings && n_positions == 0 && !has_token_type &&
                  std::all_of(layers.begin(), layers.end(),
                              [](const LayerSpec& layer) {
                                return layer.mixer == MixerKind::kAttention && layer.latent.is_none() &&
                                       layer.heads.has_own_kv() && layer.heads.index.is_none() &&
                                       layer.gate_dim() == 0 && !layer.is_chunked && !layer.is_parallel &&
                                       layer.qk_norm == QkNorm::kHead && !layer.qk_norm_after_rope;
                              })),
             "keys and values are made of hidden rows for plain attention with norms of heads");
  EH2O_CHECK(!joins(HiddenJoin::kApart) ||
                 (n_layers() == 1 && features_dim > 0 && hidden_dim == 0 && !centres_norms &&
                  !has_embedding_norm && !norms_embeddings && n_positions == 0 && !has_token_type &&
                  layers[0].mixer == MixerKind::kAttention && !layers[0].has_mixer_norm &&
                  layers[0].latent.is_none() && layers[0].heads.has_own_kv() &&
                  layers[0].is_parallel == false && layers[0].laurel_rank == 0),
             "a row that stands apart goes into one layer of plain attention without a norm of its input");
  EH2O_CHECK(passes.empty() || (!has_streams && token_input_dim() == 0 && !reads_hidden && !centres_norms &&
                                !has_norm_biases),
             "layers that are gone through several times have one residual stream and RMS norms");
  for (size_t i = 0; i < n_own_layers(); i += pass_layers()) {
    EH2O_CHECK(first_use(i) < layers.size(), "no pass goes through the layers from ", i, " on");
  }
  EH2O_CHECK(!norms_passes || !passes.empty(), "norms between passes that there are not");
  EH2O_CHECK(is_causal() || (passes.empty() && !has_streams && !reads_hidden && token_input_dim() == 0),
             "a model whose tokens read those behind them has plain layers");
  EH2O_CHECK(has_output_norm || (!is_causal() && layers.back().norm_placement == NormPlacement::kSum),
             "only a residual stream that its layer has normed needs no other norm");
  EH2O_CHECK(!has_two_states || (!passes.empty() && passes[0] == 0 && n_own_layers() == 2 * pass_layers() &&
                                 !norms_passes && n_positions == 0),
             "the states of two stacks that there are not");
  for (const RopeConfig& rope : ropes) {
    EH2O_CHECK(rope.long_inv_freq.empty() || rope.long_inv_freq.size() == rope.n_pairs(),
               "a table of RoPE frequencies has ", rope.long_inv_freq.size(), " entries, another ",
               rope.n_pairs());
  }
  check_streams(*this);
  EH2O_CHECK(
      !chooses_adapters() || (adapter_tokens.size() == adapter_scales.size() && adapter_gain > 0.0f &&
                              passes.empty() && !reads_hidden && !norms_embeddings && token_input_dim() == 0),
      adapter_tokens.size(), " tokens that choose one of ", adapter_scales.size(), " adapters, by a gain of ",
      adapter_gain, ", of a plain decoder");
  for (const AdapterToken& each : adapter_tokens) {
    EH2O_CHECK(each.token >= 0 && each.substitute >= 0 && static_cast<size_t>(each.token) < vocab_size &&
                   static_cast<size_t>(each.substitute) < vocab_size,
               "token ", each.token, ", which is read as ", each.substitute, ", chooses an adapter of ",
               vocab_size, " tokens");
  }
  const LayerSpec* choosing = nullptr;  // the last layer with an indexer of its own
  for (const LayerSpec& layer : layers) {
    check_layer(*this, layer);
    EH2O_CHECK(!chooses_adapters() || (layer.mixer == MixerKind::kAttention && layer.latent.is_none() &&
                                       layer.ffn == FfnKind::kGated && !layer.has_head_gains),
               "adapters that tokens choose are of plain attention and plain networks");
    const IndexHeads& index = layer.heads.index;
    if (index.has_own()) choosing = &layer;
    EH2O_CHECK(index.is_none() || (choosing && choosing->heads.index.top_k == index.top_k),
               "a layer reads what no layer before it has chosen");
  }
}

}  // namespace edgeh2o
