// Products with weights of two levels of scales in integers: activations share a scale by 256 values
// (quant/packed_format.h), a dot product of 16 or 32 values fits 16 bits, and one instruction or two add it,
// times the fine scale of its weights, to a sum of 32 bits. One conversion and the coarse scales follow per
// 256 values, in the same order for one row and for many.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// Where a row's dot product number `part` of a record begins: minus the offset times the sum of the quants.
template <PackedFormat kFormat, typename Dot, size_t kRows>
EH2O_INLINE simd::I32 word_start(const ActivationRecord<kRows>& x, size_t part, size_t row) {
  using Format = WordFormat<kFormat>;
  constexpr bool kIsHalved = Format::kDepth < kBlock;
  constexpr size_t kFirst = kIsHalved ? 2 : Dot::kHasPairs ? 1 : 0;
  constexpr int kShift = (kIsHalved ? 5 : Dot::kHasPairs ? 4 : 3) - Format::kOffsetLog2;
  const int32_t stored = x.starts[(kFirst + part) * kRows + row];
  if constexpr (kShift == 0) {
    return simd::set1_i32(stored);
  } else if constexpr (Dot::kHasPairs) {
    return Dot::template shift_right<kShift>(simd::set1_i32(stored));
  } else {
    const auto bits = static_cast<uint32_t>(stored);
    return simd::set1_i32(static_cast<int32_t>(kShift > 0 ? bits >> kShift : bits << -kShift));
  }
}

// sum += dot products of one record times their fine scales: load(step, v) gives weights, scale(sub, v) a
// scale.
template <PackedFormat kFormat, typename Dot, size_t kChains, size_t kRows, typename Load, typename Scale>
EH2O_INLINE void add_record(simd::I32 (&sum)[kRows][simd::kGemmQ8Vectors], const ActivationRecord<kRows>& x,
                            const Load& load, const Scale& scale) {
  using namespace simd;
  using Format = WordFormat<kFormat>;
  constexpr size_t kVectors = kGemmQ8Vectors, kSteps = Format::kDepth / 4;
  unroll<kBlock / Format::kDepth>([&](auto part) EH2O_INLINE_LAMBDA {
    I32 dot[kChains][kRows][kVectors];
    unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
      const I32 start = word_start<kFormat, Dot>(x, part, r);
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
        dot[0][r][v] = start;
        if constexpr (kChains == 2) dot[1][r][v] = set1_i32(0);
      });
    });
    unroll<kSteps>([&](auto i) EH2O_INLINE_LAMBDA {
      constexpr size_t kStep = part * kSteps + i;
      I8 columns[kVectors];
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { columns[v] = load(Index<kStep>{}, v); });
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
        unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
          I32& d = dot[i % kChains][r][v];
          d = Dot::add(d, columns[v], x.quants + 4 * (kStep * kRows + r));
        });
      });
    });
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
      const I32 fine = scale(part * Format::kDepth / Format::Traits::kSubBlock, v);
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
        I32 whole = dot[0][r][v];
        if constexpr (kChains == 2) whole = Dot::add_parts(whole, dot[1][r][v]);
        sum[r][v] = Dot::add_scaled(sum[r][v], whole, fine);
      });
    });
  });
}

// total += the sums of a super-block times their coarse scales.
template <typename Dot, size_t kRows>
EH2O_INLINE void add_super_block(simd::F32 (&total)[kRows][simd::kGemmQ8Vectors],
                                 const simd::I32 (&sum)[kRows][simd::kGemmQ8Vectors],
                                 const simd::F32 (&d)[simd::kGemmQ8Vectors], const float* x_scale) {
  using namespace simd;
  unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
    const F32 scale = set1(x_scale[r]);
    unroll<kGemmQ8Vectors>([&](auto v) EH2O_INLINE_LAMBDA {
      total[r][v] = mul_add(mul(Dot::to_f32(sum[r][v]), d[v]), scale, total[r][v]);
    });
  });
}

