// What comes out of a decoder: logits, hidden rows, and guesses by those of another model.
#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"
#include "model/branch.h"
#include "model/decoder.h"
#include "model/hidden_input.h"
#include "model/stream_mix.h"
#include "model/streams.h"
#include "ops/matmul.h"
#include "ops/rows.h"

namespace edgeh2o {

void Decoder::take_rows_before(size_t layer, Span<const Step> steps, Workspace& workspace) const {
  const size_t dim = config_.model_dim;
  size_t first_row = 0;
  for (const Step& step : steps) {
    const size_t n = step.tokens.size, width = step.taken.size * dim;
    for (size_t i = 0; i < step.taken.size; ++i) {
      if (step.taken[i] != layer) continue;
      copy_rows({workspace.activations().x + first_row * dim, n, dim, dim},
                {step.taken_out + i * dim, n, dim, width});
    }
    first_row += n;
  }
}

void Decoder::guess(const Guess& guess, Workspace& workspace) const {
  const std::lock_guard<std::mutex> lock(workspace.mutex());
  const ThreadScope threads(workspace.n_threads());
  const Sequence& target = *guess.target;
  target.check_whole();
  EH2O_CHECK(config_.reads_lent() && main_, "only what reads keys and values of another model guesses so");
  EH2O_CHECK(target.position() > 0, "there is nothing yet to guess by");
  EH2O_CHECK(guess.token >= 0 && static_cast<size_t>(guess.token) < config_.vocab_size, "token ", guess.token,
             " is outside the vocabulary of ", config_.vocab_size);
  const Step step{guess.target, {&guess.token, 1}, PromptEnd::kFinal, true,
                  guess.logits, guess.hidden,      nullptr,           0,
                  nullptr,      {nullptr, 0},      guess.lent};
  workspace.begin_call(1, true);
  Activations& a = workspace.activations();
  join_plain(config_, weights_, a, guess.token, guess.hidden);
  fill_ropes(a, 0, target.position(), 1, target.shape().max_context);
  for (size_t layer = 0; layer < config_.n_layers(); ++layer) {
    run_layer({config_, weights_, workspace, step, layer, 0, {}}, {});
  }
  compute_logits(workspace, 0, 1, {}, guess.logits);
  const size_t dim = config_.model_dim;
  const MatmulInput normed =
      norm_outputs(workspace, 0, {},
                   {{a.norm, 1, dim, dim},
                    packed_for(weights_.table(), a.packed, {&weights_.hidden_out().weight}, false)});
  const MatmulOutput output = output_of(weights_.hidden_out(), guess.hidden_out, config_.hidden_width());
  matmul(weights_.table(), normed, {&output, 1}, {a.scratch, {}});
}

void Decoder::encode(MatView<const float> features, Workspace& workspace, MatView<float> out) const {
  const std::lock_guard<std::mutex> lock(workspace.mutex());
  const ThreadScope threads(workspace.n_threads());
  EH2O_CHECK(config_.features_dim > 0 && features.cols == config_.features_dim, "rows of ", features.cols,
             " numbers are not what this model reads of another");
  const KernelTable& table = weights_.table();
  Activations& a = workspace.activations();
  for (size_t first = 0; first < features.rows; first += a.rows_at_once) {
    const size_t n = std::min(a.rows_at_once, features.rows - first), width = config_.features_dim;
    const MatView<const float> rows = features.rows_from(first, n);
    const PackedOut packed = packed_for(table, a.packed, {&weights_.features().weight}, false);
    const MatmulInput input = config_.norms_features
                                  ? norm_rows(table, rows, row_norm(config_, weights_.features_norm(), {}),
                                              {{a.inner, n, width, width}, packed}, a.scratch)
                                  : pack_rows(table, rows, packed);
    const MatmulOutput output = output_of(weights_.features(), out.rows_from(first, n).data, out.stride);
    matmul(table, input, {&output, 1}, {a.scratch, {}});
    if (!config_.joins(HiddenJoin::kCached)) continue;
    const MatView<float> encoded = out.rows_from(first, n);
    norm_rows(table, as_const(encoded), row_norm(config_, weights_.hidden_norm(), {}), {encoded, {}},
              a.scratch);
  }
}

void Decoder::row_logits(const Sequence& sequence, Workspace& workspace, size_t first, size_t n_rows,
                         float* out) const {
  const std::lock_guard<std::mutex> lock(workspace.mutex());
  const ThreadScope threads(workspace.n_threads());
  sequence.check_whole();
  EH2O_CHECK(sequence.shape().all_rows, "logits of single rows need a session made with all_rows");
  const Workspace::LeftRows& left = workspace.left;
  const size_t n_left = left.sequence == &sequence && left.end == sequence.position() ? left.n_rows : 0;
  EH2O_CHECK(n_rows > 0 && first <= n_left && n_rows <= n_left - first, "rows ", first, " to ", first, " + ",
             n_rows, " are not among the ", n_left, " of the latest prefill call");
  const size_t rows_at_once = workspace.activations().rows_at_once;
  for (size_t begin = 0; begin < n_rows; begin += rows_at_once) {
    compute_logits(workspace, first + begin, std::min(rows_at_once, n_rows - begin),
                   {sequence.shape().scales()}, out + begin * config_.n_outputs());
  }
}

void Decoder::compute_logits(Workspace& workspace, size_t first, size_t n_rows, const AdapterScales& adapters,
                             float* out) const {
  const KernelTable& table = weights_.table();
  const PackedMatrix& head = weights_.output();
  Activations& a = workspace.activations();
  const size_t dim = config_.model_dim, n_outputs = config_.n_outputs();
  const MatmulInput normed =
      norm_outputs(workspace, first, adapters,
                   {{a.norm, n_rows, dim, dim}, packed_for(table, a.packed, {&head}, adapters.any())});
  const MatmulOutput logits{&head, weights_.output_bias(), out, n_outputs, false};
  matmul(table, normed, {&logits, 1}, {a.scratch, adapters});
  scale_logits(table, {out, n_rows, n_outputs, n_outputs}, config_.logit_scale, config_.logit_soft_cap);
}

void Decoder::write_hidden(Workspace& workspace, size_t first, size_t n_rows, const AdapterScales& adapters,
                           float* out) const {
  const size_t dim = config_.model_dim, rows_at_once = workspace.activations().rows_at_once;
  for (size_t begin = 0; begin < n_rows; begin += rows_at_once) {
    const size_t n = std::min(rows_at_once, n_rows - begin);
    if (config_.joins(HiddenJoin::kApart)) {  // the residual stream as it is
      copy_rows({workspace.activations().x + (first + begin) * dim, n, dim, dim},
                {out + begin * dim, n, dim, dim});
      continue;
    }
    norm_outputs(workspace, first + begin, adapters, {{out + begin * dim, n, dim, dim}, {}});
  }
}

MatmulInput Decoder::norm_outputs(Workspace& workspace, size_t first, const AdapterScales& adapters,
                                  const ActivationsOut& out) const {
  Activations& a = workspace.activations();
  const size_t dim = config_.model_dim, n_rows = out.rows.rows;
  if (config_.has_streams) merge_streams(weights_, a, first, n_rows, adapters);
  if (config_.mixes_streams()) {
    mix_streams(config_, weights_.table(), weights_.output_mixer(), a, first, n_rows, adapters);
    if (out.rows.data) copy_rows({a.x + first * dim, n_rows, dim, dim}, out.rows);
    return pack_rows(weights_.table(), as_const(out.rows), out.packed);
  }
  const MatView<const float> x{a.x + first * dim, n_rows, dim, dim};
  if (!config_.has_output_norm) {
    if (out.rows.data) copy_rows(x, out.rows);
    return pack_rows(weights_.table(), x, out.packed);
  }
  return norm_rows(weights_.table(), x,
                   row_norm(config_, weights_.output_norm(), weights_.output_norm_bias()), out, a.scratch);
}

}  // namespace edgeh2o
