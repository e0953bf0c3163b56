#include "model/mixers/delta_net.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

struct DeltaNet {
  using Parts = MatrixParts;  // rows: queries, keys and values

  static size_t width(const LayerCall& call) { return call.spec().delta.value_dim(); }

  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    if (call.spec().delta.decays_by_row) return project_apart(call, x, parts);
    const bool has_one_matrix = static_cast<bool>(w.delta_gates.weight);
    const MatmulInput input =
        has_one_matrix
            ? begin_branch(call, x, w.attn_norm, {&w.delta_qkv, &w.delta_z, &w.delta_gates})
            : begin_branch(call, x, w.attn_norm, {&w.delta_qkv, &w.delta_z, &w.delta_rate, &w.delta_decay});
    const auto output = [](const Linear& linear, const MatView<float>& part) {
      return output_of(linear, part.data, part.stride);
    };
    const MatmulOutput outputs[] = {output(w.delta_qkv, parts.rows), output(w.delta_z, parts.z),
                                    output(has_one_matrix ? w.delta_gates : w.delta_rate, parts.rates),
                                    output(w.delta_decay, parts.decays)};
    matmul(call.table(), input, {outputs, has_one_matrix ? size_t{3} : size_t{4}}, call.products());
  }

  // Queries, keys and values have a matrix each.
  static void project_apart(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    const bool has_vectors = call.spec().delta.gate_rank > 0;
    const Linear &z = has_vectors ? w.delta_z_a : w.delta_z,
                 &decay = has_vectors ? w.delta_decay_a : w.delta_decay;
    const MatView<float>&z_out = has_vectors ? parts.z_vectors : parts.z,
          &decay_out = has_vectors ? parts.decay_vectors : parts.decays;
    const std::initializer_list<const Linear*> layers = {&w.attn_q, &w.attn_k,     &w.attn_v,
                                                         &z,        &w.delta_rate, &decay};
    const MatmulInput input = begin_branch(call, x, w.attn_norm, layers);
    const size_t dim = call.spec().delta.key_dim(), stride = parts.rows.stride;
    float* rows = parts.rows.data;
    const MatmulOutput outputs[] = {output_of(w.attn_q, rows, stride),
                                    output_of(w.attn_k, rows + dim, stride),
                                    output_of(w.attn_v, rows + 2 * dim, stride),
                                    output_of(z, z_out.data, stride),
                                    output_of(w.delta_rate, parts.rates.data, stride),
                                    output_of(decay, decay_out.data, stride)};
    matmul(table, input, {outputs, layers.size()}, call.products());
    if (!has_vectors) return;
    multiply(call, w.delta_z, as_const(z_out), parts.z);
    multiply(call, w.delta_decay, as_const(decay_out), parts.decays);
  }

  // Queries and keys x / sqrt(|x|^2 + eps), as an RMS norm; queries also by the root of the head size.
  static void norm_qk(const LayerCall& call, const MatView<float>& qkv) {
    const LayerWeights& w = call.layer_weights();
    const size_t key_dim = call.spec().delta.key_dim();
    const float eps = call.config.norm_eps / static_cast<float>(call.spec().delta.head_dim);
    MatView<float> half{qkv.data, qkv.rows, key_dim, qkv.stride};
    rms_norm_groups(call.table(), half, {w.delta_q_scale.data(), w.delta_q_scale.size()}, eps);
    half.data += key_dim;
    rms_norm_groups(call.table(), half, {w.delta_k_scale.data(), w.delta_k_scale.size()}, eps);
  }

  static void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    const DeltaHeads& heads = call.spec().delta;
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    const bool looks_ahead = call.looks_ahead();
    const StateStep step = state.step(looks_ahead, begin);
    const MatView<const float> qkv = as_const(parts.rows), rates = as_const(parts.rates),
                               decays = as_const(parts.decays);
    if (looks_ahead) state.note_inputs(begin, qkv);
    convolve_silu(table, parts.rows, w.conv.data(), call.spec().n_conv_taps, step.at(heads.n_state()));
    norm_qk(call, parts.rows);
    if (heads.decays_by_row) {
      find_row_gates(table, heads, parts.rates, parts.decays, w.delta_a.data(), w.delta_bias.data());
    } else {
      find_gates(parts.rates, parts.decays, w.delta_a.data(), w.delta_bias.data());
    }
    if (looks_ahead) state.note_rows(begin, qkv, rates, decays);
    uint8_t* chunk_scratch = call.step.is_decode ? nullptr : call.buffers().scratch;
    delta_net(table, heads, qkv, rates, decays, step, out, chunk_scratch);
  }

  static void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    const PackedOut packed = packed_for(call, {&w.delta_out});
    rms_norm_groups(table, out, {w.delta_norm.data(), w.delta_norm.size()}, call.config.norm_eps);
    const ActivationsOut gated{{packed.needs_floats ? out.data : nullptr, out.rows, out.cols, out.stride},
                               packed};
    const bool is_sigmoid = call.spec().delta.decays_by_row || call.spec().has_delta_sigmoid;
    const GateKernel gate = is_sigmoid ? table.gate_f32 : table.swiglu_f32;
    const MatmulInput input =
        gate_rows(table, gate, as_const(parts.z), as_const(out), gated, call.buffers().scratch);
    end_branch(call, x, input, w.delta_out, w.attn_post_norm);
  }
};

}  // namespace

void mix_delta_net(const LayerCall& call) { mix_step<DeltaNet>(call, 0); }

void mix_delta_nets(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_steps<DeltaNet>(call, steps, x);
}

}  // namespace edgeh2o
