// Rows of the key-value cache as base/kv_rows.h describes them: written, loaded, gathered, added up.

namespace edgeh2o::EH2O_ISA {

// Calls f with the type as a constant.
template <typename F>
EH2O_INLINE void with_cache_type(CacheType type, const F& f) {
  switch (type) {
    case CacheType::kF16:
      return f(std::integral_constant<CacheType, CacheType::kF16>{});
    case CacheType::kF32:
      return f(std::integral_constant<CacheType, CacheType::kF32>{});
    case CacheType::kQ8_0:
      return f(std::integral_constant<CacheType, CacheType::kQ8_0>{});
  }
}

// d = max|x| / 127 in f16, q = rint(x / d). A block with a value that is not finite, or beyond what the
// largest f16 scales, reads as NaN.
inline void store_q8_0_block(uint8_t* out, const float* x) {
  using namespace simd;
  constexpr size_t kVectors = kKvBlock / kLanes;
  F32 values[kVectors], largest = zero(), poison = zero();
  unroll<kVectors>([&](auto i) {
    values[i] = load(x + i * kLanes);
    largest = max(largest, abs(values[i]));
    poison = mul_add(values[i], zero(), poison);  // 0, or NaN, which `max` may lose
  });
  uint16_t scales[kLanes];
  store_f16(scales, set1(reduce_max(largest) / 127.0f + reduce_add(poison)));
  __builtin_memcpy(out, scales, sizeof(uint16_t));
  const float d = reduce_max(load_f16(scales));
  const F32 inverse = set1(d > 0.0f && d <= __FLT_MAX__ ? 1.0f / d : 0.0f);
  int8_t* quants = reinterpret_cast<int8_t*>(out + 2);
  unroll<kVectors>([&](auto i) {
    // A d that is denormal in f16 may be much smaller than max|x| / 127.
    const F32 q = min(max(round_nearest(mul(values[i], inverse)), set1(-127.0f)), set1(127.0f));
    store_s8(quants + i * kLanes, q);
  });
}

// out: one row of the cache; x: [head_dim].
inline void store_kv_row_f32(CacheType type, uint8_t* out, const float* x, size_t head_dim) {
  switch (type) {
    case CacheType::kF16:
      return store_f16_f32(reinterpret_cast<uint16_t*>(out), x, head_dim);
    case CacheType::kF32:
      __builtin_memcpy(out, x, head_dim * sizeof(float));
      return;
    case CacheType::kQ8_0:
      for (size_t dim = 0; dim < head_dim; dim += kKvBlock, out += kKvBlockBytes) {
        store_q8_0_block(out, x + dim);
      }
  }
}

// At most a vector. No memcpy: with a call gcc 12 stores the sums of the caller's loops in every step.
EH2O_INLINE simd::F32 load_f16_n(const uint16_t* p, size_t n) {
  uint16_t tail[simd::kLanes] = {};
  simd::unroll<simd::kLanes>([&](auto i) {
    if (i < n) tail[i] = p[i];
  });
  return simd::load_f16(tail);
}

// Values [dim, dim + kLanes) of a row, or `count` of them followed by zeros.
template <CacheType kType, typename Count>
EH2O_INLINE simd::F32 load_cached(const uint8_t* row, size_t dim, Count count) {
  if constexpr (kType == CacheType::kF32) {
    return load_n(reinterpret_cast<const float*>(row) + dim, count);
  } else if constexpr (kType == CacheType::kQ8_0) {  // whole blocks are whole vectors
    const uint8_t* block = row + dim / kKvBlock * kKvBlockBytes;
    const simd::F32 quants = simd::load_s8(reinterpret_cast<const int8_t*>(block + 2 + dim % kKvBlock));
    return simd::mul(quants, simd::set1_f16(reinterpret_cast<const uint16_t*>(block)));
  } else if constexpr (std::is_same_v<Count, size_t>) {
    return load_f16_n(reinterpret_cast<const uint16_t*>(row) + dim, count);
  } else {
    return simd::load_f16(reinterpret_cast<const uint16_t*>(row) + dim);
  }
}

// Row i of the gathered rows: rows[positions[i]], or rows[i] if positions is null.
template <CacheType kType>
EH2O_INLINE const uint8_t* gathered_row(const void* rows, const int32_t* positions, size_t i,
                                        size_t head_dim) {
  const size_t row = positions ? static_cast<size_t>(positions[i]) : i;
  return static_cast<const uint8_t*>(rows) + row * kv_row_bytes(kType, head_dim);
}

// out[head_dim] = what add_value(out, value) makes of it for all gathered rows, one after another.
template <CacheType kType, typename AddValue>
void add_rows(float* out, const void* rows, const int32_t* positions, size_t n_rows, size_t head_dim,
              const AddValue& add_value) {
  using namespace simd;
  for_each_vector(head_dim, [&](size_t dim, auto count) {
    F32 sum = load_n(out + dim, count);
    for (size_t i = 0; i < n_rows; ++i) {
      sum = add_value(sum, load_cached<kType>(gathered_row<kType>(rows, positions, i, head_dim), dim, count));
    }
    store_n(out + dim, sum, count);
  });
}

// out[head_dim] += the gathered rows.
inline void add_kv_rows_f32(CacheType type, float* out, const void* rows, const int32_t* positions,
                            size_t n_rows, size_t head_dim) {
  with_cache_type(type, [&](auto constant) {
    add_rows<constant>(out, rows, positions, n_rows, head_dim,
                       [](simd::F32 sum, simd::F32 value) { return simd::add(sum, value); });
  });
}

// out[head_dim] += the squares of rows 0 to n_rows - 1.
inline void add_kv_squares_f32(CacheType type, float* out, const void* rows, size_t n_rows, size_t head_dim) {
  with_cache_type(type, [&](auto constant) {
    add_rows<constant>(out, rows, nullptr, n_rows, head_dim,
                       [](simd::F32 sum, simd::F32 value) { return simd::mul_add(value, value, sum); });
  });
}

// Cached rows as they are read: one after another, or those at the listed positions, of which every
// kNeighbourRows are neighbours.
struct RowsInPlace {
  const uint8_t* data = nullptr;
  size_t row_bytes = 0;
  const int32_t* positions = nullptr;

