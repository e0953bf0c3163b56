#include "cuda/device_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "cuda/launches.h"
#include "model/mixers/attention.h"
#include "ops/chunk_plan.h"
#include "ops/rows.h"

namespace edgeh2o::cuda {
namespace {

GateKind gate_kind(Activation activation) {
  switch (activation) {
    case Activation::kGeluTanh:
      return GateKind::kGelu;
    case Activation::kSiluClamped:
      return GateKind::kSiluClamped;
    case Activation::kRelu:
    case Activation::kReluSquared:  // of x gated by itself
      return GateKind::kRelu;
    case Activation::kUngatedGelu:  // refused by check_supported
    case Activation::kXielu:
    case Activation::kSilu:
      break;
  }
  return GateKind::kSilu;
}

}  // namespace

void check_supported(const DecoderConfig& config) {
  const char* cure = "; use --device cpu";
  const Temperature temperature = temperature_of(config);
  EH2O_CHECK(!config.centres_norms, "LayerNorm does not run on a GPU yet", cure);
  EH2O_CHECK(config.has_norm_weights, "norms without weights do not run on a GPU yet", cure);
  EH2O_CHECK(!config.has_norm_biases && !config.has_output_bias,
             "biases of norms and of the output do not run on a GPU yet", cure);
  EH2O_CHECK(config.n_positions == 0, "positions by a table do not run on a GPU yet", cure);
  EH2O_CHECK(config.is_causal(), "attention that is not causal does not run on a GPU yet", cure);
  EH2O_CHECK(!config.has_streams, "several residual streams (AltUp) do not run on a GPU yet", cure);
  EH2O_CHECK(!config.mixes_streams(),
             "residual streams that are mixed (hyper-connections) do not run on a GPU yet", cure);
  EH2O_CHECK(!config.norms_embeddings && config.post_norm_eps == 0.0f,
             "normed embeddings and norms with another epsilon do not run on a GPU yet", cure);
  EH2O_CHECK(config.passes.empty(), "layers that are gone through several times do not run on a GPU yet",
             cure);
  EH2O_CHECK(!config.chooses_adapters(), "adapters that tokens choose do not run on a GPU yet", cure);
  size_t n_attending = 0;
  for (const LayerSpec& layer : config.layers) {
    EH2O_CHECK(layer.laurel_rank == 0 && !layer.cuts_gate(),
               "LAuReL and networks whose gate is cut off do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.limits_gates(), "networks whose gate has a limit do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.is_parallel, "feed-forward networks beside attention do not run on a GPU yet", cure);
    EH2O_CHECK(layer.activation != Activation::kXielu && layer.activation != Activation::kUngatedGelu,
               "networks with xIELU, or GELU without a gate, do not run on a GPU yet", cure);
    EH2O_CHECK(layer.qkv_limit == 0.0f && !layer.has_joint_bias,
               "limits and joint biases of queries, keys and values do not run on a GPU yet", cure);
    EH2O_CHECK(layer.experts_scale == 1.0f, "a factor of all experts together does not run on a GPU yet",
               cure);
    EH2O_CHECK(!layer.routes_by_input, "experts chosen by the input of their layer do not run on a GPU yet",
               cure);
    EH2O_CHECK(layer.adjugate_ffn_dim == 0, "experts that share others do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.has_expert_norms, "experts with norms of their own do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.has_sub_norms, "norms behind attention and activations do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.is_chunked && !layer.has_plain_qk_norm && !layer.scales_expert_inputs,
               "windows that begin at fixed positions, norms of heads without weights and scaled inputs of "
               "experts do not run on a GPU yet",
               cure);
    EH2O_CHECK(layer.scan.is_none() && layer.ssd.step_rank == 0,
               "Mamba-1 layers, and Mamba-2 with rates made of its channels, do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.delta.decays_by_row,
               "delta nets whose rows decay by themselves do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.has_head_gains, "gains of heads do not run on a GPU yet", cure);
    EH2O_CHECK(layer.qk_norm != QkNorm::kOwnHead,
               "norms of heads by weights of their own do not run on a GPU yet", cure);
    n_attending += layer.attends();
    if (!layer.attends()) continue;
    EH2O_CHECK(!layer.has_gate_matrix(),
               "gates of attention by a matrix of their own do not run on a GPU yet", cure);
    EH2O_CHECK(layer.heads.key_dim == layer.heads.value_dim && layer.value_scale == 1.0f,
               "values of another size than their keys, or with a factor, do not run on a GPU yet", cure);
    EH2O_CHECK(layer.heads.max_alibi_bias == 0.0f,
               "attention with a bias by distance (ALiBi) does not run on a GPU yet", cure);
    EH2O_CHECK(layer.heads.index.is_none(),
               "attention to what an indexer chooses (DSA) does not run on a GPU yet", cure);
    EH2O_CHECK(!layer.qk_norm_after_rope || layer.qk_norm != QkNorm::kProjection,
               "whole projections that are normed after their rotation do not run on a GPU yet", cure);
    EH2O_CHECK(layer.temperature_period == 0 || (layer.temperature_period == temperature.period &&
                                                 layer.temperature_scale == temperature.scale),
               "layers whose queries are scaled differently do not run on a GPU yet", cure);
    EH2O_CHECK(layer.latent.is_none() || layer.temperature_period == 0,
               "latent attention whose queries are scaled by their position does not run on a GPU yet", cure);
  }
  EH2O_CHECK(n_attending > 0, "models without attention do not run on a GPU yet", cure);
}

Temperature temperature_of(const DecoderConfig& config) {
  for (const LayerSpec& layer : config.layers) {
    if (layer.temperature_period > 0) return {layer.temperature_scale, layer.temperature_period};
  }
  return {};
}

DeviceDecoder::DeviceDecoder(const DecoderConfig& config, const KernelTable& table,
                             std::shared_ptr<Device> device, size_t block_bytes)
    : config_(config),
      table_(table),
      device_((check_supported(config), std::move(device))),
      weights_(config_, table, *device_, block_bytes) {}

void DeviceDecoder::forward(Sequence& sequence, DeviceState& state, Span<const int32_t> tokens,
                            bool is_decode, PromptEnd end, float* logits, const OnLayer& on_layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const SequenceShape& shape = sequence.shape();
  sequence.check_whole();
  const size_t position = sequence.position(), n_layers = config_.n_layers();
  EH2O_CHECK(tokens.size > 0 && tokens.size <= shape.batch_size, "a call takes 1 to ", shape.batch_size,
             " tokens, got ", tokens.size);
  EH2O_CHECK(tokens.size <= shape.max_context - position, "position ", position, " plus ", tokens.size,
             " tokens exceeds the context of ", shape.max_context);
  for (const int32_t token : tokens) {
    EH2O_CHECK(token >= 0 && static_cast<size_t>(token) < config_.vocab_size, "token ", token,
               " is outside the vocabulary of ", config_.vocab_size);
  }
  sequence.begin_call();
  state.begin_call(sequence);
  const Rows rows{sequence, state, 0, tokens.size, position};
  stage(rows, tokens);
  const auto end_layer = [&](size_t layer) {
    if (sequence.has_own_rows(layer)) sequence.layer(layer).advance(tokens.size);
    if (sequence.has_recurrent(layer)) sequence.recurrent(layer).advance(tokens.size);
    if (!on_layer) return;
    device_->wait();
    on_layer(layer + 1, n_layers);
  };
  if (is_decode && tokens.size == 1 && !on_layer && repeats_itself(sequence)) {
    replay_token(rows, logits != nullptr);
    for (size_t layer = 0; layer < n_layers; ++layer) end_layer(layer);
  } else {
    launch_call(rows, is_decode, end, logits != nullptr, end_layer);
  }
  if (logits) read_logits(state, 1, logits);
  device_->wait();
  state.end_call();
  sequence.append_tokens(tokens);
  sequence.end_call();
  if (is_decode) return;
  sequence.end_prefill(sequence.position());
  if (end != PromptEnd::kOpen || !sequence.is_recurrent()) return;
  // As on the CPU: the next prompt may have to go back to here.
  state.download_states(sequence);
  sequence.mark();
}

void DeviceDecoder::launch_call(const Rows& rows, bool is_decode, PromptEnd end, bool has_logits,
                                const std::function<void(size_t)>& end_layer) {
  const size_t dim = config_.model_dim;
  upload_inputs(rows);
  embed(rows, weights_.token_embd(), 0, dim, config_.embedding_scale, rows.x(dim));
  for (size_t layer = 0; layer < config_.n_layers(); ++layer) {
    run_layer(rows, layer, is_decode, end);
    if (end_layer) end_layer(layer);
  }
  if (has_logits) launch_logits(rows.state, rows.x(dim) + (rows.n - 1) * dim, 1);
}

// Where experts or rules choose on the CPU a layer waits for that.
bool DeviceDecoder::repeats_itself(const Sequence& sequence) const {
  const auto has_experts = [](const LayerSpec& layer) { return layer.ffn == FfnKind::kExperts; };
  return !sequence.policy().chooses_in_decode() &&
         std::none_of(config_.layers.begin(), config_.layers.end(), has_experts);
}

// A token of a small model is hundreds of launches, each of which takes the CPU microseconds (a Jetson's most
// of all): recorded once, they are one.
void DeviceDecoder::replay_token(const Rows& token, bool has_logits) {
  DeviceState::Token& known = token.state.token_;
  const size_t n_ranges = ranges_of(token.position + 1);
  if (known.n_ranges != n_ranges || known.has_logits != has_logits) {
    known = {n_ranges, has_logits, {}};
    return launch_call(token, true, PromptEnd::kFinal, has_logits, {});
  }
  if (!known.graph) {
    known.graph = device_->record([&] { launch_call(token, true, PromptEnd::kFinal, has_logits, {}); });
  }
  device_->replay(known.graph);
}

void DeviceDecoder::embed(const Rows& rows, const DeviceTable& table, size_t first, size_t n_columns,
                          float scale, float* out) {
  device_->launch("embed_rows",
                  EmbedArguments{table.parts, rows.state.tokens() + rows.first, out, table.part_rows,
                                 u32(first), u32(n_columns), scale},
                  rows.n, ceil_div(n_columns, size_t{kEmbedColumns}), 1, kThreads, 0);
}

// Position, token ids and rotations of all rows of a call, in pinned memory that the last call has let go.
void DeviceDecoder::stage(const Rows& rows, Span<const int32_t> tokens) {
  const DeviceState& state = rows.state;
  auto* const inputs = state.staged_.as<uint32_t>();
  inputs[0] = u32(rows.position);
  std::memcpy(inputs + 1, tokens.data, tokens.size * sizeof(int32_t));
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    const RopeConfig& rope = config_.ropes[i];
    const std::vector<float>& inv_freq = rope.of_context(rows.sequence.shape().max_context);
    uint8_t* const staged = state.staged_rope(i);
    fill_rope_table(reinterpret_cast<float*>(staged),
                    reinterpret_cast<float*>(staged + state.ropes_[i].size() / 2), rows.position, rows.n,
                    {inv_freq.data(), inv_freq.size()}, rope.attention_factor);
  }
  const Temperature temperature = temperature_of(config_);
  if (temperature.period == 0) return;
  auto* const factors = reinterpret_cast<float*>(state.staged_rope(config_.ropes.size()));
  for (size_t i = 0; i < rows.n; ++i) {
    const auto n_periods = static_cast<double>((rows.position + i) / temperature.period);
    factors[i] = static_cast<float>(1.0 + static_cast<double>(temperature.scale) * std::log1p(n_periods));
  }
}

// What stage() has written, to the device.
void DeviceDecoder::upload_inputs(const Rows& rows) {
  const DeviceState& state = rows.state;
  device_->upload(state.inputs_.as<void>(), state.staged_.as<void>(), (1 + rows.n) * sizeof(int32_t));
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    const size_t n_used = rows.n * config_.ropes[i].n_pairs() * sizeof(float);
    for (const size_t part : {size_t{0}, state.ropes_[i].size() / 2}) {
      device_->upload(state.ropes_[i].as<uint8_t>() + part, state.staged_rope(i) + part, n_used);
    }
  }
  if (temperature_of(config_).period == 0) return;
  device_->upload(state.query_factors_.as<void>(), state.staged_rope(config_.ropes.size()),
                  rows.n * sizeof(float));
}

