// Products with weights of two levels of scales in integers: activations share a scale by 256 values
// (quant/packed_format.h), a dot product of 16 or 32 values fits 16 bits, and one instruction or two add it,
// times the fine scale of its weights, to a sum of 32 bits. Where scale times quant fits a byte
// (Unpacked::kBytes), and many rows share that product, there is nothing left to do between dot products.
// Mins meet the sums of 16 activations. One conversion and the coarse scales follow per 256 values, in the
// same order for one row and for many.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// Where a row's dot product number `part` of a record begins: minus the offset times the sum of the quants.
template <PackedFormat kFormat, typename Dot, size_t kRows>
EH2O_INLINE simd::I32 word_start(const ActivationRecord<kRows>& x, size_t part, size_t row) {
  using Format = WordFormat<kFormat>;
  if constexpr (Format::kOffsetLog2 < 0) return simd::set1_i32(0);
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
    EH2O_UNROLL_FOR(r, kRows) {
      const I32 start = word_start<kFormat, Dot>(x, part, r);
      EH2O_UNROLL_FOR(v, kVectors) {
        dot[0][r][v] = start;
        if constexpr (kChains == 2) dot[1][r][v] = set1_i32(0);
      }
    }
    unroll<kSteps>([&](auto i) EH2O_INLINE_LAMBDA {
      constexpr size_t kStep = part * kSteps + i;
      I8 columns[kVectors];
      EH2O_UNROLL_FOR(v, kVectors) {
        columns[v] = load(Index<kStep>{}, v);
      }
      EH2O_UNROLL_FOR(r, kRows) {
        EH2O_UNROLL_FOR(v, kVectors) {
          I32& d = dot[i % kChains][r][v];
          d = Dot::add(d, columns[v], x.quants + 4 * (kStep * kRows + r));
        }
      }
    });
    EH2O_UNROLL_FOR(v, kVectors) {
      const I32 fine = scale(part * Format::kDepth / Format::Traits::kSubBlock, v);
      EH2O_UNROLL_FOR(r, kRows) {
        I32 whole = dot[0][r][v];
        if constexpr (kChains == 2) whole = Dot::add_parts(whole, dot[1][r][v]);
        sum[r][v] = Dot::add_scaled(sum[r][v], whole, fine);
      }
    }
  });
}

// total += the sums of a super-block times their coarse scales, which coarse(v) gives.
template <typename Dot, size_t kRows, typename Coarse>
EH2O_INLINE void add_super_block(simd::F32 (&total)[kRows][simd::kGemmQ8Vectors],
                                 const simd::I32 (&sum)[kRows][simd::kGemmQ8Vectors], const Coarse& coarse,
                                 const float* x_scale) {
  using namespace simd;
  F32 d[kGemmQ8Vectors];
  EH2O_UNROLL_FOR(v, kGemmQ8Vectors) d[v] = coarse(v);
  EH2O_UNROLL_FOR(r, kRows) {
    const F32 scale = set1(x_scale[r]);
    EH2O_UNROLL_FOR(v, kGemmQ8Vectors)
      total[r][v] = mul_add(mul(Dot::to_f32(sum[r][v]), d[v]), scale, total[r][v]);
  }
}

// total += what the mins of a super-block add: load(record, v) gives pairs.
template <typename Dot, size_t kRows, typename Coarse, typename Load>
EH2O_INLINE void add_mins(simd::F32 (&total)[kRows][simd::kGemmQ8Vectors], const uint8_t* x, size_t n_records,
                          const Coarse& coarse, const Load& load) {
  using namespace simd;
  alignas(64) int32_t halves[kSuperRecords][kLanes];
  for (size_t i = 0; i < n_records; ++i) {
    const ActivationRecord<kRows> rows(x + i * kActivationRecordPerRow * kRows);
    Dot::store(reinterpret_cast<uint8_t*>(halves[i]), rows.template halves<Dot>());
  }
  asm("" : "+m"(halves));  // broadcast from memory, not from registers, on a port of the products
  I32 sum[kRows][kGemmQ8Vectors];
  EH2O_UNROLL_FOR(r, kRows) {
    EH2O_UNROLL_FOR(v, kGemmQ8Vectors) sum[r][v] = set1_i32(0);
  }
  for (size_t i = 0; i < n_records; ++i) {
    I32 mins[kGemmQ8Vectors];
    EH2O_UNROLL_FOR(v, kGemmQ8Vectors) mins[v] = load(i, v);
    EH2O_UNROLL_FOR(r, kRows) {
      const I32 row = set1_i32(halves[i][r]);
      EH2O_UNROLL_FOR(v, kGemmQ8Vectors) sum[r][v] = Dot::add_scaled(sum[r][v], row, mins[v]);
    }
  }
  add_super_block<Dot>(total, sum, coarse, reinterpret_cast<const float*>(x));
}

