// Quantised matrix products: C[rows][cols] (+)= X[rows][depth] * W[cols][depth]^T with packed 8-bit
// activations X and packed 4- to 8-bit weights W (layouts: quant/packed_format.h). Products accumulate in
// int32 over a record of 32, then one conversion and one multiply-add per record bring them to f32. Sums
// start from what is in C if they are to be added, so that a row's result depends neither on the rows that go
// with it nor on the parts in which its depth is taken.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

inline constexpr size_t kGemmQ8Columns = simd::kGemmQ8Vectors * simd::kLanes;

// Two-level formats whose scales are applied in integers (gemm_words-inl.h). Those with scales of 6 bits and
// a min would gain little by it, and lose what scales by 32 values are worth.
template <PackedFormat kFormat>
struct WordFormat {
  using Traits = PackedTraits<kFormat>;
  static constexpr bool kExists = simd::kHasWordDot && Traits::kTwoLevel &&
                                  (!Traits::kHasMin || Traits::kNibbleScales) && Traits::kBits < 8;
  static constexpr int kOffsetLog2 = Traits::kOffsetLog2;
  // Of a dot product that fits 16 bits.
  static constexpr size_t kDepth = Traits::kSubBlock < 32 || kOffsetLog2 > 4 ? 16 : 32;
  static constexpr int kLargest = kOffsetLog2 < 0 ? 3 : 1 << kOffsetLog2;
  static_assert(!kExists || kMostOf16 * static_cast<int>(kDepth / 16) * kLargest <= 32767);
};

// What the matrix kernel reads.
template <PackedFormat kFormat, typename Dot, bool kIsWord = WordFormat<kFormat>::kExists>
inline constexpr Unpacked kUnpackedAs =
    simd::kSplitsBytes&& PackedTraits<kFormat>::kBits == 8 ? Unpacked::kNibbles : Unpacked::kFloats;
template <PackedFormat kFormat, typename Dot>
inline constexpr Unpacked kUnpackedAs<kFormat, Dot, true> =
    kFitsBytes<kFormat>&& Dot::kScalesBytes ? Unpacked::kBytes : Unpacked::kWords;

// A dot product times the scale of its weights, rounded once. Where kDotBias is not 0, dot has the bits of
// the float 1.5 * 2^23 + dot (|dot| < 2^22), and a multiply-add takes 1.5 * 2^23 * scale off, which is exact,
// since a scale has at most 22 significant bits (f16 times a byte): an instruction less than converting
// first.
struct DotScale {
  simd::F32 scale, negated_bias;
  EH2O_INLINE explicit DotScale(simd::F32 value)
      : scale(value), negated_bias(simd::mul(value, simd::set1(-12582912.0f))) {}
  EH2O_INLINE simd::F32 times(simd::I32 dot) const { return simd::mul_dot(dot, scale, negated_bias); }
};

// Whether starts of packed activations are pairs.
template <typename Dot, bool kExists = simd::kHasWordDot>
inline constexpr bool kHasPairs = false;
template <typename Dot>
inline constexpr bool kHasPairs<Dot, true> = Dot::kHasPairs;

// One record of packed activations, a tile of kRows rows.
template <size_t kRows>
struct ActivationRecord {
  const float *scale, *sums;
  const int32_t* starts;  // [4][kRows]
  const int8_t* quants;   // [8][kRows][4]

  EH2O_INLINE explicit ActivationRecord(const uint8_t* x)
      : scale(reinterpret_cast<const float*>(x)),
        sums(scale + kRows),
        starts(reinterpret_cast<const int32_t*>(sums + kRows)),
        quants(reinterpret_cast<const int8_t*>(x + kActivationHeaderPerRow * kRows)) {}

