// The names of a decoder's tensors and their places.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "kernels/streams.h"
#include "model/weights.h"

namespace edgeh2o {

Weights::Weights(const DecoderConfig& config, const KernelTable& table, const Weights* main)
    : config_(config), table_(&table), main_(main), layers_(config.n_own_layers()) {
  config_.check();
  EH2O_CHECK((main != nullptr) == config.reads_hidden,
             "a layer that guesses tokens ahead, and no other, has a model that it belongs to");
  EH2O_CHECK(!main || (main->table_ == table_ && main->config_.vocab_size == config.vocab_size),
             "what guesses tokens ahead has the vocabulary and the kernels of its model");
  const bool shares_width = config.reads_hidden && config.features_dim == 0;
  EH2O_CHECK(!main || !shares_width || main->config_.model_dim == config.hidden_width(),
             "what guesses tokens ahead reads rows of ", config.hidden_width(), " numbers, the model has ",
             main ? main->config_.model_dim : 0);
  for_each_tensor([this](const std::string& name, const Slot& slot) { slots_.emplace(name, slot); });
}

template <typename F>
void Weights::for_each_tensor(const F& f) {
  const size_t model_dim = config_.model_dim;
  const auto matrix = [&](const std::string& name, PackedMatrix& slot, size_t rows, size_t cols,
                          bool required) {
    f(name, Slot{&slot, nullptr, rows, cols, required});
  };
  const auto vector = [&](const std::string& name, std::vector<float>& slot, size_t size, bool required) {
    f(name, Slot{nullptr, &slot, 1, size, required});
  };
  const auto linear = [&](const std::string& name, Linear& slot, size_t rows, size_t cols) {
    matrix(name + ".weight", slot.weight, rows, cols, true);
    vector(name + ".bias", slot.bias, rows, false);
  };
  const bool shares_embedding = main_ && !config_.joins(HiddenJoin::kPlain);
  matrix("token_embd.weight", token_embd_.weight, config_.vocab_size, model_dim, !shares_embedding);
  if (config_.norms_embeddings) ones_.assign(model_dim, 1.0f);
  if (config_.n_positions > 0) {
    matrix("position_embd.weight", position_embd_, config_.n_positions, model_dim, true);
  }
  matrix("output.weight", output_.weight, config_.n_outputs(), model_dim, !main_ && !config_.tied_embeddings);
  const auto norm = [&](const std::string& name, std::vector<float>& slot) {
    if (config_.has_norm_weights) {
      vector(name, slot, model_dim, true);
    } else {
      slot.assign(model_dim, 1.0f);
    }
  };
  const auto mixer = [&](const std::string& name, StreamMixer& slot) {
    vector(name + "_norm.weight", slot.norm, config_.streams_dim(), true);
    linear(name + "_down", slot.down, config_.stream_rank, config_.streams_dim());
    linear(name + "_up", slot.up, config_.streams_dim(), config_.stream_rank);
  };
  if (config_.mixes_streams()) {
    mixer("output_hc", output_mixer_);
  } else if (config_.has_output_norm) {
    norm("output_norm.weight", output_norm_);
  }
  if (config_.has_token_type) vector("token_types.weight", token_type_, model_dim, true);
  if (config_.has_embedding_norm) {
    vector("token_embd_norm.weight", token_norm_, model_dim, true);
    vector("token_embd_norm.bias", token_norm_bias_, model_dim, false);
  }
  if (config_.has_two_states) vector("first_state.weight", first_state_, model_dim, true);
  if (config_.reads_hidden) {
    const size_t width = config_.hidden_width();
    if (config_.features_dim > 0) {
      linear("features", features_, model_dim, config_.features_dim);
      if (config_.norms_features) {
        vector("features_norm.weight", features_norm_, config_.features_dim, true);
      }
    } else {
      linear("hidden_proj", hidden_proj_, model_dim, 2 * width);
    }
    if (config_.hidden_join == HiddenJoin::kCached) {
      vector("hidden_norm.weight", hidden_norm_, model_dim, true);
    } else if (config_.hidden_join == HiddenJoin::kPlain) {
      linear("hidden_out", hidden_out_, width, model_dim);
    } else {
      vector("embedding_norm.weight", embedding_norm_, model_dim, true);
      vector("hidden_norm.weight", hidden_norm_, model_dim, true);
    }
  }
  if (config_.has_output_bias) vector("output.bias", output_.bias, config_.vocab_size, true);
  const bool must_have_biases = config_.has_norm_biases;
  const bool may_have_biases = config_.centres_norms || must_have_biases;
  if (may_have_biases && config_.has_output_norm) {
    vector("output_norm.bias", output_norm_bias_, model_dim, must_have_biases);
  }
  const size_t input_dim = config_.token_input_dim();
  if (input_dim > 0) {
    const size_t all_inputs = layers_.size() * input_dim;
    const size_t n_rows = config_.token_input_rows;
    token_inputs_.resize(ceil_div(config_.vocab_size, n_rows));
    for (size_t part = 0; part < token_inputs_.size(); ++part) {
      matrix("per_layer_token_embd." + std::to_string(part) + ".weight", token_inputs_[part],
             std::min(n_rows, config_.vocab_size - part * n_rows), all_inputs, true);
    }
    vector("per_layer_proj_norm.weight", token_input_norm_, input_dim, true);
  }
  if (config_.has_streams) {
    streams_in_.resize(kStreams - 1);
    streams_out_.resize(kStreams - 1);
    for (size_t k = 0; k + 1 < kStreams; ++k) {
      const std::string number = "." + std::to_string(k) + ".weight";
      matrix("altup_proj" + number, streams_in_[k], model_dim, model_dim, true);
      matrix("altup_unembd_proj" + number, streams_out_[k], model_dim, model_dim, true);
    }
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    const LayerSpec& spec = config_.layers[config_.first_use(i)];
    const AttentionHeads& heads = spec.heads;
    LayerWeights& layer = layers_[i];
    if (spec.has_pre_norm()) {
      const bool has_mixer_norm = spec.has_mixer() && spec.has_mixer_norm;
      if (has_mixer_norm) norm(prefix + "attn_norm.weight", layer.attn_norm);
      const bool has_ffn_norm = spec.has_ffn() && (!spec.is_parallel || spec.has_parallel_norm);
      if (has_ffn_norm) norm(prefix + "ffn_norm.weight", layer.ffn_norm);
      if (may_have_biases) {
        if (spec.has_mixer_norm)
          vector(prefix + "attn_norm.bias", layer.attn_norm_bias, model_dim, must_have_biases);
        if (has_ffn_norm) vector(prefix + "ffn_norm.bias", layer.ffn_norm_bias, model_dim, must_have_biases);
      }
    }
    if (config_.mixes_streams()) {
      for (const auto& [name, slot] :
           {std::pair("hc_attn", &layer.attn_mixer), {"hc_ffn", &layer.ffn_mixer}}) {
        mixer(prefix + name, *slot);
        linear(prefix + name + "_inject", slot->shares, config_.n_streams, config_.streams_dim());
      }
    }
    if (spec.looks_up_ngrams()) {
      NgramWeights& ngrams = layer.ngrams;
      linear(prefix + "ple_key", ngrams.key, config_.streams_dim(), model_dim);
      linear(prefix + "ple_value", ngrams.value, model_dim, model_dim);
      vector(prefix + "ple_norm_key.weight", ngrams.key_norm, config_.streams_dim(), true);
      vector(prefix + "ple_norm_query.weight", ngrams.query_norm, config_.streams_dim(), true);
      vector(prefix + "ple_norm_conv.weight", ngrams.conv_norm, config_.streams_dim(), true);
      f(prefix + "ple_conv1d.weight",
        Slot{nullptr, &ngrams.conv, config_.streams_dim(), config_.ngrams.n_taps, true});
    }
    if (spec.has_post_norm()) {
      vector(prefix + "post_attention_norm.weight", layer.attn_post_norm, model_dim, true);
      vector(prefix + "post_ffw_norm.weight", layer.ffn_post_norm, model_dim, true);
    }
    if (spec.norm_placement == NormPlacement::kSum) {
      vector(prefix + "attn_output_norm.weight", layer.attn_sum_norm, model_dim, true);
      vector(prefix + "attn_output_norm.bias", layer.attn_sum_norm_bias, model_dim, false);
      vector(prefix + "layer_output_norm.weight", layer.ffn_sum_norm, model_dim, true);
      vector(prefix + "layer_output_norm.bias", layer.ffn_sum_norm_bias, model_dim, false);
      if (spec.has_second_norm) {
        vector(prefix + "attn_norm_2.weight", layer.second_norm, model_dim, true);
        vector(prefix + "attn_norm_2.bias", layer.second_norm_bias, model_dim, false);
      }
    }
    if (spec.has_head_gains) {
      layer.attn_q_norm.assign(heads.key_dim, 1.0f);
      layer.attn_k_norm.assign(heads.key_dim, 1.0f);
      f(prefix + "attn_q_norm.weight", Slot{nullptr, &layer.head_gains, heads.n_heads, 1, true});
      vector(prefix + "embedding_share.weight", layer.embedding_share, 1, true);
      vector(prefix + "attn_output.scale", layer.attn_output.scale, 1, false);
    } else if (spec.has_plain_qk_norm) {
      layer.attn_q_norm.assign(heads.key_dim, 1.0f);
      layer.attn_k_norm.assign(heads.key_dim, 1.0f);
    } else if (spec.qk_norm == QkNorm::kOwnHead && !heads.is_none()) {
      f(prefix + "attn_q_norm.weight",
        Slot{nullptr, &layer.attn_q_norm, heads.n_heads, heads.key_dim, true, false, 1});
      f(prefix + "attn_k_norm.weight",
        Slot{nullptr, &layer.attn_k_norm, heads.n_kv_heads, heads.key_dim, true, false, 1});
    } else if (spec.qk_norm != QkNorm::kNone && !heads.is_none()) {
      const bool is_per_head = spec.qk_norm == QkNorm::kHead;
      vector(prefix + "attn_q_norm.weight", layer.attn_q_norm, is_per_head ? heads.key_dim : heads.q_dim(),
             true);
      if (heads.has_own_kv()) {
        vector(prefix + "attn_k_norm.weight", layer.attn_k_norm, is_per_head ? heads.key_dim : heads.k_dim(),
               true);
      }
      if (spec.qk_norm == QkNorm::kLayer) {
        vector(prefix + "attn_q_norm.bias", layer.attn_q_norm_bias, heads.q_dim(), false);
        vector(prefix + "attn_k_norm.bias", layer.attn_k_norm_bias, heads.k_dim(), false);
      }
    }
    if (spec.has_joint_bias)
      vector(prefix + "attn_qkv.bias", layer.attn_qkv_bias, heads.q_dim() + heads.k_dim() + heads.v_dim(),
             true);
    if (spec.has_sinks && !heads.is_none())
      vector(prefix + "attn_sinks.weight", layer.attn_sinks, heads.n_heads, true);
    if (spec.norms_values) layer.attn_v_norm.assign(heads.value_dim, 1.0f);
    if (spec.mixer == MixerKind::kShortConv) {
      linear(prefix + "shortconv.in_proj", layer.conv_in, 3 * model_dim, model_dim);
      f(prefix + "shortconv.conv.weight", Slot{nullptr, &layer.conv, model_dim, spec.n_conv_taps, true});
      linear(prefix + "shortconv.out_proj", layer.conv_out, model_dim, model_dim);
    } else if (spec.mixer == MixerKind::kDeltaNet) {
      const DeltaHeads& delta = spec.delta;
      const bool is_split = delta.decays_by_row;
      if (!is_split) {
        linear(prefix + "attn_qkv", layer.delta_qkv, delta.conv_dim(), model_dim);
        linear(prefix + "attn_gate", layer.delta_z, delta.value_dim(), model_dim);
      }
      const auto gate = [&](const std::string& name, Linear& whole, Linear& first) {
        const size_t rank = delta.gate_rank;
        linear(prefix + name + "_a", rank > 0 ? first : whole, rank > 0 ? rank : delta.value_dim(),
               model_dim);
        if (rank > 0) linear(prefix + name + "_b", whole, delta.value_dim(), rank);
      };
      if (is_split) {
        for (const auto& [name, slot, taps] : {std::tuple("q", &layer.attn_q, &layer.conv_parts[0]),
                                               {"k", &layer.attn_k, &layer.conv_parts[1]},
                                               {"v", &layer.attn_v, &layer.conv_parts[2]}}) {
          linear(prefix + "attn_" + name, *slot, delta.value_dim(), model_dim);
          f(prefix + "ssm_conv1d_" + name + ".weight",
            Slot{nullptr, taps, delta.value_dim(), spec.n_conv_taps, true});
        }
        linear(prefix + "ssm_beta", layer.delta_rate, delta.n_value_heads, model_dim);
        gate("ssm_g", layer.delta_z, layer.delta_z_a);
        gate("ssm_f", layer.delta_decay, layer.delta_decay_a);
        f(prefix + "ssm_a", Slot{nullptr, &layer.delta_a, delta.n_value_heads, 1, true});
      } else if (delta.are_grouped) {
        linear(prefix + "ssm_ba", layer.delta_gates, 2 * delta.n_value_heads, model_dim);
      } else {
        linear(prefix + "ssm_beta", layer.delta_rate, delta.n_value_heads, model_dim);
        linear(prefix + "ssm_alpha", layer.delta_decay, delta.n_value_heads, model_dim);
      }
      if (!is_split) {
        f(prefix + "ssm_conv1d.weight", Slot{nullptr, &layer.conv, delta.conv_dim(), spec.n_conv_taps, true});
        vector(prefix + "ssm_a", layer.delta_a, delta.n_value_heads, true);
      }
      vector(prefix + "ssm_dt.bias", layer.delta_bias, delta.n_decays(), true);
      vector(prefix + "ssm_norm.weight", layer.delta_norm, delta.head_dim, true);
      linear(prefix + (is_split ? "attn_output" : "ssm_out"), layer.delta_out, model_dim, delta.value_dim());
      // An RMS norm, over the root of the size, has length 1.
      const float scale = 1.0f / std::sqrt(static_cast<float>(delta.head_dim));
      layer.delta_k_scale.assign(delta.head_dim, scale);
      layer.delta_q_scale.assign(delta.head_dim, scale * scale);
    } else if (spec.mixer == MixerKind::kRwkv7) {
      TimeMix& mix = layer.time_mix;
      const WkvHeads& wkv = spec.wkv;
      const auto pair = [&](const std::string& name, Linear& in, Linear& out, size_t rank) {
        linear(prefix + "time_mix_" + name + "1", in, rank, model_dim);
        linear(prefix + "time_mix_" + name + "2", out, model_dim, rank);
      };
      const auto numbers = [&](const std::string& name, std::vector<float>& slot) {
        vector(prefix + name, slot, model_dim, true);
      };
      for (size_t i = 0; i < mix.shares.size() - (wkv.gate_rank == 0); ++i) {
        numbers("time_mix_lerp_fused." + std::to_string(i) + ".weight", mix.shares[i]);
      }
      linear(prefix + "time_mix_receptance", mix.queries, model_dim, model_dim);
      linear(prefix + "time_mix_key", mix.keys, model_dim, model_dim);
      linear(prefix + "time_mix_value", mix.values, model_dim, model_dim);
      linear(prefix + "time_mix_output", mix.output, model_dim, model_dim);
      pair("w", mix.decays_in, mix.decays_out, wkv.decay_rank);
      pair("a", mix.rates_in, mix.rates_out, wkv.rate_rank);
      if (wkv.gate_rank > 0) pair("g", mix.gates_in, mix.gates_out, wkv.gate_rank);
      numbers("time_mix_w0.weight", mix.decay_bias);
      numbers("time_mix_a0.weight", mix.rate_bias);
      if (wkv.value_rank > 0) {
        pair("v", mix.values_in, mix.values_out, wkv.value_rank);
        numbers("time_mix_v0.weight", mix.value_bias);
      }
      numbers("time_mix_k_k.weight", mix.direction_factors);
      numbers("time_mix_k_a.weight", mix.key_factors);
      numbers("time_mix_r_k.weight", mix.bonus);
      if (wkv.norms_heads) {
        numbers("time_mix_ln.weight", mix.norm);
        numbers("time_mix_ln.bias", mix.norm_bias);
      }
      mix.ones.assign(std::max(model_dim, wkv.gate_rank), 1.0f);
      if (spec.ffn == FfnKind::kShifted) numbers("channel_mix_lerp_k.weight", layer.ffn_shares);
    } else if (spec.mixer == MixerKind::kRwkv6) {
      TimeMix& mix = layer.time_mix;
      const WkvHeads& wkv = spec.wkv;
      const auto numbers = [&](const std::string& name, std::vector<float>& slot) {
        vector(prefix + name + ".weight", slot, model_dim, true);
      };
      numbers("time_mix_lerp_x", mix.first_shares);
      linear(prefix + "time_mix_w1", mix.shifts_in, mix.shifts_out.size() * wkv.shift_rank, model_dim);
      for (size_t i = 0; i < mix.shifts_out.size(); ++i) {
        numbers("time_mix_lerp_fused." + std::to_string(i), mix.shares[i]);
        linear(prefix + "time_mix_w2." + std::to_string(i), mix.shifts_out[i], model_dim, wkv.shift_rank);
      }
      linear(prefix + "time_mix_decay_w1", mix.decays_in, wkv.decay_rank, model_dim);
      linear(prefix + "time_mix_decay_w2", mix.decays_out, model_dim, wkv.decay_rank);
      for (const auto& [name, slot, n_outputs] : {std::tuple("receptance", &mix.queries, model_dim),
                                                  {"key", &mix.keys, wkv.kv_dim()},
                                                  {"value", &mix.values, wkv.kv_dim()},
                                                  {"gate", &mix.gates_in, model_dim},
                                                  {"output", &mix.output, model_dim}}) {
        linear(prefix + "time_mix_" + name, *slot, n_outputs, model_dim);
      }
      numbers("time_mix_decay", mix.decay_bias);
      if (wkv.norms_heads) {
        f(prefix + "time_mix_first.weight",
          Slot{nullptr, &mix.bonus, wkv.n_heads, wkv.head_dim, true, false, 1});
        numbers("time_mix_ln", mix.norm);
        vector(prefix + "time_mix_ln.bias", mix.norm_bias, model_dim, true);
      }
      if (spec.ffn == FfnKind::kShifted) {
        numbers("channel_mix_lerp_k", layer.ffn_shares);
        numbers("channel_mix_lerp_r", layer.ffn_gate_shares);
        linear(prefix + "channel_mix_receptance", layer.ffn_output_gate, model_dim, model_dim);
      }
    } else if (spec.mixer == MixerKind::kMamba1) {
      const ScanSizes& scan = spec.scan;
      linear(prefix + "ssm_in", layer.ssm_in, 2 * scan.n_channels, model_dim);
      f(prefix + "ssm_conv1d.weight", Slot{nullptr, &layer.conv, scan.n_channels, spec.n_conv_taps, true});
      vector(prefix + "ssm_conv1d.bias", layer.conv_bias, scan.n_channels, false);
      linear(prefix + "ssm_x", layer.ssm_x, scan.projected_dim(), scan.n_channels);
      linear(prefix + "ssm_dt", layer.ssm_dt, scan.n_channels, scan.step_rank);
      const auto scan_norm = [&](const char* name, std::vector<float>& slot, size_t size) {
        if (scan.norms == ScanNorms::kWeighted) vector(prefix + name, slot, size, true);
        if (scan.norms == ScanNorms::kPlain) slot.assign(size, 1.0f);
      };
      scan_norm("ssm_dt_norm.weight", layer.ssm_dt_norm, scan.step_rank);
      scan_norm("ssm_b_norm.weight", layer.ssm_b_norm, scan.state_dim);
      scan_norm("ssm_c_norm.weight", layer.ssm_c_norm, scan.state_dim);
      f(prefix + "ssm_a",
        Slot{nullptr, &layer.ssm_a, scan.n_channels, scan.state_dim, true, false, kScanChannels});
      vector(prefix + "ssm_d", layer.ssm_d, scan.n_channels, true);
      linear(prefix + "ssm_out", layer.ssm_out, model_dim, scan.n_channels);
    } else if (!spec.latent.is_none()) {
      const LatentHeads& latent = spec.latent;
      const size_t q_inputs = latent.q_rank > 0 ? latent.q_rank : model_dim;
      if (latent.q_rank > 0) {
        linear(prefix + "attn_q_a", layer.attn_q_a, latent.q_rank, model_dim);
        vector(prefix + "attn_q_a_norm.weight", layer.attn_q_a_norm, latent.q_rank, true);
      }
      linear(prefix + "attn_q", layer.attn_q, heads.n_heads * latent.head_dim(), q_inputs);
      if (spec.has_gate_matrix()) linear(prefix + "attn_gate", layer.attn_gate, spec.gate_dim(), model_dim);
      linear(prefix + "attn_kv_a", layer.attn_kv_a, latent.row_dim(), model_dim);
      vector(prefix + "attn_kv_a_norm.weight", layer.attn_kv_a_norm, latent.rank, true);
      if (spec.has_latent_key_norm) {
        vector(prefix + "attn_k_norm.weight", layer.attn_k_norm, latent.rope_dim, true);
      }
      if (heads.index.has_own()) {
        const IndexHeads& index = heads.index;
        linear(prefix + "indexer.attn_q_b", layer.index_q, index.q_dim(), latent.q_rank);
        linear(prefix + "indexer.attn_k", layer.index_k, index.key_dim, model_dim);
        linear(prefix + "indexer.proj", layer.index_weights, index.n_heads, model_dim);
        vector(prefix + "indexer.k_norm.weight", layer.index_k_norm, index.key_dim, true);
        vector(prefix + "indexer.k_norm.bias", layer.index_k_norm_bias, index.key_dim, true);
      }
      layer.attn_k_b.resize(heads.n_heads);
      layer.attn_v_b.resize(heads.n_heads);
      for (size_t head = 0; head < heads.n_heads; ++head) {
        const std::string number = "." + std::to_string(head) + ".weight";
        PackedMatrix& k_b = layer.attn_k_b[head];
        matrix(prefix + "attn_k_b" + number, k_b, latent.rank, latent.nope_dim, true);
        // Of older files: the rows of a head's keys.
        f(prefix + "attn_kv_b_k" + number, Slot{&k_b, nullptr, latent.nope_dim, latent.rank, false, true});
        matrix(prefix + "attn_v_b" + number, layer.attn_v_b[head], latent.value_dim, latent.rank, true);
      }
      linear(prefix + "attn_output", layer.attn_output, model_dim, heads.n_heads * latent.value_dim);
    } else if (spec.attends()) {
      const size_t n_inputs = config_.joins(HiddenJoin::kApart) ? 2 * model_dim : model_dim;
      linear(prefix + "attn_q", layer.attn_q, spec.q_gate_dim() + heads.q_dim(), n_inputs);
      if (spec.has_gate_matrix()) linear(prefix + "attn_gate", layer.attn_gate, spec.gate_dim(), model_dim);
      if (heads.has_own_kv()) {
        linear(prefix + "attn_k", layer.attn_k, heads.k_dim(), n_inputs);
        linear(prefix + "attn_v", layer.attn_v, heads.v_dim(), n_inputs);
      }
      linear(prefix + "attn_output", layer.attn_output, model_dim, heads.out_dim());
      if (const IndexHeads& index = heads.index; index.has_own()) {
        linear(prefix + "indexer.q_proj", layer.index_q, index.q_dim(), model_dim);
        linear(prefix + "indexer.k_proj", layer.index_k, index.key_dim, model_dim);
        vector(prefix + "indexer.q_norm.weight", layer.index_q_norm, index.key_dim, true);
        vector(prefix + "indexer.k_norm.weight", layer.index_k_norm, index.key_dim, true);
        layer.index_ones.assign(index.n_heads, 1.0f);
      }
      if (spec.has_sub_norms) {
        for (const auto& [name, slot] : {std::pair("attn_q", &layer.attn_q),
                                         {"attn_k", &layer.attn_k},
                                         {"attn_v", &layer.attn_v},
                                         {"attn_output", &layer.attn_output}}) {
          vector(prefix + name + ".scale", slot->scale, 1, false);
        }
        vector(prefix + "attn_sub_norm.weight", layer.attn_sub_norm, heads.out_dim(), true);
      }
    }
    if (spec.has_ssd()) {
      const SsdHeads& ssd = spec.ssd;
      linear(prefix + "ssm_in", layer.ssm_in, ssd.in_dim(), model_dim);
      f(prefix + "ssm_conv1d.weight", Slot{nullptr, &layer.conv, ssd.conv_dim(), spec.n_conv_taps, true});
      vector(prefix + "ssm_conv1d.bias", layer.conv_bias, ssd.conv_dim(), false);
      const bool selects = ssd.step_rank > 0;
      const size_t rows = selects ? 1 : ssd.n_heads, cols = selects ? ssd.n_heads : 1;
      f(prefix + "ssm_a", Slot{nullptr, &layer.ssm_a, rows, cols, true});
      f(prefix + "ssm_d", Slot{nullptr, &layer.ssm_d, rows, cols, true});
      vector(prefix + "ssm_dt.bias", layer.ssm_bias, ssd.n_heads, true);
      if (selects) {
        linear(prefix + "ssm_x", layer.ssm_x, ssd.projected_dim(), ssd.inner_dim());
        matrix(prefix + "ssm_dt.weight", layer.ssm_dt.weight, ssd.n_heads, ssd.step_rank, true);
        vector(prefix + "ssm_dt_norm.weight", layer.ssm_dt_norm, ssd.step_rank, true);
        vector(prefix + "ssm_b_norm.weight", layer.ssm_b_norm, ssd.state_dim, true);
        vector(prefix + "ssm_c_norm.weight", layer.ssm_c_norm, ssd.state_dim, true);
      }
      layer.ssm_norm.resize(ssd.n_groups);
      for (size_t group = 0; group < ssd.n_groups; ++group) {
        vector(prefix + "ssm_norm." + std::to_string(group) + ".weight", layer.ssm_norm[group],
               ssd.inner_dim() / ssd.n_groups, false);
      }
      linear(prefix + "ssm_out", layer.ssm_out, model_dim, ssd.inner_dim());
    }
    if (spec.laurel_rank > 0) {
      linear(prefix + "laurel_l", layer.laurel_in, spec.laurel_rank, model_dim);
      linear(prefix + "laurel_r", layer.laurel_out, model_dim, spec.laurel_rank);
      vector(prefix + "laurel_post_norm.weight", layer.laurel_post_norm, model_dim, true);
    }
    if (config_.has_streams) {
      linear(prefix + "altup_router", layer.stream_router, kStreams, model_dim);
      vector(prefix + "altup_router_norm.weight", layer.stream_router_norm, model_dim, true);
      f(prefix + "altup_predict_coef.weight",
        Slot{nullptr, &layer.stream_predictor, kStreams * kStreams, kStreams, true});
      f(prefix + "altup_correct_coef.weight",
        Slot{nullptr, &layer.stream_corrector, kStreams, kStreams, true});
      vector(prefix + "altup_correct_scale.weight", layer.stream_scale, model_dim, true);
    }
    if (!spec.has_ffn()) continue;
    const bool has_experts = spec.ffn == FfnKind::kExperts;
    layer.ffn.resize(has_experts ? spec.n_experts : 1);
    if (has_experts) linear(prefix + "ffn_gate_inp", layer.ffn_router, spec.n_experts, model_dim);
    if (spec.has_expert_bias)
      vector(prefix + "exp_probs_b.bias", layer.ffn_router_bias, spec.n_experts, true);
    for (size_t e = 0; e < layer.ffn.size(); ++e) {
      const std::string suffix = has_experts ? "_exps." + std::to_string(e) : "";
      if (spec.has_gate()) linear(prefix + "ffn_gate" + suffix, layer.ffn[e].gate, spec.ffn_dim, model_dim);
      linear(prefix + "ffn_up" + suffix, layer.ffn[e].up, spec.ffn_dim, model_dim);
      linear(prefix + "ffn_down" + suffix, layer.ffn[e].down, model_dim, spec.ffn_dim);
    }
    if (spec.has_sub_norms) {
      vector(prefix + "ffn_gate.scale", layer.ffn[0].gate.scale, 1, false);
      vector(prefix + "ffn_up.scale", layer.ffn[0].up.scale, 1, false);
      vector(prefix + "ffn_down.scale", layer.ffn[0].down.scale, 1, false);
      vector(prefix + "ffn_sub_norm.weight", layer.ffn_sub_norm, spec.ffn_dim, true);
    }
    if (spec.has_head_gains) vector(prefix + "ffn_down.scale", layer.ffn[0].down.scale, 1, false);
    layer.ffn_adjugates.resize(spec.n_adjugates());
    for (size_t e = 0; e < layer.ffn_adjugates.size(); ++e) {
      const std::string suffix = "_chexps." + std::to_string(e);
      FeedForward& ffn = layer.ffn_adjugates[e];
      linear(prefix + "ffn_gate" + suffix, ffn.gate, spec.adjugate_ffn_dim, model_dim);
      linear(prefix + "ffn_up" + suffix, ffn.up, spec.adjugate_ffn_dim, model_dim);
      linear(prefix + "ffn_down" + suffix, ffn.down, model_dim, spec.adjugate_ffn_dim);
    }
    if (spec.shared_ffn_dim > 0) {
      if (spec.has_gate())
        linear(prefix + "ffn_gate_shexp", layer.ffn_shared.gate, spec.shared_ffn_dim, model_dim);
      linear(prefix + "ffn_up_shexp", layer.ffn_shared.up, spec.shared_ffn_dim, model_dim);
      linear(prefix + "ffn_down_shexp", layer.ffn_shared.down, model_dim, spec.shared_ffn_dim);
    }
    if (input_dim > 0) {
      linear(prefix + "per_layer_model_proj", layer.token_input_proj, input_dim, model_dim);
      linear(prefix + "inp_gate", layer.token_input_gate, input_dim, model_dim);
      linear(prefix + "proj", layer.token_input_out, model_dim, input_dim);
      vector(prefix + "post_norm.weight", layer.token_input_post_norm, model_dim, true);
    }
    if (spec.output_scale != 1.0f) layer.output_scale.assign(1, spec.output_scale);
    if (spec.has_output_scale) vector(prefix + "layer_output_scale.weight", layer.output_scale, 1, false);
    if (spec.has_expert_norms) {
      vector(prefix + "ffn_router_norm.weight", layer.ffn_router_norm, model_dim, true);
      vector(prefix + "ffn_expert_norm.weight", layer.ffn_expert_norm, model_dim, true);
      vector(prefix + "ffn_expert_post_norm.weight", layer.ffn_expert_post_norm, model_dim, true);
      vector(prefix + "ffn_shared_post_norm.weight", layer.ffn_shared_post_norm, model_dim, true);
      vector(prefix + "ffn_expert_scale", layer.ffn_expert_scale, spec.n_experts, false);
    }
    if (spec.has_shared_gate)
      vector(prefix + "ffn_gate_inp_shexp.weight", layer.ffn_shared_gate, model_dim, true);
  }
}

}  // namespace edgeh2o
