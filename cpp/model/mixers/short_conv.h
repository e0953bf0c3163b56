// A short convolution as a layer's mixer (LFM2).
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// x += conv_out(c * conv(b * y)) from the first output row on, where b, c and y are the three parts of
// conv_in(norm(x)), and conv is one of n_conv_taps tokens for every channel.
void mix_short_conv(const LayerCall& call);

// The same for the rows x of several decode steps, which lie one after another; `call` is that of the first.
void mix_short_convs(const LayerCall& call, Span<const Step> steps, MatView<float> x);

}  // namespace edgeh2o