  EH2O_INLINE const uint8_t* at(size_t row) const {
    if (positions == nullptr) return data + row * row_bytes;
    const size_t within = row % kNeighbourRows;
    return data + (static_cast<size_t>(positions[row - within]) + within) * row_bytes;
  }
  RowsInPlace from(size_t row) const {
    return positions ? RowsInPlace{data, row_bytes, positions + row}
                     : RowsInPlace{data + row * row_bytes, row_bytes, nullptr};
  }
};

// Rows [first, end) that are multiplied next: while others are, they come from memory to the level-2 cache.
// Hardware does not see that keys and values take turns.
struct RowsAhead {
  RowsInPlace rows;
  size_t end = 0, first = 0;
  unsigned shift = 0;  // one row of so many, as a power of two, that are multiplied

  // Those that pass i of n fetches: all at once would be more than memory gives, and then it would rest.
  RowsAhead part(size_t i, size_t n) const {
    unsigned log2 = 0;
    while (size_t{2} << log2 <= n) ++log2;
    const size_t n_rows = ((end - first) >> log2) / kNeighbourRows * kNeighbourRows;
    if (i >> log2) return {};
    const size_t begin = first + i * n_rows;
    return {rows, (i + 1) >> log2 ? end : begin + n_rows, begin, shift + log2};
  }
  // While rows [row, row + count) are multiplied, which are at most kNeighbourRows neighbours.
  EH2O_INLINE void fetch(size_t row, size_t count) const {
    const size_t begin = first + (row >> shift), wanted = first + ((row + count) >> shift);
    if (begin >= (wanted < end ? wanted : end)) return;
    const uint8_t* data = rows.at(begin);
    for (size_t i = 0; i < (wanted - begin) * rows.row_bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
  }
};

// Keys fetch those so many behind them too: nobody has fetched the first range of a task, and processors stop
// at the end of every 4 KiB. 2 to 5 % of a token after 8,000 and 32,000, in f16 and q8_0.
inline constexpr size_t kKeysAhead = 32;

}  // namespace edgeh2o::EH2O_ISA
