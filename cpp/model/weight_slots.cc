// The names of a decoder's tensors and their places.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "kernels/streams.h"
#include "model/mixer_slots.h"
#include "model/slot_list.h"
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
  list_tensors({[this](const std::string& name, const Slot& slot) { slots_.emplace(name, slot); }});
}

void Weights::list_tensors(const SlotList& list) {
  const size_t model_dim = config_.model_dim;
  const bool shares_embedding = main_ && !config_.joins(HiddenJoin::kPlain);
  list.matrix("token_embd.weight", token_embd_.weight, config_.vocab_size, model_dim, !shares_embedding);
  if (config_.norms_embeddings) ones_.assign(model_dim, 1.0f);
  if (config_.n_positions > 0) {
    list.matrix("position_embd.weight", position_embd_, config_.n_positions, model_dim, true);
  }
  list.matrix("output.weight", output_.weight, config_.n_outputs(), model_dim,
              !main_ && !config_.tied_embeddings);
  const auto norm = [&](const std::string& name, std::vector<float>& slot) {
    if (config_.has_norm_weights) {
      list.vector(name, slot, model_dim, true);
    } else {
      slot.assign(model_dim, 1.0f);
    }
  };
  const auto mixer = [&](const std::string& name, StreamMixer& slot) {
    list.vector(name + "_norm.weight", slot.norm, config_.streams_dim(), true);
    list.linear(name + "_down", slot.down, config_.stream_rank, config_.streams_dim());
    list.linear(name + "_up", slot.up, config_.streams_dim(), config_.stream_rank);
  };
  if (config_.mixes_streams()) {
    mixer("output_hc", output_mixer_);
  } else if (config_.has_output_norm) {
    norm("output_norm.weight", output_norm_);
  }
  if (config_.has_token_type) list.vector("token_types.weight", token_type_, model_dim, true);
  if (config_.has_embedding_norm) {
    list.vector("token_embd_norm.weight", token_norm_, model_dim, true);
    list.vector("token_embd_norm.bias", token_norm_bias_, model_dim, false);
  }
  if (config_.has_two_states) list.vector("first_state.weight", first_state_, model_dim, true);
  if (config_.reads_hidden) {
    const size_t width = config_.hidden_width();
    if (config_.features_dim > 0) {
      list.linear("features", features_, model_dim, config_.features_dim);
      if (config_.norms_features) {
        list.vector("features_norm.weight", features_norm_, config_.features_dim, true);
      }
    } else {
      list.linear("hidden_proj", hidden_proj_, model_dim, 2 * width);
    }
    if (config_.hidden_join == HiddenJoin::kCached) {
      list.vector("hidden_norm.weight", hidden_norm_, model_dim, true);
    } else if (config_.hidden_join == HiddenJoin::kPlain) {
      list.linear("hidden_out", hidden_out_, width, model_dim);
    } else {
      list.vector("embedding_norm.weight", embedding_norm_, model_dim, true);
      list.vector("hidden_norm.weight", hidden_norm_, model_dim, true);
    }
  }
  if (config_.has_output_bias) list.vector("output.bias", output_.bias, config_.vocab_size, true);
  const bool must_have_biases = config_.has_norm_biases;
  const bool may_have_biases = config_.centres_norms || must_have_biases;
  if (may_have_biases && config_.has_output_norm) {
    list.vector("output_norm.bias", output_norm_bias_, model_dim, must_have_biases);
  }
  const size_t input_dim = config_.token_input_dim();
  if (input_dim > 0) {
    const size_t all_inputs = layers_.size() * input_dim;
    const size_t n_rows = config_.token_input_rows;
    token_inputs_.resize(ceil_div(config_.vocab_size, n_rows));
    for (size_t part = 0; part < token_inputs_.size(); ++part) {
      list.matrix("per_layer_token_embd." + std::to_string(part) + ".weight", token_inputs_[part],
                  std::min(n_rows, config_.vocab_size - part * n_rows), all_inputs, true);
    }
    list.vector("per_layer_proj_norm.weight", token_input_norm_, input_dim, true);
  }
  if (config_.has_streams) {
    streams_in_.resize(kStreams - 1);
    streams_out_.resize(kStreams - 1);
    for (size_t k = 0; k + 1 < kStreams; ++k) {
      const std::string number = "." + std::to_string(k) + ".weight";
      list.matrix("altup_proj" + number, streams_in_[k], model_dim, model_dim, true);
      list.matrix("altup_unembd_proj" + number, streams_out_[k], model_dim, model_dim, true);
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
          list.vector(prefix + "attn_norm.bias", layer.attn_norm_bias, model_dim, must_have_biases);
        if (has_ffn_norm)
          list.vector(prefix + "ffn_norm.bias", layer.ffn_norm_bias, model_dim, must_have_biases);
      }
    }
    if (config_.mixes_streams()) {
      for (const auto& [name, slot] :
           {std::pair("hc_attn", &layer.attn_mixer), {"hc_ffn", &layer.ffn_mixer}}) {
        mixer(prefix + name, *slot);
        list.linear(prefix + name + "_inject", slot->shares, config_.n_streams, config_.streams_dim());
      }
    }
    if (spec.looks_up_ngrams()) {
      NgramWeights& ngrams = layer.ngrams;
      list.linear(prefix + "ple_key", ngrams.key, config_.streams_dim(), model_dim);
      list.linear(prefix + "ple_value", ngrams.value, model_dim, model_dim);
      list.vector(prefix + "ple_norm_key.weight", ngrams.key_norm, config_.streams_dim(), true);
      list.vector(prefix + "ple_norm_query.weight", ngrams.query_norm, config_.streams_dim(), true);
      list.vector(prefix + "ple_norm_conv.weight", ngrams.conv_norm, config_.streams_dim(), true);
      list.add(prefix + "ple_conv1d.weight",
               Slot{nullptr, &ngrams.conv, config_.streams_dim(), config_.ngrams.n_taps, true});
    }
    if (spec.has_post_norm()) {
      list.vector(prefix + "post_attention_norm.weight", layer.attn_post_norm, model_dim, true);
      list.vector(prefix + "post_ffw_norm.weight", layer.ffn_post_norm, model_dim, true);
    }
    if (spec.norm_placement == NormPlacement::kSum) {
      list.vector(prefix + "attn_output_norm.weight", layer.attn_sum_norm, model_dim, true);
      list.vector(prefix + "attn_output_norm.bias", layer.attn_sum_norm_bias, model_dim, false);
      list.vector(prefix + "layer_output_norm.weight", layer.ffn_sum_norm, model_dim, true);
      list.vector(prefix + "layer_output_norm.bias", layer.ffn_sum_norm_bias, model_dim, false);
      if (spec.has_second_norm) {
        list.vector(prefix + "attn_norm_2.weight", layer.second_norm, model_dim, true);
        list.vector(prefix + "attn_norm_2.bias", layer.second_norm_bias, model_dim, false);
      }
    }
    if (spec.has_head_gains) {
      layer.attn_q_norm.assign(heads.key_dim, 1.0f);
      layer.attn_k_norm.assign(heads.key_dim, 1.0f);
      list.add(prefix + "attn_q_norm.weight", Slot{nullptr, &layer.head_gains, heads.n_heads, 1, true});
      list.vector(prefix + "embedding_share.weight", layer.embedding_share, 1, true);
      list.vector(prefix + "attn_output.scale", layer.attn_output.scale, 1, false);
    } else if (spec.has_plain_qk_norm) {
      layer.attn_q_norm.assign(heads.key_dim, 1.0f);
      layer.attn_k_norm.assign(heads.key_dim, 1.0f);
    } else if (spec.qk_norm == QkNorm::kOwnHead && !heads.is_none()) {
      list.add(prefix + "attn_q_norm.weight",
               Slot{nullptr, &layer.attn_q_norm, heads.n_heads, heads.key_dim, true, false, 1});
      list.add(prefix + "attn_k_norm.weight",
               Slot{nullptr, &layer.attn_k_norm, heads.n_kv_heads, heads.key_dim, true, false, 1});
    } else if (spec.qk_norm != QkNorm::kNone && !heads.is_none()) {
      const bool is_per_head = spec.qk_norm == QkNorm::kHead;
      list.vector(prefix + "attn_q_norm.weight", layer.attn_q_norm,
                  is_per_head ? heads.key_dim : heads.q_dim(), true);
      if (heads.has_own_kv()) {
        list.vector(prefix + "attn_k_norm.weight", layer.attn_k_norm,
                    is_per_head ? heads.key_dim : heads.k_dim(), true);
      }
      if (spec.qk_norm == QkNorm::kLayer) {
        list.vector(prefix + "attn_q_norm.bias", layer.attn_q_norm_bias, heads.q_dim(), false);
        list.vector(prefix + "attn_k_norm.bias", layer.attn_k_norm_bias, heads.k_dim(), false);
      }
    }
    if (spec.has_joint_bias)
      list.vector(prefix + "attn_qkv.bias", layer.attn_qkv_bias,
                  heads.q_dim() + heads.k_dim() + heads.v_dim(), true);
    if (spec.has_sinks && !heads.is_none())
      list.vector(prefix + "attn_sinks.weight", layer.attn_sinks, heads.n_heads, true);
    if (spec.norms_values) layer.attn_v_norm.assign(heads.value_dim, 1.0f);
    list_mixer(list, prefix, config_, spec, layer);
    if (spec.laurel_rank > 0) {
      list.linear(prefix + "laurel_l", layer.laurel_in, spec.laurel_rank, model_dim);
      list.linear(prefix + "laurel_r", layer.laurel_out, model_dim, spec.laurel_rank);
      list.vector(prefix + "laurel_post_norm.weight", layer.laurel_post_norm, model_dim, true);
    }
    if (config_.has_streams) {
      list.linear(prefix + "altup_router", layer.stream_router, kStreams, model_dim);
      list.vector(prefix + "altup_router_norm.weight", layer.stream_router_norm, model_dim, true);
      list.add(prefix + "altup_predict_coef.weight",
               Slot{nullptr, &layer.stream_predictor, kStreams * kStreams, kStreams, true});
      list.add(prefix + "altup_correct_coef.weight",
               Slot{nullptr, &layer.stream_corrector, kStreams, kStreams, true});
      list.vector(prefix + "altup_correct_scale.weight", layer.stream_scale, model_dim, true);
    }
    if (!spec.has_ffn()) continue;
    const bool has_experts = spec.ffn == FfnKind::kExperts;
    layer.ffn.resize(has_experts ? spec.n_experts : 1);
    if (has_experts) list.linear(prefix + "ffn_gate_inp", layer.ffn_router, spec.n_experts, model_dim);
    if (spec.has_expert_bias)
      list.vector(prefix + "exp_probs_b.bias", layer.ffn_router_bias, spec.n_experts, true);
    for (size_t e = 0; e < layer.ffn.size(); ++e) {
      const std::string suffix = has_experts ? "_exps." + std::to_string(e) : "";
      if (spec.has_gate())
        list.linear(prefix + "ffn_gate" + suffix, layer.ffn[e].gate, spec.ffn_dim, model_dim);
      list.linear(prefix + "ffn_up" + suffix, layer.ffn[e].up, spec.ffn_dim, model_dim);
      list.linear(prefix + "ffn_down" + suffix, layer.ffn[e].down, model_dim, spec.ffn_dim);
    }
    if (spec.has_sub_norms) {
      list.vector(prefix + "ffn_gate.scale", layer.ffn[0].gate.scale, 1, false);
      list.vector(prefix + "ffn_up.scale", layer.ffn[0].up.scale, 1, false);
      list.vector(prefix + "ffn_down.scale", layer.ffn[0].down.scale, 1, false);
      list.vector(prefix + "ffn_sub_norm.weight", layer.ffn_sub_norm, spec.ffn_dim, true);
    }
    if (spec.has_head_gains) list.vector(prefix + "ffn_down.scale", layer.ffn[0].down.scale, 1, false);
    layer.ffn_adjugates.resize(spec.n_adjugates());
    for (size_t e = 0; e < layer.ffn_adjugates.size(); ++e) {
      const std::string suffix = "_chexps." + std::to_string(e);
      FeedForward& ffn = layer.ffn_adjugates[e];
      list.linear(prefix + "ffn_gate" + suffix, ffn.gate, spec.adjugate_ffn_dim, model_dim);
      list.linear(prefix + "ffn_up" + suffix, ffn.up, spec.adjugate_ffn_dim, model_dim);
      list.linear(prefix + "ffn_down" + suffix, ffn.down, model_dim, spec.adjugate_ffn_dim);
    }
    if (spec.shared_ffn_dim > 0) {
      if (spec.has_gate())
        list.linear(prefix + "ffn_gate_shexp", layer.ffn_shared.gate, spec.shared_ffn_dim, model_dim);
      list.linear(prefix + "ffn_up_shexp", layer.ffn_shared.up, spec.shared_ffn_dim, model_dim);
      list.linear(prefix + "ffn_down_shexp", layer.ffn_shared.down, model_dim, spec.shared_ffn_dim);
    }
    if (input_dim > 0) {
      list.linear(prefix + "per_layer_model_proj", layer.token_input_proj, input_dim, model_dim);
      list.linear(prefix + "inp_gate", layer.token_input_gate, input_dim, model_dim);
      list.linear(prefix + "proj", layer.token_input_out, model_dim, input_dim);
      list.vector(prefix + "post_norm.weight", layer.token_input_post_norm, model_dim, true);
    }
    if (spec.output_scale != 1.0f) layer.output_scale.assign(1, spec.output_scale);
    if (spec.has_output_scale)
      list.vector(prefix + "layer_output_scale.weight", layer.output_scale, 1, false);
    if (spec.has_expert_norms) {
      list.vector(prefix + "ffn_router_norm.weight", layer.ffn_router_norm, model_dim, true);
      list.vector(prefix + "ffn_expert_norm.weight", layer.ffn_expert_norm, model_dim, true);
      list.vector(prefix + "ffn_expert_post_norm.weight", layer.ffn_expert_post_norm, model_dim, true);
      list.vector(prefix + "ffn_shared_post_norm.weight", layer.ffn_shared_post_norm, model_dim, true);
      list.vector(prefix + "ffn_expert_scale", layer.ffn_expert_scale, spec.n_experts, false);
    }
    if (spec.has_shared_gate)
      list.vector(prefix + "ffn_gate_inp_shexp.weight", layer.ffn_shared_gate, model_dim, true);
  }
}

}  // namespace edgeh2o
