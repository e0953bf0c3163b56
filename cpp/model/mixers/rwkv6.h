// The time mix of an RWKV-6 layer (Peng et al. 2024, "Eagle and Finch").
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += output(silu(gate) * heads(...)), where all that the recurrence takes is made of the layer's normed
// input mixed with that of the token before, by shares that are made of both too; of linear attention
// sigmoid(gate). The layer's tokens are counted by its network, if that looks back too.
void mix_rwkv6(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_rwkv6s(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
