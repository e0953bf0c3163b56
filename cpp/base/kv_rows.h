// Views of cached keys and values: rows [position][head_dim] of one KV head, or of all KV heads of a layer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

enum class CacheType : uint8_t { kF16, kF32 };

constexpr size_t cache_type_bytes(CacheType type) { return type == CacheType::kF16 ? 2 : 4; }

struct KvRows {
  CacheType type = CacheType::kF16;
  uint8_t* data = nullptr;
  size_t head_dim = 0;
  uint8_t* row(size_t position) const { return data + position * head_dim * cache_type_bytes(type); }
};

struct LayerKv {
  KvRows k_head0, v_head0;
  size_t head_stride = 0;  // bytes between two KV heads
  KvRows k(size_t kv_head) const {
    return {k_head0.type, k_head0.data + kv_head * head_stride, k_head0.head_dim};
  }
  KvRows v(size_t kv_head) const {
    return {v_head0.type, v_head0.data + kv_head * head_stride, v_head0.head_dim};
  }
};

}  // namespace edgeh2o
