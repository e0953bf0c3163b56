// Attention of a few query rows to cached rows of blocks of 8 bits, multiplied as integers: queries and
// weights are rounded to 16 bits, far finer than the cache.
//
// Bounds, besides the rounding of float sums, with u = 1 / (2 * kLargestX):
// - logits: a query is off by at most u max|q|, so a logit by u max|q| sum|k|;
// - outputs before they are divided by the sum of weights: of every kIntegerKeys keys, a weight times its
//   block's scale d is off by at most u max d, so an output by kIntegerKeys u 127 max d; if the errors are
//   random, by at most sqrt(kIntegerKeys) 127 / kLargestX = 1/16 of what the values themselves were rounded.

namespace edgeh2o::EH2O_ISA {

// NEON and VNNI add up high and low bytes of x; those of queries are signed.
inline constexpr float kLargestX = 127 * 256 + 127;
// Sums of so many products of kLargestX and 127 stay below 2^31.
inline constexpr size_t kIntegerKeys = 256;
inline constexpr size_t kMaxHeadDim = 1024;
inline constexpr bool kHasManyRegisters = simd::kGemmF32Rows * simd::kGemmF32Vectors >= 16;

// x[n] * factor as what KeyDot multiplies, zeros up to whole vectors behind; 2 bytes each.
EH2O_INLINE void store_integers(uint8_t* out, const float* x, size_t n, simd::F32 factor) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    F32 v = mul(load_n(x + i, count), factor);
    v = min(max(v, set1(-kLargestX)), set1(kLargestX));  // and what is not a number becomes one
    KeyDot::store_x(out + 2 * i, v);
  });
}

// The factor that makes integers of x[n], and the unit that they then count; the unit is not finite if a
// value is not.
EH2O_INLINE float integer_factor(const float* x, size_t n, float* unit) {
  using namespace simd;
  F32 largest = zero(), poison = zero();
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 v = load_n(x + i, count);
    largest = max(largest, abs(v));
    poison = mul_add(v, zero(), poison);
  });
  const float top = reduce_max(largest);
  *unit = top / kLargestX + reduce_add(poison);
  return top > 0.0f && top <= __FLT_MAX__ ? kLargestX / top : 0.0f;
}

// Logits of the kLanes keys from `first` on. x: [kRows][head_dim] integers of the queries, in the given
// units; starts: [kRows][head_dim / kKvBlock] of their sums.
template <size_t kRows>
EH2O_INLINE void dot_blocks(float* out, size_t out_stride, const uint8_t* x, const uint8_t* starts,
                            const float* units, const RowsInPlace& k, size_t first, size_t head_dim) {
  using namespace simd;
  static_assert(kLanes % kNeighbourRows == 0);
  const uint8_t* neighbours[kLanes / kNeighbourRows];
  unroll<kLanes / kNeighbourRows>([&](auto i) { neighbours[i] = k.at(first + i * kNeighbourRows); });
  F32 sum[kRows], poison = zero();  // a scale that is not finite makes no logit of any sign
  unroll<kRows>([&](auto r) { sum[r] = zero(); });
  for (size_t dim = 0, offset = 0; dim < head_dim; dim += kKvBlock, offset += kKvBlockBytes) {
    const auto block = [&](size_t row) {
      return neighbours[row / kNeighbourRows] + row % kNeighbourRows * k.row_bytes + offset;
    };
    I8 columns[8];
    load_columns(columns, [&](size_t row) { return block(row) + 2; });
    uint16_t scales[kLanes];
    unroll<kLanes>([&](auto i) { __builtin_memcpy(scales + i, block(i), 2); });
    KeyDot::Acc acc[kRows];
    unroll<kRows>([&](auto r) {
      acc[r] = KeyDot::start(starts + (r * head_dim + dim) / kKvBlock * KeyDot::kStartBytes);
    });
    unroll<8>([&](auto word) {
      const auto bytes = KeyDot::widen(columns[word]);
      unroll<kRows>(
          [&](auto r) { acc[r] = KeyDot::add(acc[r], bytes, x + 2 * (r * head_dim + dim + 4 * word)); });
    });
    const F32 scale = load_f16(scales);
    poison = mul_add(scale, zero(), poison);
    unroll<kRows>([&](auto r) { sum[r] = mul_add(KeyDot::finish(acc[r]), scale, sum[r]); });
  }
  unroll<kRows>([&](auto r) { store(out + r * out_stride, mul_add(sum[r], set1(units[r]), poison)); });
}

