// A gated delta net as a layer's mixer (Qwen3-Next, Qwen3.5).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += delta_out(norm(delta_rule(q, k, v)) * silu(z)) from the first output row on, where q, k and v are
// silu(conv(qkv)), queries and keys of length 1, and qkv, z and the gates are products with norm(x).
void mix_delta_net(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_delta_nets(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