  // The sum of the activations that the quants stand for.
  template <size_t kSubBlocks>
  EH2O_INLINE float sum(size_t sub, size_t row) const {
    static_assert(kSubBlocks == 1 || !simd::kHasWordDot);
    if constexpr (kSubBlocks == 1) return sums[row];
    return scale[row] * (-0.03125f * static_cast<float>(starts[(2 + sub) * kRows + row] - simd::kDotBias));
  }
  // Lanes of rows: minus 32 times the sums of the first 16 quants, low, and of the last 16, high.
  template <typename Dot>
  EH2O_INLINE simd::I32 halves() const {
    static_assert(kRows <= simd::kLanes);
    return Dot::template join_sums<kRows>(starts + 2 * kRows, starts + 3 * kRows);
  }
};

// Weights that the ISA multiplies as signed have had their offset removed, unless kKeepsOffset; all others
// are corrected by -offset * sum(x), which is the accumulator's start value. Those of the most common formats
// are read as they are: a computed one would take a shuffle to broadcast.
template <PackedFormat kFormat, bool kKeepsOffset = !simd::Dot4<PackedTraits<kFormat>::kBits>::kSigned>
struct Correction {
  using Traits = PackedTraits<kFormat>;
  static constexpr int kOffsetLog2 = Traits::kOffsetLog2;
  // Of a row's sub-block `sub`.
  template <size_t kRows>
  static EH2O_INLINE simd::I32 start(const ActivationRecord<kRows>& x, size_t sub, size_t row) {
    if constexpr (kOffsetLog2 < 0 || !kKeepsOffset) {
      return simd::dot_bias();
    } else {
      constexpr bool kIsHalved = Traits::kSubBlock < kBlock;
      constexpr bool kIsFirst = kOffsetLog2 < 7 || kHasPairs<simd::WordDot>;
      constexpr size_t kIndex = kIsHalved ? 2 : kIsFirst ? 0 : 1;
      constexpr int kStoredLog2 = kIsHalved ? 5 : kIsFirst ? 3 : 7;
      const int32_t stored = x.starts[(kIndex + sub) * kRows + row];
      constexpr bool kIsPair = kIsHalved && kHasPairs<simd::WordDot>;
      if constexpr (kStoredLog2 == kOffsetLog2 && !kIsPair) return simd::set1_i32(stored);
      const int32_t negated =
          kIsPair ? static_cast<int16_t>(stored) + (stored >> 16) : stored - simd::kDotBias;
      const int32_t start = kOffsetLog2 < kStoredLog2 ? negated / (1 << (kStoredLog2 - kOffsetLog2))  // exact
                                                      : negated * (1 << (kOffsetLog2 - kStoredLog2));
      return simd::set1_i32(start + simd::kDotBias);
    }
  }
};

// The dot products of one sub-block by matrix multiply instructions: pairs of rows times pairs of columns, 8
// values of depth at a time.
template <typename Dot, size_t kSteps>
EH2O_INLINE void matrix_dot(simd::I32 (&dot)[simd::kGemmQ8Rows][simd::kGemmQ8Vectors],
                            const int8_t* x,     // [kSteps][kGemmQ8Rows][4]
                            const uint8_t* w) {  // [kSteps / 2][kGemmQ8Columns][8]
  using namespace simd;
  constexpr size_t kRows = kGemmQ8Rows, kColumnPairs = 2 * kGemmQ8Vectors;
  I32 sum[kRows / 2][kColumnPairs];
  EH2O_UNROLL_FOR(r, kRows / 2) {
    EH2O_UNROLL_FOR(p, kColumnPairs) sum[r][p] = dot[2 * r][p / 2];
  }
  EH2O_UNROLL_FOR(step, kSteps / 2) {
    I8 columns[kColumnPairs];
    EH2O_UNROLL_FOR(p, kColumnPairs) columns[p] = load_i8(w + (step * kColumnPairs + p) * 4 * kLanes);
    EH2O_UNROLL_FOR(g, kRows / 4) {
      const int8_t* four_rows = x + step * 8 * kRows + g * 16;
      const I8 even = load_i8(four_rows), odd = load_i8(four_rows + 4 * kRows);
      const I8 low = Dot::low_pair(even, odd), high = Dot::high_pair(even, odd);
      EH2O_UNROLL_FOR(p, kColumnPairs) {
        sum[2 * g][p] = Dot::multiply_pairs(sum[2 * g][p], low, columns[p]);
        sum[2 * g + 1][p] = Dot::multiply_pairs(sum[2 * g + 1][p], high, columns[p]);
      }
    }
  }
  EH2O_UNROLL_FOR(r, kRows / 2) {
    EH2O_UNROLL_FOR(v, kGemmQ8Vectors) {
      dot[2 * r][v] = Dot::first_row(sum[r][2 * v], sum[r][2 * v + 1]);
      dot[2 * r + 1][v] = Dot::second_row(sum[r][2 * v], sum[r][2 * v + 1]);
    }
  }
}

