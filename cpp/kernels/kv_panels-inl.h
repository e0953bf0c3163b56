// Cached key and value rows (f16 or f32) to the f32 panels that attention_tile_f32 reads; sums of rows.

namespace edgeh2o::EH2O_ISA {

// Loads kLanes values, or `count` of them followed by zeros.
template <typename T, typename Count>
EH2O_INLINE simd::F32 load_cached(const T* p, Count count) {
  if constexpr (std::is_same_v<T, float>) {
    return load_n(p, count);
  } else if constexpr (std::is_same_v<Count, size_t>) {
    uint16_t tail[simd::kLanes] = {};
    __builtin_memcpy(tail, p, count * sizeof(uint16_t));
    return simd::load_f16(tail);
  } else {
    return simd::load_f16(p);
  }
}

// Calls f with a typed null pointer that stands for the cache's element type.
template <typename F>
EH2O_INLINE void with_cache_type(CacheType type, const F& f) {
  if (type == CacheType::kF16) {
    f(static_cast<const uint16_t*>(nullptr));
  } else {
    f(static_cast<const float*>(nullptr));
  }
}

// Row i of the gathered rows: rows[positions[i]], or rows[i] if positions is null. rows:
// [position][head_dim].
template <typename T>
EH2O_INLINE const T* gathered_row(const void* rows, const int32_t* positions, size_t i, size_t head_dim) {
  return static_cast<const T*>(rows) + (positions ? static_cast<size_t>(positions[i]) : i) * head_dim;
}

template <typename T>
void pack_keys(float* out, const void* rows, const int32_t* positions, size_t n_keys, size_t head_dim) {
  using namespace simd;
  for (size_t key = 0; key < n_keys; key += kGemmF32Columns, out += head_dim * kGemmF32Columns) {
    for (size_t col = 0; col < kGemmF32Columns; col += kLanes) {
      const size_t first = key + col, n_left = first < n_keys ? n_keys - first : 0;
      for_each_vector(head_dim, [&](size_t dim, auto count) {
        F32 block[kLanes];
        if (n_left >= kLanes) {
          unroll<kLanes>([&](auto i) {
            block[i] = load_cached(gathered_row<T>(rows, positions, first + i, head_dim) + dim, count);
          });
        } else {
          for (size_t i = 0; i < kLanes; ++i) {
            block[i] = i < n_left
                           ? load_cached(gathered_row<T>(rows, positions, first + i, head_dim) + dim, count)
                           : zero();
          }
        }
        transpose(block);
        for (size_t j = 0; j < count; ++j) store(out + (dim + j) * kGemmF32Columns + col, block[j]);
      });
    }
  }
}

// out: [ceil(n_keys / nr)][head_dim][nr], columns beyond n_keys are 0. positions: null for rows 0, 1, 2, ...
inline void pack_keys_f32p(CacheType type, float* out, const void* rows, const int32_t* positions,
                           size_t n_keys, size_t head_dim) {
  with_cache_type(type, [&](auto* element) {
    pack_keys<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(out, rows, positions, n_keys,
                                                                             head_dim);
  });
}

template <typename T>
void pack_values(float* out, size_t panel_stride, const void* rows, const int32_t* positions, size_t n_keys,
                 size_t head_dim) {
  for (size_t key = 0; key < n_keys; ++key, out += kGemmF32Columns) {
    const T* row = gathered_row<T>(rows, positions, key, head_dim);
    for_each_vector(head_dim, [&](size_t dim, auto count) {
      float* panel = out + dim / kGemmF32Columns * panel_stride;
      simd::store(panel + dim % kGemmF32Columns, load_cached(row + dim, count));
    });
  }
}

// out: [ceil(head_dim / nr)][panel_stride], per panel [n_keys][nr]; columns beyond head_dim are unspecified.
inline void pack_values_f32p(CacheType type, float* out, size_t panel_stride, const void* rows,
                             const int32_t* positions, size_t n_keys, size_t head_dim) {
  with_cache_type(type, [&](auto* element) {
    pack_values<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(out, panel_stride, rows,
                                                                               positions, n_keys, head_dim);
  });
}

template <typename T>
void add_rows(float* out, const void* rows, const int32_t* positions, size_t n_rows, size_t head_dim) {
  using namespace simd;
  for_each_vector(head_dim, [&](size_t dim, auto count) {
    F32 sum = load_n(out + dim, count);
    for (size_t i = 0; i < n_rows; ++i) {
      sum = add(sum, load_cached(gathered_row<T>(rows, positions, i, head_dim) + dim, count));
    }
    store_n(out + dim, sum, count);
  });
}

// out[head_dim] += the gathered rows.
inline void add_kv_rows_f32(CacheType type, float* out, const void* rows, const int32_t* positions,
                            size_t n_rows, size_t head_dim) {
  with_cache_type(type, [&](auto* element) {
    add_rows<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(out, rows, positions, n_rows,
                                                                            head_dim);
  });
}

}  // namespace edgeh2o::EH2O_ISA
