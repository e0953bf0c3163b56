#include "ops/page_scores.h"

#include <algorithm>
#include <cstring>

namespace edgeh2o {

void PageScores::take_scratch(Arena& arena) {
  if (max_keys_ == 0) return;
  const size_t width = 2 * key_dim_;
  panels_ = arena.take<float>(n_sets_ * max_keys_ * width);
  q_ = arena.take<float>(n_sets_ * tile_rows() * width);
  weights_ = arena.take<float>(n_sets_ * tile_rows() * weight_stride());
  states_ = arena.take<float>(n_sets_ * 3 * tile_rows());
  sums_ = arena.take<float>(n_sets_ * max_keys_);
}

// Attention of all the chunk's query rows to the pages, without values: a tile whose output has no columns.
void PageScores::score(size_t set, MatView<const float> queries, const float* bounds, size_t n_pages,
                       float* out) const {
  const size_t dim = key_dim_, width = 2 * dim, group_size = queries.cols / dim;
  AttentionPiece piece;
  float* panels = panels_ + set * max_keys_ * width;
  kernels_.pack_keys(CacheType::kF32, panels, bounds, nullptr, n_pages, width);
  piece.k = panels;
  piece.v = panels;  // not read
  piece.n_keys = n_pages;
  piece.n_visible = static_cast<ptrdiff_t>(n_pages);

  AttentionTile tile;
  float *q = q_ + set * tile_rows() * width, *states = states_ + set * 3 * tile_rows();
  tile.group_size = 1;
  tile.key_dim = width;
  tile.q = q;
  tile.weights = weights_ + set * tile_rows() * weight_stride();
  tile.weight_stride = weight_stride();
  tile.o = tile.weights;  // no columns, so never written
  tile.soft_cap = soft_cap_;
  tile.m = states;
  tile.l = states + tile_rows();
  float *factors = states + 2 * tile_rows(), *sums = sums_ + set * max_keys_;
  std::fill_n(sums, round_up(n_pages, table_.layout.panel_cols), 0.0f);

  const size_t n_rows = queries.rows * group_size;
  for (size_t first = 0; first < n_rows; first += tile_rows()) {
    tile.n_rows = std::min(tile_rows(), n_rows - first);
    for (size_t i = 0; i < tile.n_rows; ++i) {
      const float* x = queries.row((first + i) / group_size) + (first + i) % group_size * dim;
      for (size_t d = 0; d < dim; ++d) {
        q[i * width + d] = scale_ * std::max(x[d], 0.0f);
        q[i * width + dim + d] = scale_ * std::min(x[d], 0.0f);
      }
    }
    std::memset(q + tile.n_rows * width, 0, (tile_rows() - tile.n_rows) * width * sizeof(float));
    kernels_.attention_tile(tile, piece);
    for (size_t i = 0; i < tile.n_rows; ++i) {
      float* weights = tile.weights + i * tile.weight_stride;
      for (size_t page = 0; page < n_pages; ++page) weights[page] *= weights[page];
      factors[i] = 1.0f / (tile.l[i] * tile.l[i]);
    }
    kernels_.column_sums(sums, tile, piece, factors);
  }
  std::copy_n(sums, n_pages, out);
}

}  // namespace edgeh2o
