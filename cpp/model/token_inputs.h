// Inputs that every layer has of its own, per token (Gemma 3n and 4).
#pragma once

#include "model/layer_call.h"
#include "ops/matmul.h"

namespace edgeh2o {

// gelu(gate(x)) * input for rows of the step from row `first` on, as the last matrix wants them.
MatmulInput gated_token_input(const LayerCall& call, size_t first, MatView<float> x);

// x += norm(out(gelu(gate(x)) * input)) for rows of the step from row `first` on. The input of a token is
// made of its row of a table and of its embedding e: (row + norm(proj(e))) / sqrt(2), with the scales that
// make both of one size.
void add_token_input(const LayerCall& call, size_t first, MatView<float> x);

}  // namespace edgeh2o