// n_keys >= kLanes.
template <size_t kRows>
void score_blocks(float* out, size_t out_stride, const float* q, const RowsInPlace& k, size_t n_keys,
                  size_t head_dim, const RowsAhead& ahead) {
  using namespace simd;
  alignas(64) uint8_t x[kRows * kMaxHeadDim * 2];
  uint8_t starts[kRows * kMaxHeadDim / kKvBlock * KeyDot::kStartBytes + 1];
  float units[kRows];
  for (size_t r = 0; r < kRows; ++r) {
    const float factor = integer_factor(q + r * head_dim, head_dim, units + r);
    store_integers(x + 2 * r * head_dim, q + r * head_dim, head_dim, set1(factor));
  }
  for (size_t block = 0; block < kRows * head_dim / kKvBlock; ++block) {
    KeyDot::store_start(starts + block * KeyDot::kStartBytes, x + 2 * kKvBlock * block);
  }
  for (size_t key = 0; key < n_keys; key += kLanes) {
    const size_t first = key + kLanes <= n_keys ? key : n_keys - kLanes;  // some twice
    for (size_t i = 0; i < kLanes; i += kNeighbourRows) {
      ahead.fetch(key + i, kNeighbourRows);
      if (ahead.end > 0) RowsAhead{k, n_keys}.fetch(key + i + kKeysAhead, kNeighbourRows);
    }
    dot_blocks<kRows>(out + first, out_stride, x, starts, units, k, first, head_dim);
  }
}

// The scales of the blocks at `offset` in n_keys rows.
EH2O_INLINE void load_scales(uint16_t* out, const RowsInPlace& rows, size_t offset, size_t n_keys) {
  size_t key = 0;
  for (; key + kNeighbourRows <= n_keys; key += kNeighbourRows) {
    const uint8_t* row = rows.at(key) + offset;
    simd::unroll<kNeighbourRows>(
        [&](auto i) { __builtin_memcpy(out + key + i, row + i * rows.row_bytes, 2); });
  }
  for (; key < n_keys; ++key) __builtin_memcpy(out + key, rows.at(key) + offset, 2);
}

// x = weights times the scales of their values, which take kRows rows of 2 * kIntegerKeys bytes. Returns the
// unit that they count.
template <size_t kRows>
EH2O_INLINE float store_scaled_weights(uint8_t* x, const float* weights, size_t weight_stride,
                                       const RowsInPlace& v, size_t offset, size_t n_keys) {
  using namespace simd;
  uint16_t halves[kIntegerKeys];
  alignas(64) float scales[kIntegerKeys];
  load_scales(halves, v, offset, n_keys);
  load_f32_f16(scales, halves, n_keys);
  float unit;
  const float factor = integer_factor(scales, n_keys, &unit);
  for_each_vector(n_keys, [&](size_t key, auto count) {
    const F32 scale = mul(load_n(scales + key, count), set1(factor));
    unroll<kRows>([&](auto r) {
      const F32 product = mul(load_n(weights + r * weight_stride + key, count), scale);
      ValueDot::store_x(x + 2 * (r * kIntegerKeys + key), min(max(product, zero()), set1(kLargestX)));
    });
  });
  return unit;
}

// Vectors of a block's columns whose sums stay in registers.
template <size_t kRows>
constexpr size_t block_part() {
  constexpr size_t kSums = sizeof(simd::ValueDot::Acc) / sizeof(simd::I32);
  size_t n = kKvBlock / simd::kLanes;
  while (n > 2 && kRows * n * kSums > (kHasManyRegisters ? 24 : 8)) n /= 2;
  return n;
}

