// A decoder-only transformer: its weights and the layer loop. Immutable once the weights are
// set; the mutable state of a prompt is a Session.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "base/arena.h"
#include "base/mat_view.h"
#include "model/decoder_config.h"
#include "model/kv_cache.h"
#include "model/weights.h"
#include "ops/chunked_attention.h"
#include "ops/experts.h"
#include "ops/matmul.h"

namespace edgeh2o {

// cos and sin of every position of a call: both [n][rotary_dim / 2].
struct RopeTable {
  float* cos = nullptr;
  float* sin = nullptr;
};

// Buffers for the rows of one logical batch. Sizes: n = batch_size.
struct Activations {
  Activations(const DecoderConfig& config, const KernelTable& table, size_t batch_size, Arena& arena);

  float* x;         // [n][model_dim] residual stream
  float* norm;      // [rows_at_once][model_dim] normed rows, for float weights; output of a branch that is
                    // normed or scaled
  float* qkv;       // [n][q_dim + 2 * kv_dim]
  float* attended;  // [n][q_dim]
  float* gate;      // [rows_at_once][ffn_dim]
  float* up;        // [rows_at_once][ffn_dim]
  uint8_t* packed;  // rows_at_once 8-bit rows of the widest matmul input
  RopeTable rope;
  RopeTable sliding_rope;  // of layers with a window, if the model has another one for them
  float* logits;           // [vocab_size]
  uint8_t* scratch;        // num_threads() x the largest scratch of an op
  size_t rows_at_once;     // rows that pass the linear layers at a time
  int n_threads;           // threads that `scratch` serves

  // Of a mixture of experts, for rows_at_once rows:
  float* router;        // [rows_at_once][n_experts] logits
  float* expert_rows;   // [rows_at_once][model_dim] input, then output of one expert
  float* expert_input;  // [rows_at_once][model_dim] normed rows
  float* mixed;         // [rows_at_once][model_dim] weighted sum of the outputs
  ExpertRoutes routes;
};

class Decoder {
 public:
  Decoder(const DecoderConfig& config, const KernelTable& table) : config_(config), weights_(config, table) {}

  const DecoderConfig& config() const { return config_; }
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }

  // One layer's attention of a prefill call: what it read and what came out, before the output projection.
  struct AttentionView {
    size_t layer;
    MatView<const float> residual;  // [n][model_dim] residual stream before the layer
    MatView<const float> q, k, v;   // [n][q_dim], [n][kv_dim], rotary embedding applied
    MatView<const float> attended;  // [n][q_dim]
  };

  // Called, where set, after every layer, and after the attention of every layer of a prefill call.
  struct Observer {
    std::function<void(size_t done, size_t total)> on_layer;
    std::function<void(const AttentionView&)> on_attention;
  };

  // Where the rows of a call stand in the prompt.
  struct Step {
    size_t first_position;
    size_t n_tokens;
    PromptEnd end;
    bool is_decode;  // one generated token: full attention over the cache
    bool all_rows;   // else the last layer's output is computed for the prompt's last token only
  };

  // Whether a layer writes its cache rows and nothing else, but for the last token of a prompt.
  bool skips_attention(size_t layer, bool all_rows, const ChunkedAttention& attention) const {
    return outputs_last_row_only(layer, all_rows) && attention.ends_dense(config_.window(layer));
  }

  // Runs all layers on a.x (filled by embed) and leaves the residual stream there.
  void run_layers(const Step& step, Activations& a, KvCache& cache, ChunkedAttention& attention,
                  const Observer& observer) const;
  void embed(Activations& a, const int32_t* tokens, size_t n_tokens) const;

  // Logits of rows [first, first + n_rows) of a.x: out [n_rows][vocab_size].
  void compute_logits(Activations& a, size_t first, size_t n_rows, float* out) const;

 private:
  void compute_some_logits(Activations& a, size_t first, size_t n_rows, float* out) const;
  void fill_rope_tables(const Step& step, size_t max_context, Activations& a) const;
  void project_qkv(size_t layer, PositionRange rows, const Step& step, Activations& a, KvCache& cache) const;
  // The other outputs of the last layer are read by no one unless all_rows are asked for.
  bool outputs_last_row_only(size_t layer, bool all_rows) const {
    return !all_rows && layer + 1 == config_.n_layers;
  }
  size_t first_output_row(size_t layer, const Step& step) const;
  void attend(size_t layer, const Step& step, Activations& a, KvCache& cache, ChunkedAttention& attention,
              const Observer& observer) const;
  void feed_forward(const LayerWeights& w, size_t first_row, size_t n_tokens, Activations& a) const;
  // x += the weighted outputs of every row's experts, with the norms that the model has.
  void mix_experts(const LayerWeights& w, MatView<float> x, Activations& a) const;
  // activation(gate(input)) * up(input), as the down projection wants it.
  MatmulInput gate_up(const FeedForward& ffn, const MatmulInput& input, Activations& a) const;

  // The input of a residual branch: rows of x, normed unless pre_norm is empty, as the linear layers want
  // them.
  MatmulInput begin_branch(MatView<float> x, const std::vector<float>& pre_norm,
                           std::initializer_list<const Linear*> layers, Activations& a) const;
  // x += residual_scale * post_norm(linear(input)), without the norm if post_norm is empty.
  void end_branch(MatView<float> x, const MatmulInput& input, const Linear& linear,
                  const std::vector<float>& post_norm, Activations& a) const;

  DecoderConfig config_;
  Weights weights_;
};

}  // namespace edgeh2o
