// Attention of a few query rows to cached rows as they lie in the cache, each read once for all rows: decode.

namespace edgeh2o::EH2O_ISA {

// Register block of rows x keys (logits) and rows x vectors (values).
inline constexpr size_t kAttentionRows = 4;
inline constexpr size_t kAttentionKeys = simd::kGemmF32Rows * simd::kGemmF32Vectors >= 16 ? 4 : 2;

template <CacheType kType, size_t kRows, size_t kKeys>
EH2O_INLINE void dot_rows(float* out, size_t out_stride, const float* q, size_t q_stride, const uint8_t* k,
                          size_t head_dim) {
  using namespace simd;
  F32 sum[kRows][kKeys];
  unroll<kRows>([&](auto r) { unroll<kKeys>([&](auto i) { sum[r][i] = zero(); }); });
  for_each_vector(head_dim, [&](size_t dim, auto count) {
    F32 keys[kKeys];
    unroll<kKeys>(
        [&](auto i) { keys[i] = load_cached<kType>(k + i * kv_row_bytes(kType, head_dim), dim, count); });
    unroll<kRows>([&](auto r) {
      const F32 query = load_n(q + r * q_stride + dim, count);
      unroll<kKeys>([&](auto i) { sum[r][i] = mul_add(query, keys[i], sum[r][i]); });
    });
  });
  unroll<kRows>(
      [&](auto r) { unroll<kKeys>([&](auto i) { out[r * out_stride + i] = reduce_add(sum[r][i]); }); });
}

// The kVectors vectors of the output from `dim` on.
template <CacheType kType, size_t kRows, size_t kVectors, typename Count>
EH2O_INLINE void sum_values(float* o, size_t o_stride, const float* weights, size_t weight_stride,
                            const uint8_t* v, size_t n_keys, size_t head_dim, size_t dim, Count count) {
  using namespace simd;
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { sum[r][i] = zero(); }); });
  for (size_t key = 0; key < n_keys; ++key, v += kv_row_bytes(kType, head_dim)) {
    F32 values[kVectors];
    unroll<kVectors>([&](auto i) { values[i] = load_cached<kType>(v, dim + i * kLanes, count); });
    unroll<kRows>([&](auto r) {
      const F32 weight = set1(weights[r * weight_stride + key]);
      unroll<kVectors>([&](auto i) { sum[r][i] = mul_add(weight, values[i], sum[r][i]); });
    });
  }
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto i) { store_n(o + r * o_stride + dim + i * kLanes, sum[r][i], count); });
  });
}

template <CacheType kType, size_t kRows>
void attention_row_block(const AttentionTile& tile, size_t row, const uint8_t* k, const uint8_t* v,
                         size_t n_keys) {
  constexpr size_t kVectors = 4;
  const size_t key_dim = tile.key_dim, value_dim = tile.value_dim, row_bytes = kv_row_bytes(kType, key_dim);
  float* weights = tile.weights + row * tile.weight_stride;
  const float* q = tile.q + row * key_dim;
  size_t key = 0;
  for (; key + kAttentionKeys <= n_keys; key += kAttentionKeys) {
    dot_rows<kType, kRows, kAttentionKeys>(weights + key, tile.weight_stride, q, key_dim, k + key * row_bytes,
                                           key_dim);
  }
  for (; key < n_keys; ++key) {
    dot_rows<kType, kRows, 1>(weights + key, tile.weight_stride, q, key_dim, k + key * row_bytes, key_dim);
  }
  for (size_t r = 0; r < kRows; ++r) {
    if (tile.soft_cap > 0.0f) soft_cap_f32(weights + r * tile.weight_stride, tile.soft_cap, n_keys);
    softmax_row(weights + r * tile.weight_stride, n_keys, tile.m + row + r, tile.l + row + r);
  }
  float* o = tile.o + row * tile.o_stride;
  size_t dim = 0;
  for (; dim + kVectors * simd::kLanes <= value_dim; dim += kVectors * simd::kLanes) {
    sum_values<kType, kRows, kVectors>(o, tile.o_stride, weights, tile.weight_stride, v, n_keys, value_dim,
                                       dim, simd::Index<simd::kLanes>{});
  }
  for_each_vector(value_dim - dim, [&](size_t i, auto count) {
    sum_values<kType, kRows, 1>(o, tile.o_stride, weights, tile.weight_stride, v, n_keys, value_dim, dim + i,
                                count);
  });
}

template <CacheType kType>
void attention_all_rows(const AttentionTile& tile, const uint8_t* k, const uint8_t* v, size_t n_keys) {
  size_t row = 0;
  for (; row + kAttentionRows <= tile.n_rows; row += kAttentionRows) {
    attention_row_block<kType, kAttentionRows>(tile, row, k, v, n_keys);
  }
  switch (tile.n_rows - row) {
    case 3:
      return attention_row_block<kType, 3>(tile, row, k, v, n_keys);
    case 2:
      return attention_row_block<kType, 2>(tile, row, k, v, n_keys);
    case 1:
      return attention_row_block<kType, 1>(tile, row, k, v, n_keys);
    default:
      return;
  }
}

// Fills tile.weights, o, m and l like attention_tile_f32, without padded rows: every row sees all n_keys >= 1
// rows of k and v.
inline void attention_rows_f32(CacheType type, const AttentionTile& tile, const void* k, const void* v,
                               size_t n_keys) {
  with_cache_type(type, [&](auto constant) {
    attention_all_rows<constant>(tile, static_cast<const uint8_t*>(k), static_cast<const uint8_t*>(v),
                                 n_keys);
  });
}

}  // namespace edgeh2o::EH2O_ISA
