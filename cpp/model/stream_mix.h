// Residual streams that are mixed before every branch (hyper-connections: Zhu et al. 2024; as
// Qwen3.8-Flash-Next has them). A token has n_streams, which begin as its embedding. What a branch reads is
// the mean of the normed streams times gates, which are made of all of them together by way of a short
// vector; what it gives goes to every stream, times 2 sigmoid of a number per stream. No layer has norms
// beside, and what logits are made of is such a mean.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// The streams of rows [first, first + n) of a call become their embeddings, which are in x.
void copy_to_streams(const DecoderConfig& config, Activations& a, size_t first, size_t n);

// x of rows `first` on of the buffers of a call becomes what the branch of this mixer reads; for
// add_to_streams. `adapters` are of these rows. Any number of them.
void mix_streams(const DecoderConfig& config, const KernelTable& table, const StreamMixer& mixer,
                 Activations& a, size_t first, size_t n, const AdapterScales& adapters);

// Every stream of these rows gets its share of x, what the branch has given.
void add_to_streams(const DecoderConfig& config, Activations& a, size_t first, size_t n);

}  // namespace edgeh2o
