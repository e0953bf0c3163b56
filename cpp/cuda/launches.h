// What the files of the layer loop fill arguments of kernels with.
#pragma once

#include <algorithm>

#include "base/arena.h"
#include "cuda/device.h"
#include "cuda/tiles.h"
#include "model/layer_spec.h"

namespace edgeh2o::cuda {

inline constexpr size_t kThreads = 128;      // of most kernels
inline constexpr size_t kSmallShared = 512;  // what they add up in

inline uint32_t u32(size_t n) { return static_cast<uint32_t>(n); }

// Rows from which on a matrix product beats reading the weights once per row: a guess, not timed.
inline constexpr size_t kGemmFromRows = 8;
inline bool takes_gemm(const DeviceMatrix& w, size_t n_rows) {
  return is_tiled(w.format) && n_rows >= kGemmFromRows;
}

// Row by row, with a matrix or one per head.
inline void launch_row_products(Device& device, const MultiplyArguments& a, size_t n_heads) {
  const bool has_tiles = is_tiled(a.w.format);
  const size_t rows = has_tiles ? size_t{kPanelRows} : kThreads / kWarpSize;
  size_t n_blocks = ceil_div(a.w.n_out, rows);
  for (size_t i = 0; i < a.n_further; ++i) n_blocks += ceil_div(a.further[i].w.n_out, rows);
  device.launch(multiply_kernel(a.w.format), a, n_blocks, a.n_rows, n_heads,
                has_tiles ? size_t{kTilesThreads} : kThreads, kSmallShared);
}

inline size_t gate_blocks(size_t dim) { return ceil_div(round_up(dim, kTileDepth), size_t{kGateColumns}); }

inline QuantisedRows rows_of(const DeviceBuffer& q, const DeviceBuffer& d, size_t depth) {
  return {q.as<int8_t>(), d.as<float>(), u32(round_up(depth, kTileDepth))};
}

// Of blocks of delta_rule: 32 columns of the state, keys and queries of two tokens, sums.
inline size_t delta_shared_bytes(size_t head_dim) { return (head_dim * 36 + 3 * kThreads) * sizeof(float); }

// Of blocks of attend_split: a query and its logits.
inline size_t attend_head_bytes(size_t key_dim) { return (key_dim + kSplitKeys) * sizeof(float); }

// Query heads of one KV head, of `group`, that a block of attend_split takes: at most 16, in fours, and as
// few as leave room for two blocks in the shared memory of a processor.
inline size_t attend_heads(size_t group, size_t key_dim) {
  const size_t fitting = std::max<size_t>(1, (64 * 1024 - kAttendScratchBytes) / attend_head_bytes(key_dim));
  const size_t most = std::min<size_t>(16, fitting);
  return group <= most ? group : most < 4 ? most : most / 4 * 4;
}

// Ranges of keys of attend_split.
inline size_t ranges_of(size_t n_keys) { return ceil_div(n_keys, size_t{kSplitKeys}); }

// Rows from which on attention goes by tiles of 64 of them rather than row by row.
inline constexpr size_t kTilesFromRows = 16;

inline const char* attend_tiles_kernel(size_t dim) {
  return dim == 64 ? "attend_tiles_64" : dim == 128 ? "attend_tiles_128" : "attend_tiles_256";
}
inline const char* column_tiles_kernel(size_t dim) {
  return dim == 64 ? "column_tiles_64" : dim == 128 ? "column_tiles_128" : "column_tiles_256";
}

// The width of the tiles that take a layer's heads, 0 for none: those of latent attention are wider, and of a
// cache of floats nothing is to be rounded.
inline size_t tile_dim(const DeviceHeads& heads, const DeviceCache& cache, size_t stride) {
  const size_t dim = std::max(heads.key_dim, heads.value_dim);
  const bool is_aligned =
      heads.key_dim % 8 == 0 && heads.value_dim % 8 == 0 && heads.value_stride % 8 == 0 && stride % 4 == 0;
  const bool has_floats = cache.k_type == DeviceCacheType::kF32 || cache.v_type == DeviceCacheType::kF32;
  if (!is_aligned || has_floats || dim > 256) return 0;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

// Parts of the rows of a chunk that column_tiles sums by themselves.
inline size_t column_parts(size_t n_rows) { return ceil_div(n_rows, size_t{kColumnRows}); }
inline size_t attend_tiles_bytes(size_t dim) {
  return 2 * (kAttendTile + static_cast<size_t>(tile_keys(static_cast<int>(dim)))) * dim * sizeof(uint16_t);
}
inline size_t column_tiles_bytes(size_t dim) {
  return kAttendTile * (dim * sizeof(uint16_t) + kThreads / kWarpSize * sizeof(float));
}

// What attention leaves behind for a row: of latent attention the latent part of the weighted rows.
inline size_t attended_dim(const LayerSpec& spec) {
  return spec.latent.is_none() ? spec.heads.out_dim() : spec.heads.n_heads * spec.latent.rank;
}

}  // namespace edgeh2o::cuda
