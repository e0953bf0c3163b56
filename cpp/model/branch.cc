#include "model/branch.h"

#include "ops/rows.h"

namespace edgeh2o {

PackedOut packed_for(const LayerCall& call, std::initializer_list<const Linear*> layers) {
  PackedOut out;
  for (const Linear* layer : layers) {
    out.add(call.table(), call.buffers().packed, layer->weight, call.adapters.any());
  }
  return out;
}

RowNorm row_norm(const DecoderConfig& config, const std::vector<float>& weight,
                 const std::vector<float>& bias) {
  return {weight.data(), bias.empty() ? nullptr : bias.data(), config.centres_norms, config.norm_eps};
}

MatmulOutput output_of(const Linear& linear, float* out, size_t stride, bool accumulate) {
  return {&linear.weight, linear.bias.empty() ? nullptr : linear.bias.data(), out, stride, accumulate};
}

void multiply(const LayerCall& call, const Linear& linear, MatView<const float> rows, MatView<float> out) {
  const MatmulOutput output = output_of(linear, out.data, out.stride);
  matmul(call.table(), pack_rows(call.table(), rows, packed_for(call, {&linear})), {&output, 1},
         call.products());
}

void scale_output(const LayerCall& call, const Linear& linear, MatView<float> out) {
  if (!linear.scale.empty()) scale_logits(call.table(), out, linear.scale[0], 0.0f);
}

MatmulInput begin_branch(const LayerCall& call, MatView<float> x, const std::vector<float>& pre_norm,
                         std::initializer_list<const Linear*> layers, const std::vector<float>& bias) {
  Activations& a = call.buffers();
  const PackedOut packed = packed_for(call, layers);
  const MatView<const float> rows{x.data, x.rows, x.cols, x.stride};
  if (pre_norm.empty()) return pack_rows(call.table(), rows, packed);
  const ActivationsOut norm{{packed.needs_floats ? a.norm : nullptr, x.rows, x.cols, x.cols}, packed};
  return norm_rows(call.table(), rows, row_norm(call.config, pre_norm, bias), norm, a.scratch);
}

void end_branch(const LayerCall& call, MatView<float> x, const MatmulInput& input, const Linear& linear,
                const std::vector<float>& post_norm) {
  Activations& a = call.buffers();
  const float scale = call.spec().residual_scale;
  const bool is_plain = post_norm.empty() && scale == 1.0f && linear.scale.empty();
  const bool is_added = is_plain && !call.config.mixes_streams();
  const MatmulOutput output = output_of(linear, is_plain ? x.data : a.norm, x.stride, is_added);
  matmul(call.table(), input, {&output, 1}, call.products());
  if (is_plain) return;
  const MatView<float> branch{a.norm, x.rows, x.cols, x.stride};
  scale_output(call, linear, branch);
  add_rows(call.table(), x, branch, post_norm.empty() ? nullptr : post_norm.data(), call.config.output_eps(),
           scale);
}

void norm_sum(const LayerCall& call, MatView<float> x, const std::vector<float>& weight,
              const std::vector<float>& bias) {
  if (weight.empty()) return;
  norm_rows(call.table(), as_const(x), row_norm(call.config, weight, bias), {x, {}}, call.buffers().scratch);
}

}  // namespace edgeh2o
