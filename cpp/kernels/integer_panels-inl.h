// Queries, and cached key and value rows, to the integers that attention multiplies
// (attention_integers-inl.h).

namespace edgeh2o::EH2O_ISA {

// Largest absolute values of less count as this, so that nothing is divided by 0.
inline constexpr float kSmallestTop = 1e-30f;
inline constexpr float kLargestByte = 127.0f;
inline constexpr size_t kMaxByteDim = 1024;  // AttentionHeads::check

// Dimensions that are mixed before they are rounded: a power of two that divides their number.
EH2O_INLINE size_t mixed_dims(size_t head_dim) { return head_dim & (~head_dim + 1); }

// One pass over x, [n][kLanes]: kRadix vectors, `stride` apart, times a Hadamard matrix.
template <size_t kRadix>
EH2O_INLINE void mix_pass(float* x, size_t n, size_t stride) {
  using namespace simd;
  for (size_t base = 0; base < n; base += kRadix * stride) {
    for (size_t i = base; i < base + stride; ++i) {
      F32 v[kRadix];
      unroll<kRadix>([&](auto j) EH2O_INLINE_LAMBDA { v[j] = load(x + (i + j * stride) * kLanes); });
      unroll<kRadix == 8 ? 3 : kRadix / 2>([&](auto step) EH2O_INLINE_LAMBDA {
        constexpr size_t kStep = size_t{1} << step;
        unroll<kRadix>([&](auto j) EH2O_INLINE_LAMBDA {
          if constexpr ((j & kStep) == 0) {
            const F32 a = v[j], b = v[j + kStep];
            v[j] = add(a, b);
            v[j + kStep] = sub(a, b);
          }
        });
      });
      unroll<kRadix>([&](auto j) EH2O_INLINE_LAMBDA { store(x + (i + j * stride) * kLanes, v[j]); });
    }
  }
}

// x, [head_dim][kLanes], a row in every lane: each block of mixed_dims dimensions times a Hadamard matrix
// H. (H q) (H k) is their number times q k, and what a few dimensions hold is spread over all of them, so
// that a row is rounded by a smaller unit (as in QuaRot, Ashkboos et al. 2024). SmolLM2-135M, 2,048 tokens:
// outputs are off by 1.4 % of their norm for 2.0 %.
EH2O_INLINE void mix_dims(float* x, size_t head_dim) {
  const size_t size = mixed_dims(head_dim);
  size_t stride = 1;
  for (; stride * 8 <= size; stride *= 8) mix_pass<8>(x, head_dim, stride);
  if (stride * 4 == size) mix_pass<4>(x, head_dim, stride);
  if (stride * 2 == size) mix_pass<2>(x, head_dim, stride);
}

// The largest absolute value of every lane, at least kSmallestTop. Four at a time: one waits for the one
// before.
EH2O_INLINE simd::F32 find_tops(const float* x, size_t head_dim) {
  using namespace simd;
  F32 top[4];
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { top[i] = set1(kSmallestTop); });
  for (size_t dim = 0; dim < head_dim; dim += 4) {
    unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { top[i] = max(top[i], abs(load(x + (dim + i) * kLanes))); });
  }
  return max(max(top[0], top[1]), max(top[2], top[3]));
}

// Of every lane 0, or NaN if a number of it was not finite, which all numbers of its block then are since
// they were mixed. (A maximum may lose NaN.)
EH2O_INLINE simd::F32 find_poison(const float* mixed, size_t head_dim) {
  using namespace simd;
  F32 poison = zero();
  for (size_t dim = 0; dim < head_dim; dim += mixed_dims(head_dim)) {
    poison = mul_add(load(mixed + dim * kLanes), zero(), poison);
  }
  return poison;
}

// x, [head_dim][kLanes]: a row in every lane; value(row, dim, count): numbers of a row, from dim on.
template <typename Value>
EH2O_INLINE void load_lanes(float* x, size_t head_dim, const Value& value) {
  using namespace simd;
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 lanes[kLanes];
    for (size_t row = 0; row < kLanes; ++row) lanes[row] = value(row, dim, count);
    transpose(lanes);
    for (size_t i = 0; i < count; ++i) store(x + (dim + i) * kLanes, lanes[i]);
  });
}

