// The KV cache of one layer: keys and values of every position, [kv_head][position] rows.
#pragma once

#include <algorithm>
#include <string>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"
#include "sequence/layer_state.h"

namespace edgeh2o {

// "f16", "f32" or "q8_0"; anything else throws std::invalid_argument.
CacheType parse_cache_type(const std::string& name);
// One of them for keys and values, or two as "q8_0/f16": keys, values.
CacheTypes parse_cache_types(const std::string& name);

class AttentionState final : public LayerState {
 public:
  // Takes the rows from the arena, which may still be counting. Throws std::invalid_argument for heads that
  // the type cannot store.
  AttentionState(const KernelTable& table, const AttentionHeads& heads, CacheTypes types, size_t max_context,
                 Arena& arena);

  const LayerKv& rows() const { return kv_; }
  // Keys of the layer's indexer, one per position, if it has one of its own.
  bool has_index() const { return index_.head_dim > 0; }
  const KvRows& index_rows() const { return index_; }
  // Where it scores blocks of tokens, their keys, made of those: of the first n_blocks() blocks. They are
  // never saved.
  bool has_blocks() const { return blocks_.head_dim > 0; }
  const KvRows& block_rows() const { return blocks_; }
  size_t n_blocks() const { return n_blocks_; }
  size_t n_whole_blocks() const { return n_tokens_ / block_tokens_; }
  void count_blocks() { n_blocks_ = n_whole_blocks(); }
  void set_sinks(const float* sinks) { kv_.sinks = sinks; }  // of the layer that attends next
  size_t n_kv_heads() const { return n_kv_heads_; }

  bool values_are_keys() const { return values_are_keys_; }

  // The tokens' rows of one KV head's keys or values.
  Span<uint8_t> written(const KvRows& rows) const {
    return {rows.row(0), static_cast<size_t>(rows.row(n_tokens_) - rows.row(0))};
  }

  // Stores k [n][k_dim] and v [n][v_dim], and the indexer's keys [n][key_dim] if there is one, as the rows of
  // the next n positions.
  void append(MatView<const float> k, MatView<const float> v, MatView<const float> index_k = {});

  size_t n_tokens() const override { return n_tokens_; }
  void advance(size_t n_tokens) override { n_tokens_ += n_tokens; }
  void rewind(size_t n_tokens) override {
    n_tokens_ = n_tokens;
    n_blocks_ = std::min(n_blocks_, n_whole_blocks());
  }
  void renumber(size_t n_tokens) override { n_tokens_ = n_tokens; }
  void save(ByteWriter&) const override {}
  // The rows are written later.
  void load(size_t n_tokens, ByteReader&) override {
    n_tokens_ = n_tokens;
    n_blocks_ = 0;
  }

 private:
  const KernelTable* table_;
  size_t n_kv_heads_;
  bool values_are_keys_;
  LayerKv kv_;
  KvRows index_, blocks_;
  size_t n_tokens_ = 0, block_tokens_ = 1, n_blocks_ = 0;
};

}  // namespace edgeh2o
