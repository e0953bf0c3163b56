// Attention of single queries to the cache (Flash-Decoding: ranges of keys in parallel, put together after).
// Ranges are fixed and put together in order: the result does not depend on what runs when.
#pragma once

#include "cuda/kernels/attend_rows.cuh"

namespace edgeh2o::cuda {

// A range of keys that a block weighs for its query heads.
struct WeighedRange {
  // Of the cache, for key `key` of the range.
  EH2O_DEVICE size_t row(uint32_t key) const { return head_row + keys.position(first_key + key); }

  const AttendArguments& a;
  const ListedKeys& keys;
  size_t head_row;
  uint32_t first_key, n_keys, group;
  size_t first_part;
};

// Of 2 kHalf values a lane keeps the sums with its neighbour of one half: the first, or where the bit `mask`
// of its number is set the second. Returns the number of the first that it keeps.
template <int kHalf>
EH2O_DEVICE uint32_t keep_half(float (&x)[16], int mask) {
  const bool is_upper = (thread_index() & mask) != 0;
  EH2O_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const float kept = is_upper ? x[kHalf + i] : x[i], sent = is_upper ? x[i] : x[kHalf + i];
    x[i] = kept + shuffle_xor(sent, mask);
  }
  return is_upper ? kHalf : 0;
}

// Sums of 16 values over kKeyLanes lanes: a lane gets those of two, the result and the next.
EH2O_DEVICE uint32_t reduce_sixteen(float (&x)[16]) {
  static_assert(kKeyLanes == 8);
  const uint32_t first = keep_half<8>(x, 4), second = keep_half<4>(x, 2);
  return first + second + keep_half<2>(x, 1);
}

template <int kCount>
EH2O_DEVICE void load_shared(float (&out)[kCount], const float* x) {
  if constexpr (kCount == 1) {
    out[0] = *x;
  } else {
    EH2O_UNROLL
    for (int e = 0; e < kCount; e += 4) unpack_floats(out + e, *reinterpret_cast<const Words4*>(x + e));
  }
}

// Logits of a range, times log2(e): eight lanes share four keys, which they meet with four queries at a time.
struct WeighKeys {
  const WeighedRange& range;
  const float* queries;
  float* logits;

  template <typename Rows>
  EH2O_DEVICE void operator()(const Rows& rows) const {
    constexpr uint32_t kCount = Rows::kCount, kTogether = 4;
    const AttendArguments& a = range.a;
    const uint32_t t = static_cast<uint32_t>(thread_index()), key_dim = a.heads.key_dim;
    const uint32_t part = t % kKeyLanes, slot = t / kKeyLanes, n_slots = kAttendThreads / kKeyLanes;
    for (uint32_t base = 0; base < range.n_keys; base += kTogether * n_slots) {
      size_t at[kTogether];
      EH2O_UNROLL
      for (uint32_t k = 0; k < kTogether; ++k) {
        const uint32_t key = base + k * n_slots + slot, there = key < range.n_keys ? key : range.n_keys - 1;
        at[k] = range.row(there) * key_dim;
      }
      for (uint32_t g0 = 0; g0 < range.group; g0 += 4) {
        float sums[16] = {};  // [query][key]
        for (uint32_t i = kCount * part; i < key_dim; i += kCount * kKeyLanes) {
          float values[kTogether][kCount];
          EH2O_UNROLL
          for (uint32_t k = 0; k < kTogether; ++k) rows.load(values[k], at[k] + i);
          EH2O_UNROLL
          for (uint32_t g = 0; g < 4; ++g) {
            if (g0 + g >= range.group) continue;
            float q[kCount];
            load_shared(q, queries + (g0 + g) * key_dim + i);
            EH2O_UNROLL
            for (uint32_t e = 0; e < kCount; ++e) {
              EH2O_UNROLL
              for (uint32_t k = 0; k < kTogether; ++k) {
                sums[g * kTogether + k] = multiply_add(q[e], values[k][e], sums[g * kTogether + k]);
              }
            }
          }
        }
        const uint32_t first = reduce_sixteen(sums);
        EH2O_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t g = g0 + (first + i) / kTogether;
          const uint32_t key = base + (first + i) % kTogether * n_slots + slot;
          if (g >= range.group || key >= range.n_keys) continue;
          float logit = sums[i];
          if (a.soft_cap > 0.0f) logit = soft_capped(logit, a.soft_cap);
          if (a.biases) logit += a.biases[range.row(key)];
          logits[g * kSplitKeys + key] = logit * 1.44269504f;
        }
      }
    }
  }
};

