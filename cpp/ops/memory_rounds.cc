#include "ops/memory_rounds.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
void MemoryRounds::begin(size_t set, const MemorySet& memory, ptrdiff_t first_seen, bool is_scored) const {
  SetWork& work = buffers_.sets[set];
  work.memory = memory;
  work.first_seen = first_seen;
  work.is_scored = is_scored;
  work.next = 0;
  work.is_last_round = work.is_over = false;
  work.n_pieces = work.n_jobs = 0;
}

AttentionPiece MemoryRounds::add_job(SetWork& work, size_t set, const GatherJob& job) const {
  work.jobs[work.n_jobs++] = job;
  AttentionPiece piece;
  piece.k = gather_k(set) + job.dest_key * sizes_.key_words;
  piece.v = gather_v(set) + job.dest_key * sizes_.value_step;
  piece.v_panel_stride = sizes_.gather_keys * sizes_.value_step;
  piece.n_keys = job.n_keys;
  piece.n_visible = static_cast<ptrdiff_t>(job.n_keys);
  return piece;
}

void MemoryRounds::plan_next(size_t set, const LayerKv& kv, const ChunkPlan& plan) const {
  SetWork& work = buffers_.sets[set];
  const MemorySet& memory = work.memory;
  const size_t n_positions = memory.n_positions();
  const size_t kv_head = shape_.kv_head_of(set);
  const KvRows k = kv.k(kv_head), v = kv.v(kv_head);
  const size_t position_keys = std::max(sizes_.piece_keys, sizes_.memory_keys);  // of the gather buffer
  size_t n_gathered = 0;
  work.n_pieces = work.n_jobs = 0;
  work.is_over = work.is_last_round;
  if (work.is_over) return;
  // The last piece is left to the synthetic rows.
  while (work.next < n_positions && work.n_pieces + 1 < SetWork::kMaxPieces) {
    const size_t first = memory.positions ? 0 : memory.range.begin;
    const size_t boundary = round_up(first + work.next + 1, sizes_.piece_keys) - first;
    const size_t end = work.is_scored ? n_positions : std::min(boundary, n_positions),
                 n_keys = end - work.next;
    AttentionPiece& piece = work.pieces[work.n_pieces];
    const PositionRange range{first + work.next, first + end};
    if (memory.positions != nullptr || !find_in_batch(kv_head, plan, range, &piece)) {
      if (n_gathered + n_keys > position_keys) break;
      GatherJob job{k.type, v.type, k.data, v.data, memory.positions, n_keys, n_gathered};
      if (memory.positions) {
        job.positions += work.next;
      } else {
        job.k = k.row(range.begin);
        job.v = v.row(range.begin);
      }
      piece = add_job(work, set, job);
      n_gathered += round_up(n_keys, sizes_.key_block);
    }
    piece.distance = -static_cast<ptrdiff_t>(range.begin);  // of position 0
    if (work.first_seen != kNoneHidden) {
      piece.n_hidden = work.first_seen - static_cast<ptrdiff_t>(range.begin);
    }
    ++work.n_pieces;
    work.next = end;
  }
  if (work.next < n_positions) return;
  const SyntheticRows& rows = memory.synthetic;
  if (rows.count > 0) {
    const auto* row_k = reinterpret_cast<const uint8_t*>(rows.k);
    const auto* row_v = reinterpret_cast<const uint8_t*>(rows.v);
    AttentionPiece& piece = work.pieces[work.n_pieces++];
    piece =
        add_job(work, set, {CacheType::kF32, CacheType::kF32, row_k, row_v, nullptr, rows.count, n_gathered});
    piece.biases = rows.biases;
  }
  work.is_last_round = true;
}

bool MemoryRounds::read_alike(size_t a, size_t b) const {
  const SetWork &x = buffers_.sets[a], &y = buffers_.sets[b];
  const auto is_plain = [](const SetWork& work) {
    return work.memory.positions == nullptr && work.memory.synthetic.count == 0 && !work.is_scored;
  };
  return is_plain(x) && is_plain(y) && x.first_seen == y.first_seen &&
         x.memory.range.begin == y.memory.range.begin && x.memory.range.end == y.memory.range.end;
}

