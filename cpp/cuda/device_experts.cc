// Mixtures of experts on a device (model/ffn/experts.cc is that of the CPU): the router's logits come to the
// host, which says what goes where; experts run one after the other, and a row adds its experts up in order.
#include <cmath>

#include "cuda/device_decoder.h"
#include "cuda/launches.h"
#include "model/ffn/experts.h"

namespace edgeh2o::cuda {

// out [n][model_dim] = ffn(rows that indices name, or rows 0 to n - 1).
void DeviceDecoder::run_expert(const Rows& n_rows, const LayerSpec& spec, const FeedForward& ffn,
                               const int32_t* indices, float* out) {
  const size_t dim = config_.model_dim;
  DeviceState& state = n_rows.state;
  const bool up_is_tiled = is_quantised(ffn.up);
  const bool gate_is_tiled = spec.has_gate() ? is_quantised(ffn.gate) : up_is_tiled;
  float* const floats = state.norm_.as<float>();
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!gate_is_tiled && !up_is_tiled) q8.q = nullptr;
  NormArguments gather{};  // without a norm
  gather.x = state.expert_input_.as<float>();
  gather.out = gate_is_tiled && up_is_tiled ? nullptr : floats;
  gather.xq = q8;
  gather.dim = gather.x_stride = gather.out_stride = u32(dim);
  gather.n_groups = 1;
  gather.indices = indices;
  device_->launch("norm_rows", gather, n_rows.n, 1, 1, kNormThreads, kSmallShared);
  gate_up(n_rows, ffn, spec.activation, floats);
  multiply(n_rows, ffn.down, state.gate_.as<float>(), out, dim);
}

// Logits of the router for rows, [n][n_experts], and after them those of the shared expert's gate, [n].
const float* DeviceDecoder::route(const Rows& rows, const LayerSpec& spec, const LayerWeights& w) {
  const size_t dim = config_.model_dim, n_logits = rows.n * spec.n_experts;
  DeviceState& state = rows.state;
  float *const normed = state.expert_input_.as<float>(), *const logits = state.router_.as<float>();
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!is_quantised(w.ffn_router)) q8.q = nullptr;
  device_->launch("norm_rows",
                  NormArguments{rows.x(dim), weights_.vector(w.ffn_norm), normed, q8, u32(dim), 1, u32(dim),
                                u32(dim), config_.norm_eps},
                  rows.n, 1, 1, kNormThreads, kSmallShared);
  multiply(rows, w.ffn_router, normed, logits, spec.n_experts);
  const bool has_gate = !w.ffn_shared_gate.empty();
  if (has_gate) {
    const float* const values = weights_.vector(w.ffn_shared_gate);
    const DeviceMatrix gate{values, nullptr, nullptr, 1, u32(dim), 0, WeightFormat::kF32};
    launch_multiply({gate, normed, rows_of(rows.state.q8_, rows.state.d8_, gate.depth), nullptr,
                     logits + n_logits, gate.depth, 1, false, u32(rows.n)},
                    1);
  }
  float* const staged = state.staged_router_.as<float>();
  device_->download(staged, logits, (n_logits + (has_gate ? rows.n : 0)) * sizeof(float));
  device_->wait();
  return staged;
}

void DeviceDecoder::add_experts(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const bool has_shared = spec.shared_ffn_dim > 0;
  const size_t dim = config_.model_dim, n_used = spec.n_experts_used, n_mixed = n_used + has_shared,
               n_entries = rows.n * n_used, n_logits = rows.n * spec.n_experts;
  DeviceState& state = rows.state;
  const float* const logits = route(rows, spec, w);
  Arena arena;
  ExpertRoutes(rows.n, spec.n_experts, n_used, arena);
  arena.allocate();
  ExpertRoutes routes(rows.n, spec.n_experts, n_used, arena);
  route_rows({logits, rows.n, spec.n_experts, spec.n_experts}, routing_rule(spec, w), routes);

  // The row of every entry; of every row its entries by expert, the shared one last; their weights.
  auto* const entry_rows = state.staged_routes_.as<int32_t>();
  int32_t* const entries = entry_rows + n_entries;
  auto* const weights = reinterpret_cast<float*>(entries + rows.n * n_mixed);
  std::vector<size_t> n_found(rows.n, 0);
  for (size_t entry = 0; entry < n_entries; ++entry) {
    const auto row = static_cast<size_t>(routes.rows[entry]);
    const size_t at = row * n_mixed + n_found[row]++;
    entry_rows[entry] = routes.rows[entry];
    entries[at] = static_cast<int32_t>(entry);
    weights[at] = routes.weights[entry];
  }
  for (size_t row = 0; has_shared && row < rows.n; ++row) {
    const bool has_gate = !w.ffn_shared_gate.empty();
    entries[row * n_mixed + n_used] = static_cast<int32_t>(n_entries + row);
    weights[row * n_mixed + n_used] = has_gate ? 1.0f / (1.0f + std::exp(-logits[n_logits + row])) : 1.0f;
  }
  auto* const on_device = state.routes_.as<int32_t>();
  device_->upload(on_device, entry_rows, (n_entries + 2 * rows.n * n_mixed) * sizeof(int32_t));

  float *const outputs = state.expert_outputs_.as<float>(), *const mixed = state.norm_.as<float>();
  for (size_t e = 0; e < spec.n_experts; ++e) {
    const size_t first = routes.begin[e], count = routes.begin[e + 1] - first;
    if (count > 0) {
      run_expert(rows.part(0, count), spec, w.ffn[e], on_device + first, outputs + first * dim);
    }
  }
  if (has_shared) run_expert(rows, spec, w.ffn_shared, nullptr, outputs + n_entries * dim);
  MixArguments mix{};
  mix.x = outputs;
  mix.entries = on_device + n_entries;
  mix.weights = reinterpret_cast<const float*>(mix.entries + rows.n * n_mixed);
  mix.out = mixed;
  mix.dim = u32(dim);
  mix.n_used = u32(n_mixed);
  device_->launch("mix_rows", mix, rows.n, 1, 1, kThreads, 0);
  device_->launch("add_rows",
                  AddArguments{rows.x(dim), mixed, weights_.vector(w.ffn_post_norm), u32(dim),
                               config_.norm_eps, spec.residual_scale},
                  rows.n, 1, 1, kThreads, kSmallShared);
}

}  // namespace edgeh2o::cuda
