// The mutable state of one prompt: KV cache, sparse policy, activations. Everything is allocated by the
// constructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "kernels/attention_tile.h"
#include "model/decoder.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

struct SessionShape {
  size_t max_context;  // positions that the cache holds
  size_t batch_size;   // most tokens of one prefill call
  size_t chunk_size;
  CacheType cache_type;
  AttentionPrecision precision;
  bool all_rows = false;  // the last layer is computed, scored and kept for all tokens of a prompt
  void check() const;     // throws std::invalid_argument
};

// Bytes by purpose.
struct SessionBytes {
  size_t kv_cache, activations, attention, policy;
};

class Session {
 public:
  // Throws std::invalid_argument for sizes that do not fit together, std::bad_alloc when memory runs out.
  Session(std::shared_ptr<const Decoder> decoder, std::shared_ptr<SparsePolicy> policy,
          const SessionShape& shape);

  // Appends tokens to the prompt. Returns the logits of the last token [vocab_size] if it ends there, else
  // null. If the observer throws, the session must be reset before it is used again. on_attention needs
  // all_rows.
  const float* prefill(const int32_t* tokens, size_t n_tokens, PromptEnd end,
                       const Decoder::Observer& observer);

  // Writes to out [n_rows][vocab_size] the logits of tokens [first, first + n_rows) of the latest prefill
  // call; decode and reset end their life. For evaluation, which wants them in blocks, by a session that
  // keeps all_rows.
  void row_logits(size_t first, size_t n_rows, float* out);

  // Appends one generated token; its logits [vocab_size] stay valid until the next call.
  const float* decode(int32_t token);

  void reset();

  // Forgets the tokens from `position` on. Only tokens that decode appended since the last prefill can go:
  // the policy has seen the others. Throws std::invalid_argument.
  void rewind(size_t position);
  size_t prefill_end() const { return prefill_end_; }  // position after the last prefill call

  // Session files. The state is all that later calls depend on but the cached rows, which are read and
  // written in place: the rows of the tokens so far, of one KV head's keys or values. load_state forgets the
  // prompt and takes bytes from anywhere; it throws std::invalid_argument, and leaves an empty session, for a
  // state that a session like this could not have saved. The caller then writes the rows.
  std::vector<uint8_t> save_state() const;
  void load_state(Span<const uint8_t> state);
  Span<uint8_t> key_rows(size_t layer, size_t kv_head) { return rows(cache_.view(layer).k(kv_head)); }
  Span<uint8_t> value_rows(size_t layer, size_t kv_head) { return rows(cache_.view(layer).v(kv_head)); }

  size_t position() const { return position_; }
  const DecoderConfig& config() const { return decoder_->config(); }
  const SessionShape& shape() const { return shape_; }

  // Query-key pairs per head, of the prompt so far: computed, and what the model computes without a sparse
  // policy. Averaged over the layers that attend for all tokens.
  uint64_t pairs_computed() const;
  uint64_t pairs_dense() const;

  // Allocations of the last prefill or decode call; counted in debug builds only.
  uint64_t last_call_allocations() const { return last_call_allocations_; }

  const SessionBytes& bytes() const { return bytes_; }
  static SessionBytes estimate_bytes(const KernelTable& table, const DecoderConfig& config,
                                     const SparsePolicy& policy, const SessionShape& shape);

 private:
  Span<uint8_t> rows(const KvRows& rows) const {
    return {rows.row(0), static_cast<size_t>(rows.row(position_) - rows.row(0))};
  }
  size_t n_attending_layers() const;
  void check_ready() const;
  void check_call(const int32_t* tokens, size_t n_tokens) const;
  void advance(const Decoder::Step& step, const int32_t* tokens, const Decoder::Observer& observer);

  std::shared_ptr<const Decoder> decoder_;
  SessionShape shape_;
  KvCache cache_;
  ChunkedAttention attention_;
  Arena arena_;
  Activations activations_;
  SessionBytes bytes_;
  size_t position_ = 0;
  size_t prefill_end_ = 0;
  size_t n_rows_ = 0;         // of the latest prefill call, while the activations still hold them
  uint64_t pairs_dense_ = 0;  // summed over layers
  uint64_t last_call_allocations_ = 0;
  bool is_broken_ = false;  // a call was interrupted
};

}  // namespace edgeh2o
