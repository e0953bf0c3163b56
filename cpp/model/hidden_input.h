// The input of a layer that guesses tokens ahead (MTP, NextN): of DeepSeek-V3 (2024), section 2.2.
#pragma once

#include "model/decoder_config.h"
#include "model/weights.h"
#include "model/workspace.h"

namespace edgeh2o {

// x = hidden_proj [norm(x); norm(hidden)], for the rows of the residual stream from first_row on, which hold
// the embeddings of the tokens. hidden [n][model_dim].
void join_hidden(const DecoderConfig& config, const Weights& weights, Activations& a, size_t first_row,
                 MatView<const float> hidden);

}  // namespace edgeh2o