void DeviceDecoder::run_layer(const Rows& rows, size_t layer, bool is_decode, PromptEnd end) {
  const LayerSpec& spec = config_.layers[layer];
  // As on the CPU: rows whose output nobody reads are left as they are (LayerCall::first_output_row).
  const bool skips_rows = !is_decode && LayerCall::skips_rows(config_, rows.sequence, layer);
  const size_t n_left = !skips_rows ? 0 : end == PromptEnd::kLater ? rows.n : rows.n - 1;
  const Rows outputs = rows.part(n_left, rows.n - n_left);
  if (spec.attends()) {
    const bool is_rounded = attend(rows, outputs, layer, is_decode, end);
    for_groups(outputs, [&](const Rows& group) { add_attended(group, layer, is_rounded); });
  } else if (spec.has_mixer()) {
    mix_recurrent(rows, outputs, layer);
  }
  for_groups(outputs, [&](const Rows& group) {
    if (spec.has_ffn()) feed_forward(group, layer);
    if (spec.token_input_dim > 0) add_token_input(group, layer);
    scale_output(group, layer);
  });
}

void DeviceDecoder::feed_forward(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  if (spec.ffn == FfnKind::kExperts) return add_experts(rows, layer);
  const LayerWeights& w = weights_.host().layer(layer);
  const FeedForward& ffn = w.ffn[0];
  DeviceState& state = rows.state;
  const Linear* const matrices[] = {&ffn.up, &ffn.gate};
  const float* const input = begin_branch(rows, w.ffn_norm, {matrices, size_t{1} + spec.has_gate()});
  gate_up(rows, ffn, spec.activation, input);
  end_branch(rows, state.gate_.as<float>(), ffn.down, w.ffn_post_norm, spec.residual_scale);
}

