#include "model/mixers/rwkv6.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "model/mixers/rwkv.h"
#include "ops/rows.h"
#include "ops/wkv.h"

namespace edgeh2o {
namespace {

struct Rwkv6 {
  // Side by side in rows of the workspace. `mixed` is the input of one product at a time; `shares` and
  // `vectors` are what lies between two.
  struct Parts {
    Wkv6Rows rows;
    MatView<float> gate, normed, shifts, mixed, shares, vectors;

    Parts(const LayerCall& call, size_t n) {
      const WkvHeads& heads = call.spec().wkv;
      RowParts all(call, n);
      for (MatView<float>* part : {&rows.decays, &rows.keys}) *part = all.take(heads.dim());
      rows.values = all.take(heads.kv_dim());
      for (MatView<float>* part : {&rows.queries, &gate, &normed, &shifts, &mixed}) {
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

  static void project(const LayerCall& call, MatView<float>, const Parts& parts) {
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
    multiply(call, w.keys, mix(1), rows.shared_keys());
    multiply(call, w.values, mix(2), rows.values);
    multiply(call, w.queries, mix(3), rows.queries);
    multiply(call, w.gates_in, mix(4), parts.gate);
    if (heads.is_linear()) return finish_linear_rows(table, heads, w.decay_bias.data(), rows);
    finish_rows6(table, heads, w.decay_bias.data(), w.bonus.data(), rows);
  }

  static void recur(const LayerCall& call, MatView<const float> changes, const Parts& parts, StateStep state,
                    MatView<float> out) {
    wkv6(call.table(), call.spec().wkv, changes, parts.rows.queries.data, parts.rows.own.data, state, out);
  }

  static void finish(const LayerCall& call, const Parts& parts, MatView<float> out) {
    const TimeMix& w = call.layer_weights().time_mix;
    finish_heads6(call.table(), call.spec().wkv, w.norm.data(), w.norm_bias.data(), as_const(parts.gate),
                  out);
  }
};

}  // namespace

void mix_rwkv6(const LayerCall& call) { mix_time_step<Rwkv6>(call); }

void mix_rwkv6s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_time_steps<Rwkv6>(call, steps, x);
}

}  // namespace edgeh2o
