#include "bindings/model_config.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// Takes the fields of a configuration from keyword arguments; those that are left out keep their defaults.
class FieldReader {
 public:
  explicit FieldReader(const py::dict& fields)
      : fields_(py::reinterpret_steal<py::dict>(PyDict_Copy(fields.ptr()))) {}

  template <typename T>
  void read(const char* name, T& field) {
    if (fields_.contains(name)) field = py::cast<T>(fields_.attr("pop")(name));
  }

  template <typename T>
  void read_choice(const char* name, T& field, std::initializer_list<std::pair<const char*, T>> choices) {
    std::string value, known;
    read(name, value);
    if (value.empty()) return;
    for (const auto& [choice, meaning] : choices) {
      if (value == choice) {
        field = meaning;
        return;
      }
      known += (known.empty() ? "" : ", ") + std::string(choice);
    }
    throw_invalid(name, " '", value, "' is not supported; supported: ", known);
  }

  void finish() const {
    for (const auto& item : fields_)
      throw py::type_error("unknown field " + py::cast<std::string>(item.first));
  }

 private:
  py::dict fields_;
};

RopeConfig make_rope(const py::dict& fields) {
  RopeConfig rope;
  FieldReader reader(fields);
  reader.read("inv_freq", rope.inv_freq);
  reader.read("attention_factor", rope.attention_factor);
  reader.read("long_inv_freq", rope.long_inv_freq);
  reader.read("long_after", rope.long_after);
  reader.finish();
  return rope;
}