// A register tile, as gemm_q8_tile.
template <PackedFormat kFormat, typename Dot>
EH2O_INLINE void gemm_words_tile(float* c, size_t c_stride, const uint8_t* x, const uint8_t* w,
                                 size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  using namespace simd;
  using Sizes = PackedSizes<kFormat>;
  constexpr size_t kRows = kGemmQ8Rows, kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  constexpr size_t kSubBlocks = Sizes::kSubBlocks;
  F32 total[kRows][kVectors];
  unroll<kRows>([&](auto r) {
    load_tile_row<kVectors>(total[r], c + r * c_stride, accumulate && r < n_rows ? n_cols : 0);
  });
  for (size_t first = 0; first < n_records; first += kSuperRecords) {
    const size_t count = n_records - first < kSuperRecords ? n_records - first : kSuperRecords;
    F32 d[kVectors];
    unroll<kVectors>([&](auto v) { d[v] = load(reinterpret_cast<const float*>(w) + v * kLanes); });
    w += Sizes::kUnpackedHeaderPerColumn * kCols;
    const uint8_t* super_x = x;
    I32 sum[kRows][kVectors];
    unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto v) { sum[r][v] = set1_i32(0); }); });
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* quants = w + 4 * kSubBlocks * Sizes::kParts * kCols;
      add_record<kFormat, Dot, 1>(
          sum, ActivationRecord<kRows>(x),
          [&](auto step, auto v)
              EH2O_INLINE_LAMBDA { return load_i8(quants + (step * kCols + v * kLanes) * 4); },
          [&](size_t sub, auto v)
              EH2O_INLINE_LAMBDA { return Dot::load(w + (sub * kCols + v * kLanes) * 4); });
      x += kActivationRecordPerRow * kRows;
      w += Sizes::kUnpackedPerColumn * kCols;
    }
    add_super_block<Dot>(total, sum, d, reinterpret_cast<const float*>(super_x));
  }
  unroll<kRows>(
      [&](auto r) { store_tile_row<kVectors>(c + r * c_stride, total[r], r < n_rows ? n_cols : 0); });
}

// A few rows, as gemv_q8.
template <PackedFormat kFormat, typename Dot, size_t kRows>
__attribute__((flatten)) void gemv_words(float* y, size_t y_stride, const uint8_t* x, const uint8_t* w,
                                         size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  using namespace simd;
  constexpr size_t kVectors = kGemmQ8Vectors;
  constexpr size_t kChains = kRows == 1 ? kGemvQ8Chains : 1;
  F32 total[kRows][kVectors];
  unroll<kRows>([&](auto r) {
    load_tile_row<kVectors>(total[r], y + r * y_stride, accumulate && r < n_rows ? n_cols : 0);
  });
  RecordReader<kFormat> weights(w);
  for (size_t first = 0; first < n_records; first += kSuperRecords) {
    const size_t end = n_records - first < kSuperRecords ? n_records : first + kSuperRecords;
    const float* x_scale = reinterpret_cast<const float*>(x);
    I32 sum[kRows][kVectors];
    unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto v) { sum[r][v] = set1_i32(0); }); });
    for (size_t record = first; record < end; ++record) {
      weights.enter(record);
      weights.fetch_ahead();
      const uint8_t* quants = weights.quants();
      add_record<kFormat, Dot, kChains>(
          sum, ActivationRecord<kRows>(x),
          [&](auto step, auto v) EH2O_INLINE_LAMBDA { return load_weights<kFormat, step, true>(quants, v); },
          [&](size_t sub, auto v) EH2O_INLINE_LAMBDA { return weights.template fine_scale<Dot>(sub, v); });
      x += kActivationRecordPerRow * kRows;
    }
    F32 d[kVectors];
    unroll<kVectors>([&](auto v) { d[v] = weights.coarse_scale(v); });
    add_super_block<Dot>(total, sum, d, x_scale);
  }
  unroll<kRows>(
      [&](auto r) { store_tile_row<kVectors>(y + r * y_stride, total[r], r < n_rows ? n_cols : 0); });
}

}  // namespace edgeh2o::EH2O_ISA
