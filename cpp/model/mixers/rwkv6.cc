#include "model/mixers/rwkv6.h"

#include <algorithm>

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "model/token_shift.h"
#include "ops/rows.h"
#include "ops/wkv.h"

namespace edgeh2o {
namespace {

// Side by side in rows of the workspace. `mixed` is the input of one product at a time; `shares` and
// `vectors` are what lies between two.
struct Parts {
  Wkv6Rows rows;
  MatView<float> gate, normed, shifts, mixed, shares, vectors;

  Parts(const LayerCall& call, size_t n) {
    const WkvHeads& heads = call.spec().wkv;
    RowParts all(call, n);
    for (MatView<float>* part :
         {&rows.decays, &rows.keys, &rows.values, &rows.queries, &gate, &normed, &shifts, &mixed}) {
      *part = all.take(heads.dim());
    }
    rows.own = all.take(heads.n_heads);
    shares = all.take(5 * heads.shift_rank);
    vectors = all.take(heads.decay_rank);
  }
  Parts rows_from(size_t first, size_t n) const {
    Parts parts = *this;
    for (MatView<float>* part :
         {&parts.rows.decays, &parts.rows.keys, &parts.rows.values, &parts.rows.queries, &parts.rows.own,
          &parts.gate, &parts.normed, &parts.shifts, &parts.mixed, &parts.shares, &parts.vectors}) {
      *part = part->rows_from(first, n);
    }
    return parts;
  }
  // What the recurrence takes, but for what reads the state.
  MatView<const float> changes(const WkvHeads& heads) const {
    return {rows.decays.data, rows.decays.rows, heads.row_dim(), rows.decays.stride};
  }
};

void norm_input(const LayerCall& call, MatView<float> x, const Parts& parts) {
  const LayerWeights& w = call.layer_weights();
  norm_rows(call.table(), as_const(x), row_norm(call.config, w.attn_norm, w.attn_norm_bias),
            {parts.normed, {}}, call.buffers().scratch);
}

void project(const LayerCall& call, const Parts& parts) {
  const KernelTable& table = call.table();
  const TimeMix& w = call.layer_weights().time_mix;
  const WkvHeads& heads = call.spec().wkv;
  const MatView<const float> normed = as_const(parts.normed), shifts = as_const(parts.shifts);
  const Wkv6Rows& rows = parts.rows;
  mix_rows(normed, shifts, w.first_shares.data(), parts.mixed);
  multiply(call, w.shifts_in, as_const(parts.mixed), parts.shares);
  scale_logits(table, parts.shares, 1.0f, 1.0f);  // a cap of 1 is the tanh
  const auto mix = [&](size_t i) {
    const MatView<const float> own{parts.shares.data + i * heads.shift_rank, parts.shares.rows,
                                   heads.shift_rank, parts.shares.stride};
    multiply(call, w.shifts_out[i], own, parts.mixed);
    mix_rows_by(normed, shifts, w.shares[i].data(), parts.mixed);
    return as_const(parts.mixed);
  };
  multiply(call, w.decays_in, mix(0), parts.vectors);
  scale_logits(table, parts.vectors, 1.0f, 1.0f);
  multiply(call, w.decays_out, as_const(parts.vectors), rows.decays);
  multiply(call, w.keys, mix(1), rows.keys);
  multiply(call, w.values, mix(2), rows.values);
  multiply(call, w.queries, mix(3), rows.queries);
  multiply(call, w.gates_in, mix(4), parts.gate);
  finish_rows6(table, heads, w.decay_bias.data(), w.bonus.data(), rows);
}

void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
  const WkvHeads& heads = call.spec().wkv;
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const MatView<const float> changes = parts.changes(heads);
  if (call.looks_ahead()) state.note_changes(begin, changes);
  wkv6(call.table(), heads, changes, parts.rows.queries.data, parts.rows.own.data,
       state.step(call.looks_ahead(), begin), out);
}

void finish(const LayerCall& call, MatView<float> x, const Parts& parts, MatView<float> out) {
  const LayerWeights& w = call.layer_weights();
  const KernelTable& table = call.table();
  finish_heads6(table, call.spec().wkv, w.time_mix.norm.data(), w.time_mix.norm_bias.data(),
                as_const(parts.gate), out);
  const MatmulInput input = pack_rows(table, as_const(out), packed_for(call, {&w.time_mix.output}));
  end_branch(call, x, input, w.time_mix.output, w.attn_post_norm);
}

}  // namespace

void mix_rwkv6(const LayerCall& call) {
  Activations& a = call.buffers();
  const size_t n = call.step.tokens.size, width = call.spec().wkv.dim();
  for (size_t begin = 0; begin < n; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const MatView<float> x = call.x().rows_from(begin, count), out{a.attended, count, width, width};
    const Parts parts(call, count);
    norm_input(call, x, parts);
    shift_input(call, begin, 0, parts.normed, parts.shifts);
    project(call, parts);
    recur(call, begin, parts, out);
    finish(call, x, parts, out);
  }
}

void mix_rwkv6s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const size_t width = call.spec().wkv.dim();
  const MatView<float> out{call.buffers().attended, x.rows, width, width};
  const Parts parts(call, x.rows);
  norm_input(call, x, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const Parts own = parts.rows_from(one.first_row, one.step.tokens.size);
    shift_input(one, 0, 0, own.normed, own.shifts);
  });
  project(call, parts);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t n = one.step.tokens.size;
    recur(one, 0, parts.rows_from(one.first_row, n), out.rows_from(one.first_row, n));
  });
  finish(call, x, parts, out);
}

}  // namespace edgeh2o
