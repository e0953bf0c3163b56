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

// A register tile of sums += A * B. Strides of A and B and the depth are in words.
template <typename Products, size_t kRows>
EH2O_INLINE void add_products(simd::F32 (&sum)[kRows][simd::kGemmF32Vectors], const float* a, size_t a_stride,
                              const float* b, size_t b_stride, size_t depth) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors;
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
}

template <typename Products, size_t kRows>
EH2O_INLINE void gemm_f32_tile(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                               size_t b_stride, size_t depth, size_t n_cols, bool accumulate) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors;
  F32 sum[kRows][kVectors];
  unroll<kRows>([&](auto r) { load_tile_row<kVectors>(sum[r], c + r * c_stride, accumulate ? n_cols : 0); });
  add_products<Products, kRows>(sum, a, a_stride, b, b_stride, depth);
  unroll<kRows>([&](auto r) { store_tile_row<kVectors>(c + r * c_stride, sum[r], n_cols); });
}

// c: [n_rows][c_stride]; a: [n_rows][a_stride]; b: [depth][b_stride], of which kGemmF32Columns values are
// read and n_cols <= kGemmF32Columns count. Rows beyond the last full tile take tiles of half the height.
template <typename Products, size_t kRows>
void gemm_f32_rows(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                   size_t b_stride, size_t n_rows, size_t n_cols, size_t depth, bool accumulate) {
  size_t row = 0;
  for (; row + kRows <= n_rows; row += kRows) {
    gemm_f32_tile<Products, kRows>(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b, b_stride,
                                   depth, n_cols, accumulate);
  }
  if constexpr (kRows > 1) {
    if (row == n_rows) return;
    gemm_f32_rows<Products, kRows / 2>(c + row * c_stride, c_stride, a + row * a_stride, a_stride, b,
                                       b_stride, n_rows - row, n_cols, depth, accumulate);
  }
}

inline void gemm_f32_f32_f32p(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                              size_t b_stride, size_t n_rows, size_t n_cols, size_t depth, bool accumulate) {
  gemm_f32_rows<F32Products, simd::kGemmF32Rows>(c, c_stride, a, a_stride, b, b_stride, n_rows, n_cols, depth,
                                                 accumulate);
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

// One sum per output in the order of depth, as in the matrix product; several panels hide its latency.
template <PackedFormat kFormat, size_t kRows, size_t kPanels>
EH2O_INLINE void gemv_float_tile(float* y, size_t y_stride, const float* x, size_t x_stride, const uint8_t* w,
                                 size_t panel_bytes, size_t depth, size_t n_cols, bool accumulate,
                                 size_t weights_ahead) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors;
  const auto columns_of = [&](size_t panel) {
    return n_cols > panel * kGemmF32Columns ? n_cols - panel * kGemmF32Columns : 0;
  };
  F32 sum[kPanels][kRows][kVectors];
  unroll<kPanels>([&](auto p) {
    unroll<kRows>([&](auto r) {
      load_tile_row<kVectors>(sum[p][r], y + r * y_stride + p * kGemmF32Columns,
                              accumulate ? columns_of(p) : 0);
    });
  });
  constexpr size_t kStepBytes = kGemmF32Columns * (kFormat == PackedFormat::kF32 ? 4 : 2);
  for (size_t k = 0; k < depth; ++k) {
    F32 rows[kRows];
    unroll<kRows>([&](auto r) { rows[r] = set1(x[r * x_stride + k]); });
    unroll<kPanels>([&](auto p) {
      if (weights_ahead > 0 && k * kStepBytes % 64 < kStepBytes) {
        const uint8_t* ahead = w + p * panel_bytes + k * kStepBytes + weights_ahead;
        for (size_t i = 0; i < kStepBytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      }
      unroll<kVectors>([&](auto v) {
        const F32 column = load_float_weights<kFormat>(w + p * panel_bytes, k * kGemmF32Columns + v * kLanes);
        unroll<kRows>([&](auto r) { sum[p][r][v] = mul_add(rows[r], column, sum[p][r][v]); });
      });
    });
  }
  unroll<kPanels>([&](auto p) {
    unroll<kRows>([&](auto r) {
      store_tile_row<kVectors>(y + r * y_stride + p * kGemmF32Columns, sum[p][r], columns_of(p));
    });
  });
}

template <PackedFormat kFormat, size_t kRows>
void gemv_float(float* y, size_t y_stride, const float* x, size_t x_stride, const uint8_t* w,
                size_t panel_bytes, size_t depth, size_t n_cols, bool accumulate, size_t weights_ahead) {
  constexpr size_t kPanels = kRows < 4 ? 4 / kRows : 1;
  size_t col = 0;
  const auto step = [&](auto panels) {
    for (; col + (panels - 1) * kGemmF32Columns < n_cols; col += panels * kGemmF32Columns) {
      gemv_float_tile<kFormat, kRows, panels>(y + col, y_stride, x, x_stride,
                                              w + col / kGemmF32Columns * panel_bytes, panel_bytes, depth,
                                              n_cols - col, accumulate, weights_ahead);
    }
  };
  step(simd::Index<kPanels>{});
  if constexpr (kPanels > 2) step(simd::Index<2>{});
  if constexpr (kPanels > 1) step(simd::Index<1>{});
}

template <PackedFormat kFormat>
void gemv_float_rows(float* y, size_t y_stride, const float* x, size_t x_stride, const void* w,
                     size_t panel_bytes, size_t depth, size_t n_rows, size_t n_cols, bool accumulate,
                     size_t weights_ahead) {
  simd::with_constant<simd::kGemvFloatRows>(n_rows, [&](auto rows) {
    gemv_float<kFormat, rows>(y, y_stride, x, x_stride, static_cast<const uint8_t*>(w), panel_bytes, depth,
                              n_cols, accumulate, weights_ahead);
  });
}

// y: [n_rows][y_stride], n_cols outputs of neighbouring panels [depth][kGemmF32Columns], panel_bytes apart,
// of which w is the first; (+)= x times w. x: [n_rows][x_stride], n_rows <= kGemvFloatRows.
inline void gemv_f32_f32_fp(PackedFormat format, float* y, size_t y_stride, const float* x, size_t x_stride,
                            const void* w, size_t panel_bytes, size_t depth, size_t n_rows, size_t n_cols,
                            bool accumulate, size_t weights_ahead) {
  switch (format) {
#define EH2O_CASE(name)                                                                                 \
  case PackedFormat::name:                                                                              \
    return gemv_float_rows<PackedFormat::name>(y, y_stride, x, x_stride, w, panel_bytes, depth, n_rows, \
                                               n_cols, accumulate, weights_ahead);
    EH2O_CASE(kF32)
    EH2O_CASE(kF16)
    EH2O_CASE(kBF16)
#undef EH2O_CASE
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
