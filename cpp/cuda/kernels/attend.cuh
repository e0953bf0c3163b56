// Attention of single queries to the cache (Flash-Decoding: ranges of keys in parallel, put together after).
// Ranges are fixed and put together in order: the result does not depend on what runs when.
#pragma once

#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

inline constexpr int kAttendThreads = 128, kKeyLanes = 8;

EH2O_DEVICE float cached(const void* rows, DeviceCacheType type, size_t i) {
  if (type == DeviceCacheType::kF16) return f32_of_f16(static_cast<const uint16_t*>(rows)[i]);
  return static_cast<const float*>(rows)[i];
}

// Four values of a row from i on, a multiple of 4.
EH2O_DEVICE void load_cached4(float (&out)[4], const void* rows, DeviceCacheType type, size_t i) {
  if (type == DeviceCacheType::kF16) {
    const Words2 w = load_constant8(static_cast<const uint16_t*>(rows) + i);
    out[0] = f32_of_f16(static_cast<uint16_t>(w.x & 0xffffu));
    out[1] = f32_of_f16(static_cast<uint16_t>(w.x >> 16));
    out[2] = f32_of_f16(static_cast<uint16_t>(w.y & 0xffffu));
    out[3] = f32_of_f16(static_cast<uint16_t>(w.y >> 16));
  } else {
    const Words4 w = load_constant16(static_cast<const float*>(rows) + i);
    out[0] = float_of_bits(w.x), out[1] = float_of_bits(w.y);
    out[2] = float_of_bits(w.z), out[3] = float_of_bits(w.w);
  }
}

// tanh as 1 - 2 / (exp(2 x) + 1).
EH2O_DEVICE float soft_capped(float x, float cap) {
  return cap - divide(2.0f * cap, exponential(divide(2.0f * x, cap)) + 1.0f);
}

// Shared memory: queries [group][key_dim], logits [group][kSplitKeys].
EH2O_KERNEL(attend_split, AttendArguments, kAttendThreads) {
  EH2O_SHARED_MEMORY;
  const uint32_t split = static_cast<uint32_t>(block_x()), kv_head = static_cast<uint32_t>(block_y());
  const uint32_t row = static_cast<uint32_t>(block_z()), t = static_cast<uint32_t>(thread_index());
  const uint32_t key_dim = a.heads.key_dim, value_dim = a.heads.value_dim;
  const uint32_t group = a.heads.n_heads / a.heads.n_kv_heads;
  float* const queries = reinterpret_cast<float*>(shared_memory);
  float* const logits = queries + group * key_dim;
  const uint32_t end = a.first + row + 1;
  const uint32_t begin = a.window > 0 && end > a.window ? end - a.window : 0;
  const uint32_t first_key = begin + split * kSplitKeys;
  const uint32_t n_keys = first_key >= end ? 0 : end - first_key < kSplitKeys ? end - first_key : kSplitKeys;
  const size_t first_part =
      (static_cast<size_t>(row) * a.heads.n_heads + kv_head * group) * a.n_splits + split;
  if (n_keys == 0) {
    for (uint32_t g = t; g < group; g += kAttendThreads) {
      a.states[2 * (first_part + g * a.n_splits)] = -3.0e38f;
      a.states[2 * (first_part + g * a.n_splits) + 1] = 0.0f;
    }
    return;
  }
  const float* q = a.qkv + static_cast<size_t>(row) * a.stride + kv_head * group * key_dim;
  for (uint32_t i = t; i < group * key_dim; i += kAttendThreads) queries[i] = q[i] * a.scale;
  sync_block();

  // Eight lanes per key, four queries at a time.
  const size_t first_row = static_cast<size_t>(kv_head) * a.cache.max_context + first_key;
  const uint32_t part = t % kKeyLanes;
  for (uint32_t g0 = 0; g0 < group; g0 += 4) {
    for (uint32_t base = 0; base < n_keys; base += kAttendThreads / kKeyLanes) {
      const uint32_t key = base + t / kKeyLanes;
      float sums[4] = {};
      if (key < n_keys) {
        for (uint32_t i = 4 * part; i < key_dim; i += 4 * kKeyLanes) {
          float k[4];
          load_cached4(k, a.cache.k, a.cache.type, (first_row + key) * key_dim + i);
          for (uint32_t g = 0; g < 4 && g0 + g < group; ++g) {
            for (uint32_t e = 0; e < 4; ++e) {
              sums[g] = multiply_add(queries[(g0 + g) * key_dim + i + e], k[e], sums[g]);
            }
          }
        }
      }
      for (uint32_t g = 0; g < 4 && g0 + g < group; ++g) {
        float logit = reduce_add<kKeyLanes>(sums[g]);
        if (a.soft_cap > 0.0f) logit = soft_capped(logit, a.soft_cap);
        if (part == 0 && key < n_keys) logits[(g0 + g) * kSplitKeys + key] = logit * 1.44269504f;
      }
    }
  }
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

  for (uint32_t i = t; i < group * value_dim; i += kAttendThreads) {
    const uint32_t g = i / value_dim, d = i % value_dim;
    float sum = 0.0f;
    for (uint32_t key = 0; key < n_keys; ++key) {
      sum = multiply_add(logits[g * kSplitKeys + key],
                         cached(a.cache.v, a.cache.type, (first_row + key) * value_dim + d), sum);
    }
    a.parts[(first_part + g * a.n_splits) * value_dim + d] = sum;
  }
}

EH2O_KERNEL(combine_splits, CombineArguments, kAttendThreads) {
  const uint32_t head = static_cast<uint32_t>(block_x()), row = static_cast<uint32_t>(block_y());
  const size_t first = (static_cast<size_t>(row) * a.n_heads + head) * a.n_splits;
  float most = -3.0e38f;
  for (uint32_t s = 0; s < a.n_splits; ++s) most = larger(most, a.states[2 * (first + s)]);
  for (uint32_t d = static_cast<uint32_t>(thread_index()); d < a.value_dim; d += kAttendThreads) {
    float sum = 0.0f, value = 0.0f;
    for (uint32_t s = 0; s < a.n_splits; ++s) {
      const float l = a.states[2 * (first + s) + 1];
      if (l == 0.0f) continue;  // no keys: its part was not written
      const float factor = exp2_fast(a.states[2 * (first + s)] - most);
      sum = multiply_add(factor, l, sum);
      value = multiply_add(factor, a.parts[(first + s) * a.value_dim + d], value);
    }
    a.out[(static_cast<size_t>(row) * a.n_heads + head) * a.value_dim + d] = divide(value, sum);
  }
}

}  // namespace edgeh2o::cuda
