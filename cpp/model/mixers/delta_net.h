// A gated delta net as a layer's mixer (Qwen3-Next, Qwen3.5).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += delta_out(norm(delta_rule(q, k, v)) * silu(z)) from the first output row on, where q, k and v are
// silu(conv(qkv)), queries and keys of length 1, and qkv, z and the gates are products with norm(x).
void mix_delta_net(const LayerCall& call);

}  // namespace edgeh2o
