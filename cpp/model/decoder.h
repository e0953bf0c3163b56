// A decoder-only transformer: its weights and the layer loop. Immutable once the weights are set; the state
// of a prompt is a Sequence, what calls write to a Workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "model/decoder_config.h"
#include "model/layer_call.h"
#include "model/weights.h"
#include "model/workspace.h"

namespace edgeh2o {

class Decoder {
 public:
  // With `main` a layer that guesses tokens ahead, whose embedding and output matrix are those of main unless
  // it has its own. Throws std::invalid_argument where their widths or vocabularies differ.
  Decoder(const DecoderConfig& config, const KernelTable& table,
          std::shared_ptr<const Decoder> main = nullptr)
      : config_(config), main_(std::move(main)), weights_(config, table, main_ ? &main_->weights_ : nullptr) {
    const size_t n = config_.adapter_tokens.size();
    one_adapter_.assign(n * n, 0.0f);
    for (size_t i = 0; i < n; ++i) one_adapter_[i * n + i] = 1.0f;
  }

  const DecoderConfig& config() const { return config_; }
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }

  // Appends every step's tokens to its sequence. The workspace fits the sequences, and the rows of all steps
  // together; no sequence stands twice. What comes out for a sequence does not depend on the others. Throws
  // std::invalid_argument, before anything is changed, for steps that cannot be made; if the observer throws,
  // the sequences are broken. on_attention is not called for a layer that attends for the last token only.
  void forward(Span<const Step> steps, Workspace& workspace, const Observer& observer) const;

  // Writes to out [n_rows][vocab_size] the logits of tokens [first, first + n_rows) of the sequence's latest
  // prefill, as long as no other call used the workspace. For a sequence with all_rows. Throws
  // std::invalid_argument.
  void row_logits(const Sequence& sequence, Workspace& workspace, size_t first, size_t n_rows,
                  float* out) const;

  // The next token after one that the target's sequence has not read yet, for a decoder that reads_lent: its
  // layers attend to keys and values of that sequence, which stays as it is, from its position. hidden
  // [hidden_width] is what the target's logits of the token before were made of, or what hidden_out
  // [hidden_width] got by the guess before.
  struct Guess {
    Sequence* target;
    const LentRows* lent;
    int32_t token;
    const float* hidden;
    float* logits;  // [n_outputs]
    float* hidden_out;
  };
  // Throws std::invalid_argument for what cannot be.
  void guess(const Guess& guess, Workspace& workspace) const;

  // What stands beside tokens, [n][model_dim], of rows [n][features_dim] of the model that this drafts for.
  void encode(MatView<const float> features, Workspace& workspace, MatView<float> out) const;

  const Decoder* main() const { return main_.get(); }

 private:
  void fill_ropes(Activations& a, size_t first_row, size_t position, size_t n, size_t max_context) const;
  void take_rows_before(size_t layer, Span<const Step> steps, Workspace& workspace) const;
  void check_steps(Span<const Step> steps, const Workspace& workspace) const;
  void begin_call(Span<const Step> steps, Workspace& workspace) const;
  void embed(Span<const int32_t> tokens, MatView<float> rows) const;
  void add_embedding(const LayerCall& call, size_t first, MatView<float> rows) const;
  void begin_step(const Step& step, size_t first_row, Workspace& workspace) const;
  // What adapters count in the rows of steps that go together.
  AdapterScales joint_adapters(Span<const Step> steps, Workspace& workspace) const;
  // Where tokens choose adapters: those of the step's rows, by their tokens and those before.
  void choose_adapters(const Step& step, const float** rows) const;
  // What adapters count in the rows of a step, of which the first is row first_row of the call.
  AdapterScales adapters_of(const Step& step, size_t first_row, Workspace& workspace) const;
  // Whether the rows of the steps go through the layers together: decode steps of several sequences.
  bool goes_together(Span<const Step> steps, size_t n_rows, Workspace& workspace) const;
  void run_layer(const LayerCall& call, const Observer& observer) const;
  // The same for the rows of several steps; `call` is that of the first.
  void run_layer_together(const LayerCall& call, Span<const Step> steps, size_t n_rows) const;
  // What comes after the mixer, for some rows of the residual stream.
  void add_ffn(const LayerCall& call, size_t first, MatView<float> rows) const;
  // Where streams are mixed, behind the mixer: what it gave goes to the streams, and x of rows from `first`
  // of the buffers on becomes what the network reads.
  void turn_to_ffn(const LayerCall& call, size_t first, size_t n_rows) const;
  // Logits of rows [first, first + n_rows) of the residual stream; `adapters` are of these rows.
  void compute_logits(Workspace& workspace, size_t first, size_t n_rows, const AdapterScales& adapters,
                      float* out) const;

  // The rows that logits are made of: [n_rows][model_dim]; any number of them.
  void write_hidden(Workspace& workspace, size_t first, size_t n_rows, const AdapterScales& adapters,
                    float* out) const;

  // The same of rows from `first` on, at most rows_at_once, as many as `out` has.
  MatmulInput norm_outputs(Workspace& workspace, size_t first, const AdapterScales& adapters,
                           const ActivationsOut& out) const;

  DecoderConfig config_;
  std::shared_ptr<const Decoder> main_;
  Weights weights_;
  std::vector<float> one_adapter_;  // [n_adapters][n_adapters] where tokens choose them: each alone
};

}  // namespace edgeh2o
