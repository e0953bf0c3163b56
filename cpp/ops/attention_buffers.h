// Scratch memory of ChunkedAttention, and what is noted per memory set and per thread while it runs.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"

namespace edgeh2o {

// Rows that become panels of the gather buffer, from dest_key on.
struct GatherJob {
  CacheType k_type = CacheType::kF16, v_type = CacheType::kF16;
  const uint8_t *k = nullptr, *v = nullptr;  // row 0 of the source
  const int32_t* positions = nullptr;        // null: rows 0, 1, 2, ...
  size_t n_keys = 0;
  size_t dest_key = 0;
};

// One memory set for the chunk at hand, and which part of it the tiles attend to in this
// round.
struct SetWork {
  static constexpr size_t kMaxPieces = 8;

  MemorySet memory;
  ptrdiff_t first_seen =
      kNoneHidden;  // first position that the chunk's first query sees, if the layer has a window
  bool is_scored = false;
  size_t next = 0;  // positions of the set, by index, that the rounds so far cover
  bool is_last_round = false;
  bool is_over = false;  // the last round was an earlier one
  size_t n_pieces = 0, n_jobs = 0;
  AttentionPiece pieces[kMaxPieces];
  GatherJob jobs[kMaxPieces];
};

// Private buffers of a thread.
struct TileScratch {
  AttentionTile tile;         // with buffers, without rows
  float* memory_m = nullptr;  // [tile_rows] row maxima of the memory positions' part
  float* factors = nullptr;   // [2][tile_rows]
};

// Keys that one task turns into panels; a multiple of every block of keys.
inline constexpr size_t kPackKeys = 128;

// Makes panels of cached rows of a KV head, whose place the piece says: in buffers of the caller's own.
void pack_rows(const AttentionKernels& kernels, const LayerKv& kv, size_t kv_head, PositionRange rows,
               const AttentionPiece& piece);

struct AttentionBuffers {
  // Takes everything from the arena, which may still be counting.
  void take(Arena& arena, const AttentionShape& shape, const AttentionSizes& sizes, size_t n_threads);
  TileScratch tile_scratch(const AttentionSizes& sizes, const AttentionShape& shape, size_t thread) const;

  float *batch_k = nullptr, *batch_v = nullptr;  // [n_kv_heads] panels of this call's tokens, chunk by chunk
  float *gather_k = nullptr, *gather_v = nullptr;  // [n_sets] panels of gathered memory
  float *m = nullptr,
        *l = nullptr;             // [n_sets][batch_size * set_heads] softmax state of this call's rows
  float* intra_sums = nullptr;    // [n_chunks][n_sets][n_tasks][chunk_keys] partial column sums
  float* memory_sums = nullptr;   // [n_sets][n_tasks][memory_keys]
  float* reduced_sums = nullptr;  // [n_sets][max(chunk_keys, memory_keys)]
  SetWork* sets = nullptr;        // [n_sets]
  size_t* order = nullptr;        // [n_sets] the largest first
  float* tiles = nullptr;         // [n_threads]: see tile_scratch
};

}  // namespace edgeh2o
