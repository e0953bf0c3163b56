// A few rows of activations times packed weights, read in the order in which they lie in memory: decode is
// bound by memory bandwidth, so weights are unpacked in registers, once for all rows.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// Walks over the records of a packed panel: f32 scales and mins of kGemmQ8Columns columns, and the quants.
template <PackedFormat kFormat>
class RecordReader {
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  static constexpr size_t kCols = kGemmQ8Columns, kVectors = simd::kGemmQ8Vectors;

 public:
  EH2O_INLINE explicit RecordReader(const uint8_t* panel) : record_(panel) {
    if constexpr (Traits::kTwoLevel) {  // gcc does not see that the first record sets them
      EH2O_UNROLL_FOR(v, kVectors) d_[v] = negated_dmin_[v] = simd::zero();
    }
  }

  // Enters record number `record`; call it for 0, 1, 2, ...
  EH2O_INLINE void enter(size_t record) {
    if (record > 0) record_ += Sizes::kRecordPerColumn * kCols;
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        const uint16_t* header = reinterpret_cast<const uint16_t*>(record_);
        EH2O_UNROLL_FOR(v, kVectors) {
          d_[v] = simd::load_f16(header + v * simd::kLanes);
          if constexpr (Traits::kUnit != 1.0f) d_[v] = simd::mul(d_[v], simd::set1(Traits::kUnit));
          if constexpr (Traits::kHasMin) {
            const simd::F32 dmin = Traits::kMinOfScale ? simd::mul(d_[v], simd::set1(0.125f))
                                                       : simd::load_f16(header + kCols + v * simd::kLanes);
            negated_dmin_[v] = simd::sub(simd::zero(), dmin);
          }
        }
        record_ += Sizes::kHeaderPerColumn * kCols;
      }
    }
  }

  // Fetches what lies n_bytes behind the record, unless n_bytes is 0.
  EH2O_INLINE void fetch_ahead(size_t n_bytes) const {
    if (n_bytes == 0) return;
    const uint8_t* ahead = record_ + n_bytes;
    for (size_t i = 0; i < Sizes::kRecordPerColumn * kCols; i += 64) __builtin_prefetch(ahead + i, 0, 2);
  }

  EH2O_INLINE simd::F32 scale(size_t sub, size_t v) const {
    const size_t column = v * simd::kLanes;
    if constexpr (Traits::kTwoLevel) {
      const uint8_t* fine = record_ + sub * kCols + column;
      if constexpr (Traits::kNibbleScales) {
        return simd::mul(d_[v], simd::load_u4<0>(fine));
      } else if constexpr (Traits::kHasMin) {
        return simd::mul(d_[v], simd::load_u8(fine));
      } else {
        return simd::mul(d_[v], simd::load_s8(reinterpret_cast<const int8_t*>(fine)));
      }
    } else if constexpr (Traits::kBf16Scale) {
      return simd::load_bf16(reinterpret_cast<const uint16_t*>(record_) + column);
    } else {
      return simd::load_f16(reinterpret_cast<const uint16_t*>(record_) + column);
    }
  }
  EH2O_INLINE simd::F32 min(size_t sub, size_t v) const {
    const size_t column = v * simd::kLanes;
    if constexpr (Traits::kTwoLevel) {
      if constexpr (Traits::kNibbleScales) {
        const uint8_t* fine = record_ + sub * kCols + column;
        const simd::F32 min = simd::mul(negated_dmin_[v], simd::load_u4<4>(fine));
        return Traits::kMinOfScale ? simd::mul(min, simd::load_u4<0>(fine)) : min;
      } else {
        const uint8_t* fine = record_ + (Sizes::kSubBlocks + sub) * kCols + column;
        return simd::mul(negated_dmin_[v], simd::load_u8(fine));
      }
    } else {
      return simd::load_f16(reinterpret_cast<const uint16_t*>(record_) + kCols + column);
    }
  }
  // The scale of a WordFormat in integers, and what it counts.
  template <typename Dot>
  EH2O_INLINE simd::I32 fine_scale(size_t sub, size_t v) const {
    const uint8_t* fine = record_ + sub * kCols + v * simd::kLanes;
    if constexpr (Traits::kNibbleScales) return Dot::template load_nibbles<0>(fine);
    return Dot::load_scales(fine);
  }
  EH2O_INLINE simd::F32 coarse_scale(size_t v) const { return d_[v]; }
  // The mins of the record whose scales lie at `scales`, and what they count times minus 32 times a sum.
  template <typename Dot>
  static EH2O_INLINE simd::I32 min_pairs(const uint8_t* scales, size_t v) {
    const uint8_t* fine = scales + v * simd::kLanes;
    if constexpr (Traits::kMinOfScale) {
      const simd::I32 min =
          Dot::mul_words(Dot::template load_nibbles<0>(fine), Dot::template load_nibbles<4>(fine));
      return Dot::join_words(min, min);  // for both halves of the record
    }
    return Dot::join_words(Dot::template load_nibbles<4>(fine), Dot::template load_nibbles<4>(fine + kCols));
  }
  EH2O_INLINE simd::F32 coarse_min(size_t v) const {
    return simd::mul(negated_dmin_[v], simd::set1(-0.03125f));
  }
  EH2O_INLINE const uint8_t* scales() const { return record_; }
  EH2O_INLINE const uint8_t* quants() const { return record_ + Sizes::kScalesPerColumn * kCols; }

 private:
  simd::F32 d_[kVectors], negated_dmin_[kVectors];  // two-level formats: of the super-block
  const uint8_t* record_;
};

