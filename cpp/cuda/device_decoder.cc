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

// Rows from which on a matrix product beats reading the weights once per row: a guess, not timed.
constexpr size_t kGemmFromRows = 8;

DeviceHeads heads_of(const AttentionHeads& heads) {
  return {u32(heads.n_heads), u32(heads.n_kv_heads), u32(heads.key_dim), u32(heads.value_dim)};
}

GateKind gate_kind(Activation activation) {
  switch (activation) {
    case Activation::kGeluTanh:
      return GateKind::kGelu;
    case Activation::kSiluClamped:
      return GateKind::kSiluClamped;
    case Activation::kSilu:
    case Activation::kReluSquared:  // refused below
      break;
  }
  return GateKind::kSilu;
}

}  // namespace

void check_supported(const DecoderConfig& config) {
  const char* cure = "; use --device cpu";
  const Temperature temperature = temperature_of(config);
  for (const LayerSpec& layer : config.layers) {
    EH2O_CHECK(!layer.has_ssd(), "layers of Mamba-2 do not run on a GPU yet", cure);
    EH2O_CHECK(layer.has_gate(), "feed-forward networks without a gate do not run on a GPU yet", cure);
    EH2O_CHECK(layer.mixer == MixerKind::kAttention, "layers without attention do not run on a GPU yet",
               cure);
    EH2O_CHECK(layer.latent.is_none(), "multi-head latent attention does not run on a GPU yet", cure);
    EH2O_CHECK(layer.n_expert_groups == 1 && layer.expert_scale == 1.0f,
               "experts in groups, or whose shares are scaled, do not run on a GPU yet", cure);
    EH2O_CHECK(!layer.has_output_gate, "attention with a gate does not run on a GPU yet", cure);
    EH2O_CHECK(!layer.qk_norm_after_rope || layer.qk_norm != QkNorm::kProjection,
               "whole projections that are normed after their rotation do not run on a GPU yet", cure);
    EH2O_CHECK(layer.temperature_period == 0 || (layer.temperature_period == temperature.period &&
                                                 layer.temperature_scale == temperature.scale),
               "layers whose queries are scaled differently do not run on a GPU yet", cure);
    EH2O_CHECK(layer.heads.key_dim % 4 == 0, "heads of ", layer.heads.key_dim,
               " dimensions do not run on a GPU: the kernels want a multiple of 4", cure);
    EH2O_CHECK(layer.heads.group_size() <= kMaxGroup, layer.heads.group_size(),
               " query heads per KV head do not run on a GPU: at most ", kMaxGroup, cure);
  }
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
  const size_t position = sequence.position(), n_layers = config_.n_layers(), dim = config_.model_dim;
  EH2O_CHECK(tokens.size > 0 && tokens.size <= shape.batch_size, "a call takes 1 to ", shape.batch_size,
             " tokens, got ", tokens.size);
  EH2O_CHECK(tokens.size <= shape.max_context - position, "position ", position, " plus ", tokens.size,
             " tokens exceeds the context of ", shape.max_context);
  for (const int32_t token : tokens) {
    EH2O_CHECK(token >= 0 && static_cast<size_t>(token) < config_.vocab_size, "token ", token,
               " is outside the vocabulary of ", config_.vocab_size);
  }
  sequence.begin_call();
  state.begin_call(position);
  stage(sequence, state, tokens, position);
  const Rows rows{sequence, state, 0, tokens.size, position};
  embed(rows, weights_.token_embd(), 0, dim, config_.embedding_scale, rows.x(dim));
  for (size_t layer = 0; layer < n_layers; ++layer) {
    run_layer(rows, layer, is_decode, end);
    if (sequence.has_own_rows(layer)) sequence.layer(layer).advance(tokens.size);
    if (!on_layer) continue;
    device_->wait();
    on_layer(layer + 1, n_layers);
  }
  if (logits) compute_logits(state, rows.x(dim) + (tokens.size - 1) * dim, 1, logits);
  device_->wait();
  sequence.append_tokens(tokens);
  sequence.end_call();
  if (!is_decode) sequence.end_prefill(sequence.position());
}

void DeviceDecoder::embed(const Rows& rows, const DeviceTable& table, size_t first, size_t n_columns,
                          float scale, float* out) {
  device_->launch("embed_rows",
                  EmbedArguments{table.parts, rows.state.tokens_.as<int32_t>() + rows.first, out,
                                 table.part_rows, u32(first), u32(n_columns), scale},
                  rows.n, 1, 1, kThreads, 0);
}

