// Of chunked attention: what each key received, summed over queries, which its policy is told.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "ops/chunked_attention.h"

namespace edgeh2o {

// Once a row's state is final: the sums of the memory part, whose weights were kept.
void ChunkedAttention::add_joint_memory_sums(const Call& call, const Task& task,
                                             const LoadedTile& tile) const {
  const SetWork& work = buffers_.sets[task.set];
  if (work.memory.n_positions() == 0 || !wants_sums(call, task)) return;
  add_sums(call, task, tile, tile.scratch.tile, work.pieces[0], tile.scratch.memory_m,
           memory_sums(task.set, task.task_idx));
}

// Adds the column sums of a part's weights, normalised by the part's own or by the joint state.
void ChunkedAttention::add_sums(const Call& call, const Task& task, const LoadedTile& tile,
                                const AttentionTile& part, const AttentionPiece& piece, const float* m_part,
                                float* sums) const {
  float* factors = tile.scratch.factors;
  const float* m = is_joint(call) ? tile.state.m : part.m;
  const float* l = is_joint(call) ? tile.state.l : part.l;
  table_.softmax_factors_f32(factors, m_part, m, l, part.n_rows);
  for (size_t row = 0; needs_.query_weights != QueryWeights::kOne && row < part.n_rows; ++row) {
    factors[row] *= query_weight(task, tile.first_query, row / part.group_size, piece);
  }
  kernels_.column_sums(sums, part, piece, factors);
}

// Of the tile's `query`; the tile begins at the chunk's first_query.
float ChunkedAttention::query_weight(const Task& task, size_t first_query, size_t query,
                                     const AttentionPiece& piece) const {
  if (needs_.query_weights == QueryWeights::kLastQueries) {
    return first_query + query + needs_.n_last_queries >= task.chunk.size() ? 1.0f : 0.0f;
  }
  return static_cast<float>(std::min(static_cast<size_t>(piece.n_visible) + query, piece.n_keys));
}

float* ChunkedAttention::intra_sums(size_t chunk_idx, size_t set, size_t task_idx) const {
  const size_t row = (chunk_idx * n_sets_ + set) * sizes_.n_tasks + task_idx;
  return buffers_.intra_sums + row * sizes_.chunk_keys;
}

float* ChunkedAttention::memory_sums(size_t set, size_t task_idx) const {
  return buffers_.memory_sums + (set * sizes_.n_tasks + task_idx) * sizes_.memory_keys;
}

// The sums of a task's tiles reach as far as its last query sees, in whole blocks of keys.
void ChunkedAttention::clear_sums(const Call& call, const Task& task, bool with_intra,
                                  bool with_memory) const {
  if (!wants_sums(call, task)) return;
  const auto clear = [&](float* sums, size_t n_keys) {
    std::memset(sums, 0, round_up(n_keys, sizes_.key_block) * sizeof(float));
  };
  if (with_intra) {
    const size_t n_keys = std::min((task.task_idx + 1) * task_queries(), task.chunk.size());
    clear(intra_sums(task.chunk_idx, task.set, task.task_idx), n_keys);
  }
  if (with_memory) {
    clear(memory_sums(task.set, task.task_idx), buffers_.sets[task.set].memory.n_positions());
  }
}

void ChunkedAttention::observe_chunk(const Call& call, size_t chunk_idx, size_t set) {
  if (!is_scored(call, set)) return;
  const PositionRange chunk = call.plan.chunk(chunk_idx);
  const size_t n_tasks = ceil_div(chunk.size(), task_queries());
  float* sums = buffers_.reduced_sums + set * std::max(sizes_.chunk_keys, sizes_.memory_keys);
  std::fill_n(sums, chunk.size(), 0.0f);
  for (size_t i = 0; i < n_tasks; ++i) {
    table_.add_f32(sums, intra_sums(chunk_idx, set, i), std::min((i + 1) * task_queries(), chunk.size()));
  }
  policy_.observe_intra(slot(set), chunk, {sums, chunk.size()});
  if (chunk.begin == 0) return;
  const MemorySet& memory = buffers_.sets[set].memory;
  std::fill_n(sums, memory.n_positions(), 0.0f);
  for (size_t i = 0; i < n_tasks; ++i) table_.add_f32(sums, memory_sums(set, i), memory.n_positions());
  policy_.observe_memory(slot(set), chunk, memory, {sums, memory.n_positions()});
}

}  // namespace edgeh2o
