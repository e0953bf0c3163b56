// Queries, and cached key and value rows, to what attention multiplies in 8 bits (attention_bytes-inl.h).

namespace edgeh2o::EH2O_ISA {

// Largest absolute values of less count as this, so that nothing is divided by 0.
inline constexpr float kSmallestTop = 1e-30f;
inline constexpr float kLargestByte = 127.0f;

// out: n_rows rows of factor * x[head_dim].
template <typename Bytes>
void pack_byte_queries(float* out, const float* x, float factor, size_t n_rows, size_t head_dim) {
  using namespace simd;
  for (size_t row = 0; row < n_rows; ++row, x += head_dim, out += byte_query_words(head_dim)) {
    float* q = out + head_dim / 4 + 2;
    F32 top = set1(kSmallestTop), poison = zero(), sum = zero();
    for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
      const F32 v = mul(load_n(x + dim, count), set1(factor));
      store_n(q + dim, v, count);
      top = max(top, abs(v));
      poison = mul_add(v, zero(), poison);  // 0, or NaN, which `max` may lose
    });
    const float largest = reduce_max(top);
    const F32 inverse = set1(kLargestByte / largest);
    for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
      const F32 v = round_nearest(mul(load_n(q + dim, count), inverse));
      sum = add(sum, v);
      int8_t bytes[kLanes];
      store_s8(bytes, v);
      __builtin_memcpy(reinterpret_cast<int8_t*>(out) + dim, bytes, count);
    });
    out[head_dim / 4] = largest / kLargestByte + reduce_add(poison);
    const float total = reduce_add(sum);  // of integers: exact
    const int32_t start = total - total == 0.0f ? -Bytes::kKeyOffset * static_cast<int32_t>(total) : 0;
    __builtin_memcpy(out + head_dim / 4 + 1, &start, sizeof(start));
  }
}

// A block of n_keys <= kByteKeys keys; row(i): the cached row of key i.
template <typename Bytes, CacheType kType, typename Row>
EH2O_INLINE void pack_key_block(float* out, const Row& row, size_t n_keys, size_t head_dim) {
  using namespace simd;
  float *units = out + kByteKeys * head_dim / 4, *mean = units + kByteKeys;
  alignas(64) float inverse[kByteKeys] = {};
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 sum = zero();
    for (size_t i = 0; i < n_keys; ++i) sum = add(sum, load_cached<kType>(row(i), dim, count));
    store_n(mean + dim, mul(sum, set1(1.0f / static_cast<float>(n_keys))), count);
  });
  for (size_t i = 0; i < n_keys; ++i) {
    F32 top = set1(kSmallestTop);
    for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
      top = max(top, abs(sub(load_cached<kType>(row(i), dim, count), load_n(mean + dim, count))));
    });
    const float largest = reduce_max(top);
    inverse[i] = kLargestByte / largest;
    units[i] = largest / kLargestByte;
  }
  for (size_t i = n_keys; i < kByteKeys; ++i) units[i] = 0.0f;
  for (size_t key = 0; key < kByteKeys; key += kLanes) {
    const F32 factor = load(inverse + key), offset = set1(static_cast<float>(Bytes::kKeyOffset));
    const size_t col = key % kGemmF32Columns, n_left = key < n_keys ? n_keys - key : 0;
    float* panel = out + (key - col) * head_dim / 4 + col;
    for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
      F32 lanes[kLanes];
      const F32 m = load_n(mean + dim, count);
      for (size_t i = 0; i < kLanes; ++i) {
        lanes[i] = i < n_left ? sub(load_cached<kType>(row(key + i), dim, count), m) : zero();
      }
      transpose(lanes);
      for (size_t i = 0; i < count; i += 4) {
        F32 word[4];
        unroll<4>([&](auto j) EH2O_INLINE_LAMBDA { word[j] = mul_add(lanes[i + j], factor, offset); });
        store_i8(panel + (dim + i) / 4 * kGemmF32Columns, Bytes::round_words(word));
      }
    });
  }
}

template <typename Bytes, CacheType kType, typename Row>
EH2O_INLINE void pack_value_block(float* out, const Row& row, size_t n_keys, size_t head_dim,
                                  size_t o_stride) {
  using namespace simd;
  float* units = out + kByteKeys * o_stride / 4;
  __builtin_memset(units + head_dim, 0, (o_stride - head_dim) * sizeof(float));
  const F32 offset = set1(static_cast<float>(Bytes::kValueOffset));
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 top = set1(kSmallestTop), poison = zero();
    for (size_t i = 0; i < n_keys; ++i) {
      const F32 v = load_cached<kType>(row(i), dim, count);
      top = max(top, abs(v));
      poison = mul_add(v, zero(), poison);
    }
    store_n(units + dim, mul_add(top, set1(1.0f / kLargestByte), poison), count);
    const F32 inverse = div(set1(kLargestByte), top);
    float* panel = out + dim / kGemmF32Columns * kGemmF32Columns * kByteKeys / 4 + dim % kGemmF32Columns;
    for (size_t key = 0; key < kByteKeys; key += 4) {
      F32 word[4];
      unroll<4>([&](auto j) EH2O_INLINE_LAMBDA {
        word[j] = key + j < n_keys ? mul_add(load_cached<kType>(row(key + j), dim, count), inverse, offset)
                                   : offset;
      });
      store_i8(panel + key / 4 * kGemmF32Columns, Bytes::round_words(word));
    }
  });
}

// Calls f(constant cache type, row(key), first key, number of keys) for blocks of the gathered rows.
template <typename F>
EH2O_INLINE void for_each_byte_block(CacheType type, const void* rows, const int32_t* positions,
                                     size_t n_keys, size_t head_dim, const F& f) {
  with_cache_type(type, [&](auto constant) EH2O_INLINE_LAMBDA {
    for (size_t key = 0; key < n_keys; key += kByteKeys) {
      const auto row = [&](size_t i) { return gathered_row<constant>(rows, positions, key + i, head_dim); };
      f(constant, row, key, n_keys - key < kByteKeys ? n_keys - key : kByteKeys);
    }
  });
}

// As pack_keys: out as in attention_tile.h.
template <typename Bytes>
void pack_byte_keys(CacheType type, float* out, const void* rows, const int32_t* positions, size_t n_keys,
                    size_t head_dim) {
  for_each_byte_block(
      type, rows, positions, n_keys, head_dim, [&](auto constant, const auto& row, size_t key, size_t n) {
        pack_key_block<Bytes, constant>(out + key * byte_key_words(head_dim), row, n, head_dim);
      });
}

// As pack_values; there is nothing between the panels of a block.
template <typename Bytes>
void pack_byte_values(CacheType type, float* out, size_t, const void* rows, const int32_t* positions,
                      size_t n_keys, size_t head_dim) {
  const size_t o_stride = (head_dim + kGemmF32Columns - 1) / kGemmF32Columns * kGemmF32Columns;
  for_each_byte_block(
      type, rows, positions, n_keys, head_dim, [&](auto constant, const auto& row, size_t key, size_t n) {
        pack_value_block<Bytes, constant>(out + key * byte_value_words(o_stride), row, n, head_dim, o_stride);
      });
}

}  // namespace edgeh2o::EH2O_ISA
