// Float matrix products: C[rows][cols] (+)= A[rows][depth] * B[depth][cols], B in panels
// [depth][kGemmF32Columns]. Serves float weights, attention scores (B = K transposed) and the weighted sum of
// V.

namespace edgeh2o::EH2O_ISA {

inline constexpr size_t kGemmF32Columns = simd::kGemmF32Vectors * simd::kLanes;

// What a 32-bit word of A and B holds: an f32 value, or two bf16 values that are neighbours in depth; or two
// f16 values, neighbours in depth in A and columns side by side in B (gemm_f16-inl.h). Templates, so that an
// ISA without the others need not have their functions.
struct F32Products {
  static constexpr size_t kValuesPerWord = 1, kDepthPerWord = 1;  // of A; of B
  static constexpr bool kAreShort = false;                        // added by the tile below
  template <typename Vector>
  static EH2O_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return simd::mul_add(a, b, c);
  }
  template <size_t I, typename Vector>
  static EH2O_INLINE Vector multiply_add_lane(simd::Index<I> i, Vector a, Vector b, Vector c) {
    using namespace simd;
    return mul_add_lane(i, a, b, c);
  }
  // Values [i, i + kLanes) of words.
  static EH2O_INLINE simd::F32 load_values(const float* words, size_t i) { return simd::load(words + i); }
  // Columns [i, i + kLanes) of a panel of B.
  static EH2O_INLINE void store_columns(float* panel, size_t i, simd::F32 columns) {
    simd::store(panel + i, columns);
  }
};
struct Bf16Products {
  static constexpr size_t kValuesPerWord = 2, kDepthPerWord = 2;
  static constexpr bool kAreShort = false;
  template <typename Vector>
  static EH2O_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    using namespace simd;
    return mul_add_bf16(a, b, c);
  }
  template <size_t I, typename Vector>
  static EH2O_INLINE Vector multiply_add_lane(simd::Index<I> i, Vector a, Vector b, Vector c) {
    using namespace simd;
    return mul_add_bf16_lane(i, a, b, c);
  }
  template <typename Vector>
  static EH2O_INLINE Vector narrow(Vector low, Vector high) {
    using namespace simd;
    return narrow_bf16(low, high);
  }
  template <typename Vector>
  static EH2O_INLINE Vector interleave(Vector even, Vector odd) {
    using namespace simd;
    return interleave_bf16(even, odd);
  }
  static EH2O_INLINE simd::F32 load_values(const float* words, size_t i) {
    return simd::load_bf16(reinterpret_cast<const uint16_t*>(words) + i);
  }
  static EH2O_INLINE void store_columns(float* panel, size_t i, simd::F32 columns) {
    simd::store(panel + i, columns);
  }
};

// Strides of A and B and the depth are in words.
template <typename Products, size_t kRows>
EH2O_INLINE void gemm_f32_tile(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                               size_t b_stride, size_t depth, size_t n_cols, bool accumulate) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors;
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto v) { sum[r][v] = zero(); }); });
  size_t k = 0;
  if constexpr (kHasLaneMulAdd) {  // one load of a row serves kLanes steps of depth
    for (; k + kLanes <= depth; k += kLanes) {
      F32 rows[kRows];
      unroll<kRows>([&](auto r) { rows[r] = load(a + r * a_stride + k); });
      unroll<kLanes>([&](auto i) {
        F32 columns[kVectors];
        unroll<kVectors>([&](auto v) { columns[v] = load(b + v * kLanes); });
        unroll<kRows>([&](auto r) {
          unroll<kVectors>(
              [&](auto v) { sum[r][v] = Products::multiply_add_lane(i, rows[r], columns[v], sum[r][v]); });
        });
        b += b_stride;
      });
    }
  }
  for (; k < depth; ++k) {
    F32 columns[kVectors];
    unroll<kVectors>([&](auto v) { columns[v] = load(b + v * kLanes); });
    unroll<kRows>([&](auto r) {
      const F32 row = set1(a[r * a_stride + k]);
      unroll<kVectors>([&](auto v) { sum[r][v] = Products::multiply_add(row, columns[v], sum[r][v]); });
    });
    b += b_stride;
  }
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto v) {
      float* out = c + r * c_stride + v * kLanes;
      if (n_cols == kGemmF32Columns) {
        store(out, accumulate ? add(load(out), sum[r][v]) : sum[r][v]);
      } else {
        const size_t left = n_cols > v * kLanes ? n_cols - v * kLanes : 0;
        const size_t n = left < kLanes ? left : kLanes;
        store_partial(out, accumulate ? add(load_partial(out, n), sum[r][v]) : sum[r][v], n);
      }
    });
  });
}

