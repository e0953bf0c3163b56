// The work of one layer for the rows of one sequence.
#pragma once

#include <algorithm>
#include <functional>

#include "base/mat_view.h"
#include "model/weights.h"
#include "model/workspace.h"
#include "ops/matmul.h"
#include "ops/streams.h"
#include "sequence/sequence.h"

namespace edgeh2o {

class LentRows;

// The next tokens of a sequence.
struct Step {
  Sequence* sequence;
  Span<const int32_t> tokens;
  PromptEnd end;  // of a prefill
  // A generated token, which reads what the policy says; those after it stay ahead of the sequence.
  bool is_decode;
  // [n_outputs] after the last token, unless end is kLater; null: not wanted. In decode [n][n_outputs] of
  // all.
  float* logits;
  const float* hidden = nullptr;  // [n][hidden_width] beside the tokens, of a decoder that reads_hidden
  float* hidden_out = nullptr;    // [n_hidden][model_dim] what logits are made of
  size_t n_hidden = 0;            // of the last tokens; 0: not wanted
  // [n][taken.size * model_dim] the residual stream of all tokens before these layers, ascending; or null.
  float* taken_out = nullptr;
  Span<const size_t> taken = {nullptr, 0};
  const LentRows* lent = nullptr;  // of a decoder that reads_lent, whose sequence is that of the other model

  AdapterScales adapters() const { return {sequence->shape().scales()}; }
};

// One layer's attention of a prefill call: what it read and what came out, before the output projection.
struct AttentionView {
  size_t layer;
  MatView<const float> residual;  // [n][model_dim] residual stream before the layer
  MatView<const float> q, k, v;   // [n][q_dim], [n][k_dim], [n][v_dim], rotary embedding applied
  MatView<const float> attended;  // [n][out_dim]
};

// Called, where set, after every layer, and after the attention of every layer of a prefill call that
// attends for all its tokens.
struct Observer {
  std::function<void(size_t done, size_t total)> on_layer;
  std::function<void(const AttentionView&)> on_attention;
};

struct LayerCall {
  const DecoderConfig& config;
  const Weights& weights;
  Workspace& workspace;
  const Step& step;
  size_t layer;
  size_t first_row;        // of the step in the buffers of the call
  AdapterScales adapters;  // of the rows at hand: of the step, or of all that go together

  const LayerSpec& spec() const { return config.layers[layer]; }
  const LayerWeights& layer_weights() const { return weights.layer(layer); }
  const KernelTable& table() const { return weights.table(); }
  Activations& buffers() const { return workspace.activations(); }
  MatmulContext products() const { return {buffers().scratch, adapters}; }

  // The same for rows from `first` of those at hand on.
  LayerCall from(size_t first) const {
    LayerCall part = *this;
    if (part.adapters.rows) part.adapters.rows += first;
    return part;
  }

  // Of the step's first token.
  size_t position() const { return step.sequence->position(); }

  // [n][model_dim] the step's rows of the residual stream.
  MatView<float> x() const {
    return {buffers().x + first_row * config.model_dim, step.tokens.size, config.model_dim, config.model_dim};
  }

  // Those of the step's rows, where the model has them.
  Streams streams() const {
    const Streams all{buffers().streams, 0, config.model_dim};
    return all.rows_from(first_row, step.tokens.size);
  }

  // Whether tokens of the step may be taken back: all but the first.
  bool looks_ahead() const { return step.is_decode && step.tokens.size > 1; }

  // The layer's recurrent state has gone through the step's tokens.
  void count_recurrent() const {
    RecurrentState& state = step.sequence->recurrent(layer);
    looks_ahead() ? state.look_ahead(step.tokens.size) : state.advance(step.tokens.size);
  }

  // The outputs of a layer that none after it makes keys and values of are read by no one but for the
  // prompt's last token, unless the sequence wants all rows or the step some: rows before first_output_row
  // are left as they are. The answer is made of those from first_answer_row on, and stays what it is without
  // others.
  size_t first_output_row() const {
    if (step.taken.size > 0 && layer < step.taken[step.taken.size - 1]) return 0;
    return std::min(first_answer_row(), step.tokens.size - step.n_hidden);
  }
  size_t first_answer_row() const {
    const size_t n = step.tokens.size;
    if (step.is_decode || spec().ffn == FfnKind::kShifted) return 0;  // later tokens look back
    if (!skips_rows(config, *step.sequence, layer)) return 0;
    return step.end == PromptEnd::kLater ? n : n - 1;
  }

  // Layers behind must not attend for other tokens either, as they do where these are scored.
  static bool skips_rows(const DecoderConfig& config, const Sequence& sequence, size_t layer) {
    if (sequence.shape().all_rows || layer + 1 < config.n_storing_layers()) return false;
    for (size_t i = layer + 1; i < config.n_layers(); ++i) {
      if (sequence.attends(i) && !sequence.plan(i).ends_dense(config.layers[i].window)) return false;
    }
    return true;
  }
};

// Calls f with the call of every step, whose rows lie one after another; `call` is that of the first.
template <typename F>
void for_each_step(const LayerCall& call, Span<const Step> steps, const F& f) {
  size_t first_row = call.first_row;
  for (const Step& step : steps) {
    f(LayerCall{call.config, call.weights, call.workspace, step, call.layer, first_row, step.adapters()});
    first_row += step.tokens.size;
  }
}

}  // namespace edgeh2o