// The dot products of one sub-block with Unpacked::kNibbles.
template <typename Dot, size_t kSteps>
EH2O_INLINE void nibble_dot(simd::I32 (&dot)[simd::kGemmQ8Rows][simd::kGemmQ8Vectors],
                            const int8_t* x,     // [kSteps][kGemmQ8Rows][4]
                            const uint8_t* w) {  // low bits, [kSteps][kGemmQ8Columns][4]
  using namespace simd;
  constexpr size_t kRows = kGemmQ8Rows, kVectors = kGemmQ8Vectors;
  static_assert(kSteps <= Dot::kMaxSteps);
  unroll<2>([&](auto plane) EH2O_INLINE_LAMBDA {
    asm("" : "+r"(x));  // gcc would keep what was broadcast for the other plane, on the stack
    typename Dot::Acc acc[kRows][kVectors];
    EH2O_UNROLL_FOR(r, kRows) {
      EH2O_UNROLL_FOR(v, kVectors) acc[r][v] = Dot::start(dot[r][v]);
    }
    EH2O_UNROLL_FOR(step, kSteps) {
      I8 weights[kVectors];
      EH2O_UNROLL_FOR(v, kVectors) {
        weights[v] = load_i8(w + ((plane * kBlock / 4 + step) * kGemmQ8Columns + v * kLanes) * 4);
      }
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
        EH2O_UNROLL_FOR(v, kVectors) {
          acc[r][v] = Dot::template add<r>(acc[r][v], weights[v], Dot::load_x(x + step * 4 * kRows));
        }
      });
    }
    EH2O_UNROLL_FOR(r, kRows) {
      EH2O_UNROLL_FOR(v, kVectors)
        dot[r][v] = Dot::template finish < plane == 0 ? 1 : 16 > (acc[r][v], dot[r][v]);
    }
  });
}