// n_rows <= kLanes rows of factor * row(i)[head_dim]; mixed: [head_dim][kLanes].
template <typename Bytes, typename Row>
EH2O_INLINE void pack_query_lanes(float* out, const Row& row_of, float factor, size_t n_rows, size_t head_dim,
                                  float* mixed) {
  using namespace simd;
  const size_t stride = kIntegerLayout<Bytes>.query_words(head_dim), n_floats = head_dim / 4 + 2;
  alignas(64) float units[kLanes], sums[kLanes];
  load_lanes(mixed, head_dim, [&](size_t row, size_t dim, auto count) EH2O_INLINE_LAMBDA {
    if (row >= n_rows) return zero();
    const F32 v = mul(load_n(row_of(row) + dim, count), set1(factor));
    store_n(out + row * stride + n_floats + dim, v, count);
    return v;
  });
  mix_dims(mixed, head_dim);
  const F32 top = find_tops(mixed, head_dim), inverse = div(set1(kLargestByte), top);
  const float unit = 1.0f / (kLargestByte * static_cast<float>(mixed_dims(head_dim)));
  store(units, mul_add(top, set1(unit), find_poison(mixed, head_dim)));
  F32 sum[4];
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { sum[i] = zero(); });
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 lanes[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
      lanes[i] = i < count ? round_nearest(mul(load(mixed + (dim + i) * kLanes), inverse)) : zero();
      sum[i % 4] = add(sum[i % 4], lanes[i]);  // of integers: exact
    }
    transpose(lanes);
    for (size_t row = 0; row < n_rows; ++row) {
      int8_t bytes[kLanes];
      store_s8(bytes, lanes[row]);
      __builtin_memcpy(reinterpret_cast<int8_t*>(out + row * stride) + dim, bytes, count);
    }
  });
  store(sums, add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  for (size_t row = 0; row < n_rows; ++row) {
    const float total = sums[row];
    const int32_t start = total - total == 0.0f ? -Bytes::kKeyOffset * static_cast<int32_t>(total) : 0;
    out[row * stride + head_dim / 4] = units[row];
    __builtin_memcpy(out + row * stride + head_dim / 4 + 1, &start, sizeof(start));
  }
}

// As pack_queries.
template <typename Bytes>
void pack_byte_queries(float* out, const float* x, size_t x_stride, float factor, size_t n_queries,
                       size_t group_size, size_t head_dim) {
  using simd::kLanes;
  alignas(64) float mixed[kMaxByteDim * kLanes];
  const float* rows[kLanes];
  const auto row_of = [&](size_t i) { return rows[i]; };
  size_t n_rows = 0;
  for (size_t query = 0; query < n_queries; ++query) {
    for (size_t head = 0; head < group_size; ++head) {
      rows[n_rows++] = x + query * x_stride + head * head_dim;
      if (n_rows < kLanes && (query + 1 < n_queries || head + 1 < group_size)) continue;
      pack_query_lanes<Bytes>(out, row_of, factor, n_rows, head_dim, mixed);
      out += n_rows * kIntegerLayout<Bytes>.query_words(head_dim);
      n_rows = 0;
    }
  }
}

// A block of n_keys <= kLevelKeys keys; row(i): the cached row of key i.
template <typename Bytes, CacheType kType, typename Row>
EH2O_INLINE void pack_key_block(float* out, const Row& row, size_t n_keys, size_t head_dim) {
  using namespace simd;
  float *units = out + kLevelKeys * head_dim / 4, *mean = units + kLevelKeys;
  alignas(64) float mixed[kMaxByteDim * kLanes];
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 sum = zero();
    for (size_t i = 0; i < n_keys; ++i) sum = add(sum, load_cached<kType>(row(i), dim, count));
    store_n(mean + dim, mul(sum, set1(1.0f / static_cast<float>(n_keys))), count);
  });
  for (size_t key = 0; key < kLevelKeys; key += kLanes) {
    const size_t col = key % kGemmF32Columns, n_left = key < n_keys ? n_keys - key : 0;
    float* panel = out + (key - col) * head_dim / 4 + col;
    load_lanes(mixed, head_dim, [&](size_t i, size_t dim, auto count) EH2O_INLINE_LAMBDA {
      return i < n_left ? sub(load_cached<kType>(row(key + i), dim, count), load_n(mean + dim, count))
                        : zero();
    });
    mix_dims(mixed, head_dim);
    const F32 top = find_tops(mixed, head_dim), factor = div(set1(kLargestByte), top);
    const F32 offset = set1(static_cast<float>(Bytes::kKeyOffset)),
              unit = mul(top, set1(1.0f / kLargestByte));
    store(units + key, n_left >= kLanes ? unit : keep_first(unit, n_left, zero()));
    for (size_t dim = 0; dim < head_dim; dim += 4) {
      F32 word[4];
      unroll<4>([&](auto j) EH2O_INLINE_LAMBDA {
        word[j] = mul_add(load(mixed + (dim + j) * kLanes), factor, offset);
      });
      store_i8(panel + dim / 4 * kGemmF32Columns, Bytes::round_words(word));
    }
  }
}

