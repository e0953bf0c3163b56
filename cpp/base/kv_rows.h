// Views of cached keys and values: rows [position][head_dim] of one KV head, or of all KV heads of a layer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

enum class CacheType : uint8_t { kF16, kF32, kQ8_0 };

// Of keys and of values.
struct CacheTypes {
  CacheType k, v;
};

// Listed rows are read in place where every so many, from a multiple of it on, are neighbours: a page.
inline constexpr size_t kNeighbourRows = 4;

// Rows of kQ8_0 are blocks as in GGUF files: a scale d (f16), then 32 quants q (int8); a value is d * q.
inline constexpr size_t kKvBlock = 32, kKvBlockBytes = 2 + kKvBlock;

// head_dim is a multiple of kKvBlock for kQ8_0.
constexpr size_t kv_row_bytes(CacheType type, size_t head_dim) {
  switch (type) {
    case CacheType::kF16:
      return 2 * head_dim;
    case CacheType::kF32:
      return 4 * head_dim;
    case CacheType::kQ8_0:
      return head_dim / kKvBlock * kKvBlockBytes;
  }
  return 0;
}

struct KvRows {
  CacheType type = CacheType::kF16;
  uint8_t* data = nullptr;
  size_t head_dim = 0;
  uint8_t* row(size_t position) const { return data + position * kv_row_bytes(type, head_dim); }
};

struct LayerKv {
  KvRows k_head0, v_head0;
  size_t n_positions = 0;  // rows between two KV heads
  // [n_heads] a logit per query head that takes part in every softmax and has no value, or null.
  const float* sinks = nullptr;
  KvRows k(size_t kv_head) const {
    return {k_head0.type, k_head0.row(kv_head * n_positions), k_head0.head_dim};
  }
  // What lies from a position on, as if it were the first.
  LayerKv from(size_t position) const {
    LayerKv rest = *this;
    rest.k_head0.data = k_head0.row(position);
    rest.v_head0.data = v_head0.row(position);
    return rest;
  }
  KvRows v(size_t kv_head) const {
    return {v_head0.type, v_head0.row(kv_head * n_positions), v_head0.head_dim};
  }
};

}  // namespace edgeh2o