// One register tile: kGemmQ8Rows x kGemmQ8Columns, n_records of depth.
template <PackedFormat kFormat>
EH2O_INLINE void gemm_q8_tile(float* c,          // [n_rows][c_stride]
                              size_t c_stride,   //
                              const uint8_t* x,  // one packed tile of activations
                              const uint8_t* w,  // one unpacked panel
                              size_t n_records, size_t n_rows, size_t n_cols, bool accumulate) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  using Dot = Dot4<Traits::kBits>;
  constexpr size_t kRows = kGemmQ8Rows, kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock, kSteps = Traits::kSubBlock / 4;
  constexpr size_t kStepsAtOnce = Dot::kMaxSteps < kSteps ? Dot::kMaxSteps : kSteps;
  static_assert(kSteps % kStepsAtOnce == 0 && kRows % Dot::kXRows == 0);
  constexpr Unpacked kKind = kUnpackedAs<kFormat, simd::WordDot>;
  using Offset = Correction<kFormat, !Dot::kSigned || kKind == Unpacked::kNibbles>;

  F32 sum[kRows][kVectors];
  EH2O_UNROLL_FOR(r, kRows)
    load_tile_row<kVectors>(sum[r], c + r * c_stride, accumulate && r < n_rows ? n_cols : 0);

  for (size_t record = 0; record < n_records; ++record) {
    const ActivationRecord<kRows> rows(x);
    const int8_t* x_quants = rows.quants;
    const float* w_scale = reinterpret_cast<const float*>(w);
    const float* w_min = w_scale + kSubBlocks * kCols;
    const uint8_t* w_quants =
        reinterpret_cast<const uint8_t*>(w_min + (Traits::kHasMin ? kSubBlocks * kCols : 0));
    const float* totals = rows.sums;  // of the activations of a sub-block, [kSubBlocks][kRows]
    float halves[2 * kRows];
    if constexpr (Traits::kHasMin && kSubBlocks == 2) {
      for (size_t i = 0; i < 2 * kRows; ++i) halves[i] = rows.template sum<2>(i / kRows, i % kRows);
      // In memory: gcc would broadcast them from registers, on the port of the products, which took a quarter
      // of the time of Q2_K.
      asm("" : "+m"(halves));
      totals = halves;
    }

    for (size_t sub = 0; sub < kSubBlocks; ++sub) {
      I32 dot[kRows][kVectors];
      EH2O_UNROLL_FOR(r, kRows) {
        EH2O_UNROLL_FOR(v, kVectors) dot[r][v] = Offset::start(rows, sub, r);
      }
      if constexpr (kHasMmla) {
        matrix_dot<Dot, kSteps>(dot, x_quants, w_quants);
        x_quants += kSteps * 4 * kRows;
        w_quants += kSteps * 4 * kCols;
      } else if constexpr (kKind == Unpacked::kNibbles) {
        nibble_dot<Dot4<Traits::kBits / 2>, kSteps>(dot, x_quants, w_quants);
        x_quants += kSteps * 4 * kRows;
        w_quants += kSteps * 4 * kCols;
      } else {
        for (size_t step = 0; step < kSteps; step += kStepsAtOnce) {
          typename Dot::Acc acc[kRows][kVectors];
          EH2O_UNROLL_FOR(r, kRows) {
            EH2O_UNROLL_FOR(v, kVectors) acc[r][v] = Dot::start(dot[r][v]);
          }
          unroll<kStepsAtOnce>([&](auto) {
            I8 weights[kVectors];
            EH2O_UNROLL_FOR(v, kVectors) weights[v] = load_i8(w_quants + v * 4 * kLanes);
            EH2O_UNROLL_FOR(g, kRows / Dot::kXRows) {
              const typename Dot::X values = Dot::load_x(x_quants + g * 4 * Dot::kXRows);
              unroll<Dot::kXRows>([&](auto i) {
                EH2O_UNROLL_FOR(v, kVectors) {
                  auto& a = acc[g * Dot::kXRows + i][v];
                  a = Dot::template add<i>(a, weights[v], values);
                }
              });
            }
            w_quants += 4 * kCols;
            x_quants += 4 * kRows;
          });
          EH2O_UNROLL_FOR(r, kRows) {
            EH2O_UNROLL_FOR(v, kVectors) dot[r][v] = Dot::finish(acc[r][v], dot[r][v]);
          }
        }
      }
      EH2O_UNROLL_FOR(v, kVectors) {
        const DotScale scale(load(w_scale + sub * kCols + v * kLanes));
        EH2O_UNROLL_FOR(r, kRows) sum[r][v] = mul_add(scale.times(dot[r][v]), set1(rows.scale[r]), sum[r][v]);
      }
      if constexpr (Traits::kHasMin) {
        EH2O_UNROLL_FOR(r, kRows) {
          const F32 total = set1(totals[sub * kRows + r]);
          EH2O_UNROLL_FOR(v, kVectors)
            sum[r][v] = mul_add(total, load(w_min + sub * kCols + v * kLanes), sum[r][v]);
        }
      }
    }
    x += kActivationRecordPerRow * kRows;
    w += UnpackedSizes<kFormat, kKind>::kRecordPerColumn * kCols;
  }

  EH2O_UNROLL_FOR(r, kRows) store_tile_row<kVectors>(c + r * c_stride, sum[r], r < n_rows ? n_cols : 0);
}

}  // namespace edgeh2o::EH2O_ISA
