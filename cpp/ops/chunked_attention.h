// Attention of a logical batch of prompt tokens: every query sees its own chunk causally, and the memory set
// that the sparse policy names for its chunk and KV head. Both parts are fused exactly by online softmax.
//
// A layer with a sliding window has no policy: its queries see the last `window` positions, their own
// included, wherever chunks begin.
//
// Phase 1 computes the chunks' own (intra) parts, all in parallel. Phase 2 goes chunk after chunk: the policy
// selects a memory set per KV head, its rows are gathered, and the inter part is merged into the output. For
// a policy that asks for joint column sums, phase 2 computes both parts, because a row's weights are known
// only when both are.
#pragma once

#include <cstdint>
#include <memory>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/attention_buffers.h"
#include "ops/attention_sizes.h"
#include "ops/chunk_plan.h"
#include "ops/decode_attention.h"
#include "ops/memory_rounds.h"
#include "ops/page_scores.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// Whether a prompt ends with a call, and whether another may go on from there (the next turn of a chat).
enum class PromptEnd : uint8_t { kLater, kOpen, kFinal };

class ChunkedAttention {
 public:
  // Allocates; run and decode do not. Serves up to num_threads() threads as set now. Throws
  // std::invalid_argument for sizes that do not fit together and for a policy that serves another session.
  ChunkedAttention(const KernelTable& table, const AttentionShape& shape,
                   std::shared_ptr<SparsePolicy> policy);
  ~ChunkedAttention();
  ChunkedAttention(const ChunkedAttention&) = delete;
  ChunkedAttention& operator=(const ChunkedAttention&) = delete;

  // Bytes that the constructor allocates, the policy's own state not included.
  static size_t estimate_bytes(const KernelTable& table, const AttentionShape& shape,
                               const SparsePolicy& policy);

  // Forgets the prompt.
  void begin_prompt();

  // Attention of tokens [first_position, first_position + q.rows) of the prompt. kv: the layer's cache, their
  // rows written. q, out: [n_tokens][n_heads * head_dim], q after rotary embedding. window: of the layer, or
  // 0. Tokens of a dense tail are scored no more than decoded ones.
  void run(size_t layer, MatView<const float> q, const LayerKv& kv, size_t first_position, size_t window,
           PromptEnd end, MatView<float> out);

  // Attention of one token at `position` to everything before it, or to its window; scores and memory sets
  // stay as they are.
  void decode(MatView<const float> q, const LayerKv& kv, size_t position, size_t window, MatView<float> out);

  // Whether the last token of every prompt reads all that it may see, whatever was scored and chosen before:
  // `decode` then gives its attention too.
  bool ends_dense(size_t window) const { return window > 0 || needs_.reads_all || needs_.n_dense_tail > 0; }

  // Query-key pairs of this prompt's calls of run, averaged over layers and heads.
  uint64_t pairs_computed() const { return n_pairs_ / (shape_.n_layers * shape_.n_kv_heads); }

  // Session files: takes up a prompt of n_tokens tokens whose policy state comes next in `in`.
  uint64_t pairs_of_all_heads() const { return n_pairs_; }
  void load(size_t n_tokens, uint64_t pairs_of_all_heads, ByteReader& in) {
    policy_->load(n_tokens, in);
    n_pairs_ = pairs_of_all_heads;
  }

  const AttentionShape& shape() const { return shape_; }
  const SparsePolicy& policy() const { return *policy_; }

  // Softmax state of the first n_tokens rows of the latest run: maxima of the logits and sums of exp(logit -
  // maximum), both [n_tokens][n_heads]. The third part of the state is the output.
  void read_state(size_t n_tokens, float* m, float* l) const;

 private:
  // One call of run.
  struct Call {
    size_t layer;
    MatView<const float> q;
    const LayerKv& kv;
    ChunkPlan plan;
    size_t window;  // 0: none
    bool is_last;   // nothing is scored for a later call
    MatView<float> out;
    size_t first_row = 0;  // token of the call of run that this part of it begins with
  };

  // Consecutive tiles of one chunk and KV head. They share partial column sums, which are added up in task
  // order.
  struct Task {
    size_t chunk_idx, kv_head, task_idx;
    PositionRange chunk;
  };

  // The query rows of a tile, loaded.
  struct LoadedTile {
    TileScratch scratch;
    SoftmaxRows state;
    size_t first_query;  // of the chunk
  };

  void check_threads() const;
  void check_call(const Call& call) const;
  size_t slot(const Call& call, size_t kv_head) const { return call.layer * shape_.n_kv_heads + kv_head; }
  size_t rows_per_head() const { return shape_.batch_size * shape_.group_size(); }
  bool is_scored(const Call& call, size_t kv_head) const;
  bool wants_sums(const Call& call, const Task& task) const;

  bool is_joint(const Call& call) const {
    return needs_.column_sums == ColumnSums::kJoint && call.window == 0;
  }
  size_t task_queries() const { return sizes_.tiles_per_task * sizes_.tile_queries; }

  static Call part_of(const Call& call, size_t first, size_t n_tokens);
  void run_part(const Call& call);
  void run_phase_1(const Call& call, size_t n_chunks) const;
  void run_phase_2(const Call& call, size_t chunk_idx);
  MemorySet select_memory(const Call& call, PositionRange chunk, size_t kv_head) const;
  void advance_head(const Call& call, size_t chunk_idx, size_t kv_head);
  void order_heads() const;
  void observe_chunk(const Call& call, size_t chunk_idx, size_t kv_head);

  template <typename F>
  void for_each_task(const Call& call, size_t first_chunk, size_t n_chunks, const F& f) const;
  template <typename F>
  void for_each_tile(const Call& call, const Task& task, size_t thread, const F& f) const;
  void attend_intra(const Call& call, const Task& task, const LoadedTile& tile, bool is_first) const;
  void attend_memory(const Call& call, const Task& task, const LoadedTile& tile, bool is_first) const;

  void clear_sums(const Call& call, const Task& task, bool with_intra, bool with_memory) const;
  void add_sums(const Call& call, const Task& task, const LoadedTile& tile, const AttentionTile& part,
                const AttentionPiece& piece, const float* m_part, float* sums) const;
  float query_weight(const Task& task, size_t first_query, size_t query, const AttentionPiece& piece) const;
  void add_joint_memory_sums(const Call& call, const Task& task, const LoadedTile& tile) const;
  float* intra_sums(size_t chunk_idx, size_t kv_head, size_t task_idx) const;
  float* memory_sums(size_t kv_head, size_t task_idx) const;

  const KernelTable& table_;
  const AttentionKernels& kernels_;
  AttentionShape shape_;
  std::shared_ptr<SparsePolicy> policy_;
  PolicyNeeds needs_;
  AttentionSizes sizes_;
  size_t n_threads_;
  Arena arena_;
  AttentionBuffers buffers_;
  DecodeAttention decode_;
  MemoryRounds rounds_;
  PageScores page_scores_;
  uint64_t n_pairs_ = 0;  // summed over layers and KV heads
};

// Query-key pairs of one head when queries [first, first + n) see everything before them and themselves, or
// the last `window` positions of it if that is not 0.
uint64_t causal_pairs(size_t first, size_t n, size_t window);

}  // namespace edgeh2o
