// A mixture of experts as the feed-forward network.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += the weighted outputs of every row's experts, with the norms that the layer has.
void add_experts(const LayerCall& call, MatView<float> x);

}  // namespace edgeh2o
