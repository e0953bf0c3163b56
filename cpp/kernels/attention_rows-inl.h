// Attention of a few query rows to rows where they lie in the cache, each read once for all rows: decode.
// Rows of q8_0 are multiplied as integers (attention_blocks-inl.h), the others as floats.

namespace edgeh2o::EH2O_ISA {

// Register blocks of rows x keys (logits) and rows x vectors (values).
inline constexpr size_t kBlockRows = 4, kSumBlockRows = simd::kLanes >= 16 ? 6 : kBlockRows;
template <size_t kRows>
inline constexpr size_t kScoreKeys = kRows < 4 || kHasManyRegisters ? 4 : 2;
template <size_t kRows>
inline constexpr size_t kSumVectors = kRows < 3 || kHasManyRegisters ? 4 : 2;

template <CacheType kType, size_t kRows, size_t kKeys>
EH2O_INLINE void dot_rows(float* out, size_t out_stride, const float* q, size_t q_stride, const uint8_t* k,
                          size_t head_dim) {
  using namespace simd;
  F32 sum[kRows][kKeys];
  unroll<kRows>([&](auto r) { unroll<kKeys>([&](auto i) { sum[r][i] = zero(); }); });
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 keys[kKeys];
    unroll<kKeys>(
        [&](auto i) { keys[i] = load_cached<kType>(k + i * kv_row_bytes(kType, head_dim), dim, count); });
    unroll<kRows>([&](auto r) {
      const F32 query = load_n(q + r * q_stride + dim, count);
      unroll<kKeys>([&](auto i) { sum[r][i] = mul_add(query, keys[i], sum[r][i]); });
    });
  });
  if constexpr (kKeys == 1) {
    // In the order of several keys: how many go together depends on the rows.
    unroll<kRows>([&](auto r) {
      float four[4];
      store_sums(four, sum[r][0], zero(), zero(), zero());
      out[r * out_stride] = four[0];
    });
  } else {
    constexpr size_t kRowsAtOnce = 4 / kKeys;
    unroll<kRows / kRowsAtOnce>([&](auto i) {
      constexpr size_t kRow = i * kRowsAtOnce, kLast = kRow + kRowsAtOnce - 1;
      float four[4];
      store_sums(four, sum[kRow][0], sum[kRow][1], sum[kLast][kKeys - 2], sum[kLast][kKeys - 1]);
      unroll<kRowsAtOnce>([&](auto r) {
        __builtin_memcpy(out + (kRow + r) * out_stride, four + r * kKeys, kKeys * sizeof(float));
      });
    });
  }
}

// The kVectors vectors of the output from `dim` on.
template <CacheType kType, size_t kRows, size_t kVectors, typename Count>
EH2O_INLINE void sum_values(float* o, size_t o_stride, const float* weights, size_t weight_stride,
                            const RowsInPlace& v, size_t n_keys, size_t dim, Count count,
                            const RowsAhead& ahead) {
  using namespace simd;
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { sum[r][i] = zero(); }); });
  const auto add_key = [&](size_t key, const uint8_t* row) EH2O_INLINE_LAMBDA {
    F32 values[kVectors];
    unroll<kVectors>([&](auto i) { values[i] = load_cached<kType>(row, dim + i * kLanes, count); });
    unroll<kRows>([&](auto r) {
      const F32 weight = keep(set1(weights[r * weight_stride + key]));
      unroll<kVectors>([&](auto i) { sum[r][i] = mul_add(weight, values[i], sum[r][i]); });
    });
  };
  size_t key = 0;
  for (; key + kNeighbourRows <= n_keys; key += kNeighbourRows) {
    ahead.fetch(key, kNeighbourRows);
    const uint8_t* row = v.at(key);
    unroll<kNeighbourRows>([&](auto i) { add_key(key + i, row + i * v.row_bytes); });
  }
  for (; key < n_keys; ++key) {
    add_key(key, v.at(key));
  }
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto i) { store_n(o + r * o_stride + dim + i * kLanes, sum[r][i], count); });
  });
}

// Logits of the keys from `first` on.
template <CacheType kType, size_t kRows>
void score_rows(float* out, size_t out_stride, const float* q, const RowsInPlace& k, size_t first,
                size_t n_keys, size_t head_dim, const RowsAhead& ahead) {
  if constexpr (kType == CacheType::kQ8_0) {
    if (n_keys >= simd::kLanes) return score_blocks<kRows>(out, out_stride, q, k, n_keys, head_dim, ahead);
  }
  size_t key = first;
  constexpr size_t kKeys = kScoreKeys<kRows>;
  static_assert(kNeighbourRows % kKeys == 0);
  for (; key + kKeys <= n_keys; key += kKeys) {
    ahead.fetch(key, kKeys);
    if (ahead.end > 0) RowsAhead{k, n_keys}.fetch(key + kKeysAhead, kKeys);
    dot_rows<kType, kRows, kKeys>(out + key, out_stride, q, head_dim, k.at(key), head_dim);
  }
  for (; key < n_keys; ++key) {
    dot_rows<kType, kRows, 1>(out + key, out_stride, q, head_dim, k.at(key), head_dim);
  }
}

