// Activations to 8 bits: per row and block of 32 or 256 values, d = top / 127 and q = rint(x / d), in the
// packed layout that the quantised matrix kernels read (quant/packed_format.h). top is max|x|; of 256 values
// it is at least what leaves the magnitudes of 16 neighbours below kMostOf16, with what they are rounded up
// by.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// The sums of 16 quants each of the rows of a record, as the products that start at kDotBias need them.
template <typename Dot, size_t kTileRows>
EH2O_INLINE void store_starts(int32_t* starts, const int32_t (&halves)[2][kTileRows], const int8_t* q) {
  for (size_t row = 0; row < kTileRows; ++row) {
    starts[row] = simd::kDotBias - 8 * (halves[0][row] + halves[1][row]);
  }
  if constexpr (kHasPairs<Dot>) {
    for (size_t row = 0; row < kTileRows; ++row) {
      int16_t sums[2][2], words[3][2];
      simd::unroll<2>([&](auto half) { Dot::sum_pairs(sums[half], q + row * kBlock + half * kBlock / 2); });
      simd::unroll<2>([&](auto i) {
        words[0][i] = static_cast<int16_t>(-16 * (sums[0][i] + sums[1][i]));
        words[1][i] = static_cast<int16_t>(-32 * sums[0][i]);
        words[2][i] = static_cast<int16_t>(-32 * sums[1][i]);
      });
      simd::unroll<3>([&](auto i) { __builtin_memcpy(starts + (1 + i) * kTileRows + row, words[i], 4); });
    }
  } else {
    for (size_t row = 0; row < kTileRows; ++row) {
      starts[kTileRows + row] = simd::kDotBias - 128 * (halves[0][row] + halves[1][row]);
      starts[2 * kTileRows + row] = simd::kDotBias - 32 * halves[0][row];
      starts[3 * kTileRows + row] = simd::kDotBias - 32 * halves[1][row];
    }
  }
}

// The largest number in 32 values.
EH2O_INLINE simd::F32 largest_of(const float* x) {
  using namespace simd;
  F32 largest = zero();
  unroll<kBlock / kLanes>([&](auto v) { largest = max(largest, abs(load(x + v * kLanes))); });
  return largest;
}

// What 256 values are divided by, times 127.
EH2O_INLINE float top_of_256(const float* x) {
  using namespace simd;
  constexpr size_t kGroup = 16, kVectors = kGroup / kLanes;
  constexpr float kLargestSum = kMostOf16 - kGroup / 2;  // before rounding
  F32 largest = zero(), sums = zero();
  for (size_t k = 0; k < kSuperBlock; k += kGroup * kLanes) {
    F32 groups[kLanes];  // lanes that add up to a group's magnitudes
    unroll<kLanes>([&](auto i) {
      groups[i] = zero();
      unroll<kVectors>([&](auto v) {
        const F32 value = abs(load(x + k + i * kGroup + v * kLanes));
        largest = max(largest, value);
        groups[i] = mul_add(value, set1(127.0f / kLargestSum), groups[i]);
      });
    });
    transpose(groups);
    unroll<kLanes - 1>([&](auto i) { groups[0] = add(groups[0], groups[i + 1]); });
    sums = max(sums, groups[0]);
  }
  return reduce_max(max(largest, sums));
}

// 32 values of n_rows rows, times their factors; units: what a quant of a row counts. What is stored of all
// rows at once is a fifth of the time of storing row after row. Missing rows keep zeros. A row alone is
// stored where it stays: a copy, which reads its two halves at once behind their stores, waits 200 cycles for
// them.
template <size_t kTileRows>
EH2O_INLINE void quantize_record(uint8_t* record, const float* x, size_t x_stride, size_t n_rows,
                                 const float (&factors)[kTileRows], const float (&units)[kTileRows]) {
  using namespace simd;
  constexpr size_t kVectors = kBlock / 2 / kLanes;
  uint8_t* const quants = record + kActivationHeaderPerRow * kTileRows;
  int8_t rows[kTileRows > 1 ? kTileRows * kBlock : 1] = {};
  int8_t* const q = kTileRows > 1 ? rows : reinterpret_cast<int8_t*>(quants);
  if (kTileRows == 1 && n_rows == 0) __builtin_memset(quants, 0, kBlock);
  int32_t halves[2][kTileRows] = {};
  for (size_t row = 0; row < n_rows; ++row) {
    const F32 factor = set1(factors[row]);
    unroll<2>([&](auto half) {
      F32 sixteen[kVectors];
      unroll<kVectors>([&](auto v) {
        sixteen[v] = mul(load(x + row * x_stride + half * kBlock / 2 + v * kLanes), factor);
      });
      halves[half][row] = store_rounded_s8(q + row * kBlock + half * kBlock / 2, sixteen);
    });
  }
  float* scales = reinterpret_cast<float*>(record);
  float* sums = scales + kTileRows;
  for (size_t row = 0; row < kTileRows; ++row) {
    scales[row] = units[row];
    sums[row] = units[row] * static_cast<float>(halves[0][row] + halves[1][row]);
  }
  store_starts<WordDot>(reinterpret_cast<int32_t*>(sums + kTileRows), halves, q);
  if constexpr (kTileRows > 1) {
    uint8_t* out = quants;
    for (size_t step = 0; step < kBlock / 4; ++step) {
      for (size_t row = 0; row < kTileRows; ++row, out += 4)
        __builtin_memcpy(out, q + row * kBlock + 4 * step, 4);
    }
  }
}

template <size_t kTileRows>
void quantize_tile(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t depth,
                   size_t scale_block) {
  constexpr size_t kRecord = kActivationRecordPerRow * kTileRows;
  for (size_t k = 0; k < depth; k += scale_block, out += scale_block / kBlock * kRecord) {
    float tops[kTileRows] = {}, factors[kTileRows], units[kTileRows];
    for (size_t row = 0; row < n_rows; ++row) {
      const float* block = x + row * x_stride + k;
      tops[row] = scale_block == kBlock ? simd::reduce_max(largest_of(block)) : top_of_256(block);
    }
    for (size_t row = 0; row < kTileRows; ++row) {
      // A block of zeros, or of values too small to matter, gets zeros.
      const float inverse = 127.0f / tops[row];
      const bool is_zero = inverse > __FLT_MAX__;
      factors[row] = is_zero ? 0.0f : inverse;
      units[row] = is_zero ? 0.0f : tops[row] / 127.0f;
    }
    for (size_t i = 0; i < scale_block / kBlock; ++i) {
      quantize_record<kTileRows>(out + i * kRecord, x + k + i * kBlock, x_stride, n_rows, factors, units);
    }
  }
}

// out: one tile of tile_rows rows, kGemmQ8Rows or up to kGemvRows; depth / 32 records. x: [n_rows][x_stride],
// n_rows <= tile_rows; missing rows become zeros. scale_block, of values that share a scale, is 32 or 256,
// and depth a multiple of it.
inline void quantize_q8p_f32(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t tile_rows,
                             size_t depth, size_t scale_block) {
  constexpr size_t kMaxRows = simd::kGemmQ8Rows > simd::kGemvRows ? simd::kGemmQ8Rows : simd::kGemvRows;
  simd::with_constant<kMaxRows>(
      tile_rows, [&](auto rows) { quantize_tile<rows>(out, x, x_stride, n_rows, depth, scale_block); });
}

}  // namespace edgeh2o::EH2O_ISA
