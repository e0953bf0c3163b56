// Shape and constants of a decoder-only transformer: everything in which model families differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/layer_spec.h"
#include "sequence/layer_state.h"

namespace edgeh2o {

struct RopeConfig {
  std::vector<float> inv_freq;  // [rotary_dim / 2] radians per position, any scaling applied
  float attention_factor = 1.0f;
  std::vector<float>
      long_inv_freq;  // instead if a sequence may hold more than long_after positions, or empty
  size_t long_after = 0;

  size_t n_pairs() const { return inv_freq.size(); }
  const std::vector<float>& of_context(size_t max_context) const {
    return !long_inv_freq.empty() && max_context > long_after ? long_inv_freq : inv_freq;
  }
};

// Embeddings of the last tokens together, which one layer adds to its residual streams: of every number of
// tokens from 2 to n_tokens, n_heads_per_size rows of a table, which hashes of the tokens name. Row h of a
// token t at p is offsets[h] + (t[p] * factors[0] ^ t[p - 1] * factors[1] ^ ...) % sizes[h], modulo 2^64.
// Tokens before the first, and from a token that ends a text on, count as that one.
struct NgramConfig {
  size_t layer = 0;
  size_t n_tokens = 0, n_heads_per_size = 0;  // 0: none
  size_t row_dim = 0, n_rows = 0;             // of the table
  size_t n_taps = 0;                          // of the convolution, n_tokens apart
  int32_t end_token = 0;
  std::vector<uint64_t> factors, offsets, sizes;

  bool is_none() const { return n_tokens == 0; }
  size_t n_heads() const { return is_none() ? 0 : (n_tokens - 1) * n_heads_per_size; }
  size_t history_rows() const { return (n_taps - 1) * n_tokens; }
};
// A token from which on an adapter counts, the adapter_tokens'th one of a decoder (Granite Switch), and which
// is read as another.
struct AdapterToken {
  int32_t token = 0, substitute = 0;
};
inline constexpr size_t kMaxNgramTokens = 16, kMaxNgramHeads = 256;
inline constexpr size_t kMaxMixedStreams = 16, kMaxStreamRank = 65536;

// How what drafts has the hidden row that stands beside a token: in a product with both normed (MTP), in one
// with both as they are (the assistants of Gemma 4), or as its residual stream, with both normed beside one
// another before attention alone (EAGLE-3). Or keys and values of every layer are made of it, and no more,
// and tokens stand in blocks behind them, all of which see each other (DFlash).
enum class HiddenJoin : uint8_t { kNormed, kPlain, kApart, kCached };

struct DecoderConfig {
  size_t model_dim = 0;
  size_t vocab_size = 0;
  float norm_eps = 0.0f;
  float post_norm_eps = 0.0f;  // of norms of what branches give; 0: norm_eps
  bool centres_norms = false;  // they are LayerNorm, not RMS norm
  bool has_norm_weights = true;
  // Else the residual stream behind the last layer is what comes out: its norm was that of the layer.
  bool has_output_norm = true;
  bool has_norm_biases = false;  // those of inputs and of the output have biases; LayerNorm may, without this
  std::vector<RopeConfig> ropes;
  std::vector<LayerSpec> layers;

