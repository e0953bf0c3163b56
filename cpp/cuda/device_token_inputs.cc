// What layers have of their own per token on a device, and what they scale (model/token_inputs.cc is that of
// the CPU).
#include <cmath>

#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {

void DeviceDecoder::add_token_input(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const size_t model_dim = config_.model_dim, dim = spec.token_input_dim;
  DeviceState& state = rows.state;

  // The input: (row of the table + norm(proj(embedding))) / sqrt(2).
  float* const embedded = state.norm_.as<float>();
  const float embedding_scale = config_.embedding_scale / std::sqrt(static_cast<float>(model_dim));
  embed(rows, weights_.token_embd(), 0, model_dim, embedding_scale, embedded);
  quantise(rows, embedded, model_dim, w.token_input_proj);
  float *const gate = state.gate_.as<float>(), *const input = state.up_.as<float>();
  multiply(rows, w.token_input_proj, embedded, gate, dim);
  const float half = std::sqrt(0.5f);
  embed(rows, weights_.token_inputs(), layer * dim, dim, half * std::sqrt(static_cast<float>(dim)), input);
  device_->launch("add_rows",
                  AddArguments{input, gate, weights_.vector(weights_.host().token_input_norm()), u32(dim),
                               config_.norm_eps, half},
                  rows.n, 1, 1, kThreads, kSmallShared);

  // x += norm(out(gelu(gate(x)) * input))
  const Linear* const matrices[] = {&w.token_input_gate};
  begin_branch(rows, {}, {matrices, 1});
  multiply(rows, w.token_input_gate, rows.x(model_dim), gate, dim);
  gate_by(rows, gate, dim, input, dim, GateKind::kGelu, w.token_input_out);
  end_branch(rows, input, w.token_input_out, w.token_input_post_norm, spec.residual_scale);
}

// The residual stream behind a layer, as x += (scale - 1) x.
void DeviceDecoder::scale_output(const Rows& rows, size_t layer) {
  const std::vector<float>& scale = weights_.host().layer(layer).output_scale;
  if (scale.empty() || scale[0] == 1.0f) return;
  float* const x = rows.x(config_.model_dim);
  device_->launch("add_rows", AddArguments{x, x, nullptr, u32(config_.model_dim), 0.0f, scale[0] - 1.0f},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

}  // namespace edgeh2o::cuda