// The weighted sums of values, some columns a thread, four queries at a time, which read a value once.
// Threads that are left over share the keys; scratch [16][kAttendThreads] adds up what they have.
struct WeighValues {
  const WeighedRange& range;
  const float* weights;
  float* scratch;

  template <typename Rows>
  EH2O_DEVICE void operator()(const Rows& rows) const {
    constexpr uint32_t kCount = Rows::kCount, kQueries = kCount < 8 ? 4 : 2;  // of a round of the scratch
    const AttendArguments& a = range.a;
    const uint32_t t = static_cast<uint32_t>(thread_index()), value_dim = a.heads.value_dim;
    const uint32_t n_pieces = value_dim / kCount;
    const uint32_t width = n_pieces < kAttendThreads ? n_pieces : kAttendThreads;
    const uint32_t n_shares = width > 0 ? kAttendThreads / width : 0;
    for (uint32_t g0 = 0; g0 < range.group; g0 += 4) {
      for (uint32_t first = 0; first < n_pieces; first += width) {
        const uint32_t piece = first + t % width, share = t / width;
        float sums[4][kCount] = {};
        if (piece < n_pieces && share < n_shares) {
          EH2O_UNROLL_4
          for (uint32_t key = share; key < range.n_keys; key += n_shares) {
            const size_t at = range.row(key) * a.heads.value_stride + piece * kCount;
            float values[kCount];
            rows.load(values, at);
            EH2O_UNROLL
            for (uint32_t g = 0; g < 4; ++g) {
              if (g0 + g >= range.group) continue;
              const float weight = weights[(g0 + g) * kSplitKeys + key];
              EH2O_UNROLL
              for (uint32_t e = 0; e < kCount; ++e) sums[g][e] = multiply_add(weight, values[e], sums[g][e]);
            }
          }
        }
        EH2O_UNROLL
        for (uint32_t g1 = 0; g1 < 4; g1 += kQueries) {
          EH2O_UNROLL
          for (uint32_t g = 0; g < kQueries; ++g) {
            EH2O_UNROLL
            for (uint32_t e = 0; e < kCount; ++e) {
              scratch[(g * kCount + e) * kAttendThreads + t] = sums[g1 + g][e];
            }
          }
          sync_block();
          for (uint32_t i = t; i < kQueries * kCount * width; i += kAttendThreads) {
            const uint32_t column = i % width, g = i / width / kCount, e = i / width % kCount;
            const uint32_t query = g0 + g1 + g;
            if (query >= range.group || first + column >= n_pieces) continue;
            float sum = 0.0f;
            for (uint32_t s = 0; s < n_shares; ++s) {
              sum += scratch[(g * kCount + e) * kAttendThreads + s * width + column];
            }
            a.parts[(range.first_part + query * a.n_splits) * value_dim + (first + column) * kCount + e] =
                sum;
          }
          sync_block();
        }
      }
    }
  }
};

