#include "ops/attention_buffers.h"

#include <algorithm>

namespace edgeh2o {
namespace {

// Floats of a thread: q, weights, o, then m, l, memory_m and two rows of factors.
size_t tile_floats(const AttentionSizes& sizes) {
  const size_t per_row = sizes.query_words + sizes.weight_stride + sizes.o_stride + 5;
  return round_up(sizes.tile_rows * per_row, kAlignment / sizeof(float));
}

}  // namespace

void pack_rows(const AttentionKernels& kernels, const LayerKv& kv, size_t kv_head, PositionRange rows,
               const AttentionPiece& piece) {
  const KvRows k = kv.k(kv_head), v = kv.v(kv_head);
  // Kernels only read pieces; who packs them owns their buffers.
  kernels.pack_keys(k.type, const_cast<float*>(piece.k), k.row(rows.begin), nullptr, rows.size(), k.head_dim);
  kernels.pack_values(v.type, const_cast<float*>(piece.v), piece.v_panel_stride, v.row(rows.begin), nullptr,
                      rows.size(), v.head_dim);
}

void AttentionBuffers::take(Arena& arena, const AttentionShape& shape, const AttentionSizes& sizes,
                            size_t n_threads) {
  const size_t n_kv_heads = shape.heads.n_kv_heads, n_sets = shape.n_sets();
  batch_k = arena.take<float>(n_kv_heads * sizes.batch_keys * sizes.key_words);
  batch_v = arena.take<float>(n_kv_heads * sizes.batch_keys * sizes.value_words);
  gather_k = arena.take<float>(n_sets * sizes.gather_keys * sizes.key_words);
  gather_v = arena.take<float>(n_sets * sizes.gather_keys * sizes.value_words);
  m = arena.take<float>(shape.batch_size * shape.heads.n_heads);
  l = arena.take<float>(shape.batch_size * shape.heads.n_heads);
  if (sizes.is_scoring) {
    intra_sums = arena.take<float>(sizes.n_chunks * n_sets * sizes.n_tasks * sizes.chunk_keys);
    memory_sums = arena.take<float>(n_sets * sizes.n_tasks * sizes.memory_keys);
    reduced_sums = arena.take<float>(n_sets * std::max(sizes.chunk_keys, sizes.memory_keys));
  }
  sets = arena.take<SetWork>(n_sets);
  order = arena.take<size_t>(n_sets);
  tiles = arena.take<float>(n_threads * tile_floats(sizes));
}

TileScratch AttentionBuffers::tile_scratch(const AttentionSizes& sizes, const AttentionShape& shape,
                                           size_t thread) const {
  TileScratch scratch;
  AttentionTile& tile = scratch.tile;
  float* next = tiles + thread * tile_floats(sizes);
  const auto take_rows = [&](size_t row_floats) {
    float* rows = next;
    next += sizes.tile_rows * row_floats;
    return rows;
  };
  tile.group_size = shape.set_heads();
  tile.key_dim = shape.heads.key_dim;
  tile.value_dim = shape.heads.value_dim;
  tile.soft_cap = shape.heads.soft_cap * kLog2E;
  tile.weight_stride = sizes.weight_stride;
  tile.o_stride = sizes.o_stride;
  tile.weights = take_rows(sizes.weight_stride);
  tile.o = take_rows(sizes.o_stride);
  tile.m = take_rows(1);
  tile.l = take_rows(1);
  scratch.memory_m = take_rows(1);
  scratch.factors = take_rows(2);
  tile.q = take_rows(sizes.query_words);
  return scratch;
}

}  // namespace edgeh2o
