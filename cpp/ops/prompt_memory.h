// What generated tokens read of a prompt in one layer, where the policy names a part of it: copies of the
// named rows, and the synthetic ones, one after another per KV head. They are gathered once per prompt, so
// that every generated token reads them as a stream.
#pragma once

#include <algorithm>
#include <vector>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "isa/kernel_table.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class PromptMemory {
 public:
  // Of one KV head, in the types of `row_type`.
  struct Rows {
    KvRows k, v;
    float* biases = nullptr;       // [capacity] natural logarithms added to the logits
    int32_t* positions = nullptr;  // [n_listed] of the rows that are not synthetic, for inspection
    size_t capacity = 0, n_rows = 0, n_listed = 0;
    bool is_chosen = false;  // else the whole prompt is read, or a choice of every token
  };

  // How rows are kept that the cache has as `cached`: f16 takes twice the memory of q8_0, by which no kind of
  // text loses much (docs/quality.md).
  static CacheType row_type(CacheType cached, size_t head_dim);

  // Takes its memory from the arena, which may still be counting. is_used: the policy's ends_prompts;
  // kv_shape: its slots in decode; values_are_keys: see AttentionHeads.
  PromptMemory(const SparsePolicy& policy, bool is_used, const PolicyShape& kv_shape, size_t layer,
               CacheTypes types, bool values_are_keys, Arena& arena);

  // There is another prompt.
  void forget() { is_current_ = false; }
  // Cached rows that the copies have as they are; those behind them are copied anew.
  size_t n_copied() const { return n_copied_; }
  void keep_copied(size_t n_rows) { n_copied_ = n_rows; }
  // Of the prompts from now on a KV head's generated tokens read everything, because the policy has not seen,
  // or has not served, all of what it would choose from; and whether that is so.
  void read_all(size_t kv_head, bool reads_all) { reads_all_[kv_head] = reads_all; }
  bool reads_all(size_t kv_head) const { return reads_all_[kv_head]; }

  // Whether `choose` may copy anything the next time.
  bool gathers_next() const {
    const auto has_room = [](const Rows& rows) { return rows.capacity > 0; };
    return is_used_ && !is_current_ &&
           (std::any_of(rows_.begin(), rows_.end(), has_room) ||
            std::any_of(copies_.begin(), copies_.end(), has_room));
  }

  // Asks the policy for what is read of a prompt of n_tokens, unless that is known. kv: the layer's cache.
  void choose(SparsePolicy& policy, const KernelTable& table, const LayerKv& kv, size_t n_tokens);

  // After `choose`: the whole prompt of a KV head in fewer bits, row after row, or null.
  const Rows* copy(size_t kv_head) const {
    return is_current_ && is_used_ && copies_[kv_head].is_chosen ? &copies_[kv_head] : nullptr;
  }
  // After `choose`: the rows of a KV head, null if it reads the whole prompt.
  const Rows* rows(size_t kv_head) const {
    return is_current_ && !reads_all_[kv_head] && rows_[kv_head].is_chosen ? &rows_[kv_head] : nullptr;
  }
  size_t n_tokens() const { return n_tokens_; }

 private:
  Rows take_rows(CacheTypes types, const SlotShape& slot, size_t n_rows, Arena& arena) const;
  void copy_prompt(const SparsePolicy& policy, const KernelTable& table, const LayerKv& kv, size_t n_tokens);
  void gather(const KernelTable& table, const LayerKv& kv, size_t kv_head, const MemorySet& set);

  size_t first_slot_, n_kv_heads_;
  // [n_kv_heads] not of the arena, of which nothing is to be written before there is a prompt.
  std::vector<Rows> rows_, copies_;
  bool values_are_keys_;
  bool is_used_;  // the policy is asked at the end of a prompt
  bool is_current_ = false;
  std::vector<bool> reads_all_;  // [n_kv_heads]
  size_t n_tokens_ = 0, n_copied_ = 0;
};

}  // namespace edgeh2o
