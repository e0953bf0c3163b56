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
                  size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  simd::with_constant<simd::kGemvRows>(tile_rows, [&](auto rows) {
    if constexpr (WordFormat<kFormat>::kExists) {
      gemv_words<kFormat, simd::WordDot, rows>(y, y_stride, x, w, n_records, n_rows, n_cols, accumulate);
    } else {
      gemv_q8<kFormat, rows>(y, y_stride, x, w, n_records, n_rows, n_cols, accumulate);
    }
  });
}

// y: [n_rows][y_stride], n_cols <= kGemmQ8Columns outputs of one panel (+)= x times w. x: one packed tile of
// tile_rows <= kGemvRows rows, of which n_rows count. w: one packed panel.
inline void gemv_f32_q8_qp(PackedFormat format, float* y, size_t y_stride, const uint8_t* x, size_t tile_rows,
                           const uint8_t* w, size_t n_records, size_t n_rows, size_t n_cols,
                           bool accumulate) {
  switch (format) {
#define EH2O_CASE(name)                                                                              \
  case PackedFormat::name:                                                                           \
    return gemv_q8_rows<PackedFormat::name>(y, y_stride, x, tile_rows, w, n_records, n_rows, n_cols, \
                                            accumulate);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

template <PackedFormat kFormat, typename Dot>
EH2O_INLINE void unpack_scale(float* out, const RecordReader<kFormat>& weights, size_t sub, size_t v) {
  if constexpr (WordFormat<kFormat>::kExists) {
    Dot::store(reinterpret_cast<uint8_t*>(out), weights.template fine_scale<Dot>(sub, v));
  } else {
    simd::store(out, weights.scale(sub, v));
  }
}

// Unpacks n_records of a packed panel for gemm_f32_q8_qp; the first record starts a two-level header.
template <PackedFormat kFormat>
void unpack_panel_q(uint8_t* out, const uint8_t* w, size_t n_records) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  constexpr size_t kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  constexpr size_t kSubBlocks = Sizes::kSubBlocks;
  constexpr bool kIsWord = WordFormat<kFormat>::kExists;
  RecordReader<kFormat> weights(w);
  for (size_t record = 0; record < n_records; ++record) {
    weights.enter(record);
    weights.fetch_ahead();
    if (kIsWord && record % kSuperRecords == 0) {
      unroll<kVectors>(
          [&](auto v) { store(reinterpret_cast<float*>(out) + v * kLanes, weights.coarse_scale(v)); });
      out += Sizes::kUnpackedHeaderPerColumn * kCols;
    }
    const uint8_t* w_quants = weights.quants();
    float* out_scale = reinterpret_cast<float*>(out);
    unroll<kVectors>([&](auto v) {
      for (size_t sub = 0; sub < kSubBlocks; ++sub) {
        unpack_scale<kFormat, WordDot>(out_scale + sub * kCols + v * kLanes, weights, sub, v);
        if constexpr (Traits::kHasMin) {
          float* out_min = out_scale + (kSubBlocks + sub) * kCols + v * kLanes;
          store(out_min, weights.min(sub, v));
        }
      }
    });
    uint8_t* out_quants = out + 4 * kCols * kSubBlocks * Sizes::kParts;
    if constexpr (kHasMmla) {
      using Dot = Dot4<Traits::kBits>;
      unroll<4>([&](auto step) {
        unroll<kVectors>([&](auto v) {
          const I8 even = load_weights<kFormat, 2 * step>(w_quants, v);
          const I8 odd = load_weights<kFormat, 2 * step + 1>(w_quants, v);
          uint8_t* columns = out_quants + (step * kCols + v * kLanes) * 8;
          store_i8(columns, Dot::low_pair(even, odd));
          store_i8(columns + 4 * kLanes, Dot::high_pair(even, odd));
        });
      });
    } else {
      unroll<8>([&](auto step) {
        unroll<kVectors>([&](auto v) {
          store_i8(out_quants + (step * kCols + v * kLanes) * 4, load_weights<kFormat, step>(w_quants, v));
        });
      });
    }
    out += Sizes::kUnpackedPerColumn * kCols;
  }
}

inline void unpack_q_qp(PackedFormat format, uint8_t* out, const uint8_t* w, size_t n_records) {
  switch (format) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return unpack_panel_q<PackedFormat::name>(out, w, n_records);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

}  // namespace edgeh2o::EH2O_ISA