template <CacheType kType>
void score_tile(const AttentionTile& tile, const RowsInPlace& k, size_t n_keys, const RowsAhead& ahead) {
  size_t n_scored = 0;
  if constexpr (kHasKeyColumns<kType>) {
    if (take_columns(tile.n_rows, tile.key_dim)) {
      n_scored = score_columns<simd::HalfColumns>(tile, k, n_keys, ahead);
    }
  }
  const size_t n_blocks = (tile.n_rows + kBlockRows - 1) / kBlockRows;
  size_t block = 0;
  for_each_row_block<kBlockRows>(tile.n_rows, [&](size_t row, auto n) {
    score_rows<kType, n>(tile.weights + row * tile.weight_stride, tile.weight_stride,
                         tile.q + row * tile.key_dim, k, n_scored, n_keys, tile.key_dim,
                         ahead.part(block++, n_blocks));
  });
}

template <CacheType kType, size_t kRows>
void sum_rows(float* o, size_t o_stride, const float* weights, size_t weight_stride, const RowsInPlace& v,
              size_t n_keys, size_t head_dim, const RowsAhead& ahead) {
  if constexpr (kType == CacheType::kQ8_0) {
    sum_blocks<kRows>(o, o_stride, weights, weight_stride, v, n_keys, head_dim, ahead);
  } else {
    constexpr size_t kVectors = kSumVectors<kRows>, kDims = kVectors * simd::kLanes;
    const size_t n_passes = head_dim / kDims;
    size_t dim = 0;
    for (; dim + kDims <= head_dim; dim += kDims) {
      sum_values<kType, kRows, kVectors>(o, o_stride, weights, weight_stride, v, n_keys, dim,
                                         simd::Index<simd::kLanes>{}, ahead.part(dim / kDims, n_passes));
    }
    for_each_vector(head_dim - dim, [&](size_t i, auto count) {
      sum_values<kType, kRows, 1>(o, o_stride, weights, weight_stride, v, n_keys, dim + i, count,
                                  dim + i == 0 ? ahead : RowsAhead{});
    });
  }
}

template <CacheType kType>
void sum_tile(const AttentionTile& tile, const RowsInPlace& v, size_t n_keys, const RowsAhead& ahead) {
  const size_t n_blocks = (tile.n_rows + kSumBlockRows - 1) / kSumBlockRows;
  size_t block = 0;
  for_each_row_block<kSumBlockRows>(tile.n_rows, [&](size_t row, auto n) {
    sum_rows<kType, n>(tile.o + row * tile.o_stride, tile.o_stride, tile.weights + row * tile.weight_stride,
                       tile.weight_stride, v, n_keys, tile.value_dim, ahead.part(block++, n_blocks));
  });
}

// Fills tile.weights, o, m and l like attention_tile_f32, without padded rows: every row sees all n_keys >= 1
// rows: those of k and v one after another, or, of n_keys that divide by four, those at the positions, every
// four of which are neighbours. biases: [n_keys] natural logarithms added to the logits, or null. distance:
// as AttentionPiece has it, where the tile has slopes; keys lie one after another then. The n_next keys that
// follow them are those of the thread's next call: keys and values take turns at the memory.
inline void attention_rows_f32(CacheType k_type, CacheType v_type, const AttentionTile& tile, const void* k,
                               const void* v, const int32_t* positions, size_t n_keys, const float* biases,
                               ptrdiff_t distance, size_t n_next) {
  const RowsInPlace keys{static_cast<const uint8_t*>(k), kv_row_bytes(k_type, tile.key_dim), positions},
      values{static_cast<const uint8_t*>(v), kv_row_bytes(v_type, tile.value_dim), positions};
  with_cache_type(k_type, [&](auto type) { score_tile<type>(tile, keys, n_keys, {values, n_keys}); });
  for (size_t row = 0; row < tile.n_rows; ++row) {
    float* logits = tile.weights + row * tile.weight_stride;
    if (tile.soft_cap > 0.0f) soft_cap_f32(logits, tile.soft_cap, n_keys);
    if (biases) blend_row(logits, biases, 1.0f, kLog2E, n_keys);
    if (tile.slopes) {
      const auto query = static_cast<ptrdiff_t>(row / tile.group_size);
      subtract_distances(logits, tile.slopes[row % tile.group_size], distance + query, n_keys);
    }
    softmax_row(logits, n_keys, tile.m + row, tile.l + row);
  }
  with_cache_type(v_type, [&](auto type) {
    sum_tile<type>(tile, values, n_keys, {keys.from(n_keys), n_next});
  });
}

}  // namespace edgeh2o::EH2O_ISA
