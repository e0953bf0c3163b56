#include "model/mixers/rwkv7.h"

#include <algorithm>

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "model/token_shift.h"
#include "ops/rows.h"
#include "ops/wkv.h"

namespace edgeh2o {
namespace {

// Side by side in rows of the workspace. `mixed` is the input of one product at a time, `vectors` what lies
// between two.
struct Parts {
  WkvRows rows;
  MatView<float> gate, normed, shifts, mixed, vectors;

  Parts(const LayerCall& call, size_t n) {
    const WkvHeads& heads = call.spec().wkv;
    RowParts all(call, n);
    for (MatView<float>* part : all_rows()) *part = all.take(heads.dim());
    for (MatView<float>* part : {&gate, &normed, &shifts, &mixed}) *part = all.take(heads.dim());
    vectors = all.take(heads.widest_rank());
  }
  std::array<MatView<float>*, 6> all_rows() {
    return {&rows.decays, &rows.keys, &rows.values, &rows.directions, &rows.removals, &rows.queries};
  }
  Parts rows_from(size_t first, size_t n) const {
    Parts parts = *this;
    for (MatView<float>* part : parts.all_rows()) *part = part->rows_from(first, n);
    for (MatView<float>* part : {&parts.gate, &parts.normed, &parts.shifts, &parts.mixed, &parts.vectors}) {
      *part = part->rows_from(first, n);
    }
    return parts;
  }
  // What the recurrence takes, but for the queries.
  MatView<const float> changes(const WkvHeads& heads) const {
    return {rows.decays.data, rows.decays.rows, heads.row_dim(), rows.decays.stride};
  }
};

void norm_input(const LayerCall& call, MatView<float> x, const Parts& parts) {
  const LayerWeights& w = call.layer_weights();
  norm_rows(call.table(), as_const(x), row_norm(call.config, w.attn_norm, w.attn_norm_bias),
            {parts.normed, {}}, call.buffers().scratch);
}

// x: rows of the call, whose values of the first layer are handed on.
void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
  const KernelTable& table = call.table();
  const TimeMix& w = call.layer_weights().time_mix;
  const WkvHeads& heads = call.spec().wkv;
  const auto mix = [&](size_t i) {
    mix_rows(as_const(parts.normed), as_const(parts.shifts), w.shares[i].data(), parts.mixed);
  };
  const auto vectors = [&](size_t rank) {
    return MatView<float>{parts.vectors.data, x.rows, rank, parts.vectors.stride};
  };
  const WkvRows& rows = parts.rows;
  mix(0);
  multiply(call, w.queries, as_const(parts.mixed), rows.queries);
  mix(1);
  const MatView<float> decays = vectors(heads.decay_rank);
  multiply(call, w.decays_in, as_const(parts.mixed), decays);
  scale_logits(table, decays, 1.0f, 1.0f);  // a cap of 1 is the tanh
  multiply(call, w.decays_out, as_const(decays), rows.decays);
  mix(2);
  multiply(call, w.keys, as_const(parts.mixed), rows.keys);
  mix(3);
  multiply(call, w.values, as_const(parts.mixed), rows.values);
  const Activations& a = call.buffers();
  const MatView<float> first{a.carried + (x.data - a.x), x.rows, x.cols, x.cols};
  if (heads.value_rank > 0) {
    const MatView<float> shares = vectors(heads.value_rank);
    multiply(call, w.values_in, as_const(parts.mixed), shares);
    multiply(call, w.values_out, as_const(shares), rows.removals);  // which have nothing yet
    sigmoid_rows(table, rows.removals, w.value_bias.data(), w.ones.data());
    mix_values(rows.values, as_const(first), as_const(rows.removals));
  } else {
    copy_rows(as_const(rows.values), first);
  }
  mix(4);
  const MatView<float> rates = vectors(heads.rate_rank);
  multiply(call, w.rates_in, as_const(parts.mixed), rates);
  multiply(call, w.rates_out, as_const(rates), rows.removals);
  sigmoid_rows(table, rows.removals, w.rate_bias.data(), w.ones.data());
  mix(5);
  const MatView<float> gates = vectors(heads.gate_rank);
  multiply(call, w.gates_in, as_const(parts.mixed), gates);
  sigmoid_rows(table, gates, nullptr, w.ones.data());
  multiply(call, w.gates_out, as_const(gates), parts.gate);
  finish_rows(table, heads, {w.decay_bias.data(), w.direction_factors.data(), w.key_factors.data()}, rows);
}

void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
  const WkvHeads& heads = call.spec().wkv;
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const MatView<const float> changes = parts.changes(heads);
  if (call.looks_ahead()) state.note_changes(begin, changes);
  wkv(call.table(), heads, changes, parts.rows.queries.data, state.step(call.looks_ahead(), begin), out);
}

void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
  const LayerWeights& w = call.layer_weights();
  const KernelTable& table = call.table();
  finish_heads(table, call.spec().wkv,
               {w.time_mix.norm.data(), w.time_mix.norm_bias.data(), w.time_mix.bonus.data()}, parts.rows,
               as_const(parts.gate), out);
  const MatmulInput input = pack_rows(table, as_const(out), packed_for(call, {&w.time_mix.output}));
  end_branch(call, x, input, w.time_mix.output, w.attn_post_norm);
}

}  // namespace

void mix_rwkv7(const LayerCall& call) {
  Activations& a = call.buffers();
  const size_t n = call.step.tokens.size, width = call.spec().wkv.dim();
  for (size_t begin = 0; begin < n; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const MatView<float> x = call.x().rows_from(begin, count), out{a.attended, count, width, width};
    const Parts parts(call, count);
    norm_input(call, x, parts);
    shift_input(call, begin, 0, parts.normed, parts.shifts);
    project(call, x, parts);
    recur(call, begin, parts, out);
    finish(call, x, parts, out);
  }
}

void mix_rwkv7s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const size_t width = call.spec().wkv.dim();
  const MatView<float> out{call.buffers().attended, x.rows, width, width};
  const Parts parts(call, x.rows);
  norm_input(call, x, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const Parts own = parts.rows_from(one.first_row, one.step.tokens.size);
    shift_input(one, 0, 0, own.normed, own.shifts);
  });
  project(call, x, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t n = one.step.tokens.size;
    recur(one, 0, parts.rows_from(one.first_row, n), out.rows_from(one.first_row, n));
  });
  finish(call, x, parts, out);
}

}  // namespace edgeh2o
