#include "model/mixers/delta_net.h"

#include <algorithm>

#include "model/branch.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// What is computed of some rows, side by side in rows of the workspace.
struct Parts {
  Parts(const LayerCall& call, size_t n) {
    const DeltaHeads& heads = call.spec().delta;
    const size_t stride = heads.conv_dim() + heads.value_dim() + 2 * heads.n_value_heads;
    float* data = call.buffers().mixer_in;
    const auto take = [&](size_t cols) {
      const MatView<float> part{data, n, cols, stride};
      data += cols;
      return part;
    };
    qkv = take(heads.conv_dim());
    z = take(heads.value_dim());
    rates = take(heads.n_value_heads);
    decays = take(heads.n_value_heads);
  }
  MatView<float> qkv, z, rates, decays;
};

void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
  const LayerWeights& w = call.layer_weights();
  const bool has_one_matrix = static_cast<bool>(w.delta_gates.weight);
  const MatmulInput input =
      has_one_matrix
          ? begin_branch(call, x, w.attn_norm, {&w.delta_qkv, &w.delta_z, &w.delta_gates})
          : begin_branch(call, x, w.attn_norm, {&w.delta_qkv, &w.delta_z, &w.delta_rate, &w.delta_decay});
  const auto output = [](const Linear& linear, const MatView<float>& part) {
    return output_of(linear, part.data, part.stride);
  };
  const MatmulOutput outputs[] = {output(w.delta_qkv, parts.qkv), output(w.delta_z, parts.z),
                                  output(has_one_matrix ? w.delta_gates : w.delta_rate, parts.rates),
                                  output(w.delta_decay, parts.decays)};
  matmul(call.table(), input, {outputs, has_one_matrix ? size_t{3} : size_t{4}}, call.buffers().scratch);
}

// Queries and keys x / sqrt(|x|^2 + eps), as an RMS norm; queries also by the root of the head size.
void norm_qk(const LayerCall& call, const MatView<float>& qkv) {
  const LayerWeights& w = call.layer_weights();
  const size_t key_dim = call.spec().delta.key_dim();
  const float eps = call.config.norm_eps / static_cast<float>(call.spec().delta.head_dim);
  MatView<float> half{qkv.data, qkv.rows, key_dim, qkv.stride};
  rms_norm_groups(call.table(), half, {w.delta_q_scale.data(), w.delta_q_scale.size()}, eps);
  half.data += key_dim;
  rms_norm_groups(call.table(), half, {w.delta_k_scale.data(), w.delta_k_scale.size()}, eps);
}

}  // namespace

void mix_delta_net(const LayerCall& call) {
  const LayerWeights& w = call.layer_weights();
  const KernelTable& table = call.table();
  const DeltaHeads& heads = call.spec().delta;
  Activations& a = call.buffers();
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const bool looks_ahead = call.looks_ahead();
  const size_t n = call.step.tokens.size, width = heads.value_dim(), first = call.first_output_row();
  const PackedOut packed = packed_for(call, {&w.delta_out});
  for (size_t begin = 0; begin < n;) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const size_t n_skipped = std::min(count, std::max(first, begin) - begin), n_rows = count - n_skipped;
    const MatView<float> x = call.x().rows_from(begin, count), out{a.attended, count, width, width};
    const Parts parts(call, count);
    project(call, x, parts);
    const StateStep step = state.step(looks_ahead, begin);
    if (looks_ahead) state.note_inputs(begin, as_const(parts.qkv));
    convolve_silu(table, parts.qkv, w.conv.data(), call.spec().n_conv_taps, step.at(heads.n_state()));
    norm_qk(call, parts.qkv);
    find_gates(parts.rates, parts.decays, w.delta_a.data(), w.delta_bias.data());
    const MatView<const float> qkv = as_const(parts.qkv), rates = as_const(parts.rates),
                               decays = as_const(parts.decays);
    if (looks_ahead) state.note_rows(begin, qkv, rates, decays);
    delta_net(table, heads, qkv, rates, decays, step, out, call.step.is_decode ? nullptr : a.scratch);
    if (n_rows > 0) {
      const MatView<float> rows = out.rows_from(n_skipped, n_rows);
      rms_norm_groups(table, rows, {w.delta_norm.data(), w.delta_norm.size()}, call.config.norm_eps);
      const ActivationsOut gated{{packed.packed ? nullptr : rows.data, n_rows, width, width}, packed};
      const MatmulInput input =
          gate_rows(table, table.swiglu_f32, as_const(parts.z.rows_from(n_skipped, n_rows)), as_const(rows),
                    gated, a.scratch);
      end_branch(call, x.rows_from(n_skipped, n_rows), input, w.delta_out, w.attn_post_norm);
    }
    begin += count;
  }
  looks_ahead ? state.look_ahead(n) : state.advance(n);
}

}  // namespace edgeh2o
