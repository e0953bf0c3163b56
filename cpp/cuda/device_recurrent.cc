// Recurrent layers on a device (model/mixers/short_conv.cc and delta_net.cc are those of the CPU).
#include <algorithm>

#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {

void DeviceDecoder::mix_recurrent(const Rows& rows, const Rows& outputs, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  for_groups(rows, [&](const Rows& group) {
    const size_t n_skipped = std::min(group.n, outputs.first - std::min(outputs.first, group.first));
    if (spec.mixer == MixerKind::kShortConv) return mix_short_conv(group, layer, n_skipped);
    if (spec.mixer == MixerKind::kDeltaNet) return mix_delta_net(group, layer, n_skipped);
    mix_mamba2(group, layer, n_skipped);
  });
}

void DeviceDecoder::convolve(const Rows& rows, size_t layer, ConvolveArguments a) {
  const LayerWeights& w = weights_.host().layer(layer);
  a.weights = weights_.vector(w.conv);
  a.biases = weights_.vector(w.conv_bias);
  a.n_taps = u32(config_.layers[layer].n_conv_taps);
  a.n_rows = u32(rows.n);
  const size_t n_blocks = ceil_div(size_t{a.channels}, kThreads);
  device_->launch("convolve_rows", a, n_blocks, rows.n, 1, kThreads, 0);
  device_->launch("keep_inputs", a, n_blocks, 1, 1, kThreads, 0);
}

void DeviceDecoder::mix_short_conv(const Rows& rows, size_t layer, size_t n_skipped) {
  const LayerWeights& w = weights_.host().layer(layer);
  const size_t dim = config_.model_dim;
  DeviceState& state = rows.state;
  float *const b = state.mixed_.as<float>(), *const out = state.attended_.as<float>();
  const Linear* const matrices[] = {&w.conv_in};
  const float* const input = begin_branch(rows, w.attn_norm, {matrices, 1});
  multiply(rows, w.conv_in, input, b, 3 * dim);
  ConvolveArguments a{};
  a.x = b;
  a.gate = b + dim;
  a.factor = b + 2 * dim;
  a.state = state.recurrent(layer);
  a.out = out;
  a.stride = u32(3 * dim);
  a.channels = u32(dim);
  convolve(rows, layer, a);
  if (n_skipped == rows.n) return;
  const Rows outputs = rows.part(n_skipped, rows.n - n_skipped);
  const float* const mixed = out + n_skipped * dim;
  quantise(outputs, mixed, dim, w.conv_out);
  end_branch(outputs, mixed, w.conv_out, w.attn_post_norm, config_.layers[layer].residual_scale);
}

void DeviceDecoder::mix_delta_net(const Rows& rows, size_t layer, size_t n_skipped) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const DeltaHeads& heads = spec.delta;
  const size_t conv_dim = heads.conv_dim(), width = heads.value_dim(), n_heads = heads.n_value_heads;
  DeviceState& state = rows.state;
  float *const qkv = state.mixed_.as<float>(), *const z = qkv + kRowsAtOnce * conv_dim,
               *const gates = z + kRowsAtOnce * width, *const convolved = state.convolved_.as<float>(),
               *const out = state.attended_.as<float>(), *const matrices = state.recurrent(layer);
  project_delta_net(rows, w, {qkv, z, gates}, heads);

  ConvolveArguments c{};
  c.x = qkv;
  c.state = matrices + heads.n_state();
  c.out = convolved;
  c.stride = c.channels = u32(conv_dim);
  convolve(rows, layer, c);
  // Queries and keys x / sqrt(|x|^2 + eps), as an RMS norm; queries also by the root of the head size.
  const float eps = config_.norm_eps / static_cast<float>(heads.head_dim);
  norm_groups(rows, convolved, heads.key_dim(), conv_dim, w.delta_q_scale, eps);
  norm_groups(rows, convolved + heads.key_dim(), heads.key_dim(), conv_dim, w.delta_k_scale, eps);
  device_->launch("delta_gates",
                  DeltaGateArguments{gates, weights_.vector(w.delta_a), weights_.vector(w.delta_bias),
                                     u32(rows.n), u32(n_heads)},
                  ceil_div(rows.n * n_heads, kThreads), 1, 1, kThreads, 0);
  device_->launch(
      "delta_rule",
      DeltaArguments{convolved, gates, matrices, out, u32(conv_dim), u32(rows.n), u32(heads.n_key_heads),
                     u32(n_heads), u32(heads.head_dim), heads.are_grouped},
      heads.head_dim / kWarpSize, n_heads, 1, kThreads, delta_shared_bytes(heads.head_dim));
  if (n_skipped == rows.n) return;

  const Rows outputs = rows.part(n_skipped, rows.n - n_skipped);
  float* const mixed = out + n_skipped * width;
  norm_groups(outputs, mixed, width, width, w.delta_norm, config_.norm_eps);
  gate_by(outputs, z + n_skipped * width, width, mixed, width, GateKind::kSilu, w.delta_out);
  end_branch(outputs, mixed, w.delta_out, w.attn_post_norm, spec.residual_scale);
}

void DeviceDecoder::project_delta_net(const Rows& rows, const LayerWeights& w, const DeltaParts& parts,
                                      const DeltaHeads& heads) {
  const bool has_one_matrix = weights_.has(w.delta_gates.weight);
  const Linear* const separate[] = {&w.delta_qkv, &w.delta_z, &w.delta_rate, &w.delta_decay};
  const Linear* const joined[] = {&w.delta_qkv, &w.delta_z, &w.delta_gates};
  const Span<const Linear* const> matrices =
      has_one_matrix ? Span<const Linear* const>{joined, 3} : Span<const Linear* const>{separate, 4};
  const float* const input = begin_branch(rows, w.attn_norm, matrices);
  multiply(rows, w.delta_qkv, input, parts.qkv, heads.conv_dim());
  multiply(rows, w.delta_z, input, parts.z, heads.value_dim());
  const size_t n_gates = 2 * heads.n_value_heads;
  if (has_one_matrix) return multiply(rows, w.delta_gates, input, parts.gates, n_gates);
  multiply(rows, w.delta_rate, input, parts.gates, n_gates);
  multiply(rows, w.delta_decay, input, parts.gates + heads.n_value_heads, n_gates);
}

}  // namespace edgeh2o::cuda
