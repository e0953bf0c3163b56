// Even sizes of what queries and keys hold in every dimension, where biases or the weights of norms make a
// few dimensions large.
#pragma once

#include <cstddef>

#include "model/decoder_config.h"
#include "model/weights.h"

namespace edgeh2o {

// Keys times s and queries over s give the logits as they were, bit for bit, since s is a power of two and
// keys do not become smaller; but rows that are rounded to 8 bits by their largest numbers (caches in q8_0,
// products in int8) lose less. Keys of Qwen2.5-Coder-0.5B hold up to 211 in some dimensions and 2 in most;
// what is large in keys of Gemma 3 270M is small in its queries. Factors of normed queries and keys go into
// the weights of their norms, those of others, which biases make large, become weights.key_balance. Of layers
// that have neither, and of models whose layers share keys, nothing changes.
//
// s goes with sqrt(|q| / |k|), of the rotary pair's two dimensions together, as they turn into one another
// (the even migration of SmoothQuant, Xiao et al. 2023). Norms are estimated: of an input whose numbers are
// independent and as large as the norm before makes them, by the first columns of the weights, the biases,
// and the weights of the norms.
void balance_keys(const DecoderConfig& config, size_t layer, LayerWeights& weights);

}  // namespace edgeh2o