// The bytes that a kernel multiplies in place of 4 stored bits.
template <PackedFormat kFormat>
struct CodebookBytes {
  alignas(kCodebookSize) uint8_t byte[kCodebookSize];
  constexpr CodebookBytes() : byte{} {
    using Traits = PackedTraits<kFormat>;
    const int offset = simd::Dot4<Traits::kBits>::kSigned ? 0 : 1 << Traits::kOffsetLog2;
    for (size_t i = 0; i < kCodebookSize; ++i) {
      byte[i] = static_cast<uint8_t>(codebook_value(Traits::kCodebook, i) + offset);
    }
  }
};

// Stored with their offset, though the ISA multiplies signed weights: planes of bits hold no sign.
template <PackedFormat kFormat>
inline constexpr bool kHasOffsetPlanes =
    PackedTraits<kFormat>::kLowBits < 8 &&
    PackedTraits<kFormat>::kCodebook == Codebook::kNone&& PackedTraits<kFormat>::kOffsetLog2 >= 0 &&
    simd::Dot4<PackedTraits<kFormat>::kBits>::kSigned;

// Step kStep, 4 values of depth, of vector v in a plane of kBits bits, moved to bit kTo on.
template <int kBits, int kTo, size_t kStep>
EH2O_INLINE simd::I8 load_plane(const uint8_t* plane, size_t v) {
  constexpr size_t kCols = kGemmQ8Columns;
  const simd::I8 bits = simd::load_i8(plane + (kStep % kBits * kCols + v * simd::kLanes) * 4);
  return simd::take_bits<static_cast<int>(kStep / kBits * kBits), kBits, kTo>(bits);
}

// The weights of depth step kStep of vector v, ready to multiply.
template <PackedFormat kFormat, size_t kStep, bool kKeepsOffset = false>
EH2O_INLINE simd::I8 load_weights(const uint8_t* quants, size_t v) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  constexpr size_t kCols = kGemmQ8Vectors * kLanes;
  if constexpr (Traits::kLowBits == 8) {
    return load_i8(quants + (kStep * kCols + v * kLanes) * 4);
  } else {
    I8 values = load_plane<Traits::kLowBits, 0, kStep>(quants, v);
    if constexpr (Traits::kHighBits > 0) {
      const uint8_t* high = quants + PackedSizes<kFormat>::kLowPerColumn * kCols;
      values = or_i8(values, load_plane<Traits::kHighBits, Traits::kLowBits, kStep>(high, v));
    }
    if constexpr (Traits::kCodebook != Codebook::kNone) {
      static constexpr CodebookBytes<kFormat> kTable;
      return look_up(kTable.byte, values);
    } else if constexpr (kHasOffsetPlanes<kFormat> && !kKeepsOffset) {
      return sub_i8(values, 1 << Traits::kOffsetLog2);
    } else {
      return values;
    }
  }
}

