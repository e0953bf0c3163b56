#include "model/mixers/rwkv7.h"

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "model/mixers/rwkv.h"
#include "ops/rows.h"
#include "ops/wkv.h"

namespace edgeh2o {
namespace {

struct Rwkv7 {
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

  // x: rows of the call, whose values of the first layer are handed on.
  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
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
    finish_rows(table, heads, {w.decay_bias.data(), w.direction_factors.data(), w.key_factors.data()}, rows);
    if (heads.gate_rank == 0) return;
    mix(5);
    const MatView<float> gates = vectors(heads.gate_rank);
    multiply(call, w.gates_in, as_const(parts.mixed), gates);
    sigmoid_rows(table, gates, nullptr, w.ones.data());
    multiply(call, w.gates_out, as_const(gates), parts.gate);
  }

  static void recur(const LayerCall& call, MatView<const float> changes, const Parts& parts, StateStep state,
                    MatView<float> out) {
    wkv(call.table(), call.spec().wkv, changes, parts.rows.queries.data, state, out);
  }

  static void finish(const LayerCall& call, const Parts& parts, MatView<float> out) {
    const TimeMix& w = call.layer_weights().time_mix;
    finish_heads(call.table(), call.spec().wkv, {w.norm.data(), w.norm_bias.data(), w.bonus.data()},
                 parts.rows, as_const(parts.gate), out);
  }
};

}  // namespace

void mix_rwkv7(const LayerCall& call) { mix_time_step<Rwkv7>(call); }

void mix_rwkv7s(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_time_steps<Rwkv7>(call, steps, x);
}

}  // namespace edgeh2o
