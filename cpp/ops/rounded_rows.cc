#include "ops/rounded_rows.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "ops/attention_buffers.h"
#include "ops/attention_sinks.h"

namespace edgeh2o {
namespace {

// Rows of a tile, as long as all of them see the whole piece: their query heads fill a register block.
constexpr size_t kTileQueries = 4;

// Floats of a thread: weights, o, m, l and two rows of factors.
size_t tile_floats(const AttentionSizes& sizes, size_t tile_rows) {
  return round_up(tile_rows * (sizes.weight_stride + sizes.o_stride + 4), kAlignment / sizeof(float));
}

}  // namespace

RoundedRows::RoundedRows(const AttentionPlan& plan, size_t most_rows, uint8_t* scratch, size_t n_threads)
    : plan_(plan),
      most_rows_(most_rows),
      tile_rows_(round_up(kTileQueries * group_size(), plan.table.layout.float_rows)),
      head_rows_(most_rows * group_size() + tile_rows_) {
  Arena arena(scratch);
  take(arena, n_threads);
}

size_t RoundedRows::scratch_bytes(const AttentionPlan& plan, size_t most_rows, size_t n_threads) {
  Arena counter;
  RoundedRows(plan, most_rows, nullptr, n_threads).take(counter, n_threads);
  return counter.used();
}

void RoundedRows::take(Arena& arena, size_t n_threads) {
  const AttentionSizes& sizes = plan_.sizes;
  q_ = arena.take<float>(n_heads() * head_rows_ * sizes.query_words);
  k_ = arena.take<float>(n_heads() * sizes.piece_keys * sizes.key_words);
  v_ = arena.take<float>(n_heads() * sizes.piece_keys * sizes.value_words);
  m_ = arena.take<float>(n_heads() * most_rows_ * group_size());
  l_ = arena.take<float>(n_heads() * most_rows_ * group_size());
  tiles_ = arena.take<float>(n_threads * tile_floats(sizes, tile_rows_));
}

void RoundedRows::run(MatView<const float> q, const size_t* positions, const LayerKv& kv,
                      MatView<float> out) const {
  const size_t end = positions[q.rows - 1] + 1, step = plan_.sizes.piece_keys;
  pack_queries(q);
  for (size_t begin = 0; begin < end; begin += step) {
    const size_t n_keys = std::min(step, end - begin);
    pack_piece(kv, begin, n_keys);
    const size_t n_tiles = ceil_div(q.rows, kTileQueries);
    parallel_for(n_heads() * n_tiles, [&](size_t task, size_t thread) {
      const size_t kv_head = task / n_tiles, first = task % n_tiles * kTileQueries;
      const size_t last = std::min(first + kTileQueries, q.rows);
      const bool see_all = positions[first] + 1 >= begin + n_keys;
      const size_t n_rows = see_all ? last - first : 1;
      for (size_t row = first; row < last; row += n_rows) {
        if (positions[row] < begin) continue;
        const AttentionTile part = tile(kv_head, row, n_rows, thread);
        const SoftmaxRows rows = state(kv_head, row, out);
        AttentionPiece keys = piece(kv_head, 0, n_keys);
        keys.n_visible = static_cast<ptrdiff_t>(positions[row] + 1 - begin);
        if (begin == 0 && kv.sinks) {
          const float* sinks = kv.sinks + kv_head * group_size();
          begin_with_sinks(rows, sinks, part.n_rows, group_size(), part.value_dim);
        }
        plan_.kernels.attention_tile(part, keys);
        plan_.table.merge_softmax_f32(rows, part, part.l + tile_rows_, begin == 0 && !kv.sinks);
      }
    });
  }
}

float* RoundedRows::queries(size_t kv_head, size_t row) const {
  return q_ + (kv_head * head_rows_ + row * group_size()) * plan_.sizes.query_words;
}

void RoundedRows::pack_queries(MatView<const float> q) const {
  const AttentionHeads& heads = plan_.shape.heads;
  for (size_t kv_head = 0; kv_head < n_heads(); ++kv_head) {
    plan_.kernels.pack_queries(queries(kv_head, 0), q.data + kv_head * group_size() * heads.key_dim, q.stride,
                               heads.scale * kLog2E, q.rows, group_size(), heads.key_dim);
    std::memset(queries(kv_head, q.rows), 0, tile_rows_ * plan_.sizes.query_words * sizeof(float));
  }
}

// Makes panels of positions [begin, begin + n_keys) of every KV head.
void RoundedRows::pack_piece(const LayerKv& kv, size_t begin, size_t n_keys) const {
  const size_t n_blocks = ceil_div(n_keys, kPackKeys);
  parallel_for(n_heads() * n_blocks, [&](size_t task, size_t) {
    const size_t kv_head = task / n_blocks, first = task % n_blocks * kPackKeys;
    const size_t end = std::min(first + kPackKeys, n_keys);
    pack_rows(plan_.kernels, kv, kv_head, {begin + first, begin + end}, piece(kv_head, first, end - first));
  });
}

// Keys of the panels at hand, from `first` on.
AttentionPiece RoundedRows::piece(size_t kv_head, size_t first, size_t n_keys) const {
  const AttentionSizes& sizes = plan_.sizes;
  AttentionPiece piece;
  piece.k = k_ + (kv_head * sizes.piece_keys + first) * sizes.key_words;
  piece.v = v_ + kv_head * sizes.piece_keys * sizes.value_words + first * sizes.value_step;
  piece.v_panel_stride = sizes.piece_keys * sizes.value_step;
  piece.n_keys = n_keys;
  return piece;
}

AttentionTile RoundedRows::tile(size_t kv_head, size_t row, size_t n_rows, size_t thread) const {
  const AttentionSizes& sizes = plan_.sizes;
  const AttentionHeads& heads = plan_.shape.heads;
  float* scratch = tiles_ + thread * tile_floats(sizes, tile_rows_);
  AttentionTile tile;
  tile.n_rows = n_rows * group_size();
  tile.group_size = group_size();
  tile.key_dim = heads.key_dim;
  tile.value_dim = heads.value_dim;
  tile.q = queries(kv_head, row);
  tile.weights = scratch;
  tile.weight_stride = sizes.weight_stride;
  tile.o = tile.weights + tile_rows_ * sizes.weight_stride;
  tile.o_stride = sizes.o_stride;
  tile.soft_cap = heads.soft_cap * kLog2E;
  tile.m = tile.o + tile_rows_ * sizes.o_stride;
  tile.l = tile.m + tile_rows_;
  return tile;
}

SoftmaxRows RoundedRows::state(size_t kv_head, size_t row, MatView<float> out) const {
  const size_t first = (kv_head * most_rows_ + row) * group_size();
  return {m_ + first, l_ + first, out.row(row) + kv_head * group_size() * plan_.shape.heads.value_dim,
          out.stride};
}

}  // namespace edgeh2o
