#include "sequence/attention_state.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/index_choice.h"

namespace edgeh2o {
namespace {

constexpr size_t kWriteTokens = 64;  // of one task

KvRows take_rows(CacheType type, size_t n_rows, size_t dim, Arena& arena) {
  EH2O_CHECK(type != CacheType::kQ8_0 || dim % kKvBlock == 0, "cache type q8_0 needs heads of a multiple of ",
             kKvBlock, " dimensions, not of ", dim, "; use --cache-type f16");
  return {type, arena.take<uint8_t>(n_rows * kv_row_bytes(type, dim)), dim};
}

}  // namespace

CacheType parse_cache_type(const std::string& name) {
  if (name == "f16") return CacheType::kF16;
  if (name == "f32") return CacheType::kF32;
  EH2O_CHECK(name == "q8_0", "cache type '", name, "' is not supported; supported: f16, f32, q8_0");
  return CacheType::kQ8_0;
}

CacheTypes parse_cache_types(const std::string& name) {
  const size_t slash = name.find('/');
  const std::string k = name.substr(0, slash), v = slash == std::string::npos ? k : name.substr(slash + 1);
  return {parse_cache_type(k), parse_cache_type(v)};
}

AttentionState::AttentionState(const KernelTable& table, const AttentionHeads& heads, CacheTypes types,
                               size_t max_context, Arena& arena)
    : table_(&table), n_kv_heads_(heads.n_kv_heads), values_are_keys_(heads.values_are_keys) {
  const size_t n_rows = heads.n_kv_heads * max_context;
  kv_.k_head0 = take_rows(types.k, n_rows, heads.key_dim, arena);
  EH2O_CHECK(
      !heads.values_are_keys || types.k == types.v,
      "keys and values of this model are the same rows: they have one cache type; use --cache-type f16");
  kv_.v_head0 = heads.values_are_keys ? kv_.k_head0 : take_rows(types.v, n_rows, heads.value_dim, arena);
  kv_.n_positions = max_context;
  // They choose, and are few: 8 bits would take other tokens for a tenth of the cache.
  if (heads.index.has_own()) {
    const CacheType type = types.k == CacheType::kF32 ? CacheType::kF32 : CacheType::kF16;
    index_ = take_rows(type, max_context, heads.index.key_dim, arena);
    block_tokens_ = heads.index.scored_together();
    if (heads.index.pools_keys() && IndexChoice::chooses(heads.index, max_context)) {
      blocks_ = take_rows(type, max_context / block_tokens_, heads.index.key_dim, arena);
    }
  }
}

void AttentionState::append(MatView<const float> k, MatView<const float> v, MatView<const float> index_k) {
  const size_t key_dim = kv_.k_head0.head_dim, value_dim = kv_.v_head0.head_dim;
  EH2O_CHECK(k.cols == n_kv_heads_ * key_dim && v.cols == n_kv_heads_ * value_dim && v.rows == k.rows,
             "keys and values must have n_kv_heads * head_dim = ", n_kv_heads_ * key_dim, " and ",
             n_kv_heads_ * value_dim, " columns");
  EH2O_CHECK(index_k.cols == index_.head_dim && (!has_index() || index_k.rows == k.rows),
             "keys of the indexer must have ", index_.head_dim, " columns, not ", index_k.cols);
  EH2O_CHECK(k.rows <= kv_.n_positions - n_tokens_, "positions ", n_tokens_, " to ", n_tokens_ + k.rows,
             " exceed the context of ", kv_.n_positions);
  parallel_for(ceil_div(k.rows, kWriteTokens), [&](size_t task, size_t) {
    const size_t begin = task * kWriteTokens, end = std::min(begin + kWriteTokens, k.rows);
    for (size_t i = begin; i < end && has_index(); ++i) {
      table_->store_kv_row_f32(index_.type, index_.row(n_tokens_ + i), index_k.row(i), index_.head_dim);
    }
    for (size_t head = 0; head < n_kv_heads_; ++head) {
      const KvRows keys = kv_.k(head), values = kv_.v(head);
      for (size_t i = begin; i < end; ++i) {
        table_->store_kv_row_f32(keys.type, keys.row(n_tokens_ + i), k.row(i) + head * key_dim, key_dim);
        if (values_are_keys_) continue;
        table_->store_kv_row_f32(values.type, values.row(n_tokens_ + i), v.row(i) + head * value_dim,
                                 value_dim);
      }
    }
  });
  n_tokens_ += k.rows;
}

}  // namespace edgeh2o