// Token ids and rotations of all rows of a call, through pinned memory that the last call has let go.
void DeviceDecoder::stage(const Sequence& sequence, DeviceState& state, Span<const int32_t> tokens,
                          size_t position) {
  uint8_t* staged = state.staged_.as<uint8_t>();
  std::memcpy(staged, tokens.data, tokens.size * sizeof(int32_t));
  device_->upload(state.tokens_.as<void>(), staged, tokens.size * sizeof(int32_t));
  staged += sequence.shape().batch_size * sizeof(int32_t);
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    const RopeConfig& rope = config_.ropes[i];
    const std::vector<float>& inv_freq = rope.of_context(sequence.shape().max_context);
    const size_t n_bytes = sequence.shape().batch_size * rope.n_pairs() * sizeof(float);
    auto* const cos = reinterpret_cast<float*>(staged);
    auto* const sin = reinterpret_cast<float*>(staged + n_bytes);
    fill_rope_table(cos, sin, position, tokens.size, {inv_freq.data(), inv_freq.size()},
                    rope.attention_factor);
    const size_t used = tokens.size * rope.n_pairs() * sizeof(float);
    uint8_t* const to = state.ropes_[i].as<uint8_t>();
    device_->upload(to, cos, used);
    device_->upload(to + n_bytes, sin, used);
    staged += 2 * n_bytes;
  }
  const Temperature temperature = temperature_of(config_);
  if (temperature.period == 0) return;
  auto* const factors = reinterpret_cast<float*>(staged);
  for (size_t i = 0; i < tokens.size; ++i) {
    const auto n_periods = static_cast<double>((position + i) / temperature.period);
    factors[i] = static_cast<float>(1.0 + static_cast<double>(temperature.scale) * std::log1p(n_periods));
  }
  device_->upload(state.query_factors_.as<void>(), factors, tokens.size * sizeof(float));
}

void DeviceDecoder::run_layer(const Rows& rows, size_t layer, bool is_decode, PromptEnd end) {
  const LayerSpec& spec = config_.layers[layer];
  const auto for_groups = [](const Rows& all, const auto& f) {
    for (size_t begin = 0; begin < all.n; begin += kRowsAtOnce) {
      f(all.part(begin, std::min(kRowsAtOnce, all.n - begin)));
    }
  };
  // As on the CPU: rows whose output nobody reads are left as they are (LayerCall::first_output_row).
  const bool skips_rows = !is_decode && LayerCall::skips_rows(config_, rows.sequence, layer);
  const size_t n_left = !skips_rows ? 0 : end == PromptEnd::kLater ? rows.n : rows.n - 1;
  const Rows outputs = rows.part(n_left, rows.n - n_left);
  const bool is_row = skips_rows && skips_attention(config_, rows.sequence, layer);
  for_groups(is_row && !spec.heads.has_own_kv() ? outputs : rows,
             [&](const Rows& group) { project_qkv(group, layer); });
  const bool asks_rule =
      is_decode ? rows.sequence.policy().chooses_in_decode() : !rows.sequence.plan(layer).needs.reads_all;
  if (is_row) {
    attend_to_all(outputs, layer);
  } else if (spec.window > 0 || !asks_rule) {
    attend_to_all(rows, layer);
    const uint64_t n_pairs = causal_pairs(rows.position, rows.n, spec.window);
    if (!is_decode) rows.sequence.count_pairs(n_pairs * spec.heads.n_kv_heads, n_pairs);
  } else if (is_decode) {
    attend_token(rows, layer);
  } else {
    attend_by_policy(rows, layer, end);
  }
  for_groups(outputs, [&](const Rows& group) {
    add_attended(group, layer);
    feed_forward(group, layer);
    if (spec.token_input_dim > 0) add_token_input(group, layer);
    scale_output(group, layer);
  });
}

// Queries, keys and values: normed, rotated, and written to the cache.
void DeviceDecoder::project_qkv(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const AttentionHeads& heads = spec.heads;
  const size_t stride = spec.qkv_dim();
  const bool has_own_kv = heads.has_own_kv();
  float* const qkv = rows.qkv(stride);
  std::vector<const Linear*> matrices = {&w.attn_q};
  if (has_own_kv) matrices.insert(matrices.end(), {&w.attn_k, &w.attn_v});
  begin_branch(rows, w.attn_norm, {matrices.data(), matrices.size()});
  const float* input = w.attn_norm.empty() ? rows.x(config_.model_dim) : rows.state.norm_.as<float>();
  size_t offset = 0;
  for (const Linear* linear : matrices) {
    const DeviceMatrix& matrix = weights_.matrix(linear->weight);
    multiply(rows, matrix, input, weights_.vector(linear->bias), qkv + offset, stride, false);
    offset += matrix.n_out;
  }
  if (spec.qk_norm != QkNorm::kNone && !spec.qk_norm_after_rope) {
    norm_groups(rows, qkv, heads.q_dim(), stride, w.attn_q_norm);
    if (has_own_kv) norm_groups(rows, qkv + heads.q_dim(), heads.k_dim(), stride, w.attn_k_norm);
  }
  rotate(rows, layer);
}