LayerSpec make_layer(const py::dict& fields) {
  LayerSpec layer;
  FieldReader reader(fields);
  reader.read_choice("mixer", layer.mixer,
                     {{"attention", MixerKind::kAttention},
                      {"short_conv", MixerKind::kShortConv},
                      {"delta_net", MixerKind::kDeltaNet},
                      {"mamba2", MixerKind::kMamba2},
                      {"attention_mamba2", MixerKind::kAttentionMamba2},
                      {"mamba1", MixerKind::kMamba1},
                      {"rwkv7", MixerKind::kRwkv7},
                      {"rwkv6", MixerKind::kRwkv6},
                      {"none", MixerKind::kNone}});
  reader.read("n_heads", layer.heads.n_heads);
  reader.read("n_kv_heads", layer.heads.n_kv_heads);
  reader.read("key_dim", layer.heads.key_dim);
  reader.read("value_dim", layer.heads.value_dim);
  reader.read("attention_scale", layer.heads.scale);
  reader.read("attention_soft_cap", layer.heads.soft_cap);
  reader.read("kv_distance", layer.heads.kv_distance);
  reader.read("values_are_keys", layer.heads.values_are_keys);
  reader.read("latent_rank", layer.latent.rank);
  reader.read("latent_q_rank", layer.latent.q_rank);
  reader.read("latent_nope_dim", layer.latent.nope_dim);
  reader.read("latent_rope_dim", layer.latent.rope_dim);
  reader.read("latent_value_dim", layer.latent.value_dim);
  reader.read("index_heads", layer.heads.index.n_heads);
  reader.read("index_key_dim", layer.heads.index.key_dim);
  reader.read("index_top_k", layer.heads.index.top_k);
  reader.read("index_block_tokens", layer.heads.index.block_tokens);
  reader.read("index_per_head", layer.heads.index.is_per_head);
  reader.read("index_local_blocks", layer.heads.index.n_local);
  reader.read("are_lent", layer.heads.are_lent);
  reader.read("lender", layer.lender);
  reader.read("window", layer.window);
  reader.read("is_chunked", layer.is_chunked);
  reader.read("rope", layer.rope);
  reader.read_choice("qk_norm", layer.qk_norm,
                     {{"none", QkNorm::kNone},
                      {"head", QkNorm::kHead},
                      {"own_head", QkNorm::kOwnHead},
                      {"projection", QkNorm::kProjection},
                      {"layer", QkNorm::kLayer}});
  reader.read("qk_norm_after_rope", layer.qk_norm_after_rope);
  reader.read("has_plain_qk_norm", layer.has_plain_qk_norm);
  reader.read("has_latent_key_norm", layer.has_latent_key_norm);
  reader.read("has_sinks", layer.has_sinks);
  reader.read("norms_values", layer.norms_values);
  reader.read("value_scale", layer.value_scale);
  reader.read("has_head_gains", layer.has_head_gains);
  reader.read("has_large_keys", layer.heads.has_large_keys);
  reader.read("is_causal", layer.heads.is_causal);
  reader.read("max_alibi_bias", layer.heads.max_alibi_bias);
  reader.read("has_mixer_norm", layer.has_mixer_norm);
  reader.read("has_second_norm", layer.has_second_norm);
  reader.read("temperature_scale", layer.temperature_scale);
  reader.read("temperature_offset", layer.temperature_offset);
  reader.read("temperature_period", layer.temperature_period);
  reader.read_choice("output_gate", layer.output_gate,
                     {{"none", OutputGate::kNone},
                      {"of_queries", OutputGate::kOfQueries},
                      {"per_output", OutputGate::kPerOutput},
                      {"per_head", OutputGate::kPerHead}});
  reader.read_choice("head_gate", layer.head_gate,
                     {{"sigmoid", HeadGate::kSigmoid}, {"softplus", HeadGate::kSoftplus}});
  reader.read("n_conv_taps", layer.n_conv_taps);
  reader.read("n_delta_key_heads", layer.delta.n_key_heads);
  reader.read("n_delta_value_heads", layer.delta.n_value_heads);
  reader.read("delta_head_dim", layer.delta.head_dim);
  reader.read("has_grouped_delta_heads", layer.delta.are_grouped);
  reader.read("has_row_decays", layer.delta.decays_by_row);
  reader.read("delta_log_floor", layer.delta.log_floor);
  reader.read("delta_gate_rank", layer.delta.gate_rank);
  reader.read("has_delta_sigmoid", layer.has_delta_sigmoid);
  reader.read("history_rows", layer.history_rows);
  reader.read("history_dim", layer.history_dim);
  reader.read("n_ssd_heads", layer.ssd.n_heads);
  reader.read("ssd_head_dim", layer.ssd.head_dim);
  reader.read("n_ssd_groups", layer.ssd.n_groups);
  reader.read("ssd_state_dim", layer.ssd.state_dim);
  reader.read("ssd_step_rank", layer.ssd.step_rank);
  reader.read("n_wkv_heads", layer.wkv.n_heads);
  reader.read("n_wkv_kv_heads", layer.wkv.n_kv_heads);
  reader.read("wkv_head_dim", layer.wkv.head_dim);
  reader.read("wkv_decay_rank", layer.wkv.decay_rank);
  reader.read("wkv_rate_rank", layer.wkv.rate_rank);
  reader.read("wkv_value_rank", layer.wkv.value_rank);
  reader.read("wkv_gate_rank", layer.wkv.gate_rank);
  reader.read("wkv_shift_rank", layer.wkv.shift_rank);
  reader.read("wkv_norms_heads", layer.wkv.norms_heads);
  reader.read("n_scan_channels", layer.scan.n_channels);
  reader.read("scan_state_dim", layer.scan.state_dim);
  reader.read("scan_step_rank", layer.scan.step_rank);
  reader.read_choice(
      "scan_norms", layer.scan.norms,
      {{"none", ScanNorms::kNone}, {"plain", ScanNorms::kPlain}, {"weighted", ScanNorms::kWeighted}});
  reader.read_choice("ffn", layer.ffn,
                     {{"gated", FfnKind::kGated},
                      {"experts", FfnKind::kExperts},
                      {"shifted", FfnKind::kShifted},
                      {"none", FfnKind::kNone}});
  reader.read_choice("activation", layer.activation,
                     {{"silu", Activation::kSilu},
                      {"gelu_tanh", Activation::kGeluTanh},
                      {"silu_clamped", Activation::kSiluClamped},
                      {"relu", Activation::kRelu},
                      {"relu_squared", Activation::kReluSquared},
                      {"ungated_gelu", Activation::kUngatedGelu},
                      {"xielu", Activation::kXielu}});
  reader.read("xielu_positive", layer.xielu.positive);
  reader.read("xielu_negative", layer.xielu.negative);
  reader.read("xielu_beta", layer.xielu.beta);
  reader.read("xielu_eps", layer.xielu.eps);
  reader.read("is_parallel", layer.is_parallel);
  reader.read("has_parallel_norm", layer.has_parallel_norm);
  reader.read("qkv_limit", layer.qkv_limit);
  reader.read("has_joint_bias", layer.has_joint_bias);
  reader.read("has_sub_norms", layer.has_sub_norms);
  reader.read("gate_cutoff", layer.gate_cutoff);
  reader.read("gate_limit", layer.limits.gate);
  reader.read("up_limit", layer.limits.up);
  reader.read("shared_gate_limit", layer.shared_limits.gate);
  reader.read("shared_up_limit", layer.shared_limits.up);
  reader.read("ffn_dim", layer.ffn_dim);
  reader.read("n_experts", layer.n_experts);
  reader.read("n_experts_used", layer.n_experts_used);
  reader.read("normalises_experts", layer.normalises_experts);
  reader.read("expert_scale", layer.expert_scale);
  reader.read("n_expert_groups", layer.n_expert_groups);
  reader.read("n_expert_groups_used", layer.n_expert_groups_used);
  reader.read_choice("expert_gate", layer.expert_gate,
                     {{"softmax", ExpertGate::kSoftmax}, {"sigmoid", ExpertGate::kSigmoid}});
  reader.read("has_expert_bias", layer.has_expert_bias);
  reader.read("routes_by_input", layer.routes_by_input);
  reader.read("scales_expert_inputs", layer.scales_expert_inputs);
  reader.read("shared_ffn_dim", layer.shared_ffn_dim);
  reader.read("has_shared_gate", layer.has_shared_gate);
  reader.read("adjugate_ffn_dim", layer.adjugate_ffn_dim);
  reader.read("n_adjugate_sharers", layer.n_adjugate_sharers);
  reader.read("adjugate_scale", layer.adjugate_scale);
  reader.read("experts_scale", layer.experts_scale);
  reader.read("has_expert_norms", layer.has_expert_norms);
  reader.read_choice("norm_placement", layer.norm_placement,
                     {{"pre", NormPlacement::kPre},
                      {"post", NormPlacement::kPost},
                      {"both", NormPlacement::kBoth},
                      {"sum", NormPlacement::kSum},
                      {"none", NormPlacement::kNone}});
  reader.read("residual_scale", layer.residual_scale);
  reader.read("laurel_rank", layer.laurel_rank);
  reader.read("token_input_dim", layer.token_input_dim);
  reader.read("has_output_scale", layer.has_output_scale);
  reader.read("output_scale", layer.output_scale);
  reader.finish();
  return layer;
}

