// Several residual streams per token (AltUp, Baykal et al. 2023): what surrounds a layer, and the network. A
// layer computes the first stream, in x, from what the router of the layer predicts of it, and the others are
// corrected by how wrong that was.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// Makes the streams of rows [first, first + n) of a call of their embeddings in x.
void spread_streams(const Weights& weights, Activations& a, size_t first, size_t n,
                    const AdapterScales& adapters);

// The streams become their predictions, from the first row on that the layer reads; x is the first one.
void predict(const LayerCall& call);

// The streams are corrected by x, rows of the step from row `first` on, and all but the first get the layer's
// input per token. x is of no use then.
void correct(const LayerCall& call, size_t first, MatView<float> x);

// x = the mean of the streams, brought to what the output wants, of rows [first, first + n) of a call;
// n <= rows_at_once.
void merge_streams(const Weights& weights, Activations& a, size_t first, size_t n,
                   const AdapterScales& adapters);

}  // namespace edgeh2o
