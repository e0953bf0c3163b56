// What lies between passes over stacks of layers that are gone through several times.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// Rows of a call, embedded, become what goes into the first pass of a model with two states.
void begin_states(const Weights& weights, Activations& a, MatView<float> x);

// Behind a layer, for some rows of the residual stream: what comes out of a pass becomes what goes into the
// next, if there is one.
void end_pass(const LayerCall& call, MatView<float> rows);

}  // namespace edgeh2o
