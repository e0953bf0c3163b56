#include "model/ffn/gated.h"

#include <limits>

#include "model/branch.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

GateKernel gate_kernel(const KernelTable& table, Activation activation) {
  switch (activation) {
    case Activation::kGeluTanh:
      return table.geglu_f32;
    case Activation::kSiluClamped:
      return table.swiglu_clamped_f32;
    case Activation::kRelu:
    case Activation::kReluSquared:  // of x gated by itself
      return table.reglu_f32;
    case Activation::kUngatedGelu:
      return table.gelu_f32;
    default:
      return table.swiglu_f32;
  }
}

}  // namespace

void add_gated(const LayerCall& call, MatView<float> x) {
  const LayerWeights& w = call.layer_weights();
  const FeedForward& ffn = w.ffn[0];
  const bool is_shared = call.spec().shares_norm();
  const std::vector<float>&norm = is_shared ? w.attn_norm : w.ffn_norm,
        &bias = is_shared ? w.attn_norm_bias : w.ffn_norm_bias;
  const MatmulInput input = call.spec().has_gate() ? begin_branch(call, x, norm, {&ffn.gate, &ffn.up}, bias)
                                                   : begin_branch(call, x, norm, {&ffn.up}, bias);
  end_branch(call, x, gate_up(call, ffn, input), ffn.down, w.ffn_post_norm);
  norm_sum(call, x, w.ffn_sum_norm, w.ffn_sum_norm_bias);
}

MatmulInput gate_up(const LayerCall& call, const FeedForward& ffn, const MatmulInput& input) {
  const KernelTable& table = call.table();
  const Activations& a = call.buffers();
  const size_t n = input.rows.rows, ffn_dim = ffn.up.weight.rows();
  const bool has_gate = call.spec().has_gate();
  const size_t first = has_gate ? 0 : 1;
  const GateKernel activation = gate_kernel(table, call.spec().activation);
  const MatmulOutput outputs[] = {output_of(ffn.gate, a.gate, ffn_dim), output_of(ffn.up, a.up, ffn_dim)};
  matmul(table, input, {outputs + first, 2 - first}, call.products());
  scale_output(call, ffn.gate, {a.gate, n, ffn_dim, ffn_dim});
  scale_output(call, ffn.up, {a.up, n, ffn_dim, ffn_dim});
  if (call.spec().cuts_gate()) cut_off_rows(table, {a.gate, n, ffn_dim, ffn_dim}, call.spec().gate_cutoff);
  const bool is_shared = &ffn == &call.layer_weights().ffn_shared;
  const GateLimits& limits = is_shared ? call.spec().shared_limits : call.spec().limits;
  if (limits.any()) {
    clamp_rows({a.gate, n, ffn_dim, ffn_dim}, -std::numeric_limits<float>::infinity(), limits.gate);
    clamp_rows({a.up, n, ffn_dim, ffn_dim}, -limits.up, limits.up);
  }
  const PackedOut packed = packed_for(call, {&ffn.down});
  const ActivationsOut product{{packed.needs_floats ? a.gate : nullptr, n, ffn_dim, ffn_dim}, packed};
  if (call.spec().activation == Activation::kXielu) {
    return xielu_rows(table, call.spec().xielu, {a.up, n, ffn_dim, ffn_dim}, product, a.scratch);
  }
  const std::vector<float>& sub_norm = call.layer_weights().ffn_sub_norm;
  if (!sub_norm.empty()) {
    const MatView<float> floats{a.gate, n, ffn_dim, ffn_dim};
    gate_rows(table, activation, as_const(floats), {a.up, n, ffn_dim, ffn_dim}, {floats, {}}, a.scratch);
    return norm_rows(table, as_const(floats), row_norm(call.config, sub_norm, {}), product, a.scratch);
  }
  return gate_rows(table, activation, {has_gate ? a.gate : a.up, n, ffn_dim, ffn_dim},
                   {a.up, n, ffn_dim, ffn_dim}, product, a.scratch);
}

}  // namespace edgeh2o
