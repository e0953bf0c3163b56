#include "model/mixers/mamba2.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// silu(z) * out, with a norm of every group of heads behind it where the layer has one.
MatmulInput gate_and_norm(const LayerCall& call, const MatView<float>& z, const MatView<float>& out) {
  const LayerWeights& w = call.layer_weights();
  const KernelTable& table = call.table();
  Activations& a = call.buffers();
  const PackedOut packed = packed_for(call, {&w.ssm_out});
  const bool has_norm = !w.ssm_norm.empty() && !w.ssm_norm[0].empty();
  const bool wants_floats = has_norm || packed.needs_floats;
  const ActivationsOut gated{{wants_floats ? out.data : nullptr, out.rows, out.cols, out.stride},
                             has_norm ? PackedOut{} : packed};
  const MatmulInput input = gate_rows(table, table.swiglu_f32, as_const(z), as_const(out), gated, a.scratch);
  if (!has_norm) return input;
  const size_t width = out.cols / w.ssm_norm.size();
  for (size_t group = 0; group < w.ssm_norm.size(); ++group) {
    rms_norm_groups(table, {out.data + group * width, out.rows, width, out.stride},
                    {w.ssm_norm[group].data(), width}, call.config.norm_eps);
  }
  return pack_rows(table, as_const(out), packed);
}

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

  static void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    end_branch(call, x, gate_and_norm(call, parts.z, out), w.ssm_out, w.attn_post_norm);
  }
};

// Whose convolution has the channels alone.
struct SelectingMamba2 {
  // Side by side: the gate and the channels, which are one product, and what goes into the recurrence beside
  // these.
  struct Parts {
    MatView<float> z, x, bc, step_inputs, rates, decays;

    Parts(const LayerCall& call, size_t n) {
      const SsdHeads& heads = call.spec().ssd;
      RowParts all(call, n);
      z = all.take(heads.inner_dim());
      x = all.take(heads.inner_dim());
      bc = all.take(2 * heads.group_state_dim());
      step_inputs = all.take(heads.step_rank);
      rates = all.take(heads.n_heads);
      decays = all.take(heads.n_heads);
    }
    Parts rows_from(size_t first, size_t n) const {
      Parts parts = *this;
      for (MatView<float>* part :
           {&parts.z, &parts.x, &parts.bc, &parts.step_inputs, &parts.rates, &parts.decays}) {
        *part = part->rows_from(first, n);
      }
      return parts;
    }
    MatView<const float> rows() const { return {x.data, x.rows, x.cols + bc.cols, x.stride}; }
  };

  static size_t width(const LayerCall& call) { return call.spec().ssd.inner_dim(); }

  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    const MatmulOutput projected = output_of(w.ssm_in, parts.z.data, parts.z.stride);
    matmul(call.table(), begin_branch(call, x, w.attn_norm, {&w.ssm_in}), {&projected, 1}, call.products());
  }

  static void convolve(const LayerCall& call, size_t begin, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    if (call.looks_ahead()) state.note_inputs(begin, as_const(parts.x));
    convolve_silu(call.table(), parts.x, w.conv.data(), call.spec().n_conv_taps,
                  state.step(call.looks_ahead(), begin).at(call.spec().ssd.n_state()),
                  w.conv_bias.empty() ? nullptr : w.conv_bias.data());
  }

  static void select(const LayerCall& call, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    select_by(call, parts.x, parts.bc.data, parts.bc, parts.step_inputs, parts.rates);
    find_rates(parts.rates, parts.decays, w.ssm_a.data(), w.ssm_bias.data());
  }

  static void scan(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    const MatView<const float> rates = as_const(parts.rates), decays = as_const(parts.decays);
    if (call.looks_ahead()) state.note_rows(begin, parts.rows(), rates, decays);
    ssd(call.table(), call.spec().ssd, parts.rows(), rates, decays, call.layer_weights().ssm_d.data(),
        state.step(call.looks_ahead(), begin), out);
  }

  static void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    convolve(call, begin, parts);
    select(call, parts);
    scan(call, begin, parts, out);
  }

  static void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    end_branch(call, x, gate_and_norm(call, parts.z, out), w.ssm_out, w.attn_post_norm);
  }
};

}  // namespace

void mix_mamba2(const LayerCall& call) {
  call.spec().ssd.step_rank > 0 ? mix_step<SelectingMamba2>(call, 0) : mix_step<Mamba2>(call, 0);
}

void mix_mamba2s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  call.spec().ssd.step_rank > 0 ? mix_selecting_steps<SelectingMamba2>(call, steps, x)
                                : mix_steps<Mamba2>(call, steps, x);
}

}  // namespace edgeh2o
