// The time mix of an RWKV-7 layer (Peng et al. 2025).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += output(gate * heads(...)), with a gate or without, where all that the recurrence takes is made of the
// layer's normed input mixed with that of the token before. The layer's tokens are counted by its network, if
// that looks back too.
void mix_rwkv7(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_rwkv7s(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
