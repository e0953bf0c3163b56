// The input of a layer that guesses tokens ahead (MTP, NextN): of DeepSeek-V3 (2024), section 2.2.
#pragma once

#include <initializer_list>

#include "model/decoder_config.h"
#include "model/layer_call.h"
#include "model/weights.h"
#include "model/workspace.h"
#include "ops/matmul.h"

namespace edgeh2o {

// x = hidden_proj [norm(x); norm(hidden)], for the rows of the residual stream from first_row on, which hold
// the embeddings of the tokens. hidden [n][model_dim].
void join_hidden(const DecoderConfig& config, const Weights& weights, Activations& a, size_t first_row,
                 MatView<const float> hidden);

// x = hidden_proj [embedding; hidden] of one row, of a token's embedding in the model that is drafted for.
// hidden [hidden_width].
void join_plain(const DecoderConfig& config, const Weights& weights, Activations& a, int32_t token,
                const float* hidden);

// The input of the only layer for rows x of the residual stream, hidden rows, which those of the tokens stand
// before: [norm(embedding); norm(x)]. x is normed where the residual stream is to be.
MatmulInput join_apart(const LayerCall& call, Span<const int32_t> tokens, MatView<float> x,
                       std::initializer_list<const Linear*> layers);

}  // namespace edgeh2o