// Flat: gcc leaves a lambda of some formats out of line, with its accumulators in memory.
template <PackedFormat kFormat, size_t kRows>
__attribute__((flatten)) void gemv_q8(float* y, size_t y_stride, const uint8_t* x, const uint8_t* w,
                                      size_t n_records, size_t n_rows, size_t n_cols, bool accumulate,
                                      size_t weights_ahead) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  using Dot = Dot4<Traits::kBits>;
  constexpr size_t kVectors = kGemmQ8Vectors;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock, kSteps = Traits::kSubBlock / 4;
  constexpr size_t kStepsAtOnce = Dot::kMaxSteps < kSteps ? Dot::kMaxSteps : kSteps;
  constexpr size_t kXRows = Dot::kXRows;
  static_assert(kSteps % kStepsAtOnce == 0 && kStepsAtOnce * kRows % kXRows == 0);
  // A correction of the sum takes fewer instructions than one of every weight.
  using Offset = Correction<kFormat, !Dot::kSigned || kHasOffsetPlanes<kFormat>>;
  constexpr size_t kChains = kRows == 1 ? kQ8Chains : 1;  // so that the latency of a product is hidden

  F32 sum[kRows][kVectors];
  EH2O_UNROLL_FOR(r, kRows)
    load_tile_row<kVectors>(sum[r], y + r * y_stride, accumulate && r < n_rows ? n_cols : 0);
  RecordReader<kFormat> weights(w);
  for (size_t record = 0; record < n_records; ++record) {
    weights.enter(record);
    weights.fetch_ahead(weights_ahead);
    const uint8_t* w_quants = weights.quants();
    const ActivationRecord<kRows> row(x);
    unroll<kSubBlocks>([&](auto sub) EH2O_INLINE_LAMBDA {
      I32 dot[kRows][kVectors];
      EH2O_UNROLL_FOR(r, kRows) {
        const I32 start = Offset::start(row, sub, r);
        EH2O_UNROLL_FOR(v, kVectors) dot[r][v] = start;
      }
      unroll<kSteps / kStepsAtOnce>([&](auto part) EH2O_INLINE_LAMBDA {
        typename Dot::Acc acc[kChains][kRows][kVectors];
        EH2O_UNROLL_FOR(r, kRows) {
          EH2O_UNROLL_FOR(v, kVectors) {
            acc[0][r][v] = Dot::start(dot[r][v]);
            if constexpr (kChains == 2) acc[1][r][v] = Dot::start(set1_i32(0));
          }
        }
        typename Dot::X values;
        unroll<kStepsAtOnce>([&](auto i) EH2O_INLINE_LAMBDA {
          constexpr size_t kStep = sub * kSteps + part * kStepsAtOnce + i;
          I8 columns[kVectors];
          EH2O_UNROLL_FOR(v, kVectors) columns[v] = load_weights<kFormat, kStep, true>(w_quants, v);
          unroll<kRows>([&](auto r) {
            constexpr size_t kIndex = kStep * kRows + r;  // a load of x holds several steps or rows
            if constexpr (kIndex % kXRows == 0) values = Dot::load_x(row.quants + 4 * kIndex);
            EH2O_UNROLL_FOR(v, kVectors) {
              auto& a = acc[i % kChains][r][v];
              a = Dot::template add<kIndex % kXRows>(a, columns[v], values);
            }
          });
        });
        EH2O_UNROLL_FOR(r, kRows) {
          EH2O_UNROLL_FOR(v, kVectors) {
            dot[r][v] = Dot::finish(acc[0][r][v], dot[r][v]);
            if constexpr (kChains == 2) {
              dot[r][v] = add_i32(dot[r][v], Dot::finish(acc[1][r][v], set1_i32(0)));
            }
          }
        }
      });
      EH2O_UNROLL_FOR(v, kVectors) {
        const DotScale scale(weights.scale(sub, v));
        EH2O_UNROLL_FOR(r, kRows) sum[r][v] = mul_add(scale.times(dot[r][v]), set1(row.scale[r]), sum[r][v]);
      }
      if constexpr (Traits::kHasMin) {
        EH2O_UNROLL_FOR(v, kVectors) {
          const F32 min = weights.min(sub, v);
          EH2O_UNROLL_FOR(r, kRows)
            sum[r][v] = mul_add(set1(row.template sum<kSubBlocks>(sub, r)), min, sum[r][v]);
        }
      }
    });
    x += kActivationRecordPerRow * kRows;
  }
  EH2O_UNROLL_FOR(r, kRows) store_tile_row<kVectors>(y + r * y_stride, sum[r], r < n_rows ? n_cols : 0);
}

}  // namespace edgeh2o::EH2O_ISA
