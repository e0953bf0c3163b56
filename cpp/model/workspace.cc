#include "model/workspace.h"

#include <algorithm>

#include "base/parallel.h"
#include "model/row_table.h"
#include "ops/matmul.h"
#include "ops/rows.h"
#include "ops/streams.h"

namespace edgeh2o {
namespace {

// Rows that pass the linear layers at a time, to find them in a cache at every step: the row block of a
// matrix product. Gate and up of 192 x 1,536 are 2.4 MB.
constexpr size_t kRowsAtOnce = 192;
// With experts more, because each of them gets a few of the rows only: 64 of 1,024 with 8 of 128.
constexpr size_t kExpertRowsAtOnce = 1024;
// From so many rows on their memory is worth giving back: to get it again takes a prompt of 4,096 tokens 3
// ms.
constexpr size_t kManyRows = 1024;
// Lest chunks of a recurrence begin elsewhere.
static_assert(kRowsAtOnce % kDeltaTokens == 0 && kExpertRowsAtOnce % kDeltaTokens == 0);

size_t most_experts(const DecoderConfig& config) {
  return config.widest([](const LayerSpec& layer) { return layer.n_experts; });
}

// Positions that a row may have chosen in a sequence of max_context.
size_t most_chosen(const DecoderConfig& config, size_t max_context) {
  const size_t most = config.widest([](const LayerSpec& layer) { return layer.heads.index.most_read(); });
  return most < max_context ? most : 0;
}

size_t take_chosen(const DecoderConfig& config, size_t n_rows, size_t stride, uint8_t* memory,
                   ChosenPositions* out) {
  const size_t top_k = config.widest([](const LayerSpec& layer) { return layer.heads.index.top_k; });
  const size_t n_choices =
      config.widest([](const LayerSpec& layer) { return layer.heads.index.n_choices(); });
  Arena arena(memory);
  int32_t* counts = arena.take<int32_t>(top_k > 0 ? n_rows * n_choices : 0);
  *out = {arena.take<int32_t>(n_rows * n_choices * stride), counts, stride, n_choices};
  return arena.used();
}

}  // namespace

Activations::Activations(const DecoderConfig& config, const KernelTable& table, size_t n_rows,
                         size_t n_threads, Arena& arena)
    : rows_at_once(std::min(most_experts(config) > 0 ? kExpertRowsAtOnce : kRowsAtOnce, n_rows)),
      routes(rows_at_once, most_experts(config),
             config.widest([](const LayerSpec& layer) { return layer.n_experts_used; }), arena) {
  const size_t n_experts = most_experts(config);
  const size_t ffn_dim =
      std::max(config.has_streams ? kStreams : 0, config.widest([](const LayerSpec& layer) {
        return std::max({layer.ffn_dim, layer.shared_ffn_dim, layer.adjugate_ffn_dim, layer.token_input_dim,
                         layer.laurel_rank});
      }));
  const size_t vector_dim = config.widest([](const LayerSpec& layer) { return layer.vector_dim(); });
  const size_t qkv_dim = config.widest([](const LayerSpec& layer) { return layer.qkv_dim(); });
  const size_t out_dim =
      config.widest([&](const LayerSpec& layer) { return layer.mixer_out_dim(config.model_dim); });
  const size_t mixed_dim =
      config.widest([&](const LayerSpec& layer) { return layer.mixed_dim(config.model_dim); });
  const size_t hidden_dim =
      config.reads_hidden ? std::max(2 * config.hidden_width(), config.features_dim) : 0;
  const size_t inner_dim =
      std::max(hidden_dim, config.widest([](const LayerSpec& layer) { return layer.inner_dim(); }));
  const size_t widest = std::max({config.model_dim, out_dim, ffn_dim, inner_dim, vector_dim});
  x = arena.take<float>(n_rows * config.model_dim);
  streams = arena.take<float>(config.has_streams ? n_rows * kStreams * config.model_dim : 0);
  const bool has_carried = config.has_two_states || config.layers[0].mixer == MixerKind::kRwkv7;
  const size_t streams_dim = config.streams_dim();
  mix_rows = std::min(kRowsAtOnce, n_rows);
  mixed_streams = arena.take<float>(n_rows * streams_dim);
  shares = arena.take<float>(n_rows * config.n_streams);
  mix_norm = arena.take<float>(mix_rows * streams_dim);
  mix_gate = arena.take<float>(mix_rows * streams_dim);
  mix_vectors = arena.take<float>(mix_rows * config.stream_rank);
  ngram_rows = arena.take<int64_t>(mix_rows * config.ngrams.n_heads());
  carried = arena.take<float>(has_carried ? n_rows * config.model_dim : 0);
  norm = arena.take<float>(rows_at_once * config.model_dim);
  const bool has_both = std::any_of(config.layers.begin(), config.layers.end(), [](const LayerSpec& layer) {
    return layer.attends() && layer.has_ssd();
  });
  qkv = arena.take<float>(std::max(n_rows * qkv_dim, has_both ? 0 : rows_at_once * mixed_dim));
  mixer_in = has_both ? arena.take<float>(rows_at_once * mixed_dim) : qkv;
  attended = arena.take<float>(n_rows * out_dim);
  inner = arena.take<float>(rows_at_once * inner_dim);
  gate = arena.take<float>(rows_at_once * ffn_dim);
  up = arena.take<float>(rows_at_once * ffn_dim);
  const size_t mixed_bytes = Activations8::bytes(table, mix_rows, std::max(streams_dim, config.stream_rank));
  packed = arena.take<uint8_t>(
      std::max(Activations8::bytes(table, rows_at_once, widest), streams_dim > 0 ? mixed_bytes : 0));
  for (const RopeConfig& rope : config.ropes) {
    float* cos = arena.take<float>(n_rows * rope.n_pairs());
    ropes.push_back({cos, arena.take<float>(n_rows * rope.n_pairs())});
  }
  const size_t n_mixed = n_experts > 0 ? rows_at_once * config.model_dim : 0;
  const bool routes_by_input = std::any_of(config.layers.begin(), config.layers.end(),
                                           [](const LayerSpec& layer) { return layer.routes_by_input; });
  router = arena.take<float>((routes_by_input ? n_rows : rows_at_once) * n_experts);
  expert_rows = arena.take<float>(n_mixed);
  expert_input = arena.take<float>(n_mixed);
  mixed = arena.take<float>(n_mixed);
  const size_t n_adjugates = config.widest([](const LayerSpec& layer) { return layer.n_adjugates(); });
  adjugate_rows = arena.take<int32_t>(n_adjugates > 0 ? rows_at_once : 0);
  adjugate_weights = arena.take<float>(n_adjugates > 0 ? rows_at_once : 0);
  const size_t n_scaled = config.update_rank > 0 ? rows_at_once : 0;
  adapters = arena.take<const float*>(config.chooses_adapters() ? n_rows : n_scaled);
  read_tokens = arena.take<int32_t>(config.chooses_adapters() ? n_rows : 0);
  expert_adapters = arena.take<const float*>(n_experts > 0 ? n_scaled : 0);
  const size_t delta_bytes =
      config.widest([](const LayerSpec& layer) { return delta_scratch_bytes(layer.delta); });
  scratch = arena.take<uint8_t>(n_threads *
                                    std::max({matmul_scratch_bytes(table), row_scratch_bytes(table, widest),
                                              delta_bytes, RowTable::scratch_bytes(config.ngrams.row_dim)}) +
                                update_scratch_bytes(rows_at_once, config.update_rank));
}

Workspace::Workspace(const DecoderConfig& config, const KernelTable& table, int n_threads)
    : config_(config),
      table_(table),
      n_threads_((check_num_threads(n_threads), n_threads)),
      activations_(config, table, 0, 0, arena_) {}

size_t Workspace::estimate_bytes(const DecoderConfig& config, const KernelTable& table, size_t n_rows,
                                 size_t max_context, size_t n_threads) {
  Arena counter;
  Activations(config, table, n_rows, n_threads, counter);
  ChosenPositions chosen;
  return counter.used() + take_chosen(config, n_rows, most_chosen(config, max_context), nullptr, &chosen);
}

void Workspace::fit(size_t n_rows, const Sequence& sequence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left = {};
  const auto n_threads = static_cast<size_t>(n_threads_);
  const size_t stride = std::max(chosen_.stride, most_chosen(config_, sequence.shape().max_context));
  if (n_rows > n_rows_ || stride > chosen_.stride) {
    const size_t n_most = std::max(n_rows, n_rows_);
    chosen_memory_ = AlignedBuffer();
    chosen_memory_ = AlignedBuffer(take_chosen(config_, n_most, stride, nullptr, &chosen_));
    take_chosen(config_, n_most, stride, chosen_memory_.data(), &chosen_);
  }
  fit_rows(n_rows);
  fit_bytes(sequence.scratch_bytes(n_threads));
}

void Workspace::fit_scratch(size_t n_rows, size_t n_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left = {};
  fit_rows(n_rows);
  fit_bytes(n_bytes);
}

void Workspace::fit_rows(size_t n_rows) {
  const auto n_threads = static_cast<size_t>(n_threads_);
  if (n_rows > n_rows_) {
    arena_ = Arena();
    Activations(config_, table_, n_rows, n_threads, arena_);
    arena_.allocate();
    activations_ = Activations(config_, table_, n_rows, n_threads, arena_);
    n_rows_ = n_rows;
    n_touched_rows_ = 0;
  }
}

void Workspace::fit_bytes(size_t n_bytes) {
  if (n_bytes > scratch_.size()) {
    touched_scratch_ = 0;
    scratch_ = AlignedBuffer();
    scratch_ = AlignedBuffer(n_bytes);
  }
}

void Workspace::begin_call(size_t n_rows, bool keeps_memory) {
  left = {};
  if (!keeps_memory && n_touched_rows_ >= kManyRows && n_rows < kManyRows) {
    arena_.drop_pages();
    n_touched_rows_ = 0;
  }
  n_touched_rows_ = std::max(n_touched_rows_.load(), n_rows);
  touched_scratch_ = scratch_.size();
}

size_t Workspace::written_bytes() const {
  const size_t n_rows = n_touched_rows_;
  if (n_rows == 0) return touched_scratch_;
  return estimate_bytes(config_, table_, n_rows, 0, static_cast<size_t>(n_threads_)) + touched_scratch_;
}

}  // namespace edgeh2o