NgramConfig make_ngrams(const py::dict& fields) {
  NgramConfig ngrams;
  FieldReader reader(fields);
  reader.read("layer", ngrams.layer);
  reader.read("n_tokens", ngrams.n_tokens);
  reader.read("n_heads_per_size", ngrams.n_heads_per_size);
  reader.read("row_dim", ngrams.row_dim);
  reader.read("n_rows", ngrams.n_rows);
  reader.read("n_taps", ngrams.n_taps);
  reader.read("end_token", ngrams.end_token);
  reader.read("factors", ngrams.factors);
  reader.read("offsets", ngrams.offsets);
  reader.read("sizes", ngrams.sizes);
  reader.finish();
  return ngrams;
}

// The layers of all passes, of those of all stacks.
std::vector<LayerSpec> layers_of_passes(const std::vector<LayerSpec>& own,
                                        const std::vector<size_t>& passes) {
  const size_t last = *std::max_element(passes.begin(), passes.end());
  EH2O_CHECK(last < own.size() && own.size() % (last + 1) == 0, own.size(), " layers in ", last + 1,
             " stacks");
  const size_t n = own.size() / (last + 1);
  std::vector<LayerSpec> layers;
  for (const size_t stack : passes) {
    layers.insert(layers.end(), own.begin() + stack * n, own.begin() + (stack + 1) * n);
  }
  return layers;
}

}  // namespace

