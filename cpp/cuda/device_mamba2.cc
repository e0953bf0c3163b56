// Mamba-2 on a device (model/mixers/mamba2.cc is that of the CPU).
#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {

void DeviceDecoder::mix_mamba2(const Rows& rows, size_t layer, size_t n_skipped) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const SsdHeads& heads = spec.ssd;
  const size_t width = heads.inner_dim(), conv_dim = heads.conv_dim(), stride = heads.in_dim();
  DeviceState& state = rows.state;
  float *const z = state.mixed_.as<float>(), *const inputs = z + width, *const rates = inputs + conv_dim,
               *const out = state.attended_.as<float>(), *const matrices = state.recurrent(layer);
  const Linear* const projections[] = {&w.ssm_in};
  const float* const input = begin_branch(rows, w.attn_norm, {projections, 1});
  multiply(rows, w.ssm_in, input, z, stride);

  ConvolveArguments c{};
  c.x = inputs;
  c.state = matrices + heads.n_state();
  c.out = state.convolved_.as<float>();
  c.stride = u32(stride);
  c.channels = u32(conv_dim);
  convolve(rows, layer, c);
  SsdArguments a{};
  a.rows = c.out;
  a.rates = rates;
  a.a = weights_.vector(w.ssm_a);
  a.biases = weights_.vector(w.ssm_bias);
  a.skips = weights_.vector(w.ssm_d);
  a.state = matrices;
  a.out = out;
  a.stride = c.channels;
  a.rate_stride = u32(stride);
  a.n_rows = u32(rows.n);
  a.n_heads = u32(heads.n_heads);
  a.n_groups = u32(heads.n_groups);
  a.head_dim = u32(heads.head_dim);
  a.state_dim = u32(heads.state_dim);
  device_->launch("ssd", a, heads.head_dim / kSsdColumns, heads.n_heads, 1, kThreads, sizeof(SsdShared));
  if (n_skipped == rows.n) return;

  const Rows outputs = rows.part(n_skipped, rows.n - n_skipped);
  float* const mixed = out + n_skipped * width;
  gate_and_norm(outputs, layer, z + n_skipped * stride, mixed);
  end_branch(outputs, mixed, w.ssm_out, w.attn_post_norm, spec.residual_scale);
}

// x = silu(gate) * x, with a norm of every group of heads behind it where the layer has one; in 8 bits where
// the output's weights are quantised. gate: as what the layer made of its input.
void DeviceDecoder::gate_and_norm(const Rows& rows, size_t layer, const float* gate, float* x) {
  const LayerWeights& w = weights_.host().layer(layer);
  const SsdHeads& heads = config_.layers[layer].ssd;
  const size_t width = heads.inner_dim(), stride = heads.in_dim(), group_dim = width / heads.n_groups;
  const float* const norm = weights_.vector(w.ssm_norm[0]);  // of all groups, one after the other
  if (!norm) return gate_by(rows, gate, stride, x, width, GateKind::kSilu, w.ssm_out);
  device_->launch("gate_rows", GateArguments{gate, x, x, {}, u32(width), u32(stride), GateKind::kSilu},
                  rows.n, gate_blocks(width), 1, kThreads, 0);
  NormArguments n{};
  n.x = n.out = x;
  n.weight = norm;
  n.dim = n.weight_stride = u32(group_dim);
  n.n_groups = u32(heads.n_groups);
  n.x_stride = n.out_stride = u32(width);
  n.eps = config_.norm_eps;
  device_->launch("norm_rows", n, rows.n * heads.n_groups, 1, 1, kNormThreads, kSmallShared);
  quantise(rows, x, width, w.ssm_out);
}

}  // namespace edgeh2o::cuda
