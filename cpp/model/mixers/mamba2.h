// A Mamba-2 layer's mixer (Dao and Gu 2024).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += ssm_out(norm(silu(z) * ssd(silu(conv(u))))) from the first output row on, where z, u and the rates
// of the state-space recurrence are the parts of ssm_in(norm(x)).
void mix_mamba2(const LayerCall& call);

}  // namespace edgeh2o
