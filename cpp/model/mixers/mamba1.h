// A Mamba-1 layer's mixer (Gu and Dao 2023).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += ssm_out(silu(z) * scan(silu(conv(u)))) from the first output row on, where u and z are the halves of
// ssm_in(norm(x)), and the steps of the selective scan, what writes to its state and what reads it are made
// of its input.
void mix_mamba1(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_mamba1s(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
