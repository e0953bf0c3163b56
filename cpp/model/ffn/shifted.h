// The feed-forward network of RWKV, the channel mix: its input is mixed with that of the token before.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += down(activation(up(y + shares * (y_before - y)))), y = norm(x), of RWKV-6 times the sigmoid of a
// product with the like, of rows of the step from row `first` on, taken in order. Behind the last one the
// layer's tokens are counted.
void add_shifted(const LayerCall& call, size_t first, MatView<float> x);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void add_shifted_together(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
