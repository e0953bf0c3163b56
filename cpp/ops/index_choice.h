// What the queries of a layer with an indexer read: the positions whose scores are the largest, of equal ones
// those of the lower positions, and none whose score is no number; where there are no more positions than are
// read, all. Where blocks of positions are scored, those of the best blocks, and all behind the last block;
// or, for every KV head, those of the blocks that have the best positions, and of the last blocks.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"

namespace edgeh2o {

// The positions that rows of queries read, row by row: ascending, `counts` of `stride`, once for all KV heads
// or for each of n_choices.
struct ChosenPositions {
  int32_t* positions = nullptr;  // [n][n_choices][stride]
  int32_t* counts = nullptr;     // [n][n_choices]; 0: all up to the query's own
  size_t stride = 0, n_choices = 1;

  // Of a KV head.
  size_t at(size_t row, size_t kv_head) const { return row * n_choices + (n_choices > 1 ? kv_head : 0); }
  const int32_t* row(size_t i, size_t kv_head) const { return positions + at(i, kv_head) * stride; }
  size_t count(size_t i, size_t kv_head) const { return static_cast<size_t>(counts[at(i, kv_head)]); }
  ChosenPositions rows_from(size_t first) const {
    return {positions + first * n_choices * stride, counts + first * n_choices, stride, n_choices};
  }
};

class IndexChoice {
 public:
  // scratch: scratch_bytes bytes. With as many positions as are read nothing is ever chosen, nor needed.
  IndexChoice(const KernelTable& table, const IndexHeads& heads, size_t max_context, uint8_t* scratch,
              size_t n_threads);
  static size_t scratch_bytes(const KernelTable& table, const IndexHeads& heads, size_t max_context,
                              size_t n_threads) {
    return IndexChoice(table, heads, max_context, nullptr, n_threads).n_used_;
  }

  // Whether anything is ever chosen in a sequence of so many positions.
  static bool chooses(const IndexHeads& heads, size_t max_context) {
    return heads.has_own() && heads.most_read() < max_context;
  }

  // Queries q [n][n_heads * key_dim] and weights [n][n_heads] of the tokens from `position` on, whose keys,
  // of tokens or of blocks, are written. What comes out for one depends neither on the others nor on the
  // number of threads.
  void run(MatView<const float> q, MatView<const float> weights, const KvRows& keys, size_t position,
           const ChosenPositions& out) const;

 private:
  void score(MatView<const float> q, MatView<const float> weights, const KvRows& keys, size_t n_keys) const;
  void sign_queries(MatView<const float> q) const;
  void score_blocks(float* scores, size_t position) const;
  void choose(float* scores, size_t position, float* ranked, int32_t* out, int32_t* count) const;

  const KernelTable& table_;
  IndexHeads heads_;
  size_t max_context_;
  size_t n_together_;  // queries whose scores are there at once
  float* signed_;      // [n_together][n_heads][2][key_dim]: of heads that choose alone, queries and -queries
  float* scores_;      // [n_together][n_choices][max_context] of keys
  float* panels_;      // [n_threads] keys of a block
  float* ranked_;      // [n_threads][max_context]
  size_t panel_floats_, n_used_;
};

// The keys of blocks [first, first + n) of tokens, of all of which there are keys: the mean of those, normed
// by weights [key_dim], and rotated by the position of the block's first token.
struct BlockKeys {
  size_t block_tokens;
  const float* norm;
  float norm_eps;
  Span<const float> inv_freq;  // radians per position of the rotated pairs
  float rope_factor;
};
void pool_keys(const KernelTable& table, const BlockKeys& rule, const KvRows& keys, size_t first, size_t n,
               const KvRows& blocks);

}  // namespace edgeh2o
