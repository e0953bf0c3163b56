// The feed-forward network: down(activation(gate(x)) * up(x)), or down(relu(up(x))^2) without a gate.
#pragma once

#include "model/layer_call.h"
#include "ops/matmul.h"

namespace edgeh2o {

// x += ffn(x), with the norms that the layer has.
void add_gated(const LayerCall& call, MatView<float> x);

// activation(gate(input)) * up(input), of the gate what lies above its cutoff, or the square, with a norm
// behind it where the layer has one, as the down projection wants it.
MatmulInput gate_up(const LayerCall& call, const FeedForward& ffn, const MatmulInput& input);

}  // namespace edgeh2o
