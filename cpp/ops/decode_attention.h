// Attention of a few consecutive tokens to cached positions: each reads those of its memory set, and its own.
// Every KV head's rows are read once for all query heads of its group and for all tokens, in ranges of fixed
// length whose results are merged in order: a token's result depends neither on the number of threads nor on
// the tokens that go with it.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/attention_plan.h"
#include "ops/prompt_memory.h"
#include "ops/row_runs.h"

namespace edgeh2o {

// Most tokens of one decode call.
inline constexpr size_t kMaxDecodeTokens = 16;

// Sums of the weights that keys receive, [n_kv_heads][stride] by position, or null.
struct KeySums {
  float* data = nullptr;
  size_t stride = 0;
};

// Most tokens of a call that adds to such sums.
inline constexpr size_t kMaxSummedTokens = 4;

class DecodeAttention {
 public:
  // scratch: scratch_bytes bytes.
  DecodeAttention(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads);
  static size_t scratch_bytes(const AttentionPlan& plan, size_t n_threads);

  // What the KV head reads for a token before that token's own `position`. Synthetic rows, at most as many as
  // the policy needs, are stored as the cache kv stores rows; the KV head's later ones take their place.
  // copy: of the first rows of the cache, which are then read from there, or null.
  void set_memory(size_t token, size_t kv_head, const MemorySet& memory, size_t position, const LayerKv& kv,
                  const PromptMemory::Rows* copy = nullptr);
  // Or these rows, and all positions from `begin` on.
  void set_memory(size_t token, size_t kv_head, const PromptMemory::Rows& rows, size_t begin,
                  size_t position);

  // Or these positions and no others, n > 0 of them, ascending, the token's own among them if at all; valid
  // until `run`.
  void set_positions(size_t token, size_t kv_head, const int32_t* positions, size_t n);

  // Bytes of keys and values that `run` reads for n_tokens: what several of them share counts once.
  size_t bytes_read(size_t n_tokens, const LayerKv& kv) const;

  // q [n][n_heads * key_dim], out [n][n_heads * value_dim], n <= kMaxDecodeTokens, after set_memory for every
  // token and KV head. sums: where a plan that sums weights adds those of n <= kMaxSummedTokens tokens, which
  // read everything before them; then out may be empty, where the sums are all that is wanted.
  void run(MatView<const float> q, const LayerKv& kv, MatView<float> out, KeySums sums = {}) const;

 private:
  // Keys [first, first + n_keys) of one of the parts; beyond the last range n_keys is 0.
  struct Range {
    bool is_of_rows;
    size_t first, n_keys;
  };
  // The keys that a KV head reads for a token: gathered or copied rows, if there are any, all or those
  // listed, and then positions, a range or a list and the token's own. Both parts begin with a range of their
  // own.
  struct HeadKeys {
    const PromptMemory::Rows* rows;
    const int32_t* positions;
    size_t begin, n_keys, position;
    const int32_t* listed_rows = nullptr;
    size_t n_rows = 0;  // of `rows` or of the list
    size_t n_ranges() const;
    bool is_listed() const { return positions || listed_rows; }
    // Of the range's first key, which is not listed.
    size_t first_position(const Range& range) const { return range.first + (range.is_of_rows ? 0 : begin); }
    // The list of the part that the range is of, null if it is read row after row.
    const int32_t* listed(const Range& range) const { return range.is_of_rows ? listed_rows : positions; }
    bool reads_like(const HeadKeys& other) const {
      return !is_listed() && !other.is_listed() && rows == other.rows && begin == other.begin;
    }
  };
  // Ranges whose results are kept until they are merged: as many as there is room for with so many tokens.
  struct Round {
    size_t first, end, n_tokens;
    size_t value_dim;  // 0: weights alone are wanted
  };
  // As attention_rows_f32 takes them.
  struct Rows {
    const uint8_t *k, *v;
    const int32_t* positions = nullptr;
  };
  static Range range(const HeadKeys& keys, size_t range_idx);
  static void read_copy(const PromptMemory::Rows& copy, HeadKeys& keys);

  size_t group_size() const { return plan_.shape.heads.group_size(); }
  const HeadKeys& keys(size_t kv_head, size_t token) const {
    return keys_[kv_head * kMaxDecodeTokens + token];
  }
  size_t count_alike(size_t kv_head, size_t token, size_t n_tokens, size_t range_idx) const;
  AttentionTile range_result(const Round& round, size_t kv_head, size_t range_idx, size_t token,
                             size_t n_tokens) const;
  bool lists_all(size_t n_tokens) const;
  size_t count_ranges(const Round& round, size_t n_parts) const;
  void attend(const Round& round, const LayerKv& kv, bool keeps_weights) const;
  void attend_range(const Round& round, const LayerKv& kv, size_t kv_head, size_t range_idx, size_t token,
                    size_t n_alike, size_t n_next, float* weights, uint8_t* gathered) const;
  void merge(const Round& round, const LayerKv& kv, MatView<float> out) const;
  float* summed_weights(size_t kv_head, size_t range_idx, size_t token) const;
  void add_weights(const Round& round, size_t kv_head, size_t range_idx, float* sums) const;
  static bool lies_in_pages(const HeadKeys& keys, const Range& range);
  static bool is_in_place(const HeadKeys& keys, const Range& range);
  static size_t find_runs(const HeadKeys& keys, const Range& range, RowRun* runs);
  Rows find_rows(const HeadKeys& keys, const Range& range, const LayerKv& kv, size_t kv_head,
                 uint8_t* gathered) const;

  const AttentionPlan& plan_;
  HeadKeys* keys_;      // [n_kv_heads][kMaxDecodeTokens]
  size_t* range_ends_;  // [n_kv_heads * kMaxDecodeTokens] as count_ranges
  float* q_;            // [n_kv_heads][kMaxDecodeTokens][group_size][key_dim] scaled
  float* weights_;      // [n_threads][kMaxDecodeTokens * group_size][range length]
  float* summed_;  // [n_kv_heads][ranges][kMaxSummedTokens * group_size][range length], if they are summed
  // [n_kv_heads][ranges of a round]: m and l [tokens][group_size], o [tokens][group_size][o_stride]
  float* results_;
  size_t n_results_;               // of a KV head, a token and a range each
  PromptMemory::Rows* synthetic_;  // [n_kv_heads]
  float* merged_;                  // [n_kv_heads][kMaxDecodeTokens][4][group_size]: m, l, factors
  uint8_t* gathered_;              // [n_threads] rows of a range that lie apart: keys, then values
  size_t gathered_bytes_;          // of a thread's keys, or values
  size_t n_used_;
};

}  // namespace edgeh2o
