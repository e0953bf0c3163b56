// Keys and values of every position of a prompt: [layer][kv_head][position] rows, in one allocation.
#pragma once

#include <string>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"

namespace edgeh2o {

// "f16", "f32" or "q8_0"; anything else throws std::invalid_argument.
CacheType parse_cache_type(const std::string& name);

class KvCache {
 public:
  struct Shape {
    size_t n_layers, n_kv_heads, head_dim, max_context;
    CacheType type = CacheType::kF16;
  };

  // Throws std::invalid_argument for a head_dim that the type cannot store.
  KvCache(const KernelTable& table, const Shape& shape);
  static size_t estimate_bytes(const Shape& shape);

  const Shape& shape() const { return shape_; }
  size_t n_bytes() const { return buffer_.size(); }
  LayerKv view(size_t layer) const;

  // Stores k and v [n_tokens][n_kv_heads * head_dim] as the rows of positions first_position, first_position
  // + 1, ...
  void write(size_t layer, size_t first_position, MatView<const float> k, MatView<const float> v);

 private:
  const KernelTable* table_;
  Shape shape_;
  AlignedBuffer buffer_;  // all keys, then all values
};

}  // namespace edgeh2o