// The largest integers of 16 bits for queries and keys of so many dimensions: sums of products stay below
// 2^31.
struct LargestShorts {
  float query, key;
  EH2O_INLINE explicit LargestShorts(size_t head_dim) {
    const int n_bits = __builtin_clzll(head_dim - 1) - 33;  // of both: 31 - ceil(log2(head_dim))
    query = static_cast<float>((1 << (n_bits + 1) / 2) - 1);
    key = static_cast<float>((1 << n_bits / 2) - 1);
  }
};

// Words [word, word + count) of a row times `factor`, rounded; value(dim, count): numbers of the row.
template <typename Shorts, typename Count, typename Value>
EH2O_INLINE simd::F32 short_words(const Value& value, size_t word, Count count, simd::F32 factor) {
  using namespace simd;
  if constexpr (!std::is_same_v<Count, size_t>) {
    return Shorts::join_rounded(mul(value(2 * word, count), factor),
                                mul(value(2 * word + kLanes, count), factor));
  } else {
    const size_t n = 2 * count, n_low = n < kLanes ? n : kLanes;
    const F32 low = mul(value(2 * word, n_low), factor);
    return Shorts::join_rounded(low, n > kLanes ? mul(value(2 * word + kLanes, n - kLanes), factor) : zero());
  }
}

// The largest absolute value of a row, at least kSmallestTop; NaN if a number is not finite.
template <typename Value>
EH2O_INLINE float find_top(size_t head_dim, const Value& value) {
  using namespace simd;
  F32 top = set1(kSmallestTop), poison = zero();
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    const F32 v = value(dim, count);
    top = max(top, abs(v));
    poison = mul_add(v, zero(), poison);
  });
  return reduce_max(top) + reduce_add(poison);
}

// As pack_queries.
template <typename Shorts>
void pack_short_queries(float* out, const float* x, size_t x_stride, float factor, size_t n_queries,
                        size_t group_size, size_t head_dim) {
  using namespace simd;
  const size_t n_words = head_dim / 2;
  const float largest = LargestShorts(head_dim).query;
  for (size_t query = 0; query < n_queries; ++query) {
    for (size_t head = 0; head < group_size; ++head) {
      const float* row = x + query * x_stride + head * head_dim;
      const auto value = [&](size_t dim, auto count) EH2O_INLINE_LAMBDA { return load_n(row + dim, count); };
      const float top = find_top(head_dim, value);
      const F32 inverse = set1(largest / top);
      for_each_vector(n_words, [&](size_t word, auto count) EH2O_INLINE_LAMBDA {
        store_n(out + word, short_words<Shorts>(value, word, count, inverse), count);
      });
      out[n_words] = factor * top / largest;
      out[n_words + 1] = 0.0f;
      out += kIntegerLayout<Shorts>.query_words(head_dim);
    }
  }
}

// As pack_key_block.
template <typename Shorts, CacheType kType, typename Row>
EH2O_INLINE void pack_short_key_block(float* out, const Row& row, size_t n_keys, size_t head_dim) {
  using namespace simd;
  const size_t n_words = head_dim / 2;
  const float largest = LargestShorts(head_dim).key;
  float *units = out + kLevelKeys * n_words, poison = 0.0f;
  for (size_t key = 0; key < kLevelKeys; key += kLanes) {
    const size_t col = key % kGemmF32Columns, n_left = key < n_keys ? n_keys - key : 0;
    float* panel = out + (key - col) * n_words + col;
    const auto value_of = [&](size_t i) {
      const uint8_t* cached = row(key + i);
      return [cached](size_t dim, auto count)
                 EH2O_INLINE_LAMBDA { return load_cached<kType>(cached, dim, count); };
    };
    float inverse[kLanes];
    for (size_t i = 0; i < kLanes; ++i) {
      const float top = i < n_left ? find_top(head_dim, value_of(i)) : 0.0f;
      units[key + i] = top / largest;
      poison += 0.0f * top;
      inverse[i] = i < n_left ? largest / top : 0.0f;
    }
    for_each_vector(n_words, [&](size_t word, auto count) EH2O_INLINE_LAMBDA {
      F32 words[kLanes];
      for (size_t i = 0; i < kLanes; ++i) {
        words[i] = i < n_left ? short_words<Shorts>(value_of(i), word, count, set1(inverse[i])) : zero();
      }
      transpose(words);
      for (size_t j = 0; j < count; ++j) store(panel + (word + j) * kGemmF32Columns, words[j]);
    });
  }
  for (size_t key = 0; key < kLevelKeys; ++key) units[key] += poison;
}

