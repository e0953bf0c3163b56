// A mixture of experts as the feed-forward network.
#pragma once

#include "model/layer_call.h"
#include "ops/experts.h"

namespace edgeh2o {

// How the layer's router chooses. weights: must outlive the rule.
RoutingRule routing_rule(const LayerSpec& spec, const LayerWeights& weights);

// The router's logits of rows x of the residual stream, where the layer routes by its input: before its mixer
// adds to them.
void route_input(const LayerCall& call, MatView<const float> x);

// x += the weighted outputs of every row's experts, with the norms that the layer has.
void add_experts(const LayerCall& call, MatView<float> x);

}  // namespace edgeh2o