void DeviceDecoder::rotate(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const AttentionHeads& heads = spec.heads;
  const size_t n_pairs = config_.rope(layer).n_pairs();
  const DeviceState& state = rows.state;
  RopeArguments a{};
  a.qkv = rows.qkv(spec.qkv_dim());
  a.cos = state.ropes_[spec.rope].as<float>() + rows.first * n_pairs;
  a.sin = a.cos + rows.sequence.shape().batch_size * n_pairs;
  a.cache = state.cache(layer);
  a.heads = heads_of(heads);
  a.stride = u32(spec.qkv_dim());
  a.n_pairs = u32(n_pairs);
  a.first = u32(rows.position);
  a.norms_values = spec.norms_values;
  if (spec.qk_norm_after_rope) {
    a.q_norm = weights_.vector(w.attn_q_norm);
    a.k_norm = weights_.vector(w.attn_k_norm);
  }
  if (spec.temperature_period > 0) a.q_factors = state.query_factors_.as<float>() + rows.first;
  a.eps = config_.norm_eps;
  device_->launch("rope_rows", a, heads.n_heads + (heads.has_own_kv() ? 2 * heads.n_kv_heads : 0), rows.n, 1,
                  kWarpSize, 0);
}

void DeviceDecoder::add_attended(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const float* const attended = rows.attended(spec.heads.out_dim());
  quantise(rows, attended, spec.heads.out_dim(), weights_.matrix(w.attn_output.weight));
  end_branch(rows, attended, w.attn_output, w.attn_post_norm, spec.residual_scale);
}

void DeviceDecoder::feed_forward(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  if (spec.ffn == FfnKind::kExperts) return add_experts(rows, layer);
  const LayerWeights& w = weights_.host().layer(layer);
  const FeedForward& ffn = w.ffn[0];
  DeviceState& state = rows.state;
  const Linear* const matrices[] = {&ffn.gate, &ffn.up};
  begin_branch(rows, w.ffn_norm, {matrices, 2});
  const float* input = w.ffn_norm.empty() ? rows.x(config_.model_dim) : state.norm_.as<float>();
  gate_up(rows, ffn, spec.activation, input);
  end_branch(rows, state.gate_.as<float>(), ffn.down, w.ffn_post_norm, spec.residual_scale);
}

// act(gate) * up, for what multiplies it next: in 8 bits, or as floats in gate_.
void DeviceDecoder::gate_up(const Rows& rows, const FeedForward& ffn, Activation activation,
                            const float* input) {
  DeviceState& state = rows.state;
  const size_t ffn_dim = weights_.matrix(ffn.gate.weight).n_out;
  float *const gate = state.gate_.as<float>(), *const up = state.up_.as<float>();
  multiply(rows, weights_.matrix(ffn.gate.weight), input, weights_.vector(ffn.gate.bias), gate, ffn_dim,
           false);
  multiply(rows, weights_.matrix(ffn.up.weight), input, weights_.vector(ffn.up.bias), up, ffn_dim, false);
  const bool is_quantised = is_tiled(weights_.matrix(ffn.down.weight).format);
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, ffn_dim);
  if (!is_quantised) q8.q = nullptr;
  device_->launch(
      "gate_rows",
      GateArguments{gate, up, is_quantised ? nullptr : gate, q8, u32(ffn_dim), gate_kind(activation)}, rows.n,
      1, 1, kThreads, 0);
}