// Vectors [kFirst, kFirst + kVectors) of the columns of a block: o (+)= x times the quants of n_keys rows.
template <size_t kRows, size_t kFirst, size_t kVectors>
EH2O_INLINE void sum_block_part(float* o, size_t o_stride, const uint8_t* x, float unit, const RowsInPlace& v,
                                size_t offset, size_t n_keys, bool accumulate, const RowsAhead& ahead) {
  using namespace simd;
  static_assert(kNeighbourRows == 4);  // rows that are multiplied at a time
  const size_t row_bytes = v.row_bytes;
  ValueDot::Acc acc[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { acc[r][i] = ValueDot::start(); }); });
  const auto add_keys = [&](size_t key, const uint8_t* const(&rows)[4]) EH2O_INLINE_LAMBDA {
    I8 columns[kVectors];
    load_interleaved<kFirst>(columns, rows);
    unroll<kVectors>([&](auto i) {
      const auto bytes = ValueDot::widen(columns[i]);
      unroll<kRows>(
          [&](auto r) { acc[r][i] = ValueDot::add(acc[r][i], bytes, x + 2 * (r * kIntegerKeys + key)); });
    });
  };
  size_t key = 0;
  for (; key + kNeighbourRows <= n_keys; key += kNeighbourRows) {
    ahead.fetch(key, kNeighbourRows);
    const uint8_t* quants = v.at(key) + offset + 2;
    add_keys(key, {quants, quants + row_bytes, quants + 2 * row_bytes, quants + 3 * row_bytes});
  }
  if (key < n_keys) {  // x has zeros for what is read twice
    const size_t n = n_keys - key;
    const uint8_t* quants = v.at(key) + offset + 2;
    add_keys(key, {quants, quants + (n > 1) * row_bytes, quants + (n > 2) * 2 * row_bytes, quants});
  }
  unroll<kRows>([&](auto r) {
    F32 sum[kVectors];
    unroll<kVectors>([&](auto i) { sum[i] = mul(ValueDot::finish(acc[r][i]), set1(unit)); });
    order_block(sum);
    unroll<kVectors>([&](auto i) {
      float* out = o + r * o_stride + kBlockOrder[kFirst + i] * kLanes;
      store(out, accumulate ? add(load(out), sum[i]) : sum[i]);
    });
  });
}

// The 32 columns of the block at `offset` in the rows: o (+)= weights times values of n_keys <= kIntegerKeys
// rows.
template <size_t kRows>
EH2O_INLINE void sum_block(float* o, size_t o_stride, const float* weights, size_t weight_stride,
                           const RowsInPlace& v, size_t offset, size_t n_keys, bool accumulate,
                           const RowsAhead& ahead) {
  constexpr size_t kVectors = block_part<kRows>(), kParts = kKvBlock / simd::kLanes / kVectors;
  alignas(64) uint8_t x[kRows * 2 * kIntegerKeys];
  const float unit = store_scaled_weights<kRows>(x, weights, weight_stride, v, offset, n_keys);
  simd::unroll<kParts>([&](auto part) {
    sum_block_part<kRows, part * kVectors, kVectors>(o, o_stride, x, unit, v, offset, n_keys, accumulate,
                                                     ahead.part(part, kParts));
  });
}

template <size_t kRows>
void sum_blocks(float* o, size_t o_stride, const float* weights, size_t weight_stride, const RowsInPlace& v,
                size_t n_keys, size_t head_dim, const RowsAhead& ahead) {
  for (size_t key = 0; key < n_keys; key += kIntegerKeys) {
    const size_t n = n_keys - key < kIntegerKeys ? n_keys - key : kIntegerKeys;
    for (size_t dim = 0; dim < head_dim; dim += kKvBlock) {
      sum_block<kRows>(o + dim, o_stride, weights + key, weight_stride, v.from(key),
                       dim / kKvBlock * kKvBlockBytes, n, key > 0,
                       key == 0 ? ahead.part(dim / kKvBlock, head_dim / kKvBlock) : RowsAhead{});
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
