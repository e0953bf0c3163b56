// LAuReL (Menghani et al. 2024): a learned residual of low rank beside attention (Gemma 3n).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += e + norm(out(in(e))), where e is x as the layer's norm makes it, for rows that attention has read and
// not yet added to.
void add_laurel(const LayerCall& call, MatView<float> x);

// What a sum of the two branches is scaled by, so that it is of the size of one.
void scale_branches(const LayerCall& call, MatView<float> x);

}  // namespace edgeh2o