void DeviceDecoder::begin_branch(const Rows& rows, const std::vector<float>& weight,
                                 Span<const Linear* const> matrices) {
  bool any_float = false, any_quantised = false;
  for (const Linear* linear : matrices) {
    (is_tiled(weights_.matrix(linear->weight).format) ? any_quantised : any_float) = true;
  }
  if (weight.empty() && !any_quantised) return;
  const size_t dim = config_.model_dim;
  DeviceState& state = rows.state;
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!any_quantised) q8.q = nullptr;
  float* const out = any_float && !weight.empty() ? state.norm_.as<float>() : nullptr;
  device_->launch("norm_rows",
                  NormArguments{rows.x(dim), weights_.vector(weight), out, q8, u32(dim), 1, u32(dim),
                                u32(dim), config_.norm_eps},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

void DeviceDecoder::end_branch(const Rows& rows, const float* input, const Linear& linear,
                               const std::vector<float>& post_norm, float scale) {
  const bool is_plain = post_norm.empty() && scale == 1.0f;
  const size_t dim = config_.model_dim;
  DeviceState& state = rows.state;
  float *const x = rows.x(dim), *const branch = state.norm_.as<float>();
  multiply(rows, weights_.matrix(linear.weight), input, weights_.vector(linear.bias), is_plain ? x : branch,
           dim, is_plain);
  if (is_plain) return;
  device_->launch("add_rows",
                  AddArguments{x, branch, weights_.vector(post_norm), u32(dim), config_.norm_eps, scale},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

void DeviceDecoder::quantise(const Rows& rows, const float* input, size_t dim, const DeviceMatrix& consumer) {
  if (!is_tiled(consumer.format)) return;
  device_->launch("norm_rows",
                  NormArguments{input, nullptr, nullptr, rows_of(rows.state.q8_, rows.state.d8_, dim),
                                u32(dim), 1, u32(dim), u32(dim), 0.0f},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

void DeviceDecoder::norm_groups(const Rows& rows, float* x, size_t dim, size_t stride,
                                const std::vector<float>& weight) {
  const size_t n_groups = dim / weight.size();
  device_->launch("norm_rows",
                  NormArguments{x, weights_.vector(weight), x, QuantisedRows{}, u32(weight.size()),
                                u32(n_groups), u32(stride), u32(stride), config_.norm_eps},
                  rows.n * n_groups, 1, 1, kThreads, kSmallShared);
}

void DeviceDecoder::multiply(const Rows& rows, const DeviceMatrix& w, const float* input, const float* bias,
                             float* out, size_t stride, bool accumulates) {
  const MultiplyArguments arguments{
      w,           input,       rows_of(rows.state.q8_, rows.state.d8_, w.depth),
      bias,        out,         w.depth,
      u32(stride), accumulates, u32(rows.n)};
  if (is_tiled(w.format) && rows.n >= kGemmFromRows) {
    device_->launch(gemm_kernel(w.format), arguments, ceil_div(w.n_out, size_t{kGemmTile}),
                    ceil_div(rows.n, size_t{kGemmTile}), 1, kThreads, gemm_shared_bytes(w.format));
    return;
  }
  const size_t n_blocks = ceil_div(w.n_out, is_tiled(w.format) ? size_t{kPanelRows} : kThreads / kWarpSize);
  device_->launch(multiply_kernel(w.format), arguments, n_blocks, rows.n, 1, kThreads, kSmallShared);
}

void DeviceDecoder::compute_logits(DeviceState& state, const float* x, size_t n_rows, float* out) {
  const std::vector<DeviceMatrix>& parts = weights_.output();
  const size_t dim = config_.model_dim, vocab_size = config_.vocab_size;
  const bool is_quantised = is_tiled(parts[0].format);
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!is_quantised) q8.q = nullptr;
  float *const norm = state.norm_.as<float>(), *const logits = state.logits_.as<float>();
  device_->launch(
      "norm_rows",
      NormArguments{x, weights_.vector(weights_.host().output_norm()), is_quantised ? nullptr : norm, q8,
                    u32(dim), 1, u32(dim), u32(dim), config_.norm_eps},
      n_rows, 1, 1, kThreads, kSmallShared);
  size_t first = 0;
  for (const DeviceMatrix& part : parts) {
    const size_t n_blocks = ceil_div(part.n_out, is_quantised ? size_t{kPanelRows} : kThreads / kWarpSize);
    device_->launch(multiply_kernel(part.format),
                    MultiplyArguments{part, norm, q8, nullptr, logits + first, part.depth, u32(vocab_size),
                                      false, u32(n_rows)},
                    n_blocks, n_rows, 1, kThreads, kSmallShared);
    first += part.n_out;
  }
  const size_t n_bytes = n_rows * vocab_size * sizeof(float);
  float* const staged = state.staged_logits_.as<float>();
  device_->download(staged, logits, n_bytes);
  device_->wait();
  std::memcpy(out, staged, n_bytes);
  scale_logits(table_, {out, n_rows, vocab_size, vocab_size}, config_.logit_scale, config_.logit_soft_cap);
}

void DeviceDecoder::row_logits(DeviceState& state, size_t first, size_t n_rows, float* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  EH2O_CHECK(state.shape_.all_rows, "logits of single rows need a session made with all_rows");
  for (size_t begin = 0; begin < n_rows; begin += kLogitRows) {
    compute_logits(state, state.x_.as<float>() + (first + begin) * config_.model_dim,
                   std::min(kLogitRows, n_rows - begin), out + begin * config_.vocab_size);
  }
}

}  // namespace edgeh2o::cuda
