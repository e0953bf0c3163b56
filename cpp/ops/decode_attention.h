// Attention of one query per head to cached positions: those of a memory set, and its own. Every KV head's
// rows are read once for all query heads of its group, in ranges of fixed length whose results are merged in
// order: the result does not depend on the number of threads.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "isa/kernel_table.h"
#include "ops/attention_plan.h"

namespace edgeh2o {

class DecodeAttention {
 public:
  // scratch: scratch_bytes bytes.
  DecodeAttention(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads);
  static size_t scratch_bytes(const AttentionPlan& plan, size_t n_threads);

  // What the KV head reads before its own `position`: positions only.
  void set_memory(size_t kv_head, const MemorySet& memory, size_t position);

  // q, out: [n_heads * key_dim], [n_heads * value_dim], after set_memory for every KV head.
  void run(const float* q, const LayerKv& kv, float* out) const;

 private:
  // The keys of a KV head: a range, or listed positions and then its own.
  struct HeadKeys {
    const int32_t* positions;
    size_t begin, n_keys, position;
    size_t n_ranges() const;
  };

  size_t group_size() const { return plan_.shape.heads.group_size(); }
  AttentionTile range_result(size_t kv_head, size_t range_idx) const;
  const uint8_t* gather(const HeadKeys& keys, const KvRows& rows, size_t first, size_t n, uint8_t* out) const;

  const AttentionPlan& plan_;
  size_t n_threads_;
  HeadKeys* heads_;        // [n_kv_heads]
  float* q_;               // [n_heads * key_dim] scaled
  float* weights_;         // [n_threads][group_size][range length]
  float* results_;         // [n_kv_heads][ranges]: m and l [group_size], o [group_size][o_stride]
  float* merged_;          // [n_kv_heads][4][group_size]: m, l, factors
  uint8_t* gathered_;      // [n_threads] rows of a range that lie apart: keys, then values
  size_t gathered_bytes_;  // of a thread's keys, or values
  size_t n_used_;
};

}  // namespace edgeh2o
