// Attention as a layer's mixer.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += attn_output(attention(rope(q), rope(k), v)) from the first output row on, with the norms that the
// layer has.
void mix_attention(const LayerCall& call, const Observer& observer);

// Keys and values of the layer are made of the rows of x as they are, and cached; x stays.
void cache_hidden(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another: each product is one for all,
// and what it gives a row does not depend on the others. `call` is that of the first.
void mix_attentions(const LayerCall& call, Span<const Step> steps, MatView<float> x);

// The first row of the step whose input the layer reads: keys and values are made of all, where it has some.
size_t first_input_row(const LayerCall& call);

// Whether the layer writes its cache rows and nothing else, but for the last token of a prompt.
bool skips_attention(const DecoderConfig& config, const Sequence& sequence, size_t layer);

// Layers that attend for all tokens of a prompt.
size_t n_attending_layers(const DecoderConfig& config, const Sequence& sequence);

}  // namespace edgeh2o