// c: [n_rows][c_stride]; a: [n_rows][a_stride]; b: [depth][b_stride], of which kGemmF32Columns values are
// read and n_cols <= kGemmF32Columns count. Rows beyond the last full tile are computed one by one.
inline void gemm_f32_f32_f32p(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                              size_t b_stride, size_t n_rows, size_t n_cols, size_t depth, bool accumulate) {
  size_t row = 0;
  for (; row + simd::kGemmF32Rows <= n_rows; row += simd::kGemmF32Rows) {
    gemm_f32_tile<F32Products, simd::kGemmF32Rows>(c + row * c_stride, c_stride, a + row * a_stride, a_stride,
                                                   b, b_stride, depth, n_cols, accumulate);
  }
  for (; row < n_rows; ++row) {
    gemm_f32_tile<F32Products, 1>(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b, b_stride,
                                  depth, n_cols, accumulate);
  }
}

template <PackedFormat kFormat>
EH2O_INLINE simd::F32 load_float_weights(const void* w, size_t i) {
  if constexpr (kFormat == PackedFormat::kF32) {
    return simd::load(static_cast<const float*>(w) + i);
  } else if constexpr (kFormat == PackedFormat::kF16) {
    return simd::load_f16(static_cast<const uint16_t*>(w) + i);
  } else {
    return simd::load_bf16(static_cast<const uint16_t*>(w) + i);
  }
}

template <PackedFormat kFormat>
void gemv_float(float* y, const float* x, const void* w, size_t depth, size_t n_cols) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors, kChains = 4;
  F32 sum[kChains][kVectors];
  unroll<kChains>([&](auto c) { unroll<kVectors>([&](auto v) { sum[c][v] = zero(); }); });
  size_t k = 0;
  for (; k + kChains <= depth; k += kChains) {
    unroll<kChains>([&](auto c) {
      const F32 value = set1(x[k + c]);
      unroll<kVectors>([&](auto v) {
        sum[c][v] =
            mul_add(value, load_float_weights<kFormat>(w, (k + c) * kGemmF32Columns + v * kLanes), sum[c][v]);
      });
    });
  }
  for (; k < depth; ++k) {
    const F32 value = set1(x[k]);
    unroll<kVectors>([&](auto v) {
      sum[0][v] = mul_add(value, load_float_weights<kFormat>(w, k * kGemmF32Columns + v * kLanes), sum[0][v]);
    });
  }
  unroll<kVectors>([&](auto v) {
    const size_t left = n_cols > v * kLanes ? n_cols - v * kLanes : 0;
    const F32 total = add(add(sum[0][v], sum[1][v]), add(sum[2][v], sum[3][v]));
    store_partial(y + v * kLanes, total, left < kLanes ? left : kLanes);
  });
}

// y: n_cols <= kGemmF32Columns outputs of one float panel w [depth][kGemmF32Columns]; x: [depth].
inline void gemv_f32_f32_fp(PackedFormat format, float* y, const float* x, const void* w, size_t depth,
                            size_t n_cols) {
  switch (format) {
    case PackedFormat::kF32:
      return gemv_float<PackedFormat::kF32>(y, x, w, depth, n_cols);
    case PackedFormat::kF16:
      return gemv_float<PackedFormat::kF16>(y, x, w, depth, n_cols);
    case PackedFormat::kBF16:
      return gemv_float<PackedFormat::kBF16>(y, x, w, depth, n_cols);
    default:
      return;
  }
}

template <PackedFormat kFormat>
void unpack_float(float* out, const void* w, size_t n_values) {
  for (size_t i = 0; i < n_values; i += simd::kLanes) simd::store(out + i, load_float_weights<kFormat>(w, i));
}

// Converts a float panel [depth][kGemmF32Columns] to f32.
inline void unpack_f32_fp(PackedFormat format, float* out, const void* w, size_t depth) {
  const size_t n_values = depth * kGemmF32Columns;
  switch (format) {
    case PackedFormat::kF32:
      return unpack_float<PackedFormat::kF32>(out, w, n_values);
    case PackedFormat::kF16:
      return unpack_float<PackedFormat::kF16>(out, w, n_values);
    case PackedFormat::kBF16:
      return unpack_float<PackedFormat::kBF16>(out, w, n_values);
    default:
      return;
  }
}

}  // namespace edgeh2o::EH2O_ISA