// act(gate) * up, or act(up) * up without a gate, for what multiplies it next: in 8 bits, or as floats in
// gate_.
void DeviceDecoder::gate_up(const Rows& rows, const FeedForward& ffn, Activation activation,
                            const float* input) {
  DeviceState& state = rows.state;
  const size_t ffn_dim = weights_.n_out(ffn.up.weight);
  const bool has_gate = weights_.has(ffn.gate.weight);
  float *const gate = state.gate_.as<float>(), *const up = state.up_.as<float>();
  const Product products[] = {{&ffn.up, up}, {&ffn.gate, gate}};
  multiply_all(rows, {products, size_t{1} + has_gate}, input, ffn_dim);
  const bool has_floats = !is_quantised(ffn.down);
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, ffn_dim);
  if (has_floats) q8.q = nullptr;
  device_->launch("gate_rows",
                  GateArguments{has_gate ? gate : up, up, has_floats ? gate : nullptr, q8, u32(ffn_dim),
                                u32(ffn_dim), gate_kind(activation)},
                  rows.n, gate_blocks(ffn_dim), 1, kThreads, 0);
}

void DeviceDecoder::gate_by(const Rows& rows, const float* gate, size_t gate_stride, float* x, size_t dim,
                            GateKind kind, const Linear& consumer) {
  const bool has_floats = !is_quantised(consumer);
  QuantisedRows q8 = rows_of(rows.state.q8_, rows.state.d8_, dim);
  if (has_floats) q8.q = nullptr;
  device_->launch("gate_rows",
                  GateArguments{gate, x, has_floats ? x : nullptr, q8, u32(dim), u32(gate_stride), kind},
                  rows.n, gate_blocks(dim), 1, kThreads, 0);
}

