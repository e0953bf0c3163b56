#include "model/ffn/experts.h"

#include <algorithm>
#include <cmath>

#include "base/mat_view.h"
#include "model/branch.h"
#include "model/ffn/gated.h"
#include "model/read_ahead.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// out [n][model_dim] = ffn(rows); may be the rows themselves.
void run_expert(const LayerCall& call, const FeedForward& ffn, MatView<const float> rows, float* out) {
  const PackedOut packed = packed_for(call, {&ffn.gate, &ffn.up});
  const MatmulInput product = gate_up(call, ffn, pack_rows(call.table(), rows, packed));
  const MatmulOutput down = output_of(ffn.down, out, rows.cols);
  matmul(call.table(), product, {&down, 1}, call.products());
}

// Where the router's logits for rows x of the residual stream are: those of all rows, where the layer routes
// by its input.
MatView<float> router_logits(const LayerCall& call, MatView<const float> x) {
  const Activations& a = call.buffers();
  const size_t n_experts = call.spec().n_experts;
  const size_t first = call.spec().routes_by_input ? static_cast<size_t>(x.data - a.x) / x.stride : 0;
  return {a.router + first * n_experts, x.rows, n_experts, n_experts};
}

// The call for `count` of its rows, which were gathered.
LayerCall call_of(const LayerCall& call, const int32_t* rows, size_t count) {
  LayerCall gathered = call;
  if (!call.adapters.rows) return gathered;
  const float** const scales = call.buffers().expert_adapters;
  for (size_t i = 0; i < count; ++i) scales[i] = call.adapters.rows[rows[i]];
  gathered.adapters.rows = scales;
  return gathered;
}

}  // namespace

void route_input(const LayerCall& call, MatView<const float> x) {
  const size_t rows_at_once = call.buffers().rows_at_once;
  for (size_t first = 0; first < x.rows; first += rows_at_once) {
    const MatView<const float> rows = x.rows_from(first, std::min(rows_at_once, x.rows - first));
    multiply(call, call.layer_weights().ffn_router, rows, router_logits(call, rows));
  }
}

RoutingRule routing_rule(const LayerSpec& spec, const LayerWeights& weights) {
  return {spec.normalises_experts,
          spec.expert_gate == ExpertGate::kSigmoid,
          weights.ffn_router_bias.empty() ? nullptr : weights.ffn_router_bias.data(),
          spec.expert_scale,
          spec.n_expert_groups,
          spec.n_expert_groups_used};
}

void add_experts(const LayerCall& call, MatView<float> x) {
  const KernelTable& table = call.table();
  const LayerSpec& spec = call.spec();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const float eps = call.config.norm_eps;
  const size_t n = x.rows, dim = x.cols, n_experts = spec.n_experts;
  const MatView<float> normed{a.expert_input, n, dim, dim}, mixed{a.mixed, n, dim, dim};
  const MatView<const float> rows{normed.data, n, dim, dim};
  const auto norm_input = [&](const std::vector<float>& norm, const std::vector<float>& bias = {}) {
    if (norm.empty()) {
      std::copy_n(x.data, n * dim, normed.data);
    } else {
      norm_rows(table, {x.data, n, dim, x.stride}, row_norm(call.config, norm, bias), {normed, {}},
                a.scratch);
    }
  };
  const auto norm_output = [&](MatView<float> out, const std::vector<float>& norm) {
    rms_norm_groups(table, out, {norm.data(), norm.size()}, eps);
  };
  if (spec.has_expert_norms) {
    norm_input(w.ffn_router_norm);
  } else if (spec.shares_norm()) {
    norm_input(w.attn_norm, w.attn_norm_bias);
  } else {
    norm_input(w.ffn_norm, w.ffn_norm_bias);
  }
  const MatView<float> logits = router_logits(call, as_const(x));
  if (!spec.routes_by_input) multiply(call, call.layer_weights().ffn_router, rows, logits);
  if (spec.has_expert_norms) {
    scale_logits(table, logits, 1.0f / std::sqrt(static_cast<float>(dim)), 0.0f);
    norm_input(w.ffn_expert_norm);
  }
  route_rows(as_const(logits), routing_rule(spec, w), a.routes);

  std::fill_n(mixed.data, n * dim, 0.0f);
  ExpertsAhead ahead(call.weights.read_ahead(), call.config.own_layer(call.layer), a.routes);
  for (size_t e = 0; e < n_experts; ++e) {  // one after the other: sums have a fixed order
    const size_t first = a.routes.begin[e], count = a.routes.begin[e + 1] - first;
    if (count == 0) continue;
    ahead.before(e);
    const MatView<float> part{a.expert_rows, count, dim, dim};
    gather_rows(rows, a.routes.rows + first, part);
    float* const weights = a.routes.weights + first;
    if (spec.scales_expert_inputs) {
      scale_rows(table, part, weights);
      std::fill_n(weights, count, 1.0f);
    }
    run_expert(call_of(call, a.routes.rows + first, count), w.ffn[e], {part.data, count, dim, dim},
               part.data);
    if (!w.ffn_expert_scale.empty()) {
      for (size_t i = 0; i < count; ++i) weights[i] *= w.ffn_expert_scale[e];
    }
    scatter_rows({part.data, count, dim, dim}, a.routes.rows + first, weights, mixed);
  }
  for (size_t e = 0; e < spec.n_adjugates(); ++e) {
    const size_t n_sharers = spec.n_adjugate_sharers;
    const size_t count =
        join_routes(a.routes, e * n_sharers, n_sharers, n, a.adjugate_rows, a.adjugate_weights);
    if (count == 0) continue;
    const MatView<float> part{a.expert_rows, count, dim, dim};
    gather_rows(rows, a.adjugate_rows, part);
    run_expert(call_of(call, a.adjugate_rows, count), w.ffn_adjugates[e], as_const(part), part.data);
    for (size_t i = 0; i < count; ++i) a.adjugate_weights[i] *= spec.adjugate_scale;
    scatter_rows(as_const(part), a.adjugate_rows, a.adjugate_weights, mixed);
  }
  if (spec.shared_ffn_dim > 0) {
    const MatView<float> shared{a.expert_rows, n, dim, dim};
    if (spec.has_expert_norms) {
      norm_output(mixed, w.ffn_expert_post_norm);
      norm_input(w.ffn_norm);
    }
    route_all(rows, w.ffn_shared_gate.empty() ? nullptr : w.ffn_shared_gate.data(), a.routes);
    run_expert(call, w.ffn_shared, rows, shared.data);
    if (spec.has_expert_norms) norm_output(shared, w.ffn_shared_post_norm);
    scatter_rows({shared.data, n, dim, dim}, a.routes.rows, a.routes.weights, mixed);
  }
  if (call.config.mixes_streams()) return copy_rows(as_const(mixed), x);
  add_rows(table, x, mixed, w.ffn_post_norm.empty() ? nullptr : w.ffn_post_norm.data(), eps,
           spec.residual_scale * spec.experts_scale);
  norm_sum(call, x, w.ffn_sum_norm, w.ffn_sum_norm_bias);
}

}  // namespace edgeh2o
