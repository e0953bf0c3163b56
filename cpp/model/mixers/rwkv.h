// What the time mixes of RWKV have in common: products of the layer's normed input, mixed with that of the
// token before, and a recurrence. The layer's tokens are counted by its network, where that looks back too. A
// mixer has
//   Parts(call, n): what is computed of n rows, in the workspace, among it `normed` and `shifts`, rows_from(
//     first, n) of it, and changes(heads), which the recurrence takes but for what reads the state;
//   project(call, x, parts): products with the input of rows x;
//   recur(call, changes, parts, state, out): the recurrence;
//   finish(call, parts, out): what comes out, normed and gated.
#pragma once

#include <algorithm>

#include "model/branch.h"
#include "model/layer_call.h"
#include "model/token_shift.h"
#include "ops/rows.h"

namespace edgeh2o {

inline void norm_mixed(const LayerCall& call, MatView<float> x, MatView<float> normed) {
  const LayerWeights& w = call.layer_weights();
  norm_rows(call.table(), as_const(x), row_norm(call.config, w.attn_norm, w.attn_norm_bias), {normed, {}},
            call.buffers().scratch);
}

// The recurrence of the rows of call.step from row `begin` on.
template <typename Mixer>
void recur_from(const LayerCall& call, size_t begin, const typename Mixer::Parts& parts, MatView<float> out) {
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const MatView<const float> changes = parts.changes(call.spec().wkv);
  if (call.looks_ahead()) state.note_changes(begin, changes);
  Mixer::recur(call, changes, parts, state.step(call.looks_ahead(), begin), out);
}

template <typename Mixer>
void add_mixed(const LayerCall& call, MatView<float> x, const typename Mixer::Parts& parts,
               MatView<float> out) {
  const LayerWeights& w = call.layer_weights();
  Mixer::finish(call, parts, out);
  const MatmulInput input = pack_rows(call.table(), as_const(out), packed_for(call, {&w.time_mix.output}));
  end_branch(call, x, input, w.time_mix.output, w.attn_post_norm);
}

inline bool counts_tokens(const LayerCall& call) { return call.spec().ffn != FfnKind::kShifted; }

// All rows of the step, of which those from the first output row on are finished.
template <typename Mixer>
void mix_time_step(const LayerCall& call) {
  Activations& a = call.buffers();
  const size_t n = call.step.tokens.size, first = call.first_output_row(), width = call.spec().wkv.dim();
  for (size_t begin = 0; begin < n; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const MatView<float> x = call.x().rows_from(begin, count), out{a.attended, count, width, width};
    const typename Mixer::Parts parts(call, count);
    norm_mixed(call, x, parts.normed);
    shift_input(call, begin, 0, parts.normed, parts.shifts);
    Mixer::project(call, x, parts);
    recur_from<Mixer>(call, begin, parts, out);
    const size_t n_skipped = std::min(count, std::max(first, begin) - begin), n_rows = count - n_skipped;
    if (n_rows == 0) continue;
    add_mixed<Mixer>(call, x.rows_from(n_skipped, n_rows), parts.rows_from(n_skipped, n_rows),
                     out.rows_from(n_skipped, n_rows));
  }
  if (counts_tokens(call)) call.count_recurrent();
}

// The rows of several decode steps, at most rows_at_once, which share the products.
template <typename Mixer>
void mix_time_steps(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const size_t width = call.spec().wkv.dim();
  const MatView<float> out{call.buffers().attended, x.rows, width, width};
  const typename Mixer::Parts parts(call, x.rows);
  norm_mixed(call, x, parts.normed);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const typename Mixer::Parts own = parts.rows_from(one.first_row, one.step.tokens.size);
    shift_input(one, 0, 0, own.normed, own.shifts);
  });
  Mixer::project(call, x, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t n = one.step.tokens.size;
    recur_from<Mixer>(one, 0, parts.rows_from(one.first_row, n), out.rows_from(one.first_row, n));
    if (counts_tokens(one)) one.count_recurrent();
  });
  add_mixed<Mixer>(call, x, parts, out);
}

}  // namespace edgeh2o
