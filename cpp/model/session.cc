#include "model/session.h"

#include <algorithm>
#include <limits>

#include "base/allocation_counter.h"
#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {

void SessionShape::check() const {
  EH2O_CHECK(max_context > 0 && max_context <= std::numeric_limits<int32_t>::max(),
             "max_context = ", max_context, " is not between 1 and 2^31 - 1");
  EH2O_CHECK(chunk_size > 0 && chunk_size <= batch_size, "chunk_size = ", chunk_size,
             " is not between 1 and batch_size = ", batch_size);
  EH2O_CHECK(batch_size % chunk_size == 0, "batch_size = ", batch_size,
             " is not a multiple of chunk_size = ", chunk_size);
}

namespace {

AttentionShape attention_shape(const DecoderConfig& config, const SessionShape& shape) {
  AttentionShape result;
  result.n_layers = config.n_layers;
  result.n_heads = config.n_heads;
  result.n_kv_heads = config.n_kv_heads;
  result.head_dim = config.head_dim;
  result.max_context = shape.max_context;
  result.batch_size = shape.batch_size;
  result.chunk_size = shape.chunk_size;
  result.scale = config.attention_scale;
  result.soft_cap = config.attention_soft_cap;
  result.precision = shape.precision;
  return result;
}

KvCache::Shape cache_shape(const DecoderConfig& config, const SessionShape& shape) {
  shape.check();
  return {config.n_layers, config.n_kv_heads, config.head_dim, shape.max_context, shape.cache_type};
}

// Sizes the arena by a first, empty pass.
Activations make_activations(const DecoderConfig& config, const KernelTable& table, size_t batch_size,
                             Arena& arena) {
  Activations(config, table, batch_size, arena);
  arena.allocate();
  return Activations(config, table, batch_size, arena);
}

}  // namespace

Session::Session(std::shared_ptr<const Decoder> decoder, std::shared_ptr<SparsePolicy> policy,
                 const SessionShape& shape)
    : decoder_(std::move(decoder)),
      shape_(shape),
      cache_(decoder_->weights().table(), cache_shape(config(), shape)),
      attention_(decoder_->weights().table(), attention_shape(config(), shape), std::move(policy)),
      activations_(make_activations(config(), decoder_->weights().table(), shape.batch_size, arena_)),
      bytes_(estimate_bytes(decoder_->weights().table(), config(), attention_.policy(), shape)) {
  decoder_->weights().check_complete();
  attention_.begin_prompt();
}

SessionBytes Session::estimate_bytes(const KernelTable& table, const DecoderConfig& config,
                                     const SparsePolicy& policy, const SessionShape& shape) {
  const AttentionShape attention = attention_shape(config, shape);
  Arena arena;
  Activations(config, table, shape.batch_size, arena);
  return {KvCache::estimate_bytes(cache_shape(config, shape)), arena.used(),
          ChunkedAttention::estimate_bytes(table, attention, policy),
          policy.state_bytes(attention.policy_shape())};
}

// Only the last layer may leave out its attention.
size_t Session::n_attending_layers() const {
  const size_t n_layers = config().n_layers;
  return decoder_->skips_attention(n_layers - 1, shape_.all_rows, attention_) ? n_layers - 1 : n_layers;
}

uint64_t Session::pairs_computed() const {
  return attention_.pairs_of_all_heads() / (std::max<size_t>(1, n_attending_layers()) * config().n_kv_heads);
}

uint64_t Session::pairs_dense() const { return pairs_dense_ / std::max<size_t>(1, n_attending_layers()); }

void Session::reset() {
  position_ = prefill_end_ = 0;
  n_rows_ = 0;
  pairs_dense_ = 0;
  is_broken_ = false;
  attention_.begin_prompt();
}

void Session::rewind(size_t position) {
  check_ready();
  EH2O_CHECK(prefill_end_ <= position && position <= position_, "cannot go back to position ", position,
             ": the prompt ends at ", prefill_end_, " and the tokens at ", position_);
  position_ = position;
}

void Session::check_ready() const {
  EH2O_CHECK(!is_broken_, "the last call was interrupted: reset() the session first");
  EH2O_CHECK(num_threads() <= activations_.n_threads, "the session was made for ", activations_.n_threads,
             " threads, now there are ", num_threads());
}

