#include "model/passes.h"

#include <algorithm>

#include "ops/rows.h"

namespace edgeh2o {
namespace {

// Those of the rows, of the state that the pass at hand does not work on.
MatView<float> other_state(const Activations& a, MatView<float> x) {
  return {a.carried + (x.data - a.x), x.rows, x.cols, x.cols};
}

}  // namespace

void begin_states(const Weights& weights, Activations& a, MatView<float> x) {
  const std::vector<float>& first = weights.first_state();
  copy_rows(as_const(x), other_state(a, x));
  for (size_t begin = 0; begin < x.rows; begin += a.rows_at_once) {
    const MatView<float> rows = x.rows_from(begin, std::min(a.rows_at_once, x.rows - begin));
    const MatView<float> state{a.norm, rows.rows, rows.cols, rows.cols};
    for (size_t i = 0; i < rows.rows; ++i) std::copy(first.begin(), first.end(), state.row(i));
    add_rows(weights.table(), rows, state, nullptr, 0.0f, 1.0f);
  }
}

void end_pass(const LayerCall& call, MatView<float> rows) {
  const DecoderConfig& config = call.config;
  const bool has_norm = config.norms_passes || config.has_two_states;
  if (!has_norm || !config.ends_pass(call.layer)) return;
  const KernelTable& table = call.table();
  const std::vector<float>& weight = call.weights.output_norm();
  rms_norm_groups(table, rows, {weight.data(), weight.size()}, config.norm_eps);
  if (!config.has_two_states) return;
  const MatView<float> other = other_state(call.buffers(), rows);
  const bool is_same_stack = config.stack(call.layer) == config.stack(call.layer + 1);
  const MatView<float> state{call.buffers().norm, rows.rows, rows.cols, rows.cols};
  if (!is_same_stack) copy_rows(as_const(rows), state);
  add_rows(table, rows, other, nullptr, 0.0f, 1.0f);
  if (!is_same_stack) copy_rows(as_const(state), other);
}

}  // namespace edgeh2o
