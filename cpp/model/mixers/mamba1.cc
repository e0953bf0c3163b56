#include "model/mixers/mamba1.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "ops/convolution.h"
#include "ops/rows.h"
#include "ops/selective_scan.h"

namespace edgeh2o {
namespace {

struct Mamba1 {
  // Side by side: channels and the gate of what comes out, which are one product; steps of the channels; and
  // what these are made of, with what writes to the state and what reads it.
  struct Parts {
    MatView<float> u, z, steps, step_inputs, bc;

    Parts(const LayerCall& call, size_t n) {
      const ScanSizes& scan = call.spec().scan;
      RowParts rows(call, n);
      u = rows.take(scan.n_channels);
      z = rows.take(scan.n_channels);
      steps = rows.take(scan.n_channels);
      step_inputs = rows.take(scan.step_rank);
      bc = rows.take(scan.bc_dim());
    }
    Parts rows_from(size_t first, size_t n) const {
      Parts parts = *this;
      for (MatView<float>* part : {&parts.u, &parts.z, &parts.steps, &parts.step_inputs, &parts.bc}) {
        *part = part->rows_from(first, n);
      }
      return parts;
    }
  };

  static size_t width(const LayerCall& call) { return call.spec().scan.n_channels; }

  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    const MatmulOutput projected = output_of(w.ssm_in, parts.u.data, parts.u.stride);
    matmul(call.table(), begin_branch(call, x, w.attn_norm, {&w.ssm_in}), {&projected, 1}, call.products());
  }

  static void convolve(const LayerCall& call, size_t begin, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    if (call.looks_ahead()) state.note_inputs(begin, as_const(parts.u));
    convolve_silu(call.table(), parts.u, w.conv.data(), call.spec().n_conv_taps,
                  state.step(call.looks_ahead(), begin).at(call.spec().scan.n_state()),
                  w.conv_bias.empty() ? nullptr : w.conv_bias.data());
  }

  static void select(const LayerCall& call, const Parts& parts) {
    select_by(call, parts.u, parts.step_inputs.data, parts.bc, parts.step_inputs, parts.steps);
  }

  static void scan(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    const MatView<const float> u = as_const(parts.u), steps = as_const(parts.steps), bc = as_const(parts.bc);
    if (call.looks_ahead()) state.note_scan(begin, u, steps, bc, w.ssm_a.data());
    selective_scan(call.table(), call.spec().scan, u, steps, bc, w.ssm_a.data(), w.ssm_d.data(),
                   state.step(call.looks_ahead(), begin), out);
  }

  static void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    convolve(call, begin, parts);
    select(call, parts);
    scan(call, begin, parts, out);
  }

  static void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    const KernelTable& table = call.table();
    const PackedOut packed = packed_for(call, {&w.ssm_out});
    const ActivationsOut gated{{packed.needs_floats ? out.data : nullptr, out.rows, out.cols, out.stride},
                               packed};
    const MatmulInput input =
        gate_rows(table, table.swiglu_f32, as_const(parts.z), as_const(out), gated, call.buffers().scratch);
    end_branch(call, x, input, w.ssm_out, w.attn_post_norm);
  }
};

}  // namespace

void mix_mamba1(const LayerCall& call) { mix_step<Mamba1>(call, 0); }

void mix_mamba1s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_selecting_steps<Mamba1>(call, steps, x);
}

}  // namespace edgeh2o