void Session::check_call(const int32_t* tokens, size_t n_tokens) const {
  check_ready();
  EH2O_CHECK(n_tokens > 0 && n_tokens <= shape_.batch_size, "a call takes 1 to ", shape_.batch_size,
             " tokens, got ", n_tokens);
  EH2O_CHECK(n_tokens <= shape_.max_context - position_, "position ", position_, " plus ", n_tokens,
             " tokens exceeds the context of ", shape_.max_context);
  for (size_t i = 0; i < n_tokens; ++i) {
    EH2O_CHECK(tokens[i] >= 0 && static_cast<size_t>(tokens[i]) < config().vocab_size, "token ", tokens[i],
               " is outside the vocabulary of ", config().vocab_size);
  }
}

void Session::advance(const Decoder::Step& step, const int32_t* tokens, const Decoder::Observer& observer) {
  is_broken_ = true;
  n_rows_ = 0;
  decoder_->embed(activations_, tokens, step.n_tokens);
  decoder_->run_layers(step, activations_, cache_, attention_, observer);
  is_broken_ = false;
  position_ += step.n_tokens;
}

const float* Session::prefill(const int32_t* tokens, size_t n_tokens, PromptEnd end,
                              const Decoder::Observer& observer) {
  check_call(tokens, n_tokens);
  const uint64_t allocations_before = allocation_count();
  EH2O_CHECK(shape_.all_rows || !observer.on_attention, "on_attention needs a session made with all_rows");
  advance({position_, n_tokens, end, false, shape_.all_rows}, tokens, observer);
  for (size_t layer = 0; layer < n_attending_layers(); ++layer) {
    pairs_dense_ += causal_pairs(position_ - n_tokens, n_tokens, config().window(layer));
  }
  n_rows_ = shape_.all_rows ? n_tokens : 0;
  prefill_end_ = position_;
  const bool is_last = end != PromptEnd::kLater;
  if (is_last) decoder_->compute_logits(activations_, n_tokens - 1, 1, activations_.logits);
  last_call_allocations_ = allocation_count() - allocations_before;
  return is_last ? activations_.logits : nullptr;
}

void Session::row_logits(size_t first, size_t n_rows, float* out) {
  check_ready();
  EH2O_CHECK(shape_.all_rows, "logits of single rows need a session made with all_rows");
  EH2O_CHECK(n_rows > 0 && first <= n_rows_ && n_rows <= n_rows_ - first, "rows ", first, " to ", first,
             " + ", n_rows, " are not among the ", n_rows_, " of the latest prefill call");
  decoder_->compute_logits(activations_, first, n_rows, out);
}

const float* Session::decode(int32_t token) {
  check_call(&token, 1);
  const uint64_t allocations_before = allocation_count();
  advance({position_, 1, PromptEnd::kFinal, true, false}, &token, {});
  decoder_->compute_logits(activations_, 0, 1, activations_.logits);
  last_call_allocations_ = allocation_count() - allocations_before;
  return activations_.logits;
}

std::vector<uint8_t> Session::save_state() const {
  EH2O_CHECK(!is_broken_, "the last call was interrupted: there is no state to save");
  ByteWriter out;
  out.put<uint64_t>(position_);
  out.put<uint64_t>(prefill_end_);
  out.put<uint64_t>(pairs_dense_);
  out.put<uint64_t>(attention_.pairs_of_all_heads());
  attention_.policy().save(position_, out);
  return out.bytes();
}

void Session::load_state(Span<const uint8_t> state) {
  reset();
  ByteReader in(state);
  try {
    const size_t position = in.take_at_most<uint64_t>(shape_.max_context, "the number of tokens");
    prefill_end_ = in.take_at_most<uint64_t>(position, "the end of the prompt");
    pairs_dense_ = in.take<uint64_t>();
    const uint64_t n_pairs = in.take<uint64_t>();
    attention_.load(position, n_pairs, in);
    in.check_end();
    position_ = position;
  } catch (...) {
    reset();
    throw;
  }
}

}  // namespace edgeh2o
