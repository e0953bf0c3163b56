// Queries, and cached key and value rows, to what the attention tile multiplies (gemm_f32-inl.h,
// gemm_f16-inl.h).

namespace edgeh2o::EH2O_ISA {

// Words [word, word + count) of a cached row of which every word holds kDepthPerWord dimensions.
template <typename Products, CacheType kType, typename Count>
EH2O_INLINE simd::F32 load_words(const uint8_t* row, size_t word, Count count) {
  using namespace simd;
  if constexpr (Products::kDepthPerWord == 1) {
    return load_cached<kType>(row, word, count);
  } else if constexpr (!std::is_same_v<Count, size_t>) {
    return Products::narrow(load_cached<kType>(row, 2 * word, count),
                            load_cached<kType>(row, 2 * word + kLanes, count));
  } else {
    const size_t n = 2 * count, n_low = n < kLanes ? n : kLanes;
    const F32 low = load_cached<kType>(row, 2 * word, n_low);
    return Products::narrow(low,
                            n > kLanes ? load_cached<kType>(row, 2 * word + kLanes, n - kLanes) : zero());
  }
}

// out: words of factor times the rows [head_dim] of group_size heads of every query, which lie x_stride
// floats apart; head_dim is a multiple of kValuesPerWord.
template <typename Products>
void pack_queries(float* out, const float* x, size_t x_stride, float factor, size_t n_queries,
                  size_t group_size, size_t head_dim) {
  using namespace simd;
  const size_t n = group_size * head_dim;
  for (size_t query = 0; query < n_queries; ++query, x += x_stride, out += n / Products::kValuesPerWord) {
    if constexpr (Products::kValuesPerWord == 1) {
      scale_f32(out, x, factor, n);
    } else {
      for_each_vector(n / 2, [&](size_t word, auto count) {
        if constexpr (!std::is_same_v<decltype(count), size_t>) {
          const F32 low = load(x + 2 * word), high = load(x + 2 * word + kLanes);
          store(out + word, Products::narrow(mul(low, set1(factor)), mul(high, set1(factor))));
        } else {
          const size_t n_left = 2 * count, n_low = n_left < kLanes ? n_left : kLanes;
          const F32 low = load_partial(x + 2 * word, n_low),
                    high = load_partial(x + 2 * word + n_low, n_left - n_low);
          store_partial(out + word, Products::narrow(mul(low, set1(factor)), mul(high, set1(factor))), count);
        }
      });
    }
  }
}

template <typename Products, CacheType kType>
void pack_key_panels(float* out, const void* rows, const int32_t* positions, size_t n_keys, size_t head_dim) {
  using namespace simd;
  const size_t n_words = head_dim / Products::kDepthPerWord;
  const size_t panel_floats = head_dim / Products::kValuesPerWord * kGemmF32Columns;
  for (size_t key = 0; key < n_keys; key += kGemmF32Columns, out += panel_floats) {
    for (size_t col = 0; col < kGemmF32Columns; col += kLanes) {
      const size_t first = key + col, n_left = first < n_keys ? n_keys - first : 0;
      for_each_vector(n_words, [&](size_t word, auto count) {
        F32 block[kLanes];
        const auto load_key = [&](size_t i) {
          return load_words<Products, kType>(gathered_row<kType>(rows, positions, first + i, head_dim), word,
                                             count);
        };
        if (n_left >= kLanes) {
          unroll<kLanes>([&](auto i) { block[i] = load_key(i); });
        } else {
          for (size_t i = 0; i < kLanes; ++i) block[i] = i < n_left ? load_key(i) : zero();
        }
        transpose(block);
        for (size_t j = 0; j < count; ++j) {
          Products::store_columns(out, (word + j) * kGemmF32Columns + col, block[j]);
        }
      });
    }
  }
}

// out: [ceil(n_keys / nr)][head_dim][nr] values, columns beyond n_keys are 0. positions: null for
// rows 0, 1, 2, ...
template <typename Products>
void pack_keys(CacheType type, float* out, const void* rows, const int32_t* positions, size_t n_keys,
               size_t head_dim) {
  with_cache_type(type, [&](auto constant) {
    pack_key_panels<Products, constant>(out, rows, positions, n_keys, head_dim);
  });
}

template <typename Products, CacheType kType>
void pack_value_panels(float* out, size_t panel_stride, const void* rows, const int32_t* positions,
                       size_t n_keys, size_t head_dim) {
  using namespace simd;
  constexpr size_t kPerWord = Products::kDepthPerWord;
  panel_stride *= Products::kValuesPerWord / kPerWord;
  for (size_t key = 0, first = 0; key < n_keys; key += kPerWord, first += kGemmF32Columns) {
    const uint8_t* row = gathered_row<kType>(rows, positions, key, head_dim);
    const uint8_t* next =
        key + 1 < n_keys && kPerWord == 2 ? gathered_row<kType>(rows, positions, key + 1, head_dim) : nullptr;
    for_each_vector(head_dim, [&](size_t dim, auto count) {
      F32 words = load_cached<kType>(row, dim, count);
      if constexpr (kPerWord == 2) {
        words = Products::interleave(words, next ? load_cached<kType>(next, dim, count) : zero());
      }
      Products::store_columns(out, first + dim / kGemmF32Columns * panel_stride + dim % kGemmF32Columns,
                              words);
    });
  }
}

// out: [ceil(head_dim / nr)][panel_stride words], per panel [n_keys][nr] values; columns beyond head_dim are
// unspecified, the value beyond an odd n_keys is 0 if words hold two keys.
template <typename Products>
void pack_values(CacheType type, float* out, size_t panel_stride, const void* rows, const int32_t* positions,
                 size_t n_keys, size_t head_dim) {
  with_cache_type(type, [&](auto constant) {
    pack_value_panels<Products, constant>(out, panel_stride, rows, positions, n_keys, head_dim);
  });
}

}  // namespace edgeh2o::EH2O_ISA