DecoderConfig make_config(const py::kwargs& fields) {
  DecoderConfig config;
  FieldReader reader(fields);
  reader.read("model_dim", config.model_dim);
  reader.read("vocab_size", config.vocab_size);
  reader.read("norm_eps", config.norm_eps);
  reader.read("post_norm_eps", config.post_norm_eps);
  reader.read("centres_norms", config.centres_norms);
  reader.read("has_norm_weights", config.has_norm_weights);
  reader.read("has_norm_biases", config.has_norm_biases);
  reader.read("has_output_norm", config.has_output_norm);
  std::vector<py::dict> ropes, layers;
  reader.read("ropes", ropes);
  reader.read("layers", layers);
  for (const py::dict& rope : ropes) config.ropes.push_back(make_rope(rope));
  for (const py::dict& layer : layers) config.layers.push_back(make_layer(layer));
  reader.read("passes", config.passes);
  reader.read("norms_passes", config.norms_passes);
  reader.read("has_two_states", config.has_two_states);
  if (!config.passes.empty()) config.layers = layers_of_passes(config.layers, config.passes);
  reader.read("embedding_scale", config.embedding_scale);
  reader.read("norms_embeddings", config.norms_embeddings);
  reader.read("has_embedding_norm", config.has_embedding_norm);
  reader.read("has_token_type", config.has_token_type);
  reader.read("logit_scale", config.logit_scale);
  reader.read("logit_soft_cap", config.logit_soft_cap);
  reader.read("tied_embeddings", config.tied_embeddings);
  reader.read("has_output_bias", config.has_output_bias);
  reader.read("has_streams", config.has_streams);
  reader.read("n_streams", config.n_streams);
  reader.read("stream_rank", config.stream_rank);
  py::dict ngrams;
  reader.read("ngrams", ngrams);
  if (!ngrams.empty()) config.ngrams = make_ngrams(ngrams);
  reader.read("n_positions", config.n_positions);
  reader.read("update_rank", config.update_rank);
  reader.read("adapter_scales", config.adapter_scales);
  std::vector<std::pair<int32_t, int32_t>> adapter_tokens;
  reader.read("adapter_tokens", adapter_tokens);
  for (const auto& [token, substitute] : adapter_tokens) {
    config.adapter_tokens.push_back({token, substitute});
  }
  reader.read("adapter_gain", config.adapter_gain);
  reader.read("token_input_rows", config.token_input_rows);
  reader.read("reads_hidden", config.reads_hidden);
  reader.read("n_guessed", config.n_guessed);
  reader.read_choice("hidden_join", config.hidden_join,
                     {{"normed", HiddenJoin::kNormed},
                      {"plain", HiddenJoin::kPlain},
                      {"apart", HiddenJoin::kApart},
                      {"cached", HiddenJoin::kCached}});
  reader.read("hidden_dim", config.hidden_dim);
  reader.read("features_dim", config.features_dim);
  reader.read("norms_features", config.norms_features);
  reader.read("residual_is_normed", config.residual_is_normed);
  reader.finish();
  config.check();
  return config;
}

}  // namespace edgeh2o
