// A Mamba-2 layer's mixer (Dao and Gu 2024).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += ssm_out(norm(silu(z) * ssd(silu(conv(u))))) from the first output row on, where z, u and the rates
// of the state-space recurrence are the parts of ssm_in(norm(x)). Rates, what writes to the state and what
// reads it may be made of the channels behind the convolution, as Mamba-1's are.
void mix_mamba2(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_mamba2s(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
