// Both ends of a residual branch: x += scale * post_norm(f(pre_norm(x))), with the norms that the layer has.
#pragma once

#include <initializer_list>
#include <vector>

#include "model/layer_call.h"
#include "ops/matmul.h"
#include "ops/rows.h"

namespace edgeh2o {

// Where the rows that are the input of all these layers are packed to 8 bits, if one of them wants that.
PackedOut packed_for(const LayerCall& call, std::initializer_list<const Linear*> layers);

// The norm of weights [model_dim] and of the bias, unless it is empty, as the model has it.
RowNorm row_norm(const DecoderConfig& config, const std::vector<float>& weight,
                 const std::vector<float>& bias);

// What the linear layer writes to rows of `out`.
MatmulOutput output_of(const Linear& linear, float* out, size_t stride, bool accumulate = false);

// out = linear(rows), without its factor.
void multiply(const LayerCall& call, const Linear& linear, MatView<const float> rows, MatView<float> out);

// What the linear layer has made, times its factor, if it has one.
void scale_output(const LayerCall& call, const Linear& linear, MatView<float> out);

// The input of a branch: rows of x, normed unless pre_norm is empty, as the linear layers want them. The bias
// may be empty.
MatmulInput begin_branch(const LayerCall& call, MatView<float> x, const std::vector<float>& pre_norm,
                         std::initializer_list<const Linear*> layers, const std::vector<float>& bias = {});

// x += residual_scale * post_norm(scale * linear(input)), without the norm if post_norm is empty. Where
// streams are mixed, x is what the branch gives.
void end_branch(const LayerCall& call, MatView<float> x, const MatmulInput& input, const Linear& linear,
                const std::vector<float>& post_norm);

// x normed in place, where the layer does so behind a branch; else the weights are empty.
void norm_sum(const LayerCall& call, MatView<float> x, const std::vector<float>& weight,
              const std::vector<float>& bias);

}  // namespace edgeh2o