template <typename Integers, CacheType kType, typename Row>
EH2O_INLINE void pack_value_block(float* out, const Row& row, size_t n_keys, size_t head_dim,
                                  size_t o_stride) {
  using namespace simd;
  constexpr size_t kPerWord = kIntegerLayout<Integers>.per_word, kBlockWords = kLevelKeys / kPerWord;
  float* units = out + kBlockWords * o_stride;
  __builtin_memset(units + head_dim, 0, (o_stride - head_dim) * sizeof(float));
  const F32 offset = set1(static_cast<float>(Integers::kValueOffset));
  for_each_vector(head_dim, [&](size_t dim, auto count) EH2O_INLINE_LAMBDA {
    F32 top = set1(kSmallestTop), poison = zero();
    for (size_t i = 0; i < n_keys; ++i) {
      const F32 v = load_cached<kType>(row(i), dim, count);
      top = max(top, abs(v));
      poison = mul_add(v, zero(), poison);
    }
    store_n(units + dim, mul_add(top, set1(1.0f / kLargestValue<Integers>), poison), count);
    const F32 inverse = div(set1(kLargestValue<Integers>), top);
    float* panel = out + dim / kGemmF32Columns * kGemmF32Columns * kBlockWords + dim % kGemmF32Columns;
    for (size_t key = 0; key < kLevelKeys; key += kPerWord) {
      F32 word[kPerWord];
      unroll<kPerWord>([&](auto j) EH2O_INLINE_LAMBDA {
        word[j] = key + j < n_keys ? mul_add(load_cached<kType>(row(key + j), dim, count), inverse, offset)
                                   : offset;
      });
      store_i8(panel + key / kPerWord * kGemmF32Columns, Integers::round_words(word));
    }
  });
}

// Calls f(constant cache type, row(key), first key, number of keys) for blocks of the gathered rows.
template <typename F>
EH2O_INLINE void for_each_level_block(CacheType type, const void* rows, const int32_t* positions,
                                      size_t n_keys, size_t head_dim, const F& f) {
  with_cache_type(type, [&](auto constant) EH2O_INLINE_LAMBDA {
    for (size_t key = 0; key < n_keys; key += kLevelKeys) {
      const auto row = [&](size_t i) { return gathered_row<constant>(rows, positions, key + i, head_dim); };
      f(constant, row, key, n_keys - key < kLevelKeys ? n_keys - key : kLevelKeys);
    }
  });
}

// As pack_keys: out as in attention_tile.h.
template <typename Integers>
void pack_integer_keys(CacheType type, float* out, const void* rows, const int32_t* positions, size_t n_keys,
                       size_t head_dim) {
  for_each_level_block(type, rows, positions, n_keys, head_dim,
                       [&](auto constant, const auto& row, size_t key, size_t n) {
                         float* block = out + key * kIntegerLayout<Integers>.key_words(head_dim);
                         if constexpr (kAreBytes<Integers>) {
                           pack_key_block<Integers, constant>(block, row, n, head_dim);
                         } else {
                           pack_short_key_block<Integers, constant>(block, row, n, head_dim);
                         }
                       });
}

// As pack_values; there is nothing between the panels of a block.
template <typename Integers>
void pack_integer_values(CacheType type, float* out, size_t, const void* rows, const int32_t* positions,
                         size_t n_keys, size_t head_dim) {
  const size_t o_stride = (head_dim + kGemmF32Columns - 1) / kGemmF32Columns * kGemmF32Columns;
  for_each_level_block(type, rows, positions, n_keys, head_dim,
                       [&](auto constant, const auto& row, size_t key, size_t n) {
                         float* block = out + key * kIntegerLayout<Integers>.value_words(o_stride);
                         pack_value_block<Integers, constant>(block, row, n, head_dim, o_stride);
                       });
}

// As pack_queries.
template <typename Integers>
void pack_integer_queries(float* out, const float* x, size_t x_stride, float factor, size_t n_queries,
                          size_t group_size, size_t head_dim) {
  if constexpr (kAreBytes<Integers>) {
    pack_byte_queries<Integers>(out, x, x_stride, factor, n_queries, group_size, head_dim);
  } else {
    pack_short_queries<Integers>(out, x, x_stride, factor, n_queries, group_size, head_dim);
  }
}

}  // namespace edgeh2o::EH2O_ISA
