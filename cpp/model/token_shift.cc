#include "model/token_shift.h"

#include "ops/wkv.h"

namespace edgeh2o {

void shift_input(const LayerCall& call, size_t begin, size_t column, MatView<float> normed,
                 MatView<float> shifts) {
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const bool looks_ahead = call.looks_ahead();
  if (looks_ahead) state.note_part(begin, column, as_const(normed));
  const StateStep own = state.step(looks_ahead, begin).at(call.spec().wkv.n_state() + column);
  shift_rows(as_const(normed), own, shifts);
}

}  // namespace edgeh2o
