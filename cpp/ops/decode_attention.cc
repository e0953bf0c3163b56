#include "ops/decode_attention.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kRangeKeys = 256;
// A thread takes so many ranges that lie one after another, so that it can fetch the next one beforehand, but
// leaves tasks for the others: 8 ranges give 1.2 times the rate of one each.
constexpr size_t kMaxTaskRanges = 8, kTasksPerThread = 4;

}  // namespace

DecodeAttention::DecodeAttention(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads)
    : plan_(plan), n_threads_(n_threads) {
  const AttentionHeads& heads = plan.shape.heads;
  const size_t n_ranges = ceil_div(plan.shape.max_context, kRangeKeys);
  Arena arena(scratch);
  heads_ = arena.take<HeadKeys>(heads.n_kv_heads);
  q_ = arena.take<float>(heads.q_dim());
  weights_ = arena.take<float>(n_threads * group_size() * kRangeKeys);
  results_ = arena.take<float>(heads.n_kv_heads * n_ranges * group_size() * (2 + plan.sizes.o_stride));
  merged_ = arena.take<float>(heads.n_kv_heads * 4 * group_size());
  gathered_bytes_ = kRangeKeys * kv_row_bytes(CacheType::kF32, std::max(heads.key_dim, heads.value_dim));
  gathered_ = arena.take<uint8_t>(n_threads * 2 * gathered_bytes_);
  n_used_ = arena.used();
}

size_t DecodeAttention::scratch_bytes(const AttentionPlan& plan, size_t n_threads) {
  return DecodeAttention(plan, nullptr, n_threads).n_used_;
}

size_t DecodeAttention::HeadKeys::n_ranges() const { return ceil_div(n_keys, kRangeKeys); }

void DecodeAttention::set_memory(size_t kv_head, const MemorySet& memory, size_t position) {
  EH2O_DASSERT(memory.positions != nullptr || memory.range.end == position);
  const size_t n_keys = memory.n_positions() + 1;
  heads_[kv_head] = {memory.positions, memory.positions ? 0 : position + 1 - n_keys, n_keys, position};
}

AttentionTile DecodeAttention::range_result(size_t kv_head, size_t range_idx) const {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t n_ranges = ceil_div(plan_.shape.max_context, kRangeKeys), n_rows = group_size(),
               n_floats = n_rows * (2 + plan_.sizes.o_stride);
  AttentionTile tile;
  tile.n_rows = tile.group_size = n_rows;
  tile.key_dim = heads.key_dim;
  tile.value_dim = heads.value_dim;
  tile.soft_cap = heads.soft_cap * kLog2E;
  tile.q = q_ + kv_head * n_rows * heads.key_dim;
  tile.weight_stride = kRangeKeys;
  tile.m = results_ + (kv_head * n_ranges + range_idx) * n_floats;
  tile.l = tile.m + n_rows;
  tile.o = tile.l + n_rows;
  tile.o_stride = plan_.sizes.o_stride;
  return tile;
}

// Keys [first, first + n) of a KV head as rows one after another: where they lie, or copied to `out`.
const uint8_t* DecodeAttention::gather(const HeadKeys& keys, const KvRows& rows, size_t first, size_t n,
                                       uint8_t* out) const {
  if (keys.positions == nullptr) return rows.row(keys.begin + first);
  const size_t row_bytes = kv_row_bytes(rows.type, rows.head_dim);
  for (size_t i = first; i < first + n; ++i) {
    const size_t position = i + 1 < keys.n_keys ? static_cast<size_t>(keys.positions[i]) : keys.position;
    std::memcpy(out + (i - first) * row_bytes, rows.row(position), row_bytes);
  }
  return out;
}

void DecodeAttention::run(const float* q, const LayerKv& kv, float* out) const {
  const AttentionHeads& heads = plan_.shape.heads;
  const KernelTable& table = plan_.table;
  const size_t n_rows = group_size();
  size_t n_ranges = 0;  // of the head with the most
  for (size_t i = 0; i < heads.n_kv_heads; ++i) n_ranges = std::max(n_ranges, heads_[i].n_ranges());
  table.scale_f32(q_, q, heads.scale * kLog2E, heads.q_dim());
  const size_t n_together =
      std::clamp(heads.n_kv_heads * n_ranges / (kTasksPerThread * n_threads_), size_t{1}, kMaxTaskRanges);
  const size_t n_tasks = ceil_div(n_ranges, n_together);  // of a head
  parallel_for(heads.n_kv_heads * n_tasks, [&](size_t task, size_t thread) {
    const size_t kv_head = task / n_tasks, first_range = task % n_tasks * n_together;
    const HeadKeys& keys = heads_[kv_head];
    const KvRows k = kv.k(kv_head), v = kv.v(kv_head);
    uint8_t* gathered = gathered_ + thread * 2 * gathered_bytes_;
    const size_t end = std::min(first_range + n_together, keys.n_ranges());
    for (size_t range_idx = first_range; range_idx < end; ++range_idx) {
      const size_t first = range_idx * kRangeKeys, n_left = keys.n_keys - first;
      const size_t n_keys = std::min(kRangeKeys, n_left);
      const bool is_next_adjacent = keys.positions == nullptr && range_idx + 1 < end;
      AttentionTile tile = range_result(kv_head, range_idx);
      tile.weights = weights_ + thread * n_rows * kRangeKeys;
      table.attention_rows_f32(k.type, v.type, tile, gather(keys, k, first, n_keys, gathered),
                               gather(keys, v, first, n_keys, gathered + gathered_bytes_), n_keys,
                               is_next_adjacent ? std::min(kRangeKeys, n_left - n_keys) : 0);
    }
  });
  parallel_for(heads.n_kv_heads, [&](size_t kv_head, size_t) {
    float* m = merged_ + kv_head * 4 * n_rows;
    const SoftmaxRows state{m, m + n_rows, out + kv_head * n_rows * heads.value_dim, 0};
    for (size_t i = 0; i < heads_[kv_head].n_ranges(); ++i) {
      table.merge_softmax_f32(state, range_result(kv_head, i), m + 2 * n_rows, i == 0);
    }
  });
}

}  // namespace edgeh2o
