// N-grams that one layer looks up before its mixer (per-layer embeddings of Qwen3.8-Flash-Next): rows of a
// table, which hashes of a token and of those before it name, make a key of every residual stream and one
// value. Every stream gets the value, times a gate by which the stream and its key agree, and a convolution
// of that, over tokens as far apart as the longest n-gram is long.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// Of all rows of the steps, which lie one after another; `call` is that of the first, and its adapters are of
// all. What the convolution sees of the tokens before is in the layer's recurrent state, which does not count
// these here.
void add_ngrams(const LayerCall& call, Span<const Step> steps);

// Throws std::invalid_argument where it is not known which tokens lie before those of a step.
void check_tokens_before(const DecoderConfig& config, const Sequence& sequence);

}  // namespace edgeh2o