// total += the products of a super-block with Unpacked::kBytes, records at w.
template <PackedFormat kFormat, typename Dot, size_t kRows, typename Coarse>
EH2O_INLINE void add_bytes(simd::F32 (&total)[kRows][simd::kGemmQ8Vectors], const uint8_t* x,
                           size_t n_records, const Coarse& coarse, const uint8_t* w) {
  using namespace simd;
  using Sizes = UnpackedSizes<kFormat, Unpacked::kBytes>;
  constexpr size_t kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  constexpr size_t kStride = kActivationRecordPerRow * kRows;
  const float* x_scale = reinterpret_cast<const float*>(x);
  int32_t starts[kRows] = {};  // minus the offset times the sum of the quants
  if constexpr (WordFormat<kFormat>::kOffsetLog2 >= 0) {
    for (size_t i = 0; i < n_records; ++i) {
      const ActivationRecord<kRows> rows(x + i * kStride);
      for (size_t r = 0; r < kRows; ++r) starts[r] += rows.starts[r] - kDotBias;  // minus 8 times
    }
    static_assert(kByteOffset == 16 * 8 - 1);
    for (size_t r = 0; r < kRows; ++r) starts[r] = 16 * starts[r] - (starts[r] >> 3);
    asm("" : "+m"(starts));
  }
  I32 sum[kQ8Chains][kRows][kVectors];
  EH2O_UNROLL_FOR(chain, kQ8Chains) {
    EH2O_UNROLL_FOR(r, kRows) {
      EH2O_UNROLL_FOR(v, kVectors) sum[chain][r][v] = set1_i32(chain == 0 ? starts[r] : 0);
    }
  }
  for (size_t i = 0; i < n_records; ++i) {
    const int8_t* quants = ActivationRecord<kRows>(x).quants;
    EH2O_UNROLL_FOR(step, kBlock / 4) {
      I8 columns[kVectors];
      EH2O_UNROLL_FOR(v, kVectors)
        columns[v] = load_i8(w + (Sizes::kQuantsFrom + 4 * step) * kCols + 4 * v * kLanes);
      EH2O_UNROLL_FOR(r, kRows) {
        EH2O_UNROLL_FOR(v, kVectors) {
          I32& s = sum[step % kQ8Chains][r][v];
          s = Dot::add(s, columns[v], quants + 4 * (step * kRows + r));
        }
      }
    }
    EH2O_UNROLL_FOR(chain, kQ8Chains) {  // gcc 12 would spill and copy them
      EH2O_UNROLL_FOR(r, kRows) {
        EH2O_UNROLL_FOR(v, kVectors) sum[chain][r][v] = keep(sum[chain][r][v]);
      }
    }
    x += kStride;
    w += Sizes::kRecordPerColumn * kCols;
  }
  if constexpr (kQ8Chains == 2) {
    EH2O_UNROLL_FOR(r, kRows) {
      EH2O_UNROLL_FOR(v, kVectors) sum[0][r][v] = add_i32(sum[0][r][v], sum[1][r][v]);
    }
  }
  add_super_block<Dot>(total, sum[0], coarse, x_scale);
}

// The same with Unpacked::kWords.
template <PackedFormat kFormat, typename Dot, size_t kRows, typename Coarse>
EH2O_INLINE void add_words(simd::F32 (&total)[kRows][simd::kGemmQ8Vectors], const uint8_t* x,
                           size_t n_records, const Coarse& coarse, const uint8_t* w) {
  using namespace simd;
  using Sizes = UnpackedSizes<kFormat, Unpacked::kWords>;
  constexpr size_t kCols = kGemmQ8Columns;
  const float* x_scale = reinterpret_cast<const float*>(x);
  I32 sum[kRows][kGemmQ8Vectors];
  EH2O_UNROLL_FOR(r, kRows) {
    EH2O_UNROLL_FOR(v, kGemmQ8Vectors) sum[r][v] = set1_i32(0);
  }
  for (size_t i = 0; i < n_records; ++i) {
    add_record<kFormat, Dot, 1>(
        sum, ActivationRecord<kRows>(x),
        [&](auto step, auto v) EH2O_INLINE_LAMBDA {
          return load_i8(w + (Sizes::kQuantsFrom + 4 * step) * kCols + 4 * v * kLanes);
        },
        [&](size_t sub, auto v) EH2O_INLINE_LAMBDA { return Dot::load(w + 4 * (sub * kCols + v * kLanes)); });
    x += kActivationRecordPerRow * kRows;
    w += Sizes::kRecordPerColumn * kCols;
  }
  add_super_block<Dot>(total, sum, coarse, x_scale);
}

