#include "model/ffn/shifted.h"

#include "model/branch.h"
#include "model/ffn/gated.h"
#include "model/mixers/recurrent.h"
#include "model/token_shift.h"
#include "ops/rows.h"
#include "ops/wkv.h"

namespace edgeh2o {
namespace {

MatView<float> norm_input(const LayerCall& call, MatView<float> x) {
  const LayerWeights& w = call.layer_weights();
  const MatView<float> normed{call.buffers().norm, x.rows, x.cols, x.cols};
  norm_rows(call.table(), as_const(x), row_norm(call.config, w.ffn_norm, w.ffn_norm_bias), {normed, {}},
            call.buffers().scratch);
  return normed;
}

MatView<float> shifts_of(const LayerCall& call, MatView<float> x) {
  return {call.buffers().attended, x.rows, x.cols, x.cols};
}

// x += sigmoid(gate) * down, of RWKV-6; `hidden` is the input of down.
void add_gated_output(const LayerCall& call, MatView<float> x, const MatmulInput& hidden,
                      MatView<float> gate) {
  const KernelTable& table = call.table();
  MatView<float> out = gate;
  out.data += gate.cols;
  const MatmulOutput down = output_of(call.layer_weights().ffn[0].down, out.data, out.stride);
  matmul(table, hidden, {&down, 1}, call.products());
  gate_rows(table, table.gate_f32, as_const(gate), as_const(out), {out, {}}, call.buffers().scratch);
  add_rows(table, x, out, nullptr, 0.0f, call.spec().residual_scale);
}

void add_mixed(const LayerCall& call, MatView<float> x, MatView<float> normed, MatView<float> shifts) {
  const LayerWeights& w = call.layer_weights();
  const FeedForward& ffn = w.ffn[0];
  if (call.spec().mixer == MixerKind::kRwkv6) {
    RowParts parts(call, x.rows);
    const MatView<float> gate = parts.take(x.cols),
                         mixed = parts.take(x.cols);  // out takes the latter's place
    mix_rows(as_const(normed), as_const(shifts), w.ffn_gate_shares.data(), mixed);
    multiply(call, w.ffn_output_gate, as_const(mixed), gate);
    mix_rows(as_const(normed), as_const(shifts), w.ffn_shares.data(), mixed);
    const MatmulInput input = pack_rows(call.table(), as_const(mixed), packed_for(call, {&ffn.up}));
    add_gated_output(call, x, gate_up(call, ffn, input), gate);
    return;
  }
  mix_rows(as_const(normed), as_const(shifts), w.ffn_shares.data(), shifts);
  const MatmulInput input = pack_rows(call.table(), as_const(shifts), packed_for(call, {&ffn.up}));
  end_branch(call, x, gate_up(call, ffn, input), ffn.down, w.ffn_post_norm);
}

}  // namespace

void add_shifted(const LayerCall& call, size_t first, MatView<float> x) {
  const MatView<float> normed = norm_input(call, x), shifts = shifts_of(call, x);
  shift_input(call, first, x.cols, normed, shifts);  // behind what the mixer keeps
  add_mixed(call, x, normed, shifts);
  if (first + x.rows == call.step.tokens.size) call.count_recurrent();
}

void add_shifted_together(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const MatView<float> normed = norm_input(call, x), shifts = shifts_of(call, x);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t n = one.step.tokens.size;
    shift_input(one, 0, x.cols, normed.rows_from(one.first_row, n), shifts.rows_from(one.first_row, n));
    one.count_recurrent();
  });
  add_mixed(call, x, normed, shifts);
}

}  // namespace edgeh2o
