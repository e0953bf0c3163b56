// What sparse policies choose keys by: the attention that keys receive, halves of queries by sign, means of
// rows.
#pragma once

#include "cuda/kernels/attend_rows.cuh"

namespace edgeh2o::cuda {

// A warp per key, a lane per query.
EH2O_KERNEL(column_sums, ColumnArguments, kAttendThreads) {
  const uint32_t t = static_cast<uint32_t>(thread_index()), lane = t % kWarpSize;
  const uint32_t key = static_cast<uint32_t>(block_x()) * (kAttendThreads / kWarpSize) + t / kWarpSize;
  const uint32_t kv_head = static_cast<uint32_t>(block_y()), key_dim = a.heads.key_dim;
  const uint32_t group = a.heads.n_heads / a.heads.n_kv_heads;
  const ListedKeys keys(a.keys, kv_head, a.first + a.n_rows - 1);
  if (key >= keys.count || (a.is_scored && a.is_scored[kv_head] == 0)) return;
  const uint32_t position = keys.position(key);
  const size_t at = (static_cast<size_t>(kv_head) * a.cache.max_context + position) * key_dim;
  // A listed key is seen by all queries, others by those from their own position on.
  const uint32_t first_row = a.keys.counts ? 0 : position - a.first;
  float sum = 0.0f;
  for (uint32_t row = first_row + lane; row < a.n_rows; row += kWarpSize) {
    float weight = 1.0f;
    if (a.weight == RowWeight::kVisibleKeys)
      weight = static_cast<float>(a.keys.counts ? keys.count : row + 1);
    if (a.weight == RowWeight::kLastRows && row + a.n_last < a.n_rows) weight = 0.0f;
    for (uint32_t g = 0; g < group; ++g) {
      const uint32_t head = kv_head * group + g;
      const float* q = a.qkv + static_cast<size_t>(row) * a.stride + head * key_dim;
      float logit = 0.0f;
      for (uint32_t i = 0; i < key_dim; i += 4) {
        float k[4];
        load_cached4(k, a.cache.k, a.cache.k_type, at + i);
        for (uint32_t e = 0; e < 4; ++e) logit = multiply_add(q[i + e] * a.scale, k[e], logit);
      }
      if (a.soft_cap > 0.0f) logit = soft_capped(logit, a.soft_cap);
      const float* state = a.states + 2 * (static_cast<size_t>(row) * a.heads.n_heads + head);
      const float share = divide(exp2_fast(logit * 1.44269504f - state[0]), state[1]);
      sum += weight * (a.squares ? share * share : share);
    }
  }
  sum = reduce_add<kWarpSize>(sum);
  if (lane == 0) a.sums[static_cast<size_t>(kv_head) * a.sums_stride + key] = sum;
}

EH2O_KERNEL(split_signs, SignArguments, kAttendThreads) {
  const uint32_t head = static_cast<uint32_t>(block_x()), row = static_cast<uint32_t>(block_y());
  const float* q = a.q + static_cast<size_t>(row) * a.stride + head * a.dim;
  float* out = a.out + (static_cast<size_t>(row) * a.n_heads + head) * 2 * a.dim;
  for (uint32_t i = static_cast<uint32_t>(thread_index()); i < a.dim; i += kAttendThreads) {
    out[i] = larger(q[i], 0.0f);
    out[a.dim + i] = -larger(-q[i], 0.0f);
  }
}

// Row `row` of mean_rows, kValues columns a thread; threads that are left over share the positions. What the
// set lists is marked for 128 positions at a time. Shared memory: MeanShared.
template <int kValues>
EH2O_DEVICE void add_mean(const MeanArguments& a, uint32_t kv_head, uint32_t row, uint32_t first,
                          MeanShared& s) {
  const uint32_t t = static_cast<uint32_t>(thread_index());
  const size_t of_head = static_cast<size_t>(kv_head) * a.n_rows + row;
  const size_t head_row = static_cast<size_t>(kv_head) * a.cache.max_context;
  const uint32_t begin = a.ranges[2 * of_head], end = a.ranges[2 * of_head + 1];
  const int32_t* const listed = a.keys.positions + static_cast<size_t>(kv_head) * a.keys.stride;
  const uint32_t n_listed = a.keys.counts[kv_head];
  const uint32_t key_dim = a.heads.key_dim, n_pieces = (key_dim + a.heads.value_stride) / kValues;
  const uint32_t width = n_pieces < kAttendThreads ? n_pieces : kAttendThreads;
  const uint32_t n_shares = kAttendThreads / width, share = t / width;
  for (uint32_t first_piece = 0; first_piece < n_pieces; first_piece += width) {
    const uint32_t piece = first_piece + t % width;
    const bool is_active = share < n_shares && piece < n_pieces;
    const uint32_t column = is_active ? piece * kValues : 0;
    const bool is_key = column < key_dim;
    const void* const rows = is_key ? a.cache.k : a.cache.v;
    const DeviceCacheType type = is_key ? a.cache.k_type : a.cache.v_type;
    const uint32_t stride = is_key ? key_dim : a.heads.value_stride;
    const uint32_t of_row = is_key ? column : column - key_dim;
    float sums[kValues] = {};
    uint32_t n_left = 0, next = first;
    for (uint32_t base = begin; base < end; base += kAttendThreads) {
      const uint32_t n = end - base < kAttendThreads ? end - base : kAttendThreads;
      s.counts[t] = t < n ? 1.0f : 0.0f;
      sync_block();
      if (next + t < n_listed) {
        const uint32_t position = static_cast<uint32_t>(listed[next + t]);
        if (position < base + n) s.counts[position - base] = 0.0f;
      }
      sync_block();
      const float in_warp = reduce_add<kWarpSize>(s.counts[t]);
      if (t % kWarpSize == 0) s.warp_counts[t / kWarpSize] = in_warp;
      EH2O_UNROLL_4
      for (uint32_t i = share; i < (is_active ? n : 0); i += n_shares) {
        float x[4];
        const size_t at = (head_row + base + i) * stride + of_row;
        if constexpr (kValues == 4) {
          load_cached4(x, rows, type, at);
        } else {
          x[0] = cached(rows, type, at);
        }
        const bool counts = s.counts[i] > 0.0f;
        EH2O_UNROLL
        for (int e = 0; e < kValues; ++e) sums[e] += counts ? x[e] : 0.0f;
      }
      sync_block();  // the marks have been read by all
      float n_counted = 0.0f;
      for (int warp = 0; warp < kAttendThreads / kWarpSize; ++warp) n_counted += s.warp_counts[warp];
      n_left += static_cast<uint32_t>(n_counted);
      next += n - static_cast<uint32_t>(n_counted);
    }
    EH2O_UNROLL
    for (int e = 0; e < kValues; ++e) s.sums[e][t] = sums[e];
    sync_block();
    if (share == 0 && piece < n_pieces) {
      float* const out = (is_key ? a.k : a.v) + of_head * stride + of_row;
      EH2O_UNROLL
      for (int e = 0; e < kValues; ++e) {
        float sum = 0.0f;
        for (uint32_t other = 0; other < n_shares; ++other) sum += s.sums[e][other * width + t];
        out[e] = divide(sum, static_cast<float>(n_left));
      }
    }
    sync_block();
  }
}

EH2O_KERNEL_OF(mean_rows, MeanArguments, kAttendThreads, 5) {
  EH2O_SHARED_MEMORY;
  const uint32_t row = static_cast<uint32_t>(block_x()), kv_head = static_cast<uint32_t>(block_y());
  if (row >= a.counts[kv_head]) return;
  const uint32_t begin = a.ranges[2 * (static_cast<size_t>(kv_head) * a.n_rows + row)];
  const int32_t* const listed = a.keys.positions + static_cast<size_t>(kv_head) * a.keys.stride;
  uint32_t first = 0;  // of those that are listed in the range
  for (uint32_t last = a.keys.counts[kv_head]; first < last;) {
    const uint32_t middle = (first + last) / 2;
    if (static_cast<uint32_t>(listed[middle]) < begin) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  MeanShared& shared = *reinterpret_cast<MeanShared*>(shared_memory);
  if (a.heads.key_dim % 4 == 0 && a.heads.value_stride % 4 == 0) {
    add_mean<4>(a, kv_head, row, first, shared);
  } else {
    add_mean<1>(a, kv_head, row, first, shared);
  }
}

}  // namespace edgeh2o::cuda
