// Attention of a few rows to everything, by the kernels of prompts: what products of 8 bits alone change.
#pragma once

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "ops/attention_plan.h"

namespace edgeh2o {

class RoundedRows {
 public:
  // For up to most_rows rows. scratch: scratch_bytes bytes, of anything.
  RoundedRows(const AttentionPlan& plan, size_t most_rows, uint8_t* scratch, size_t n_threads);
  static size_t scratch_bytes(const AttentionPlan& plan, size_t most_rows, size_t n_threads);

  // q [n][q_dim], out [n][out_dim]: row i reads positions 0 to positions[i], which ascend. kv: the layer's.
  void run(MatView<const float> q, const size_t* positions, const LayerKv& kv, MatView<float> out) const;

 private:
  void take(Arena& arena, size_t n_threads);
  size_t n_heads() const { return plan_.shape.heads.n_kv_heads; }
  size_t group_size() const { return plan_.shape.heads.group_size(); }
  float* queries(size_t kv_head, size_t row) const;
  void pack_queries(MatView<const float> q) const;
  void pack_piece(const LayerKv& kv, size_t begin, size_t n_keys) const;
  AttentionPiece piece(size_t kv_head, size_t first, size_t n_keys) const;
  AttentionTile tile(size_t kv_head, size_t row, size_t n_rows, size_t thread) const;
  SoftmaxRows state(size_t kv_head, size_t row, MatView<float> out) const;

  const AttentionPlan& plan_;
  size_t most_rows_;
  size_t tile_rows_;                   // padded
  size_t head_rows_;                   // packed queries of a KV head, and what a tile reads behind them
  float* q_ = nullptr;                 // [n_kv_heads][head_rows] packed queries
  float *k_ = nullptr, *v_ = nullptr;  // [n_kv_heads] panels of the piece at hand
  float *m_ = nullptr, *l_ = nullptr;  // [n_kv_heads][most_rows][group_size]
  float* tiles_ = nullptr;             // [n_threads]: see tile
};

}  // namespace edgeh2o
