// Activations to 8 bits: per row and 32 values, d = max|x| / 127 and q = rint(x / d), in the packed layout
// that the quantised matrix kernels read (quant/packed_format.h).
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// One row and 32 values: kTileRows is the distance between its parts in a record.
template <size_t kTileRows>
EH2O_INLINE void quantize_block(uint8_t* record, size_t row, const float* x) {
  using namespace simd;
  constexpr size_t kVectors = kBlock / kLanes;
  float* scale = reinterpret_cast<float*>(record) + row;
  float* sum = scale + kTileRows;
  int32_t* starts = reinterpret_cast<int32_t*>(sum + kTileRows);
  int8_t* quants = reinterpret_cast<int8_t*>(record + kActivationHeaderPerRow * kTileRows) + 4 * row;

  F32 values[kVectors], largest = zero();
  unroll<kVectors>([&](auto v) {
    values[v] = load(x + v * kLanes);
    largest = max(largest, abs(values[v]));
  });
  const float max_abs = reduce_max(largest);
  // A block of zeros, or of values too small to matter, gets zeros.
  const float inverse = 127.0f / max_abs;
  const bool is_zero = inverse > __FLT_MAX__;
  const F32 factor = set1(is_zero ? 0.0f : inverse);
  int8_t q[kBlock];
  int32_t halves[2];
  unroll<2>([&](auto half) {
    F32 sixteen[kVectors / 2];
    unroll<kVectors / 2>([&](auto v) { sixteen[v] = mul(values[half * kVectors / 2 + v], factor); });
    halves[half] = store_rounded_s8(q + half * kBlock / 2, sixteen);
  });
  const float d = is_zero ? 0.0f : max_abs / 127.0f;
  const int32_t total = halves[0] + halves[1];
  *scale = d;
  *sum = d * static_cast<float>(total);
  starts[0] = kDotBias - 8 * total;
  starts[kTileRows] = kDotBias - 128 * total;
  starts[2 * kTileRows] = kDotBias - 32 * halves[0];
  starts[3 * kTileRows] = kDotBias - 32 * halves[1];
  unroll<kBlock / 4>([&](auto step) { __builtin_memcpy(quants + step * 4 * kTileRows, q + 4 * step, 4); });
}

// A missing row: zeros, in memory that is 0.
template <size_t kTileRows>
EH2O_INLINE void clear_block(uint8_t* record, size_t row) {
  int32_t* starts = reinterpret_cast<int32_t*>(record) + 2 * kTileRows + row;
  for (size_t i = 0; i < 4; ++i) starts[i * kTileRows] = simd::kDotBias;
}

template <size_t kTileRows>
void quantize_tile(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t depth) {
  constexpr size_t kRecord = kActivationRecordPerRow * kTileRows;
  if (n_rows < kTileRows) __builtin_memset(out, 0, depth / kBlock * kRecord);
  for (size_t k = 0; k < depth; k += kBlock, out += kRecord) {
    for (size_t row = 0; row < n_rows; ++row) quantize_block<kTileRows>(out, row, x + row * x_stride + k);
    for (size_t row = n_rows; row < kTileRows; ++row) clear_block<kTileRows>(out, row);
  }
}

// out: one tile of tile_rows rows, kGemmQ8Rows or up to kGemvRows; depth / 32 records. x: [n_rows][x_stride],
// n_rows <= tile_rows; missing rows become zeros. depth is a multiple of 32.
inline void quantize_q8p_f32(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t tile_rows,
                             size_t depth) {
  constexpr size_t kMaxRows = simd::kGemmQ8Rows > simd::kGemvRows ? simd::kGemmQ8Rows : simd::kGemvRows;
  simd::with_constant<kMaxRows>(tile_rows,
                                [&](auto rows) { quantize_tile<rows>(out, x, x_stride, n_rows, depth); });
}

}  // namespace edgeh2o::EH2O_ISA
