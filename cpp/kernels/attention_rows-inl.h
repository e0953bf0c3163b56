// Attention of a few query rows to cached rows as they lie in the cache, each read once for all rows: decode.

namespace edgeh2o::EH2O_ISA {

// Register block of rows x keys (logits) and rows x vectors (values).
inline constexpr size_t kAttentionRows = 4;
inline constexpr size_t kAttentionKeys = simd::kGemmF32Rows * simd::kGemmF32Vectors >= 16 ? 4 : 2;

template <size_t kRows, size_t kKeys, typename T>
EH2O_INLINE void dot_rows(float* out, size_t out_stride, const float* q, size_t q_stride, const T* k,
                          size_t head_dim) {
  using namespace simd;
  F32 sum[kRows][kKeys];
  unroll<kRows>([&](auto r) { unroll<kKeys>([&](auto i) { sum[r][i] = zero(); }); });
  for_each_vector(head_dim, [&](size_t dim, auto count) {
    F32 keys[kKeys];
    unroll<kKeys>([&](auto i) { keys[i] = load_cached(k + i * head_dim + dim, count); });
    unroll<kRows>([&](auto r) {
      const F32 query = load_n(q + r * q_stride + dim, count);
      unroll<kKeys>([&](auto i) { sum[r][i] = mul_add(query, keys[i], sum[r][i]); });
    });
  });
  unroll<kRows>(
      [&](auto r) { unroll<kKeys>([&](auto i) { out[r * out_stride + i] = reduce_add(sum[r][i]); }); });
}

template <size_t kRows, size_t kVectors, typename T, typename Count>
EH2O_INLINE void sum_values(float* o, size_t o_stride, const float* weights, size_t weight_stride, const T* v,
                            size_t n_keys, size_t head_dim, Count count) {
  using namespace simd;
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { sum[r][i] = zero(); }); });
  for (size_t key = 0; key < n_keys; ++key, v += head_dim) {
    F32 values[kVectors];
    unroll<kVectors>([&](auto i) { values[i] = load_cached(v + i * kLanes, count); });
    unroll<kRows>([&](auto r) {
      const F32 weight = set1(weights[r * weight_stride + key]);
      unroll<kVectors>([&](auto i) { sum[r][i] = mul_add(weight, values[i], sum[r][i]); });
    });
  }
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto i) { store_n(o + r * o_stride + i * kLanes, sum[r][i], count); });
  });
}

template <size_t kRows, typename T>
void attention_row_block(const AttentionTile& tile, size_t row, const T* k, const T* v, size_t n_keys) {
  constexpr size_t kVectors = 4;
  const size_t head_dim = tile.head_dim;
  float* weights = tile.weights + row * tile.weight_stride;
  const float* q = tile.q + row * head_dim;
  size_t key = 0;
  for (; key + kAttentionKeys <= n_keys; key += kAttentionKeys) {
    dot_rows<kRows, kAttentionKeys>(weights + key, tile.weight_stride, q, head_dim, k + key * head_dim,
                                    head_dim);
  }
  for (; key < n_keys; ++key) {
    dot_rows<kRows, 1>(weights + key, tile.weight_stride, q, head_dim, k + key * head_dim, head_dim);
  }
  for (size_t r = 0; r < kRows; ++r) {
    if (tile.soft_cap > 0.0f) soft_cap_f32(weights + r * tile.weight_stride, tile.soft_cap, n_keys);
    softmax_row(weights + r * tile.weight_stride, n_keys, tile.m + row + r, tile.l + row + r);
  }
  float* o = tile.o + row * tile.o_stride;
  size_t dim = 0;
  for (; dim + kVectors * simd::kLanes <= head_dim; dim += kVectors * simd::kLanes) {
    sum_values<kRows, kVectors>(o + dim, tile.o_stride, weights, tile.weight_stride, v + dim, n_keys,
                                head_dim, simd::Index<simd::kLanes>{});
  }
  for_each_vector(head_dim - dim, [&](size_t i, auto count) {
    sum_values<kRows, 1>(o + dim + i, tile.o_stride, weights, tile.weight_stride, v + dim + i, n_keys,
                         head_dim, count);
  });
}

template <typename T>
void attention_all_rows(const AttentionTile& tile, const T* k, const T* v, size_t n_keys) {
  size_t row = 0;
  for (; row + kAttentionRows <= tile.n_rows; row += kAttentionRows) {
    attention_row_block<kAttentionRows>(tile, row, k, v, n_keys);
  }
  switch (tile.n_rows - row) {
    case 3:
      return attention_row_block<3>(tile, row, k, v, n_keys);
    case 2:
      return attention_row_block<2>(tile, row, k, v, n_keys);
    case 1:
      return attention_row_block<1>(tile, row, k, v, n_keys);
    default:
      return;
  }
}

// Fills tile.weights, o, m and l like attention_tile_f32, without padded rows: every row sees all n_keys >= 1
// rows of k and v [n_keys][head_dim].
inline void attention_rows_f32(CacheType type, const AttentionTile& tile, const void* k, const void* v,
                               size_t n_keys) {
  with_cache_type(type, [&](auto* element) {
    using Pointer = decltype(element);
    attention_all_rows(tile, static_cast<Pointer>(k), static_cast<Pointer>(v), n_keys);
  });
}

}  // namespace edgeh2o::EH2O_ISA
