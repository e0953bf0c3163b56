// What mixers with a recurrent state have in common: products of rows before and behind a recurrence, which
// is of one sequence. A mixer has
//   Parts(call, n): what is computed of n rows, in the workspace, and rows_from(first, n) of it;
//   width(call): numbers that the recurrence gives a row;
//   project(call, x, parts): products with rows x of the residual stream;
//   recur(call, begin, parts, out): the recurrence of the rows of call.step from row `begin` on, and out;
//   finish(call, x, parts, out): adds to rows x what is made of out.
#pragma once

#include <algorithm>

#include "model/layer_call.h"

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

}  // namespace edgeh2o
