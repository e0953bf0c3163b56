// Scores of pages by the bounds of their keys, for policies that ask for them: see sparse/page_recall.h.
#pragma once

#include "base/arena.h"
#include "isa/kernel_table.h"
#include "ops/attention_sizes.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class PageScores final : public PageScorer {
 public:
  PageScores(const KernelTable& table, const AttentionShape& shape, const PolicyNeeds& needs)
      : table_(table),
        kernels_(attention_kernels(table, AttentionPrecision::kF32)),
        n_sets_(shape.n_sets()),
        key_dim_(shape.heads.key_dim),
        max_keys_(round_up(needs.max_scored_pages, table.layout.panel_cols)),
        scale_(shape.heads.scale * kLog2E),
        soft_cap_(shape.heads.soft_cap * kLog2E) {}

  void take_scratch(Arena& arena);

  void score(size_t set, MatView<const float> queries, const float* bounds, size_t n_pages,
             float* out) const override;

 private:
  size_t tile_rows() const { return kTileBlocks * table_.layout.float_rows; }
  size_t weight_stride() const { return max_keys_ + 16; }  // as AttentionSizes::weight_stride

  static constexpr size_t kTileBlocks = 4;

  const KernelTable& table_;
  const AttentionKernels& kernels_;
  size_t n_sets_, key_dim_;
  size_t max_keys_;  // pages, rounded up to panels; 0: nobody asks
  float scale_, soft_cap_;
  // The sets run in parallel: [n_sets] each.
  float* panels_ = nullptr;   // [max_keys * 2 * key_dim]
  float* q_ = nullptr;        // [tile_rows][2 * key_dim]
  float* weights_ = nullptr;  // [tile_rows][weight_stride]
  float* states_ = nullptr;   // [3][tile_rows]: m, l, factors
  float* sums_ = nullptr;     // [max_keys]
};

}  // namespace edgeh2o
