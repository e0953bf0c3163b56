#include "model/mixers/mamba2.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

struct Mamba2 {
  using Parts = MatrixParts;  // z, rows and rates are one product

  static size_t width(const LayerCall& call) { return call.spec().ssd.inner_dim(); }

  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    const MatmulOutput projected = output_of(w.ssm_in, parts.z.data, parts.z.stride);
    matmul(call.table(), begin_branch(call, x, w.attn_norm, {&w.ssm_in}), {&projected, 1}, call.products());
  }

  static void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    const SsdHeads& heads = call.spec().ssd;
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    const bool looks_ahead = call.looks_ahead();
    const StateStep step = state.step(looks_ahead, begin);
    const MatView<const float> rows = as_const(parts.rows), rates = as_const(parts.rates),
                               decays = as_const(parts.decays);
    if (looks_ahead) state.note_inputs(begin, rows);
    convolve_silu(table, parts.rows, w.conv.data(), call.spec().n_conv_taps, step.at(heads.n_state()),
                  w.conv_bias.empty() ? nullptr : w.conv_bias.data());
    find_rates(parts.rates, parts.decays, w.ssm_a.data(), w.ssm_bias.data());
    if (looks_ahead) state.note_rows(begin, rows, rates, decays);
    ssd(table, heads, rows, rates, decays, w.ssm_d.data(), step, out);
  }

  // silu(z) * out, with a norm of every group of heads behind it where the layer has one.
  static MatmulInput gate_and_norm(const LayerCall& call, const MatView<float>& z,
                                   const MatView<float>& out) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    Activations& a = call.buffers();
    const PackedOut packed = packed_for(call, {&w.ssm_out});
    const bool has_norm = !w.ssm_norm.empty() && !w.ssm_norm[0].empty();
    const bool wants_floats = has_norm || packed.needs_floats;
    const ActivationsOut gated{{wants_floats ? out.data : nullptr, out.rows, out.cols, out.stride},
                               has_norm ? PackedOut{} : packed};
    const MatmulInput input =
        gate_rows(table, table.swiglu_f32, as_const(z), as_const(out), gated, a.scratch);
    if (!has_norm) return input;
    const size_t width = out.cols / w.ssm_norm.size();
    for (size_t group = 0; group < w.ssm_norm.size(); ++group) {
      rms_norm_groups(table, {out.data + group * width, out.rows, width, out.stride},
                      {w.ssm_norm[group].data(), width}, call.config.norm_eps);
    }
    return pack_rows(table, as_const(out), packed);
  }

  static void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    end_branch(call, x, gate_and_norm(call, parts.z, out), w.ssm_out, w.attn_post_norm);
  }
};

}  // namespace

void mix_mamba2(const LayerCall& call) { mix_step<Mamba2>(call, 0); }

void mix_mamba2s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_steps<Mamba2>(call, steps, x);
}

}  // namespace edgeh2o
