// A mixture of experts as the feed-forward network.
#pragma once

#include "model/layer_call.h"
#include "ops/experts.h"

namespace edgeh2o {

// How the layer's router chooses. weights: must outlive the rule.
RoutingRule routing_rule(const LayerSpec& spec, const LayerWeights& weights);

// x += the weighted outputs of every row's experts, with the norms that the layer has.
void add_experts(const LayerCall& call, MatView<float> x);

}  // namespace edgeh2o
