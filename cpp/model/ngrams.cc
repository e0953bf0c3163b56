#include "model/ngrams.h"

#include <algorithm>

#include "base/check.h"
#include "model/branch.h"
#include "ops/convolution.h"
#include "ops/rows.h"
#include "ops/stream_mix.h"

namespace edgeh2o {
namespace {

// Of the step's tokens from row `begin` on: which rows of the table, [n][n_heads].
void find_rows(const NgramConfig& ngrams, const Step& step, size_t begin, size_t n, int64_t* out) {
  const Span<const int32_t> before = step.sequence->tokens(), own = step.tokens;
  const auto token_at = [&](size_t index) {  // of all tokens
    return index < before.size ? before[index] : own[index - before.size];
  };
  for (size_t i = begin; i < begin + n; ++i) {
    const size_t position = before.size + i;
    uint64_t mixed = static_cast<uint64_t>(own[i]) * ngrams.factors[0];
    bool has_ended = false;
    for (size_t back = 1; back < ngrams.n_tokens; ++back) {
      has_ended = has_ended || back > position || token_at(position - back) == ngrams.end_token;
      const int32_t token = has_ended ? ngrams.end_token : token_at(position - back);
      mixed ^= static_cast<uint64_t>(token) * ngrams.factors[back];
      for (size_t k = 0; k < ngrams.n_heads_per_size; ++k) {
        const size_t head = (back - 1) * ngrams.n_heads_per_size + k;
        *out++ = static_cast<int64_t>(mixed % ngrams.sizes[head] + ngrams.offsets[head]);
      }
    }
  }
}

// Calls f(one, begin, n, row) for the rows [begin, begin + n) of every step, the first of which is row `row`
// of the rows from `first` on, of which there are at most mix_rows.
template <typename F>
void for_each_part(const LayerCall& call, Span<const Step> steps, size_t first, size_t n_rows, const F& f) {
  for_each_step(call, steps, [&](const LayerCall& one) {
    const size_t from = one.first_row - call.first_row, end = from + one.step.tokens.size;
    const size_t begin = std::max(from, first), stop = std::min(end, first + n_rows);
    if (begin < stop) f(one, begin - from, stop - begin, begin - first);
  });
}

// Rows [first, first + n) of all, n <= mix_rows.
void add_rows_of_ngrams(const LayerCall& call, Span<const Step> steps, size_t first, size_t n) {
  const KernelTable& table = call.table();
  const DecoderConfig& config = call.config;
  const NgramConfig& ngrams = config.ngrams;
  const NgramWeights& w = call.layer_weights().ngrams;
  Activations& a = call.buffers();
  const size_t dim = config.model_dim, streams_dim = config.streams_dim(), row = call.first_row + first;
  const MatView<float> streams{a.mixed_streams + row * streams_dim, n, streams_dim, streams_dim};
  const MatView<float> values{a.x + row * dim, n, dim, dim};  // of no use before the streams are mixed
  const MatView<float> keys{a.mix_norm, n, streams_dim, streams_dim},
      gated{a.mix_gate, n, streams_dim, streams_dim}, embedded{a.norm, n, dim, dim};
  const auto norm = [&](const MatView<float>& rows, const std::vector<float>& weight, MatView<float> out) {
    norm_groups(table, as_const(rows), dim, {weight.data(), weight.size()}, config.norm_eps, out);
  };

  for_each_part(call, steps, first, n, [&](const LayerCall& one, size_t begin, size_t count, size_t at) {
    find_rows(ngrams, one.step, begin, count, a.ngram_rows + at * ngrams.n_heads());
  });
  // Rows of a token lie side by side.
  const size_t n_looked_up = n * ngrams.n_heads();
  call.weights.ngram_rows().read({a.ngram_rows, n_looked_up},
                                 {embedded.data, n_looked_up, ngrams.row_dim, ngrams.row_dim}, a.scratch);
  const MatmulOutput outputs[] = {output_of(w.key, keys.data, keys.stride),
                                  output_of(w.value, values.data, values.stride)};
  matmul(table, pack_rows(table, as_const(embedded), packed_for(call, {&w.key, &w.value})), {outputs, 2},
         call.products());
  norm(keys, w.key_norm, keys);
  norm(streams, w.query_norm, gated);
  gate_values(table, as_const(keys), as_const(values), gated);
  norm(gated, w.conv_norm, keys);
  add_rows(table, streams, gated, nullptr, 0.0f, 1.0f);
  for_each_part(call, steps, first, n, [&](const LayerCall& one, size_t begin, size_t count, size_t at) {
    RecurrentState& state = one.step.sequence->recurrent(one.layer);
    const MatView<const float> inputs = as_const(keys.rows_from(at, count));
    if (one.looks_ahead()) state.note_history(begin, inputs);
    add_dilated_silu(table, inputs, w.conv.data(), ngrams.n_taps, ngrams.n_tokens,
                     state.step(one.looks_ahead(), begin).at(state.history_at()),
                     streams.rows_from(at, count));
  });
}

}  // namespace

void add_ngrams(const LayerCall& call, Span<const Step> steps) {
  size_t n_rows = 0;
  for (const Step& step : steps) n_rows += step.tokens.size;
  const size_t mix_rows = call.buffers().mix_rows;
  for (size_t first = 0; first < n_rows; first += mix_rows) {
    LayerCall part = call;
    if (part.adapters.rows) part.adapters.rows += first;
    add_rows_of_ngrams(part, steps, first, std::min(mix_rows, n_rows - first));
  }
}

void check_tokens_before(const DecoderConfig& config, const Sequence& sequence) {
  if (config.ngrams.is_none() && !config.chooses_adapters()) return;
  const size_t n_known = sequence.tokens().size, n_read = sequence.position() + sequence.n_evicted();
  const char* what = config.ngrams.is_none() ? "has adapters that tokens choose" : "looks up n-grams";
  EH2O_CHECK(n_known == n_read, "this model ", what, ", and of ", n_read, " tokens that were read only ",
             n_known, " are known");
}

}  // namespace edgeh2o
