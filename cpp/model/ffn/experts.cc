#include "model/ffn/experts.h"

#include <algorithm>

#include "model/branch.h"
#include "model/ffn/gated.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// out [n][model_dim] = ffn(rows); may be the rows themselves.
void run_expert(const LayerCall& call, const FeedForward& ffn, MatView<const float> rows, float* out) {
  const Activations& a = call.buffers();
  uint8_t* packed = any_quantised({&ffn.gate, &ffn.up}) ? a.packed : nullptr;
  const MatmulInput product = gate_up(call, ffn, pack_rows(call.table(), rows, packed));
  const MatmulOutput down = output_of(ffn.down, out, rows.cols);
  matmul(call.table(), product, {&down, 1}, a.scratch);
}

}  // namespace

void add_experts(const LayerCall& call, MatView<float> x) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const float eps = call.config.norm_eps;
  const size_t n = x.rows, dim = x.cols, n_experts = call.spec().n_experts;
  const MatView<float> normed{a.expert_input, n, dim, dim}, mixed{a.mixed, n, dim, dim};
  if (w.ffn_norm.empty()) {
    std::copy_n(x.data, n * dim, normed.data);
  } else {
    rms_norm_rows(table, {x.data, n, dim, x.stride}, w.ffn_norm.data(), eps, {normed}, a.scratch);
  }
  const MatView<const float> rows{normed.data, n, dim, dim};
  const MatmulOutput router = output_of(w.ffn_router, a.router, n_experts);
  matmul(table, pack_rows(table, rows, any_quantised({&w.ffn_router}) ? a.packed : nullptr), {&router, 1},
         a.scratch);
  const RoutingRule rule{call.spec().normalises_experts,
                         call.spec().expert_gate == ExpertGate::kSigmoid,
                         w.ffn_router_bias.empty() ? nullptr : w.ffn_router_bias.data(),
                         call.spec().expert_scale,
                         call.spec().n_expert_groups,
                         call.spec().n_expert_groups_used};
  route_rows({a.router, n, n_experts, n_experts}, rule, a.routes);

  std::fill_n(mixed.data, n * dim, 0.0f);
  for (size_t e = 0; e < n_experts; ++e) {  // one after the other: sums have a fixed order
    const size_t first = a.routes.begin[e], count = a.routes.begin[e + 1] - first;
    if (count == 0) continue;
    const MatView<float> part{a.expert_rows, count, dim, dim};
    gather_rows(rows, a.routes.rows + first, part);
    run_expert(call, w.ffn[e], {part.data, count, dim, dim}, part.data);
    scatter_rows({part.data, count, dim, dim}, a.routes.rows + first, a.routes.weights + first, mixed);
  }
  if (call.spec().shared_ffn_dim > 0) {
    route_all(rows, w.ffn_shared_gate.empty() ? nullptr : w.ffn_shared_gate.data(), a.routes);
    run_expert(call, w.ffn_shared, rows, a.expert_rows);
    scatter_rows({a.expert_rows, n, dim, dim}, a.routes.rows, a.routes.weights, mixed);
  }
  add_rows(table, x, mixed, w.ffn_post_norm.empty() ? nullptr : w.ffn_post_norm.data(), eps,
           call.spec().residual_scale);
}

}  // namespace edgeh2o
