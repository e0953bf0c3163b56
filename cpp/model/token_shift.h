// What the mixer and the network of a layer of RWKV look back by: the input of the token before.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// shifts = differences to the token before, of rows `normed` of call.step from row `begin` on (ops/wkv.h).
// The layer's state keeps the last row in its columns from `column` on.
void shift_input(const LayerCall& call, size_t begin, size_t column, MatView<float> normed,
                 MatView<float> shifts);

}  // namespace edgeh2o