// A block of query heads of a KV head. Shared memory: queries [block_heads][key_dim], logits [block_heads]
// [kSplitKeys], scratch of WeighValues.
EH2O_KERNEL_OF(attend_split, AttendArguments, kAttendThreads, 4) {
  EH2O_SHARED_MEMORY;
  const uint32_t range = static_cast<uint32_t>(block_x());
  const uint32_t row = static_cast<uint32_t>(block_z()), t = static_cast<uint32_t>(thread_index());
  const uint32_t key_dim = a.heads.key_dim, value_dim = a.heads.value_dim;
  const uint32_t kv_group = a.heads.n_heads / a.heads.n_kv_heads;
  const uint32_t n_blocks = (kv_group + a.block_heads - 1) / a.block_heads;
  const uint32_t kv_head = static_cast<uint32_t>(block_y()) / n_blocks;
  const uint32_t of_group = static_cast<uint32_t>(block_y()) % n_blocks * a.block_heads;
  const uint32_t group = kv_group - of_group < a.block_heads ? kv_group - of_group : a.block_heads;
  const uint32_t first_head = kv_head * kv_group + of_group;
  float* const queries = reinterpret_cast<float*>(shared_memory);
  float* const logits = queries + group * key_dim;
  const uint32_t of_qkv = a.rows ? a.rows[row] : row;
  const ListedKeys keys(a.keys, kv_head, first_of(a) + of_qkv);
  const uint32_t first_key = range * kSplitKeys;
  const uint32_t n_keys = first_key >= keys.count               ? 0
                          : keys.count - first_key < kSplitKeys ? keys.count - first_key
                                                                : kSplitKeys;
  const uint32_t split = a.first_split + range;
  const size_t first_part = (static_cast<size_t>(row) * a.heads.n_heads + first_head) * a.n_splits + split;
  if (n_keys == 0) {
    for (uint32_t g = t; g < group; g += kAttendThreads) {
      a.states[2 * (first_part + g * a.n_splits)] = -3.0e38f;
      a.states[2 * (first_part + g * a.n_splits) + 1] = 0.0f;
    }
    return;
  }
  const float* q = a.qkv + static_cast<size_t>(of_qkv) * a.stride + first_head * key_dim;
  for (uint32_t i = t; i < group * key_dim; i += kAttendThreads) queries[i] = q[i] * a.scale;
  sync_block();

  const WeighedRange weighed{
      a, keys, static_cast<size_t>(kv_head) * a.cache.max_context, first_key, n_keys, group, first_part};
  with_rows(a.cache.k, a.cache.k_type, key_dim, WeighKeys{weighed, queries, logits});
  sync_block();

  // A warp per query: the range's maximum, weights and their sum.
  const uint32_t lane = t % kWarpSize;
  for (uint32_t g = t / kWarpSize; g < group; g += kAttendThreads / kWarpSize) {
    float* own = logits + g * kSplitKeys;
    float most = -3.0e38f, sum = 0.0f;
    for (uint32_t key = lane; key < n_keys; key += kWarpSize) most = larger(most, own[key]);
    most = reduce_max<kWarpSize>(most);
    for (uint32_t key = lane; key < n_keys; key += kWarpSize) {
      own[key] = exp2_fast(own[key] - most);
      sum += own[key];
    }
    sum = reduce_add<kWarpSize>(sum);
    if (lane == 0) {
      a.states[2 * (first_part + g * a.n_splits)] = most;
      a.states[2 * (first_part + g * a.n_splits) + 1] = sum;
    }
  }
  sync_block();

  float* const scratch = logits + group * kSplitKeys;
  // Both widths are multiples of what is loaded at a time.
  with_rows(a.cache.v, a.cache.v_type, value_dim | a.heads.value_stride,
            WeighValues{weighed, logits, scratch});
}