  float embedding_scale = 1.0f;
  bool norms_embeddings = false;    // by an RMS norm without weights
  bool has_embedding_norm = false;  // by a norm as the others, which may have a bias
  bool has_token_type = false;      // a vector that is added to all embeddings, before that norm
  float logit_scale = 1.0f;
  float logit_soft_cap = 0.0f;  // of the output; 0: none
  bool tied_embeddings = false;
  bool has_output_bias = false;  // a number per token is added to its logit
  bool has_streams = false;      // tokens have kStreams residual streams, of which layers compute one (AltUp)
  // Residual streams of a token that are mixed before every branch, by way of vectors of stream_rank numbers,
  // and that all get what the branch gives (model/stream_mix.h); 0: none are.
  size_t n_streams = 0, stream_rank = 0;
  NgramConfig ngrams;
  size_t n_positions = 0;  // rows of a table of positions, which are added to embeddings; 0: none
  size_t update_rank = 0;  // the largest that the low-rank updates of a matrix have together (LoRA)
  std::vector<float> adapter_scales;  // what each adapter counts where a sequence says nothing
  // Which adapter counts in the row of a token is said by the tokens up to it: of n that choose adapters and
  // m others that with the number nearest to sum / (n + m * exp(-2 * adapter_gain)), where the first adapter
  // adds 1 to the sum, the second 2, and so on, and 0 is none. Empty: sequences say it.
  std::vector<AdapterToken> adapter_tokens;
  float adapter_gain = 0.0f;
  size_t token_input_rows = 0;  // tokens of each part that the table of inputs per token is loaded in
  // A layer that guesses tokens ahead (MTP): beside a token it reads what logits are made of at the token
  // before, and it has logits of the first n_guessed tokens only.
  bool reads_hidden = false;
  size_t n_guessed = 0;  // 0: of all
  HiddenJoin hidden_join = HiddenJoin::kNormed;
  size_t hidden_dim = 0;  // of that row, and of what comes out for the next guess; 0: model_dim
  // kApart, kCached: several rows of the other model together, of which the row beside a token is made;
  // whether they are normed before, and whether the normed row is the residual stream.
  size_t features_dim = 0;
  bool norms_features = false;
  bool residual_is_normed = false;
  // Which stack of layers is gone through in every pass: passes in that one stack recurs have its weights,
  // but keys and values of their own, and `layers` has those of all passes. Empty: one stack, once.
  std::vector<size_t> passes;
  bool norms_passes = false;  // the residual stream is normed between passes, as logits are made of it
  // HRM: of two stacks each has a state. What goes into a pass is the sum of both, and what comes out, normed
  // as logits are made of it, is the new state of its stack. The second one's first is the embedding.
  bool has_two_states = false;

  size_t n_layers() const { return layers.size(); }
  size_t hidden_width() const { return hidden_dim > 0 ? hidden_dim : model_dim; }
  bool joins(HiddenJoin join) const { return reads_hidden && hidden_join == join; }
  bool reads_lent() const { return !layers.empty() && layers[0].heads.are_lent; }
  // Else tokens read those behind them too: a text is read in one call, and nothing is written.
  bool is_causal() const { return layers.empty() || layers[0].heads.is_causal; }
  // Layers with weights of their own, which are those of the stacks.
  size_t n_own_layers() const;
  size_t pass_layers() const { return passes.empty() ? layers.size() : layers.size() / passes.size(); }
  // Which of these a layer has the weights of, and the first layer that has them.
  size_t own_layer(size_t layer) const;
  size_t first_use(size_t own_layer) const;
  size_t stack(size_t layer) const { return passes.empty() ? 0 : passes[layer / pass_layers()]; }
  // Whether a pass ends with the layer, and another one follows.
  bool ends_pass(size_t layer) const { return layer + 1 < layers.size() && (layer + 1) % pass_layers() == 0; }
  bool mixes_streams() const { return n_streams > 0; }
  bool chooses_adapters() const { return !adapter_tokens.empty(); }
  size_t streams_dim() const { return n_streams * model_dim; }  // of a token
  float output_eps() const { return post_norm_eps > 0.0f ? post_norm_eps : norm_eps; }
  size_t n_outputs() const { return n_guessed > 0 ? n_guessed : vocab_size; }  // logits of a token
  const RopeConfig& rope(size_t layer) const { return ropes[layers[layer].rope]; }
  std::vector<LayerKeeps> keeps() const;  // of every layer
  // Layers up to the last that keeps tokens: what a prompt needs of the others is its last token.
  size_t n_storing_layers() const;
  size_t token_input_dim() const { return layers.empty() ? 0 : layers[0].token_input_dim; }

  // The largest value that f gives of a layer.
  template <typename F>
  size_t widest(const F& f) const {
    size_t most = 0;
    for (const LayerSpec& layer : layers) most = f(layer) > most ? f(layer) : most;
    return most;
  }
  void check() const;  // throws std::invalid_argument
};

}  // namespace edgeh2o
