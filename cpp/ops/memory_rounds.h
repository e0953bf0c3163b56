// Turns memory sets into pieces of key and value panels. A set may be longer than the gather
// buffer: it is then attended to in several rounds. Pieces of a range begin at fixed absolute positions, so
// that results do not depend on where a call began.
#pragma once

#include "base/kv_rows.h"
#include "ops/attention_buffers.h"
#include "ops/attention_sizes.h"
#include "ops/chunk_plan.h"

namespace edgeh2o {

class MemoryRounds {
 public:
  MemoryRounds(const AttentionKernels& kernels, const AttentionShape& shape, const AttentionSizes& sizes,
               const AttentionBuffers& buffers)
      : kernels_(kernels), shape_(shape), sizes_(sizes), buffers_(buffers) {}

  // Starts on a new memory set. first_seen: see SetWork; only for ranges.
  void begin(size_t set, const MemorySet& memory, ptrdiff_t first_seen, bool is_scored) const;

  // Fills pieces and jobs of the next round. A scored set comes whole, positions first: one piece.
  void plan_next(size_t set, const LayerKv& kv, const ChunkPlan& plan) const;

  // Whether two sets of a KV head attend to the same range and nothing else, unscored.
  bool read_alike(size_t a, size_t b) const;
  // Of such sets, what plan_next gave the first one is the next round of another too.
  void share_round(size_t from, size_t set) const;

  // Runs the jobs of all sets, in parallel.
  void gather() const;

  // Makes panels of the call's own tokens, in parallel.
  void pack_batch(const LayerKv& kv, const ChunkPlan& plan) const;

  // Keys [begin, begin + n_keys) of a chunk of the call, as packed; begin is at the start of a block of keys.
  AttentionPiece batch_piece(size_t kv_head, size_t chunk_idx, size_t begin, size_t n_keys) const;

 private:
  bool find_in_batch(size_t kv_head, const ChunkPlan& plan, PositionRange range, AttentionPiece* piece) const;
  AttentionPiece add_job(SetWork& work, size_t set, const GatherJob& job) const;
  float* gather_k(size_t set) const {
    return buffers_.gather_k + set * sizes_.gather_keys * sizes_.key_words;
  }
  float* gather_v(size_t set) const {
    return buffers_.gather_v + set * sizes_.gather_keys * sizes_.value_words;
  }

  const AttentionKernels& kernels_;
  const AttentionShape& shape_;
  const AttentionSizes& sizes_;
  const AttentionBuffers& buffers_;
};

}  // namespace edgeh2o
