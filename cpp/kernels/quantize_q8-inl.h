// Activations to 8 bits: per row and block of 32 or 256 values, d = top / 127 and q = rint(x / d), in the
// packed layout that the quantised matrix kernels read (quant/packed_format.h). top is max|x|; of 256 values
// it is at least what leaves the magnitudes of 16 neighbours below kMostOf16, with what they are rounded up
// by.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// The starts of a record from `starts` on, kStride apart. halves: the sums of 16 quants each.
template <typename Dot, size_t kStride>
EH2O_INLINE void store_starts(int32_t* starts, const int32_t (&halves)[2], const int8_t* q) {
  const int32_t total = halves[0] + halves[1];
  starts[0] = simd::kDotBias - 8 * total;
  if constexpr (kHasPairs<Dot>) {
    int16_t sums[2][2], words[3][2];
    simd::unroll<2>([&](auto half) { Dot::sum_pairs(sums[half], q + half * kBlock / 2); });
    simd::unroll<2>([&](auto i) {
      words[0][i] = static_cast<int16_t>(-16 * (sums[0][i] + sums[1][i]));
      words[1][i] = static_cast<int16_t>(-32 * sums[0][i]);
      words[2][i] = static_cast<int16_t>(-32 * sums[1][i]);
    });
    simd::unroll<3>([&](auto i) { __builtin_memcpy(starts + (1 + i) * kStride, words[i], 4); });
  } else {
    starts[kStride] = simd::kDotBias - 128 * total;
    starts[2 * kStride] = simd::kDotBias - 32 * halves[0];
    starts[3 * kStride] = simd::kDotBias - 32 * halves[1];
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

// One row and 32 values: kTileRows is the distance between its parts in a record.
template <size_t kTileRows>
EH2O_INLINE void quantize_record(uint8_t* record, size_t row, const float* x, float top) {
  using namespace simd;
  constexpr size_t kVectors = kBlock / kLanes;
  float* scale = reinterpret_cast<float*>(record) + row;
  float* sum = scale + kTileRows;
  int32_t* starts = reinterpret_cast<int32_t*>(sum + kTileRows);
  int8_t* quants = reinterpret_cast<int8_t*>(record + kActivationHeaderPerRow * kTileRows) + 4 * row;

  // A block of zeros, or of values too small to matter, gets zeros.
  const float inverse = 127.0f / top;
  const bool is_zero = inverse > __FLT_MAX__;
  const F32 factor = set1(is_zero ? 0.0f : inverse);
  int8_t q[kBlock];
  int32_t halves[2];
  unroll<2>([&](auto half) {
    F32 sixteen[kVectors / 2];
    unroll<kVectors / 2>([&](auto v) { sixteen[v] = mul(load(x + half * kBlock / 2 + v * kLanes), factor); });
    halves[half] = store_rounded_s8(q + half * kBlock / 2, sixteen);
  });
  const float d = is_zero ? 0.0f : top / 127.0f;
  *scale = d;
  *sum = d * static_cast<float>(halves[0] + halves[1]);
  store_starts<WordDot, kTileRows>(starts, halves, q);
  unroll<kBlock / 4>([&](auto step) { __builtin_memcpy(quants + step * 4 * kTileRows, q + 4 * step, 4); });
}

// A missing row: zeros, in memory that is 0.
template <size_t kTileRows>
EH2O_INLINE void clear_block(uint8_t* record, size_t row) {
  int32_t* starts = reinterpret_cast<int32_t*>(record) + 2 * kTileRows + row;
  constexpr size_t kBiased = kHasPairs<simd::WordDot> ? 1 : 4;
  for (size_t i = 0; i < kBiased; ++i) starts[i * kTileRows] = simd::kDotBias;
}

template <size_t kTileRows>
void quantize_tile(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t depth,
                   size_t scale_block) {
  constexpr size_t kRecord = kActivationRecordPerRow * kTileRows;
  if (n_rows < kTileRows) __builtin_memset(out, 0, depth / kBlock * kRecord);
  for (size_t k = 0; k < depth; k += scale_block, out += scale_block / kBlock * kRecord) {
    for (size_t row = 0; row < n_rows; ++row) {
      const float* block = x + row * x_stride + k;
      const float top = scale_block == kBlock ? simd::reduce_max(largest_of(block)) : top_of_256(block);
      for (size_t i = 0; i < scale_block; i += kBlock) {
        quantize_record<kTileRows>(out + i / kBlock * kRecord, row, block + i, top);
      }
    }
    for (size_t i = 0; i < scale_block / kBlock; ++i) {
      for (size_t row = n_rows; row < kTileRows; ++row) clear_block<kTileRows>(out + i * kRecord, row);
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
