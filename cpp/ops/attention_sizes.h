// Shape of an attention layer and the buffer sizes that follow from it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "isa/kernel_table.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// The table's kernels of a precision. Throws std::invalid_argument if it has none.
const AttentionKernels& attention_kernels(const KernelTable& table, AttentionPrecision precision);

// "f32", "bf16", "f16", "int8", "int16".
const char* attention_precision_name(AttentionPrecision precision);

// Throws std::invalid_argument for other names.
AttentionPrecision parse_attention_precision(const std::string& name);

// Names of the precisions that the table has kernels of.
std::vector<std::string> attention_precisions(const KernelTable& table);

// The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025, section 2.1): a query reads the
// top_k tokens that score best, by small queries and one small key per token of the layer's own, or, without
// any, those that the nearest layer before it which has an indexer has chosen. Or it scores whole blocks of
// block_tokens tokens by the mean of their keys, and reads the best of those that end before it or with it,
// top_k tokens together, and all tokens behind the last of these blocks. Or every KV head has a small query
// of its own, and reads blocks of its own: those whose best tokens score best, and the n_local last ones,
// its own among them, top_k tokens together at the most (MiniMax sparse attention).
struct IndexHeads {
  size_t n_heads = 0, key_dim = 0;  // 0: the choice is another layer's
  size_t top_k = 0;                 // 0: queries read everything
  size_t block_tokens = 0;          // 0: tokens are chosen one by one
  bool is_per_head = false;
  size_t n_local = 0;

  bool is_none() const { return top_k == 0; }
  bool has_own() const { return n_heads > 0; }
  size_t q_dim() const { return n_heads * key_dim; }
  bool scores_blocks() const { return block_tokens > 0; }
  bool pools_keys() const { return scores_blocks() && !is_per_head; }
  // Tokens that are chosen together, tokens that have one key, tokens that a query reads at the most, and the
  // choices of a query.
  size_t chosen_together() const { return std::max<size_t>(block_tokens, 1); }
  size_t scored_together() const { return pools_keys() ? block_tokens : 1; }
  size_t most_read() const { return is_none() ? 0 : top_k + scored_together() - 1; }
  size_t n_choices() const { return is_per_head ? n_heads : 1; }
  // What a layer makes of its input for it: queries, the key, and a weight per head unless blocks are scored.
  size_t n_weights() const { return scores_blocks() ? 0 : n_heads; }
  size_t row_dim() const { return q_dim() + key_dim + n_weights(); }
  // Of n queries from `position` on, the first ones that have no more to choose from than they read.
  size_t n_free(size_t position, size_t n) const {
    return is_none() ? n : std::min(n, most_read() > position ? most_read() - position : 0);
  }
  bool operator==(const IndexHeads& other) const {
    return n_heads == other.n_heads && key_dim == other.key_dim && top_k == other.top_k &&
           block_tokens == other.block_tokens && is_per_head == other.is_per_head && n_local == other.n_local;
  }
};

// Of an indexer that scores blocks.
inline constexpr size_t kMaxBlockKeyDim = 1024;

// The heads of a layer; of a layer without attention all is 0.
struct AttentionHeads {
  size_t n_heads = 0, n_kv_heads = 0;
  size_t key_dim = 0, value_dim = 0;  // of a head
  float scale = 0.0f;                 // factor of the logits
  float soft_cap = 0.0f;         // logits become soft_cap * tanh(logit / soft_cap); 0: they stay as they are
  size_t kv_distance = 0;        // the keys and values are those of so many layers before; 0: the layer's own
  bool values_are_keys = false;  // one row is both, and is kept once
  bool are_lent = false;  // keys and values are those of a layer of another model, for which this one drafts
  bool has_large_keys = false;  // their biases: integers would round the others too much
  // Else queries read the keys behind theirs too, as far as a window reaches to both sides: a text is read in
  // one call.
  bool is_causal = true;
  // ALiBi (Press et al. 2021): logits lose a slope of the head times the distance of query and key, with
  // slopes down to 2^-max_alibi_bias. 0: none. What is read lies in a row then: no indexer chooses it.
  float max_alibi_bias = 0.0f;
  IndexHeads index = {};  // what says which positions a query reads, if anything does

  bool is_none() const { return n_heads == 0; }
  bool has_own_kv() const { return kv_distance == 0 && !are_lent; }
  size_t group_size() const { return n_heads / n_kv_heads; }
  size_t q_dim() const { return n_heads * key_dim; }
  size_t k_dim() const { return n_kv_heads * key_dim; }
  size_t v_dim() const { return n_kv_heads * value_dim; }
  size_t out_dim() const { return n_heads * value_dim; }
  // Numbers that a token leaves in the cache.
  size_t cached_dim() const { return k_dim() + (values_are_keys ? 0 : v_dim()); }
  // What its products are rounded to where others are rounded so.
  AttentionPrecision rounded_as(AttentionPrecision precision) const {
    return has_large_keys && is_integer(precision) ? AttentionPrecision::kF32 : precision;
  }
  // [n_heads] of logits as they are, not in base 2; empty without a bias.
  std::vector<float> alibi_slopes() const;
  void check() const;  // throws std::invalid_argument
};

// How a layer is run.
struct AttentionShape {
  AttentionHeads heads;
  size_t max_context = 0;
  size_t batch_size = 0;  // most tokens of one call
  size_t chunk_size = 0;
  AttentionPrecision precision = AttentionPrecision::kF32;
  bool sums_weights = false;  // those of generated tokens: KeySums
  // Every query head has a memory set of its own, instead of one for all query heads of a KV head.
  bool splits_groups = false;

  size_t n_sets() const { return splits_groups ? heads.n_heads : heads.n_kv_heads; }
  size_t set_heads() const { return heads.n_heads / n_sets(); }  // query heads that share a memory set
  size_t kv_head_of(size_t set) const { return set * set_heads() / heads.group_size(); }
  size_t longest_chunk() const;
  void check() const;  // throws std::invalid_argument
};

// "Keys" counts columns: rounded up to whole blocks of keys. Words: see AttentionPiece.
struct AttentionSizes {
  AttentionSizes(const KernelTable& table, const AttentionShape& shape, const PolicyNeeds& needs);

  size_t weight_words(size_t n_keys) const;  // of a row

  bool is_scoring;
  IntegerLayout integers;  // per_word 0: floats
  size_t key_block;
  size_t query_words;  // of a packed row
  size_t key_words;    // of a packed key
  size_t o_stride;     // value_dim rounded up to panels
  size_t value_words;  // of a packed key's values, in the mean
  size_t value_step;   // words between the values of two keys
  size_t chunk_keys;   // between the starts of two chunks in the batch panels
  size_t n_chunks;     // most chunks of a call
  size_t batch_keys;   // all chunks of a call
  size_t piece_keys;   // longest piece of keys where no column sums are wanted
  size_t memory_keys;  // longest memory set with column sums
  size_t gather_keys;  // gather buffer of a memory set: positions, then synthetic rows
  size_t block_keys;   // widest block of weights
  size_t weight_stride;
  size_t tile_queries;    // queries of a tile
  size_t tile_rows;       // rows of a tile, padded
  size_t tiles_per_task;  // tiles that share one partial column sum
  size_t n_tasks;         // most tasks of a chunk and memory set
};

}  // namespace edgeh2o