const float* DeviceDecoder::begin_branch(const Rows& rows, const std::vector<float>& weight,
                                         Span<const Linear* const> matrices) {
  bool any_float = false, any_quantised = false;
  for (const Linear* linear : matrices) {
    (is_quantised(*linear) ? any_quantised : any_float) = true;
  }
  const size_t dim = config_.model_dim;
  DeviceState& state = rows.state;
  const float* const floats = weight.empty() ? rows.x(dim) : state.norm_.as<float>();
  if (weight.empty() && !any_quantised) return floats;
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!any_quantised) q8.q = nullptr;
  float* const out = any_float && !weight.empty() ? state.norm_.as<float>() : nullptr;
  device_->launch("norm_rows",
                  NormArguments{rows.x(dim), weights_.vector(weight), out, q8, u32(dim), 1, u32(dim),
                                u32(dim), config_.norm_eps},
                  rows.n, 1, 1, kNormThreads, kSmallShared);
  return floats;
}

void DeviceDecoder::end_branch(const Rows& rows, const float* input, const Linear& linear,
                               const std::vector<float>& post_norm, float scale) {
  const bool is_plain = post_norm.empty() && scale == 1.0f;
  const size_t dim = config_.model_dim;
  DeviceState& state = rows.state;
  float *const x = rows.x(dim), *const branch = state.norm_.as<float>();
  multiply(rows, linear, input, is_plain ? x : branch, dim, is_plain);
  if (is_plain) return;
  device_->launch("add_rows",
                  AddArguments{x, branch, weights_.vector(post_norm), u32(dim), config_.norm_eps, scale},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

void DeviceDecoder::quantise(const Rows& rows, const float* input, size_t dim, const Linear& consumer) {
  if (!is_quantised(consumer)) return;
  device_->launch("norm_rows",
                  NormArguments{input, nullptr, nullptr, rows_of(rows.state.q8_, rows.state.d8_, dim),
                                u32(dim), 1, u32(dim), u32(dim), 0.0f},
                  rows.n, 1, 1, kNormThreads, kSmallShared);
}

void DeviceDecoder::norm_groups(const Rows& rows, float* x, size_t dim, size_t stride,
                                const std::vector<float>& weight, float eps) {
  const size_t n_groups = dim / weight.size();
  device_->launch("norm_rows",
                  NormArguments{x, weights_.vector(weight), x, QuantisedRows{}, u32(weight.size()),
                                u32(n_groups), u32(stride), u32(stride), eps},
                  rows.n * n_groups, 1, 1, kNormThreads, kSmallShared);
}

}  // namespace edgeh2o::cuda
