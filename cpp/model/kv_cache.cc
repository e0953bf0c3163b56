#include "model/kv_cache.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kWriteTokens = 64;  // of one task

size_t head_bytes(const KvCache::Shape& shape) {
  return shape.max_context * kv_row_bytes(shape.type, shape.head_dim);
}

}  // namespace

CacheType parse_cache_type(const std::string& name) {
  if (name == "f16") return CacheType::kF16;
  if (name == "f32") return CacheType::kF32;
  EH2O_CHECK(name == "q8_0", "cache type '", name, "' is not supported; supported: f16, f32, q8_0");
  return CacheType::kQ8_0;
}

size_t KvCache::estimate_bytes(const Shape& shape) {
  EH2O_CHECK(shape.type != CacheType::kQ8_0 || shape.head_dim % kKvBlock == 0,
             "cache type q8_0 needs heads of a multiple of ", kKvBlock, " dimensions, not of ",
             shape.head_dim, "; use --cache-type f16");
  return 2 * shape.n_layers * shape.n_kv_heads * head_bytes(shape);
}

KvCache::KvCache(const KernelTable& table, const Shape& shape)
    : table_(&table), shape_(shape), buffer_(estimate_bytes(shape)) {}

LayerKv KvCache::view(size_t layer) const {
  const size_t head = head_bytes(shape_);
  uint8_t* keys = buffer_.data() + layer * shape_.n_kv_heads * head;
  return {
      {shape_.type, keys, shape_.head_dim}, {shape_.type, keys + buffer_.size() / 2, shape_.head_dim}, head};
}

void KvCache::write(size_t layer, size_t first_position, MatView<const float> k, MatView<const float> v) {
  const size_t dim = shape_.head_dim;
  EH2O_CHECK(layer < shape_.n_layers, "layer ", layer, " does not exist; the cache has ", shape_.n_layers);
  EH2O_CHECK(k.cols == shape_.n_kv_heads * dim && v.cols == k.cols && v.rows == k.rows,
             "keys and values must have n_kv_heads * head_dim = ", shape_.n_kv_heads * dim, " columns");
  EH2O_CHECK(first_position + k.rows <= shape_.max_context, "positions ", first_position, " to ",
             first_position + k.rows, " exceed the context of ", shape_.max_context);
  const LayerKv kv = view(layer);
  parallel_for(ceil_div(k.rows, kWriteTokens), [&](size_t task, size_t) {
    const size_t begin = task * kWriteTokens, end = std::min(begin + kWriteTokens, k.rows);
    for (size_t head = 0; head < shape_.n_kv_heads; ++head) {
      for (size_t i = begin; i < end; ++i) {
        const size_t position = first_position + i;
        table_->store_kv_row_f32(shape_.type, kv.k(head).row(position), k.row(i) + head * dim, dim);
        table_->store_kv_row_f32(shape_.type, kv.v(head).row(position), v.row(i) + head * dim, dim);
      }
    }
  });
}

}  // namespace edgeh2o