// One head of a row, kValues columns a thread; threads that are left over share the splits.
template <int kValues>
EH2O_DEVICE void combine_head(const CombineArguments& a, CombineShared& s) {
  const uint32_t head = static_cast<uint32_t>(block_x()), row = static_cast<uint32_t>(block_y());
  const uint32_t t = static_cast<uint32_t>(thread_index());
  const size_t first = (static_cast<size_t>(row) * a.n_heads + head) * a.n_splits;
  const float* const states = a.states + 2 * first;
  const float sink = a.sinks ? a.sinks[head] * 1.44269504f : -3.0e38f;
  float most = sink;
  EH2O_UNROLL_4
  for (uint32_t i = t; i < a.n_splits; i += kAttendThreads) most = larger(most, states[2 * i]);
  most = reduce_max<kWarpSize>(most);
  if (t % kWarpSize == 0) s.warps[t / kWarpSize] = most;
  sync_block();
  for (int warp = 0; warp < kAttendThreads / kWarpSize; ++warp) most = larger(most, s.warps[warp]);

  const uint32_t n_pieces = a.value_dim / kValues;
  const uint32_t width = n_pieces < kAttendThreads ? n_pieces : kAttendThreads;
  const uint32_t n_shares = kAttendThreads / width, share = t / width;
  for (uint32_t first_piece = 0; first_piece < n_pieces; first_piece += width) {
    const uint32_t piece = first_piece + t % width;
    const bool is_active = share < n_shares && piece < n_pieces;
    float sums[kValues] = {}, weight = 0.0f;
    for (uint32_t base = 0; base < a.n_splits; base += kAttendThreads) {
      const uint32_t n = a.n_splits - base < kAttendThreads ? a.n_splits - base : kAttendThreads;
      // Without keys a split's part was not written.
      const float l = t < n ? states[2 * (base + t) + 1] : 0.0f;
      const float factor = l != 0.0f ? exp2_fast(states[2 * (base + t)] - most) : 0.0f;
      weight = multiply_add(factor, l, weight);
      sync_block();  // what stood there has been read by all
      s.factors[t] = factor;
      sync_block();
      EH2O_UNROLL_4
      for (uint32_t i = share; i < (is_active ? n : 0); i += n_shares) {
        const float* const part = a.parts + (first + base + i) * a.value_dim + piece * kValues;
        float x[4];
        if constexpr (kValues == 4) {
          load_cached4(x, part, DeviceCacheType::kF32, 0);
        } else {
          x[0] = *part;
        }
        const float f = s.factors[i];
        EH2O_UNROLL
        for (int e = 0; e < kValues; ++e) sums[e] = f != 0.0f ? multiply_add(f, x[e], sums[e]) : sums[e];
      }
    }
    weight = reduce_add<kWarpSize>(weight);
    if (t % kWarpSize == 0) s.warps[t / kWarpSize] = weight;
    EH2O_UNROLL
    for (int e = 0; e < kValues; ++e) s.sums[e][t] = sums[e];
    sync_block();
    if (share == 0 && is_active) {
      float total = a.sinks ? exp2_fast(sink - most) : 0.0f;
      for (int warp = 0; warp < kAttendThreads / kWarpSize; ++warp) total += s.warps[warp];
      EH2O_UNROLL
      for (int e = 0; e < kValues; ++e) {
        float sum = 0.0f;
        for (uint32_t other = 0; other < n_shares; ++other) sum += s.sums[e][other * width + t];
        s.out[t * kValues + e] = divide(sum, total);
      }
    }
    sync_block();
    const uint32_t n_columns = (n_pieces - first_piece < width ? n_pieces - first_piece : width) * kValues;
    const uint32_t column = head * a.value_dim + first_piece * kValues, end = column + n_columns;
    if (a.xq.q) {
      quantise_row<kRowWarps>(a.xq, row, column, end, end, [&](uint32_t i) { return s.out[i - column]; });
    }
    if (!a.out) continue;
    float* const out = a.out + static_cast<size_t>(row) * a.n_heads * a.value_dim + column;
    for (uint32_t i = t; i < n_columns; i += kAttendThreads) out[i] = s.out[i];
  }
}

EH2O_KERNEL(combine_splits, CombineArguments, kAttendThreads) {
  EH2O_SHARED_MEMORY;
  CombineShared& shared = *reinterpret_cast<CombineShared*>(shared_memory);
  if (a.value_dim % 4 == 0) {
    combine_head<4>(a, shared);
  } else {
    combine_head<1>(a, shared);
  }
}

EH2O_KERNEL(join_states, JoinArguments, kAttendThreads) {
  const uint32_t row = static_cast<uint32_t>(block_x() * kAttendThreads + thread_index());
  if (row >= a.n_rows) return;
  const float* states = a.states + 2 * (static_cast<size_t>(row) * a.n_splits + a.first_split);
  const float sink = a.sinks ? a.sinks[row % a.n_heads] * 1.44269504f : -3.0e38f;
  float most = sink;
  for (uint32_t s = 0; s < a.n_joined; ++s) most = larger(most, states[2 * s]);
  float sum = a.sinks ? exp2_fast(sink - most) : 0.0f;
  for (uint32_t s = 0; s < a.n_joined; ++s) {
    sum = multiply_add(exp2_fast(states[2 * s] - most), states[2 * s + 1], sum);
  }
  a.out[2 * static_cast<size_t>(row)] = most;
  a.out[2 * static_cast<size_t>(row) + 1] = sum;
}

}  // namespace edgeh2o::cuda
