// What mixers with a recurrent state have in common: products of rows before and behind a recurrence, which
// is of one sequence. A mixer has
//   Parts(call, n): what is computed of n rows, in the workspace, and rows_from(first, n) of it;
//   width(call): numbers that the recurrence gives a row;
//   project(call, x, parts): products with rows x of the residual stream;
//   recur(call, begin, parts, out): the recurrence of the rows of call.step from row `begin` on, and out;
//   finish(call, x, parts, out): adds to rows x what is made of out.
// One whose recurrence takes what is made of the channels behind a convolution has, in place of recur,
//   convolve(call, begin, parts): the convolution;
//   select(call, parts): products with its channels;
//   scan(call, begin, parts, out): the rest.
#pragma once

#include <algorithm>

#include "model/branch.h"
#include "model/layer_call.h"
#include "ops/rows.h"

namespace edgeh2o {

// Hands out what lies side by side in n rows of the workspace.
class RowParts {
 public:
  RowParts(const LayerCall& call, size_t n)
      : next_(call.buffers().mixer_in), n_(n), stride_(call.spec().mixed_dim(call.config.model_dim)) {}
  // The next columns.
  MatView<float> take(size_t cols) {
    const MatView<float> part{next_, n_, cols, stride_};
    next_ += cols;
    return part;
  }

 private:
  float* next_;
  size_t n_, stride_;
};

// Parts of mixers whose state has matrices, side by side in rows of the workspace: a gate of what comes out,
// inputs of the convolution, and the gates of the recurrence; and what gates are made of, where that is
// not the layer's input.
struct MatrixParts {
  MatView<float> z, rows, rates, decays, z_vectors, decay_vectors;

  MatrixParts(const LayerCall& call, size_t n) {
    const Recurrence recurrence = call.spec().recurrence(call.config.model_dim);
    RowParts all(call, n);
    z = all.take(recurrence.out_dim());
    rows = all.take(recurrence.conv_dim);
    rates = all.take(recurrence.n_gates());
    decays = all.take(recurrence.n_decays());
    z_vectors = all.take(recurrence.delta.gate_rank);
    decay_vectors = all.take(recurrence.delta.gate_rank);
  }
  MatrixParts rows_from(size_t first, size_t n) const {
    MatrixParts parts = *this;
    for (MatView<float>* part :
         {&parts.z, &parts.rows, &parts.rates, &parts.decays, &parts.z_vectors, &parts.decay_vectors}) {
      *part = part->rows_from(first, n);
    }
    return parts;
  }
};

// All rows of the step from row `begin` on, of which those from the first output row on are finished.
template <typename Mixer>
void mix_step(const LayerCall& call, size_t begin) {
  Activations& a = call.buffers();
  const size_t n = call.step.tokens.size, first = call.first_output_row(), width = Mixer::width(call);
  while (begin < n) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const size_t n_skipped = std::min(count, std::max(first, begin) - begin), n_rows = count - n_skipped;
    const MatView<float> x = call.x().rows_from(begin, count), out{a.attended, count, width, width};
    const typename Mixer::Parts parts(call, count);
    Mixer::project(call, x, parts);
    Mixer::recur(call, begin, parts, out);
    if (n_rows > 0) {
      Mixer::finish(call, x.rows_from(n_skipped, n_rows), parts.rows_from(n_skipped, n_rows),
                    out.rows_from(n_skipped, n_rows));
    }
    begin += count;
  }
  call.count_recurrent();
}

// The rows of several decode steps, at most rows_at_once, which share the products.
template <typename Mixer>
void mix_steps(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const size_t width = Mixer::width(call);
  const MatView<float> out{call.buffers().attended, x.rows, width, width};
  const typename Mixer::Parts parts(call, x.rows);
  Mixer::project(call, x, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t n = one.step.tokens.size;
    Mixer::recur(one, 0, parts.rows_from(one.first_row, n), out.rows_from(one.first_row, n));
    one.count_recurrent();
  });
  Mixer::finish(call, x, parts, out);
}

// The same, but that the products behind the convolutions are shared too.
template <typename Mixer>
void mix_selecting_steps(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const size_t width = Mixer::width(call);
  const MatView<float> out{call.buffers().attended, x.rows, width, width};
  const typename Mixer::Parts parts(call, x.rows);
  const auto for_each = [&](const auto& f) {
    for_each_step(call, steps, [&](const LayerCall& one) {
      const size_t n = one.step.tokens.size;
      f(one, parts.rows_from(one.first_row, n), out.rows_from(one.first_row, n));
    });
  };
  Mixer::project(call, x, parts);
  for_each([](const LayerCall& one, const typename Mixer::Parts& own, MatView<float>) {
    Mixer::convolve(one, 0, own);
  });
  Mixer::select(call, parts);
  for_each([](const LayerCall& one, const typename Mixer::Parts& own, MatView<float> rows) {
    Mixer::scan(one, 0, own, rows);
    one.count_recurrent();
  });
  Mixer::finish(call, x, parts, out);
}

// What a recurrence selects by, made of the channels behind its convolution: one product makes bc, what
// writes to the state and what reads it, and step_inputs, which lie side by side in any order from `first`
// on; steps are made of the latter. The three are normed where the layer has norms of them.
inline void select_by(const LayerCall& call, MatView<float> channels, float* first, MatView<float> bc,
                      MatView<float> step_inputs, MatView<float> steps) {
  const LayerWeights& w = call.layer_weights();
  const MatView<float> projected{first, channels.rows, bc.cols + step_inputs.cols, channels.stride};
  multiply(call, w.ssm_x, as_const(channels), projected);
  const auto norm = [&](MatView<float> rows, size_t column, const std::vector<float>& weight) {
    if (weight.empty()) return;
    rms_norm_groups(call.table(), {rows.data + column, rows.rows, weight.size(), rows.stride},
                    {weight.data(), weight.size()}, call.config.norm_eps);
  };
  norm(step_inputs, 0, w.ssm_dt_norm);
  norm(bc, 0, w.ssm_b_norm);
  norm(bc, w.ssm_b_norm.size(), w.ssm_c_norm);
  multiply(call, w.ssm_dt, as_const(step_inputs), steps);
}

}  // namespace edgeh2o
