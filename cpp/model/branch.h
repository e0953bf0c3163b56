// Both ends of a residual branch: x += scale * post_norm(f(pre_norm(x))), with the norms that the layer has.
#pragma once

#include <initializer_list>
#include <vector>

#include "model/layer_call.h"
#include "ops/matmul.h"

namespace edgeh2o {

bool any_quantised(std::initializer_list<const Linear*> layers);

// What the linear layer writes to rows of `out`.
MatmulOutput output_of(const Linear& linear, float* out, size_t stride, bool accumulate = false);

// The input of a branch: rows of x, normed unless pre_norm is empty, as the linear layers want them.
MatmulInput begin_branch(const LayerCall& call, MatView<float> x, const std::vector<float>& pre_norm,
                         std::initializer_list<const Linear*> layers);

// x += residual_scale * post_norm(linear(input)), without the norm if post_norm is empty.
void end_branch(const LayerCall& call, MatView<float> x, const MatmulInput& input, const Linear& linear,
                const std::vector<float>& post_norm);

}  // namespace edgeh2o