// A register tile, as gemm_q8_tile.
template <PackedFormat kFormat, typename Dot>
EH2O_INLINE void gemm_words_tile(float* c, size_t c_stride, const uint8_t* x, const uint8_t* w,
                                 size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  using namespace simd;
  constexpr Unpacked kKind = kUnpackedAs<kFormat, Dot>;
  using Sizes = UnpackedSizes<kFormat, kKind>;
  constexpr size_t kRows = kGemmQ8Rows, kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  F32 total[kRows][kVectors];
  EH2O_UNROLL_FOR(r, kRows) {
    load_tile_row<kVectors>(total[r], c + r * c_stride, accumulate && r < n_rows ? n_cols : 0);
  }
  for (size_t first = 0; first < n_records; first += kSuperRecords) {
    const size_t count = n_records - first < kSuperRecords ? n_records - first : kSuperRecords;
    const float* header = reinterpret_cast<const float*>(w);
    w += Sizes::kHeaderPerColumn * kCols;
    const auto coarse = [&](auto v) EH2O_INLINE_LAMBDA { return load(header + v * kLanes); };
    if constexpr (kKind == Unpacked::kBytes) {
      asm("" : "+m"(total));  // not in registers, of which the sums need all
      add_bytes<kFormat, Dot>(total, x, count, coarse, w);
    } else {
      add_words<kFormat, Dot>(total, x, count, coarse, w);
    }
    if constexpr (Sizes::kPairsPerColumn > 0) {
      const uint8_t* pairs = w + Sizes::kScalesPerColumn * kCols;
      add_mins<Dot>(
          total, x, count, [&](auto v) EH2O_INLINE_LAMBDA { return load(header + kCols + v * kLanes); },
          [&](size_t i, auto v) EH2O_INLINE_LAMBDA {
            return Dot::load(pairs + (i * Sizes::kRecordPerColumn * kCols + 4 * v * kLanes));
          });
    }
    x += count * kActivationRecordPerRow * kRows;
    w += count * Sizes::kRecordPerColumn * kCols;
  }
  EH2O_UNROLL_FOR(r, kRows) store_tile_row<kVectors>(c + r * c_stride, total[r], r < n_rows ? n_cols : 0);
}

// A few rows, as gemv_q8.
template <PackedFormat kFormat, typename Dot, size_t kRows>
__attribute__((flatten)) void gemv_words(float* y, size_t y_stride, const uint8_t* x, const uint8_t* w,
                                         size_t n_records, size_t n_rows, size_t n_cols, bool accumulate,
                                         size_t weights_ahead) {
  using namespace simd;
  constexpr size_t kVectors = kGemmQ8Vectors;
  constexpr size_t kChains = kRows == 1 ? kQ8Chains : 1;
  F32 total[kRows][kVectors];
  EH2O_UNROLL_FOR(r, kRows) {
    load_tile_row<kVectors>(total[r], y + r * y_stride, accumulate && r < n_rows ? n_cols : 0);
  }
  RecordReader<kFormat> weights(w);
  for (size_t first = 0; first < n_records; first += kSuperRecords) {
    const size_t end = n_records - first < kSuperRecords ? n_records : first + kSuperRecords;
    const uint8_t *super_x = x, *scales = nullptr;
    I32 sum[kRows][kVectors];
    EH2O_UNROLL_FOR(r, kRows) {
      EH2O_UNROLL_FOR(v, kVectors) sum[r][v] = set1_i32(0);
    }
    for (size_t record = first; record < end; ++record) {
      weights.enter(record);
      weights.fetch_ahead(weights_ahead);
      if (record == first) scales = weights.scales();
      const uint8_t* quants = weights.quants();
      add_record<kFormat, Dot, kChains>(
          sum, ActivationRecord<kRows>(x),
          [&](auto step, auto v) EH2O_INLINE_LAMBDA { return load_weights<kFormat, step, true>(quants, v); },
          [&](size_t sub, auto v) EH2O_INLINE_LAMBDA { return weights.template fine_scale<Dot>(sub, v); });
      x += kActivationRecordPerRow * kRows;
    }
    add_super_block<Dot>(
        total, sum, [&](auto v) EH2O_INLINE_LAMBDA { return weights.coarse_scale(v); },
        reinterpret_cast<const float*>(super_x));
    if constexpr (PackedTraits<kFormat>::kHasMin) {
      add_mins<Dot>(
          total, super_x, end - first, [&](auto v) EH2O_INLINE_LAMBDA { return weights.coarse_min(v); },
          [&](size_t i, auto v) EH2O_INLINE_LAMBDA {
            const uint8_t* own = scales + i * PackedSizes<kFormat>::kRecordPerColumn * kGemmQ8Columns;
            return weights.template min_pairs<Dot>(own, v);
          });
    }
  }
  EH2O_UNROLL_FOR(r, kRows) store_tile_row<kVectors>(y + r * y_stride, total[r], r < n_rows ? n_cols : 0);
}

}  // namespace edgeh2o::EH2O_ISA
