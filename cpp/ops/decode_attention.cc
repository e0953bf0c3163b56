#include "ops/decode_attention.h"

#include <algorithm>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kRangeKeys = 256;

}  // namespace

void DecodeAttention::take_scratch(Arena& arena, const KernelTable& table, size_t n_threads) {
  const size_t n_ranges = ceil_div(max_context_, kRangeKeys);
  o_stride_ = round_up(head_dim_, table.layout.panel_cols);
  q_ = arena.take<float>(n_kv_heads_ * group_size_ * head_dim_);
  weights_ = arena.take<float>(n_threads * group_size_ * kRangeKeys);
  results_ = arena.take<float>(n_kv_heads_ * n_ranges * group_size_ * (2 + o_stride_));
  merged_ = arena.take<float>(n_kv_heads_ * 4 * group_size_);
}

AttentionTile DecodeAttention::range_result(size_t kv_head, size_t range_idx) const {
  const size_t n_ranges = ceil_div(max_context_, kRangeKeys), n_floats = group_size_ * (2 + o_stride_);
  AttentionTile tile;
  tile.n_rows = tile.group_size = group_size_;
  tile.head_dim = head_dim_;
  tile.soft_cap = soft_cap_;
  tile.q = q_ + kv_head * group_size_ * head_dim_;
  tile.weight_stride = kRangeKeys;
  tile.m = results_ + (kv_head * n_ranges + range_idx) * n_floats;
  tile.l = tile.m + group_size_;
  tile.o = tile.l + group_size_;
  tile.o_stride = o_stride_;
  return tile;
}

void DecodeAttention::run(const KernelTable& table, const float* q, const LayerKv& kv, PositionRange keys,
                          float* out) const {
  const size_t n_ranges = ceil_div(keys.size(), kRangeKeys);
  table.scale_f32(q_, q, scale_, n_kv_heads_ * group_size_ * head_dim_);
  parallel_for(n_kv_heads_ * n_ranges, [&](size_t task, size_t thread) {
    const size_t kv_head = task / n_ranges, range_idx = task % n_ranges;
    const size_t begin = keys.begin + range_idx * kRangeKeys, end = std::min(begin + kRangeKeys, keys.end);
    AttentionTile tile = range_result(kv_head, range_idx);
    tile.weights = weights_ + thread * group_size_ * kRangeKeys;
    const KvRows k = kv.k(kv_head), v = kv.v(kv_head);
    table.attention_rows_f32(k.type, tile, k.row(begin), v.row(begin), end - begin);
  });
  parallel_for(n_kv_heads_, [&](size_t kv_head, size_t) {
    float* m = merged_ + kv_head * 4 * group_size_;
    const SoftmaxRows state{m, m + group_size_, out + kv_head * group_size_ * head_dim_, 0};
    for (size_t i = 0; i < n_ranges; ++i) {
      table.merge_softmax_f32(state, range_result(kv_head, i), m + 2 * group_size_, i == 0);
    }
  });
}

}  // namespace edgeh2o
