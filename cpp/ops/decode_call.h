// The attention of one layer in a decode call: asks the policy what every token reads, and attends to that.
#pragma once

#include <vector>

#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "ops/attention_plan.h"
#include "ops/decode_attention.h"
#include "ops/prompt_memory.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// A few tokens, the first of them at `position`, whose rows are in the cache. Without a policy, or in a
// window (0: none), they read everything before them that they may see. What comes out for a token does not
// depend on those after it. Throws std::invalid_argument for more than kMaxDecodeTokens or beyond the
// context.
struct DecodeCall {
  const AttentionPlan& plan;
  SparsePolicy* policy;  // or null
  PromptMemory& prompt;  // of the layer
  size_t n_prompt;       // tokens of the prompt
  size_t first_slot;     // the policy's, of the layer's first KV head
  uint8_t* scratch;      // plan.scratch_bytes(n_threads) bytes, of anything
  size_t n_threads;
  uint64_t* n_bytes;  // counts what is read of the cache and of the policy's memory, or null
  KeySums sums = {};  // what a call of one token adds its weights to; not in a window
  // [n_kv_heads] gets, for inspection, the positions that the last token reads, its own included; or null.
  std::vector<int32_t>* reads = nullptr;
  PageKernels pages{plan.table.store_kv_row_f32, plan.table.score_blocks_f32};

  // q [n][q_dim] after rotary embedding, out [n][out_dim].
  void run(MatView<const float> q, const LayerKv& kv, size_t position, size_t window,
           MatView<float> out) const;

 private:
  void note_read(size_t kv_head, const PromptMemory::Rows* rows, const MemorySet& memory,
                 size_t position) const;
  bool score(const float* q, const LayerKv& kv, size_t position) const;
  SelectionInput input(const float* q, const LayerKv& kv, size_t position, size_t kv_head) const;
};

}  // namespace edgeh2o
