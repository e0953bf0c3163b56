// The products with quantised weights of every format, each by the kernels that it has on the ISA.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

template <PackedFormat kFormat>
void gemm_q8(float* c, size_t c_stride, const uint8_t* x, size_t x_tile_bytes, const uint8_t* w,
             size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  for (size_t row = 0; row < n_rows; row += simd::kGemmQ8Rows) {
    const size_t rows = n_rows - row < simd::kGemmQ8Rows ? n_rows - row : simd::kGemmQ8Rows;
    float* tile = c + row * c_stride;
    if constexpr (WordFormat<kFormat>::kExists) {
      gemm_words_tile<kFormat, simd::WordDot>(tile, c_stride, x, w, n_records, rows, n_cols, accumulate);
    } else {
      gemm_q8_tile<kFormat>(tile, c_stride, x, w, n_records, rows, n_cols, accumulate);
    }
    x += x_tile_bytes;
  }
}

// c: [n_rows][c_stride], (+)= x times w. x: packed tiles of activations, x_tile_bytes from one tile to the
// next (>= n_records records). w: one unpacked panel of n_records. n_cols <= kGemmQ8Columns outputs are
// written.
inline void gemm_f32_q8_qp(PackedFormat format, float* c, size_t c_stride, const uint8_t* x,
                           size_t x_tile_bytes, const uint8_t* w, size_t n_records, size_t n_rows,
                           size_t n_cols, bool accumulate) {
  switch (format) {
#define EH2O_CASE(name)                                                                            \
  case PackedFormat::name:                                                                         \
    return gemm_q8<PackedFormat::name>(c, c_stride, x, x_tile_bytes, w, n_records, n_rows, n_cols, \
                                       accumulate);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

template <PackedFormat kFormat>
void gemv_q8_rows(float* y, size_t y_stride, const uint8_t* x, size_t tile_rows, const uint8_t* w,
                  size_t n_records, size_t n_rows, size_t n_cols, bool accumulate, size_t weights_ahead) {
  simd::with_constant<simd::kGemvRows>(tile_rows, [&](auto rows) {
    if constexpr (rows != vector_tile_rows(rows)) {
      return;
    } else if constexpr (WordFormat<kFormat>::kExists) {
      gemv_words<kFormat, simd::WordDot, rows>(y, y_stride, x, w, n_records, n_rows, n_cols, accumulate,
                                               weights_ahead);
    } else {
      gemv_q8<kFormat, rows>(y, y_stride, x, w, n_records, n_rows, n_cols, accumulate, weights_ahead);
    }
  });
}

// y: [n_rows][y_stride], n_cols <= kGemmQ8Columns outputs of one panel (+)= x times w. x: one packed tile of
// tile_rows <= kGemvRows rows, of which n_rows count. w: one packed panel. weights_ahead:
// base/cpu_features.h.
inline void gemv_f32_q8_qp(PackedFormat format, float* y, size_t y_stride, const uint8_t* x, size_t tile_rows,
                           const uint8_t* w, size_t n_records, size_t n_rows, size_t n_cols, bool accumulate,
                           size_t weights_ahead) {
  switch (format) {
#define EH2O_CASE(name)                                                                              \
  case PackedFormat::name:                                                                           \
    return gemv_q8_rows<PackedFormat::name>(y, y_stride, x, tile_rows, w, n_records, n_rows, n_cols, \
                                            accumulate, weights_ahead);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

// What stands in front of the quants of a record that has been entered.
template <PackedFormat kFormat, typename Dot>
EH2O_INLINE void unpack_scales(uint8_t* out, const RecordReader<kFormat>& weights) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  constexpr Unpacked kKind = kUnpackedAs<kFormat, Dot>;
  using Sizes = UnpackedSizes<kFormat, kKind>;
  constexpr size_t kSubBlocks = PackedSizes<kFormat>::kSubBlocks, kCols = kGemmQ8Columns;
  unroll<kGemmQ8Vectors>([&](auto v) {
    for (size_t sub = 0; sub < kSubBlocks; ++sub) {
      uint8_t* scale = out + 4 * (sub * kCols + v * kLanes);
      if constexpr (kKind == Unpacked::kWords) Dot::store(scale, weights.template fine_scale<Dot>(sub, v));
      if constexpr (Sizes::kHasFloats) {
        float* scales = reinterpret_cast<float*>(scale);
        store(scales, weights.scale(sub, v));
        if constexpr (Traits::kHasMin) store(scales + kSubBlocks * kCols, weights.min(sub, v));
      }
    }
    if constexpr (Sizes::kPairsPerColumn > 0) {
      uint8_t* pairs = out + Sizes::kScalesPerColumn * kCols + 4 * v * kLanes;
      Dot::store(pairs, weights.template min_pairs<Dot>(weights.scales(), v));
    }
  });
}

template <PackedFormat kFormat, typename Dot>
EH2O_INLINE void unpack_quants(uint8_t* out, const RecordReader<kFormat>& weights) {
  using namespace simd;
  constexpr size_t kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  const uint8_t* quants = weights.quants();
  if constexpr (kHasMmla) {
    using Dot8 = Dot4<PackedTraits<kFormat>::kBits>;
    unroll<4>([&](auto step) {
      unroll<kVectors>([&](auto v) {
        const I8 even = load_weights<kFormat, 2 * step>(quants, v);
        const I8 odd = load_weights<kFormat, 2 * step + 1>(quants, v);
        uint8_t* columns = out + (step * kCols + v * kLanes) * 8;
        store_i8(columns, Dot8::low_pair(even, odd));
        store_i8(columns + 4 * kLanes, Dot8::high_pair(even, odd));
      });
    });
  } else if constexpr (kUnpackedAs<kFormat, Dot> == Unpacked::kBytes) {
    unroll<kVectors>([&](auto v) {
      unroll<8>([&](auto step) {
        constexpr int kOffset =
            PackedTraits<kFormat>::kOffsetLog2 < 0 ? 0 : 1 << PackedTraits<kFormat>::kOffsetLog2;
        constexpr int kAdded = kOffset == 0 ? 0 : kByteOffset;
        const I32 scale = weights.template fine_scale<Dot>(step * 4 / PackedTraits<kFormat>::kSubBlock, v);
        const I8 values = load_weights<kFormat, step, true>(quants, v);
        const I8 scaled = Dot::template scale_bytes<kOffset, kAdded>(values, Dot::join_words(scale, scale));
        store_i8(out + (step * kCols + v * kLanes) * 4, scaled);
      });
    });
  } else if constexpr (kUnpackedAs<kFormat, Dot> == Unpacked::kNibbles) {
    unroll<8>([&](auto step) {
      unroll<kVectors>([&](auto v) {
        const I8 values = sub_i8(load_weights<kFormat, step>(quants, v), 128);
        uint8_t* low = out + (step * kCols + v * kLanes) * 4;
        store_i8(low, take_bits<0, 4, 0>(values));
        store_i8(low + kBlock * kCols, take_bits<4, 4, 0>(values));
      });
    });
  } else {
    unroll<8>([&](auto step) {
      unroll<kVectors>([&](auto v) {
        store_i8(out + (step * kCols + v * kLanes) * 4, load_weights<kFormat, step>(quants, v));
      });
    });
  }
}

// Unpacks n_records of a packed panel for gemm_f32_q8_qp; the first record starts a two-level header.
template <PackedFormat kFormat, typename Dot = simd::WordDot>
void unpack_panel_q(uint8_t* out, const uint8_t* w, size_t n_records, size_t weights_ahead) {
  using namespace simd;
  using Sizes = UnpackedSizes<kFormat, kUnpackedAs<kFormat, Dot>>;
  constexpr size_t kCols = kGemmQ8Columns;
  RecordReader<kFormat> weights(w);
  for (size_t record = 0; record < n_records; ++record) {
    weights.enter(record);
    weights.fetch_ahead(weights_ahead);
    if (Sizes::kHeaderPerColumn > 0 && record % kSuperRecords == 0) {
      float* header = reinterpret_cast<float*>(out);
      unroll<kGemmQ8Vectors>([&](auto v) {
        store(header + v * kLanes, weights.coarse_scale(v));
        if constexpr (Sizes::kPairsPerColumn > 0) store(header + kCols + v * kLanes, weights.coarse_min(v));
      });
      out += Sizes::kHeaderPerColumn * kCols;
    }
    unpack_scales<kFormat, Dot>(out, weights);
    unpack_quants<kFormat, Dot>(out + Sizes::kQuantsFrom * kCols, weights);
    out += Sizes::kRecordPerColumn * kCols;
  }
}

inline void unpack_q_qp(PackedFormat format, uint8_t* out, const uint8_t* w, size_t n_records,
                        size_t weights_ahead) {
  switch (format) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return unpack_panel_q<PackedFormat::name>(out, w, n_records, weights_ahead);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

}  // namespace edgeh2o::EH2O_ISA
