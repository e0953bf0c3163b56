// Attention of a logical batch of prompt tokens: every query sees its own chunk causally, and the memory set
// that the sparse policy names for its chunk and its KV head, or its query head where the shape splits
// groups. Both parts are fused exactly by online softmax.
//
// A layer with a sliding window has no policy: its queries see the last `window` positions, their own
// included, wherever chunks begin.
//
// Where attention is not causal a call is one chunk, whose queries see all of it, or, with a window, as many
// positions behind theirs as before them: phase 1 is all there is.
//
// Phase 1 computes the chunks' own (intra) parts, all in parallel. Phase 2 goes chunk after chunk: the policy
// selects the memory sets, their rows are gathered, and the inter part is merged into the output. For
// a policy that asks for joint column sums, phase 2 computes both parts, because a row's weights are known
// only when both are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/attention_buffers.h"
#include "ops/attention_plan.h"
#include "ops/chunk_plan.h"
#include "ops/memory_rounds.h"
#include "ops/page_scores.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// Whether a prompt ends with a call, and whether another may go on from there (the next turn of a chat).
enum class PromptEnd : uint8_t { kLater, kOpen, kFinal };

// What a call does for a memory set, whatever the policy would say: asks it, reads everything without telling
// it, or leaves the set's part of the output as it is.
enum class SetReads : uint8_t { kByPolicy, kAll, kNone };

// The attention of one layer, for the calls that follow: nothing in it outlives them.
class ChunkedAttention {
 public:
  // first_slot: the policy's first of the layer. scratch: plan.scratch_bytes(n_threads) bytes, of
  // anything; n_threads: the number that parallel_for takes.
  ChunkedAttention(const AttentionPlan& plan, SparsePolicy& policy, size_t first_slot, uint8_t* scratch,
                   size_t n_threads);
  ChunkedAttention(const ChunkedAttention&) = delete;
  ChunkedAttention& operator=(const ChunkedAttention&) = delete;

  // Attention of tokens [first_position, first_position + q.rows) of the prompt; returns the query-key pairs,
  // summed over the KV heads, where sets of the same one count by their mean. kv: the layer's cache, their
  // rows written. q [n_tokens][q_dim] after rotary embedding, out [n_tokens][out_dim]. window: of the layer,
  // or 0. Tokens of a dense tail are scored no more than decoded ones. reads: of every set, or null if all go
  // by the policy.
  uint64_t run(MatView<const float> q, const LayerKv& kv, size_t first_position, size_t window, PromptEnd end,
               MatView<float> out, const SetReads* reads = nullptr);

  // Softmax state of the first n_tokens rows of the run before on this scratch: maxima of the logits and sums
  // of exp(logit - maximum), both [n_tokens][n_heads]. The third part of the state is the output.
  void read_state(size_t n_tokens, float* m, float* l) const;

 private:
  // One call of run.
  struct Call {
    MatView<const float> q;
    const LayerKv& kv;
    ChunkPlan plan;
    size_t window;  // 0: none
    bool is_last;   // nothing is scored for a later call
    MatView<float> out;
    const SetReads* reads;  // [n_sets] or null
    size_t first_row = 0;   // token of the call of run that this part of it begins with
  };

  // Consecutive tiles of one chunk and memory set. They share partial column sums, which are added up in task
  // order.
  struct Task {
    size_t chunk_idx, set, task_idx;
    PositionRange chunk;
  };

  // The query rows of a tile, loaded.
  struct LoadedTile {
    TileScratch scratch;
    SoftmaxRows state;
    size_t first_query;  // of the chunk
  };

  void check_call(const Call& call) const;
  size_t slot(size_t set) const { return first_slot_ + set; }
  static SetReads reads_of(const Call& call, size_t set) {
    return call.reads ? call.reads[set] : SetReads::kByPolicy;
  }
  size_t rows_per_set() const { return shape_.batch_size * set_heads_; }
  bool is_scored(const Call& call, size_t set) const;
  bool wants_sums(const Call& call, const Task& task) const;

  bool is_joint(const Call& call) const {
    return needs_.column_sums == ColumnSums::kJoint && call.window == 0;
  }
  size_t task_queries() const { return sizes_.tiles_per_task * sizes_.tile_queries; }
  // Keys behind its own that a query of a chunk of n_keys sees.
  size_t n_behind(const Call& call, size_t n_keys) const {
    if (heads_.is_causal) return 0;
    return call.window == 0 ? n_keys : std::min(call.window - 1, n_keys);
  }

  void choose_sets(const Call& call);
  template <typename F>
  void for_each_set(const F& f) const;
  static Call part_of(const Call& call, size_t first, size_t n_tokens);
  void run_part(const Call& call);
  void run_phase_1(const Call& call, size_t n_chunks) const;
  void run_phase_2(const Call& call, size_t chunk_idx);
  void plan_round(const Call& call) const;
  MemorySet select_memory(const Call& call, PositionRange chunk, size_t set) const;
  void advance_set(const Call& call, size_t chunk_idx, size_t set);
  void order_sets() const;
  void observe_chunk(const Call& call, size_t chunk_idx, size_t set);

  template <typename F>
  void for_each_task(const Call& call, size_t first_chunk, size_t n_chunks, const F& f) const;
  template <typename F>
  void for_each_tile(const Call& call, const Task& task, size_t thread, const F& f) const;
  void attend_intra(const Call& call, const Task& task, const LoadedTile& tile, bool is_first) const;
  void attend_memory(const Call& call, const Task& task, const LoadedTile& tile, bool is_first) const;

  bool has_begun(const Call& call, size_t set, const LoadedTile& tile) const;
  void clear_sums(const Call& call, const Task& task, bool with_intra, bool with_memory) const;
  void add_sums(const Call& call, const Task& task, const LoadedTile& tile, const AttentionTile& part,
                const AttentionPiece& piece, const float* m_part, float* sums) const;
  float query_weight(const Task& task, size_t first_query, size_t query, const AttentionPiece& piece) const;
  void add_joint_memory_sums(const Call& call, const Task& task, const LoadedTile& tile) const;
  float* intra_sums(size_t chunk_idx, size_t set, size_t task_idx) const;
  float* memory_sums(size_t set, size_t task_idx) const;

  const AttentionPlan& plan_;
  const KernelTable& table_;
  const AttentionKernels& kernels_;
  const AttentionShape& shape_;
  const AttentionHeads& heads_;
  size_t n_sets_, set_heads_;
  const PolicyNeeds& needs_;
  const AttentionSizes& sizes_;
  SparsePolicy& policy_;
  size_t first_slot_;
  [[maybe_unused]] uint8_t* scratch_;  // in debug builds, as n_threads_
  [[maybe_unused]] size_t n_threads_;
  AttentionBuffers buffers_;
  MemoryRounds rounds_;
  PageScores page_scores_;
  size_t n_read_ = 0;     // sets that the run at hand reads: the first of buffers_.order
  uint64_t n_pairs_ = 0;  // of the run, summed over memory sets
};

}  // namespace edgeh2o