void MemoryRounds::share_round(size_t from, size_t set) const {
  const SetWork& planned = buffers_.sets[from];
  SetWork& work = buffers_.sets[set];
  std::copy_n(planned.pieces, planned.n_pieces, work.pieces);
  work.n_pieces = planned.n_pieces;
  work.n_jobs = 0;
  work.next = planned.next;
  work.is_last_round = planned.is_last_round;
  work.is_over = planned.is_over;
}

void MemoryRounds::gather() const {
  const size_t n_blocks = ceil_div(sizes_.gather_keys, kPackKeys);
  parallel_for(shape_.n_sets() * n_blocks, [&](size_t task, size_t) {
    const size_t set = task / n_blocks, block = task % n_blocks * kPackKeys;
    const SetWork& work = buffers_.sets[set];
    for (size_t i = 0; i < work.n_jobs; ++i) {
      const GatherJob& job = work.jobs[i];
      const size_t begin = std::max(block, job.dest_key),
                   end = std::min(block + kPackKeys, job.dest_key + job.n_keys);
      if (begin >= end) continue;
      const size_t first = begin - job.dest_key, n_keys = end - begin;
      const size_t key_dim = shape_.heads.key_dim, value_dim = shape_.heads.value_dim;
      const size_t first_row = job.positions ? 0 : first;
      const int32_t* positions = job.positions ? job.positions + first : nullptr;
      kernels_.pack_keys(job.k_type, gather_k(set) + begin * sizes_.key_words,
                         job.k + first_row * kv_row_bytes(job.k_type, key_dim), positions, n_keys, key_dim);
      kernels_.pack_values(
          job.v_type, gather_v(set) + begin * sizes_.value_step, sizes_.gather_keys * sizes_.value_step,
          job.v + first_row * kv_row_bytes(job.v_type, value_dim), positions, n_keys, value_dim);
    }
  });
}

AttentionPiece MemoryRounds::batch_piece(size_t kv_head, size_t chunk_idx, size_t begin,
                                         size_t n_keys) const {
  const size_t key = chunk_idx * sizes_.chunk_keys + begin;
  AttentionPiece piece;
  piece.k = buffers_.batch_k + (kv_head * sizes_.batch_keys + key) * sizes_.key_words;
  piece.v = buffers_.batch_v + kv_head * sizes_.batch_keys * sizes_.value_words + key * sizes_.value_step;
  piece.v_panel_stride = sizes_.batch_keys * sizes_.value_step;
  piece.n_keys = n_keys;
  piece.n_visible = static_cast<ptrdiff_t>(n_keys);
  return piece;
}

void MemoryRounds::pack_batch(const LayerKv& kv, const ChunkPlan& plan) const {
  const size_t n_blocks = ceil_div(sizes_.chunk_keys, kPackKeys), n_per_head = plan.n_chunks() * n_blocks;
  parallel_for(shape_.heads.n_kv_heads * n_per_head, [&](size_t task, size_t) {
    const size_t kv_head = task / n_per_head, chunk_idx = task % n_per_head / n_blocks;
    const size_t first = task % n_blocks * kPackKeys;
    const PositionRange chunk = plan.chunk(chunk_idx);
    if (first >= chunk.size()) return;
    const size_t n_keys = std::min(kPackKeys, chunk.size() - first);
    const size_t begin = chunk.begin + first;
    pack_rows(kernels_, kv, kv_head, {begin, begin + n_keys}, batch_piece(kv_head, chunk_idx, first, n_keys));
  });
}

// A range of positions that this call has packed already, if its panels are adjacent and begin at a whole
// block.
bool MemoryRounds::find_in_batch(size_t kv_head, const ChunkPlan& plan, PositionRange range,
                                 AttentionPiece* piece) const {
  if (range.begin < plan.first_position) return false;
  const size_t offset = range.begin - plan.first_position;
  const size_t chunk_idx = offset / plan.chunk_size, begin = offset % plan.chunk_size;
  const bool is_adjacent = plan.chunk_size == sizes_.chunk_keys || range.end <= plan.chunk(chunk_idx).end;
  if (begin % sizes_.key_block != 0 || !is_adjacent) return false;
  *piece = batch_piece(kv_head, chunk_idx, begin, range.size());
  return true;
}

}  // namespace edgeh2o
