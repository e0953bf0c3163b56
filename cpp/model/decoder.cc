#include "model/decoder.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "model/branch.h"
#include "model/ffn/experts.h"
#include "model/ffn/gated.h"
#include "model/ffn/shifted.h"
#include "model/hidden_input.h"
#include "model/mixers/attention.h"
#include "model/mixers/delta_net.h"
#include "model/mixers/mamba1.h"
#include "model/mixers/mamba2.h"
#include "model/mixers/rwkv6.h"
#include "model/mixers/rwkv7.h"
#include "model/mixers/short_conv.h"
#include "model/ngrams.h"
#include "model/passes.h"
#include "model/read_ahead.h"
#include "model/stream_mix.h"
#include "model/streams.h"
#include "model/token_inputs.h"
#include "ops/decode_attention.h"
#include "ops/matmul.h"
#include "ops/rows.h"

namespace edgeh2o {

void Decoder::forward(Span<const Step> steps, Workspace& workspace, const Observer& observer) const {
  const std::lock_guard<std::mutex> lock(workspace.mutex());
  const ThreadScope threads(workspace.n_threads());
  check_steps(steps, workspace);
  begin_call(steps, workspace);
  size_t n_rows = 0;
  for (const Step& step : steps) {
    begin_step(step, n_rows, workspace);
    n_rows += step.tokens.size;
  }
  const bool is_joint = goes_together(steps, n_rows, workspace);
  const AdapterScales joint = is_joint ? joint_adapters(steps, workspace) : AdapterScales{};
  const ReadAhead* const ahead = weights_.read_ahead();
  if (ahead) ahead->layer(config_.own_layer(0));
  for (size_t layer = 0; layer < config_.n_layers(); ++layer) {
    if (ahead) {
      const bool is_last = layer + 1 == config_.n_layers();
      ahead->experts(config_.own_layer(layer), n_rows);
      ahead->layer(is_last ? config_.n_own_layers() : config_.own_layer(layer + 1));
    }
    take_rows_before(layer, steps, workspace);
    if (is_joint) {
      run_layer_together({config_, weights_, workspace, steps[0], layer, 0, joint}, steps, n_rows);
    } else {
      size_t first_row = 0;
      for (const Step& step : steps) {
        run_layer(
            {config_, weights_, workspace, step, layer, first_row, adapters_of(step, first_row, workspace)},
            observer);
        first_row += step.tokens.size;
      }
    }
    if (observer.on_layer) observer.on_layer(layer + 1, config_.n_layers());
  }
  size_t begin_row = 0;
  for (const Step& step : steps) {
    begin_row += step.tokens.size;
    if (step.n_hidden > 0) {
      write_hidden(workspace, begin_row - step.n_hidden, step.n_hidden, step.adapters(), step.hidden_out);
    }
  }
  if (is_joint) compute_logits(workspace, 0, n_rows, joint, steps[0].logits);
  size_t end_row = 0;
  for (const Step& step : steps) {
    Sequence& sequence = *step.sequence;
    end_row += step.tokens.size;
    if (step.is_decode) {
      if (!is_joint) {
        compute_logits(workspace, end_row - step.tokens.size, step.tokens.size, step.adapters(), step.logits);
      }
      sequence.append_ahead(step.tokens);
      sequence.end_call();
      continue;
    }
    if (step.end != PromptEnd::kLater && step.logits) {
      compute_logits(workspace, end_row - 1, 1, step.adapters(), step.logits);
    }
    sequence.append_tokens(step.tokens);
    sequence.end_call();
    sequence.end_prefill(sequence.position());
    // An answer moves a recurrent state on: the next prompt may have to go back to the end of this one.
    if (step.end == PromptEnd::kOpen && sequence.is_recurrent()) sequence.mark();
  }
  if (steps.size == 1 && !steps[0].is_decode) {
    workspace.left = {steps[0].sequence, n_rows, steps[0].sequence->position()};
  }
}

// x += mixer(x); x += ffn(x), each with the norms that the layer has. Where tokens have several residual
// streams, x is the prediction of the first.
void Decoder::run_layer(const LayerCall& call, const Observer& observer) const {
  if (config_.joins(HiddenJoin::kCached) && !call.step.is_decode) return cache_hidden(call);
  if (config_.has_streams) predict(call);
  if (config_.mixes_streams()) {
    if (call.spec().looks_up_ngrams()) add_ngrams(call, {&call.step, 1});
    const size_t first = first_input_row(call);
    mix_streams(config_, call.table(), call.layer_weights().attn_mixer, call.buffers(),
                call.first_row + first, call.step.tokens.size - first, call.adapters);
  }
  if (call.spec().routes_by_input) {
    const size_t first = call.first_output_row();
    route_input(call, as_const(call.x().rows_from(first, call.x().rows - first)));
  }
  switch (call.spec().mixer) {
    case MixerKind::kAttention:
    case MixerKind::kAttentionMamba2:
      mix_attention(call, observer);
      break;
    case MixerKind::kShortConv:
      mix_short_conv(call);
      break;
    case MixerKind::kDeltaNet:
      mix_delta_net(call);
      break;
    case MixerKind::kMamba2:
      mix_mamba2(call);
      break;
    case MixerKind::kMamba1:
      mix_mamba1(call);
      break;
    case MixerKind::kRwkv7:
      mix_rwkv7(call);
      break;
    case MixerKind::kRwkv6:
      mix_rwkv6(call);
      break;
    case MixerKind::kNone:
      break;
  }
  const MatView<float> x = call.x();
  const size_t rows_at_once = call.buffers().rows_at_once;
  for (size_t first = call.first_output_row(); first < x.rows; first += rows_at_once) {
    const MatView<float> rows = x.rows_from(first, std::min(rows_at_once, x.rows - first));
    if (config_.mixes_streams()) {
      turn_to_ffn(call, call.first_row + first, rows.rows);
      add_ffn(call, first, rows);
      add_to_streams(config_, call.buffers(), call.first_row + first, rows.rows);
      continue;
    }
    if (!call.spec().is_parallel) add_ffn(call.from(first), first, rows);
    if (config_.has_streams) {
      correct(call, first, rows);
    } else if (call.spec().token_input_dim > 0) {
      add_token_input(call, first, rows);
    }
    if (call.spec().has_head_gains) add_embedding(call, first, rows);
    const std::vector<float>& scale = call.layer_weights().output_scale;
    if (!scale.empty()) scale_logits(call.table(), rows, scale[0], 0.0f);
    end_pass(call, rows);
  }
}

void Decoder::run_layer_together(const LayerCall& call, Span<const Step> steps, size_t n_rows) const {
  const MatView<float> x{call.buffers().x, n_rows, config_.model_dim, config_.model_dim};
  if (config_.has_streams) for_each_step(call, steps, predict);
  if (config_.mixes_streams()) {
    if (call.spec().looks_up_ngrams()) add_ngrams(call, steps);
    mix_streams(config_, call.table(), call.layer_weights().attn_mixer, call.buffers(), 0, n_rows,
                call.adapters);
  }
  if (call.spec().routes_by_input) route_input(call, as_const(x));
  switch (call.spec().mixer) {
    case MixerKind::kAttention:
    case MixerKind::kAttentionMamba2:
      mix_attentions(call, steps, x);
      break;
    case MixerKind::kShortConv:
      mix_short_convs(call, steps, x);
      break;
    case MixerKind::kDeltaNet:
      mix_delta_nets(call, steps, x);
      break;
    case MixerKind::kMamba2:
      mix_mamba2s(call, steps, x);
      break;
    case MixerKind::kMamba1:
      mix_mamba1s(call, steps, x);
      break;
    case MixerKind::kRwkv7:
      mix_rwkv7s(call, steps, x);
      break;
    case MixerKind::kRwkv6:
      mix_rwkv6s(call, steps, x);
      break;
    case MixerKind::kNone:
      break;
  }
  if (config_.mixes_streams()) {
    turn_to_ffn(call, 0, n_rows);
    add_ffn(call, 0, x);
    add_to_streams(config_, call.buffers(), 0, n_rows);
    return;
  }
  if (call.spec().ffn == FfnKind::kShifted) {
    add_shifted_together(call, steps, x);
  } else if (!call.spec().is_parallel) {
    add_ffn(call, 0, x);
  }
  // What is of the tokens themselves: products with small matrices.
  for_each_step(call, steps, [&](const LayerCall& one) {
    const MatView<float> rows = x.rows_from(one.first_row, one.step.tokens.size);
    if (config_.has_streams) {
      correct(one, 0, rows);
    } else if (one.spec().token_input_dim > 0) {
      add_token_input(one, 0, rows);
    }
    if (one.spec().has_head_gains) add_embedding(one, 0, rows);
  });
  const std::vector<float>& scale = call.layer_weights().output_scale;
  if (!scale.empty()) scale_logits(call.table(), x, scale[0], 0.0f);
  end_pass(call, x);
}

void Decoder::add_ffn(const LayerCall& call, size_t first, MatView<float> rows) const {
  switch (call.spec().ffn) {
    case FfnKind::kGated:
      add_gated(call, rows);
      break;
    case FfnKind::kExperts:
      add_experts(call, rows);
      break;
    case FfnKind::kShifted:
      add_shifted(call, first, rows);
      break;
    case FfnKind::kNone:
      break;
  }
}

void Decoder::turn_to_ffn(const LayerCall& call, size_t first, size_t n_rows) const {
  add_to_streams(config_, call.buffers(), first, n_rows);
  mix_streams(config_, call.table(), call.layer_weights().ffn_mixer, call.buffers(), first, n_rows,
              call.adapters);
}

bool Decoder::goes_together(Span<const Step> steps, size_t n_rows, Workspace& workspace) const {
  if (steps.size < 2 || n_rows > workspace.activations().rows_at_once) return false;
  if (config_.features_dim > 0) return false;  // it looks at the tokens of one
  const float* logits = steps[0].logits;
  for (const Step& step : steps) {
    if (!step.is_decode || step.logits != logits) return false;  // the logits of all are one matrix
    logits += step.tokens.size * config_.n_outputs();
  }
  return true;
}

void Decoder::choose_adapters(const Step& step, const float** rows) const {
  const size_t n_adapters = config_.adapter_tokens.size();
  const double other = std::exp(-2.0 * static_cast<double>(config_.adapter_gain));
  double sum = 0.0, weight = 0.0;
  const auto count = [&](int32_t token) {
    size_t adapter = 0;
    while (adapter < n_adapters && config_.adapter_tokens[adapter].token != token) ++adapter;
    if (adapter < n_adapters) sum += static_cast<double>(adapter + 1);
    weight += adapter < n_adapters ? 1.0 : other;
  };
  for (const int32_t token : step.sequence->tokens()) count(token);
  for (const int32_t token : step.tokens) {
    count(token);
    const auto number = static_cast<size_t>(std::round(static_cast<float>(sum / weight)));
    *rows++ = number == 0 ? nullptr : one_adapter_.data() + (number - 1) * n_adapters;
  }
}

AdapterScales Decoder::adapters_of(const Step& step, size_t first_row, Workspace& workspace) const {
  if (!config_.chooses_adapters()) return step.adapters();
  return {nullptr, workspace.activations().adapters + first_row};
}

AdapterScales Decoder::joint_adapters(Span<const Step> steps, Workspace& workspace) const {
  if (config_.chooses_adapters()) return {nullptr, workspace.activations().adapters};
  const std::vector<float>& first = steps[0].sequence->shape().adapter_scales;
  const bool are_alike = std::all_of(steps.begin(), steps.end(), [&](const Step& step) {
    return step.sequence->shape().adapter_scales == first;
  });
  if (are_alike) return steps[0].adapters();
  const float** rows = workspace.activations().adapters;
  for (const Step& step : steps) {
    rows = std::fill_n(rows, step.tokens.size, step.adapters().all);
  }
  return {nullptr, workspace.activations().adapters};
}

void Decoder::check_steps(Span<const Step> steps, const Workspace& workspace) const {
  size_t n_rows = 0;
  for (const Step& step : steps) {
    const Sequence& sequence = *step.sequence;
    const SequenceShape& shape = sequence.shape();
    const size_t n_tokens = step.tokens.size;
    sequence.check_whole();
    EH2O_CHECK(n_tokens > 0 && n_tokens <= shape.batch_size, "a call takes 1 to ", shape.batch_size,
               " tokens, got ", n_tokens);
    EH2O_CHECK(!step.is_decode || n_tokens <= sequence.max_decode_tokens(), "a decode call takes 1 to ",
               sequence.max_decode_tokens(), " tokens, got ", n_tokens);
    EH2O_CHECK(n_tokens <= shape.max_context - sequence.position(), "position ", sequence.position(),
               " plus ", n_tokens, " tokens exceeds the context of ", shape.max_context);
    EH2O_CHECK(
        config_.is_causal() || (!step.is_decode && step.end == PromptEnd::kFinal && sequence.position() == 0),
        "tokens of this model read those behind them too: a text is read whole, in one call, and "
        "nothing is written behind it");
    EH2O_CHECK(
        step.taken.size == 0 || (!config_.has_streams && !config_.mixes_streams() && config_.passes.empty() &&
                                 step.taken[step.taken.size - 1] < config_.n_layers()),
        "rows before layer ", step.taken.size > 0 ? step.taken[step.taken.size - 1] : 0, " of a model of ",
        config_.n_layers(), " layers that go through one residual stream once");
    const bool is_block = config_.joins(HiddenJoin::kCached) && step.is_decode;
    EH2O_CHECK(!config_.joins(HiddenJoin::kCached) || is_block || step.end == PromptEnd::kLater,
               "of tokens that become keys and values alone there are no logits");
    EH2O_CHECK((step.hidden != nullptr) == (config_.reads_hidden && !is_block),
               config_.reads_hidden
                   ? "a layer that guesses tokens ahead reads a hidden row beside every token"
                   : "this model reads tokens alone, no hidden rows");
    EH2O_CHECK(config_.n_positions == 0 || n_tokens <= config_.n_positions - sequence.position(), "position ",
               sequence.position(), " plus ", n_tokens, " tokens exceeds the ", config_.n_positions,
               " positions that the model has");
    for (const int32_t token : step.tokens) {
      EH2O_CHECK(token >= 0 && static_cast<size_t>(token) < config_.vocab_size, "token ", token,
                 " is outside the vocabulary of ", config_.vocab_size);
    }
    check_tokens_before(config_, sequence);
    n_rows += n_tokens;
  }
  EH2O_CHECK(n_rows <= workspace.n_rows(), "the steps have ", n_rows, " rows, the workspace ",
             workspace.n_rows());
}

// A token that copies what it reads of its prompt takes memory that the rows of the prompt have had: else
// there would be both at once, the most that an answer takes.
void Decoder::begin_call(Span<const Step> steps, Workspace& workspace) const {
  size_t n_rows = 0;
  bool gathers = false;
  for (const Step& step : steps) {
    n_rows += step.tokens.size;
    gathers |= step.is_decode && step.sequence->gathers_next();
  }
  workspace.begin_call(n_rows, !gathers);
}

void Decoder::embed(Span<const int32_t> tokens, MatView<float> rows) const {
  const KernelTable& table = weights_.table();
  embed_rows(table, weights_.token_embd(), tokens, config_.embedding_scale, rows);
  if (!config_.norms_embeddings) return;
  rms_norm_groups(table, rows, {weights_.ones().data(), weights_.ones().size()}, config_.norm_eps);
}

// Of rows of the step, of which the first is row `first` of it, at most rows_at_once.
void Decoder::add_embedding(const LayerCall& call, size_t first, MatView<float> rows) const {
  const MatView<float> embedded{call.buffers().norm, rows.rows, rows.cols, rows.cols};
  embed({call.step.tokens.data + first, rows.rows}, embedded);
  add_rows(call.table(), rows, embedded, nullptr, 0.0f, call.layer_weights().embedding_share[0]);
}

void Decoder::begin_step(const Step& step, size_t first_row, Workspace& workspace) const {
  Activations& a = workspace.activations();
  Sequence& sequence = *step.sequence;
  const size_t dim = config_.model_dim, position = sequence.position(), n = step.tokens.size;
  sequence.begin_call();
  const MatView<float> x{a.x + first_row * dim, n, dim, dim};
  if (config_.chooses_adapters()) {
    choose_adapters(step, a.adapters + first_row);
    std::transform(step.tokens.begin(), step.tokens.end(), a.read_tokens, [&](int32_t token) {
      for (const AdapterToken& each : config_.adapter_tokens) {
        if (each.token == token) return each.substitute;
      }
      return token;
    });
  }
  if (step.hidden && config_.features_dim > 0) {
    copy_rows({step.hidden, n, dim, dim}, x);
  } else {
    embed(config_.chooses_adapters() ? Span<const int32_t>{a.read_tokens, n} : step.tokens, x);
  }
  if (config_.has_token_type) add_vector(weights_.table(), x, weights_.token_type().data());
  if (config_.n_positions > 0) {
    for (size_t first = 0; first < n; first += a.rows_at_once) {
      const size_t count = std::min(a.rows_at_once, n - first);
      add_table_rows(weights_.table(), weights_.position_embd(), position + first, {a.norm, count, dim, dim},
                     {a.x + (first_row + first) * dim, count, dim, dim});
    }
  }
  if (config_.has_embedding_norm) {
    norm_rows(weights_.table(), as_const(x),
              row_norm(config_, weights_.token_norm(), weights_.token_norm_bias()), {x, {}}, a.scratch);
  }
  if (config_.has_streams) spread_streams(weights_, a, first_row, n, step.adapters());
  if (config_.mixes_streams()) copy_to_streams(config_, a, first_row, n);
  if (config_.has_two_states) begin_states(weights_, a, {a.x + first_row * dim, n, dim, dim});
  if (config_.joins(HiddenJoin::kNormed)) {
    join_hidden(config_, weights_, a, first_row, {step.hidden, n, dim, dim});
  }
  fill_ropes(a, first_row, position, n, sequence.shape().max_context);
}

void Decoder::fill_ropes(Activations& a, size_t first_row, size_t position, size_t n,
                         size_t max_context) const {
  for (size_t i = 0; i < config_.ropes.size(); ++i) {
    const RopeConfig& rope = config_.ropes[i];
    const std::vector<float>& inv_freq = rope.of_context(max_context);
    const size_t row = first_row * rope.n_pairs();
    fill_rope_table(a.ropes[i].cos + row, a.ropes[i].sin + row, position, n,
                    {inv_freq.data(), inv_freq.size()}, rope.attention_factor);
  }
}

}  // namespace edgeh2o
