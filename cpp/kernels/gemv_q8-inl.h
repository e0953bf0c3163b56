// One row of activations times packed weights, read in the order in which they lie in memory: the decode path
// is bound by memory bandwidth, so weights are unpacked in registers.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// Walks over the records of a packed panel: f32 scales and mins of kGemmQ8Columns columns, and the quants.
template <PackedFormat kFormat>
class RecordReader {
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  static constexpr size_t kCols = kGemmQ8Columns;

 public:
  EH2O_INLINE explicit RecordReader(const uint8_t* panel) : record_(panel) {}

  // Enters record number `record`; call it for 0, 1, 2, ...
  EH2O_INLINE void enter(size_t record) {
    if (record > 0) record_ += Sizes::kRecordPerColumn * kCols;
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        header_ = reinterpret_cast<const uint16_t*>(record_);
        record_ += Sizes::kHeaderPerColumn * kCols;
      }
    }
  }

  EH2O_INLINE simd::F32 scale(size_t sub, size_t v) const {
    const size_t column = v * simd::kLanes;
    if constexpr (Traits::kTwoLevel) {
      const simd::F32 d = simd::load_f16(header_ + column);
      const uint8_t* fine = record_ + sub * kCols + column;
      if constexpr (Traits::kHasMin) {
        return simd::mul(d, simd::load_u8(fine));
      } else {
        return simd::mul(d, simd::load_s8(reinterpret_cast<const int8_t*>(fine)));
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
      const simd::F32 dmin = simd::load_f16(header_ + kCols + column);
      const uint8_t* fine = record_ + (Sizes::kSubBlocks + sub) * kCols + column;
      return simd::mul(simd::sub(simd::zero(), dmin), simd::load_u8(fine));
    } else {
      return simd::load_f16(reinterpret_cast<const uint16_t*>(record_) + kCols + column);
    }
  }
  EH2O_INLINE const uint8_t* quants() const { return record_ + Sizes::kScalesPerColumn * kCols; }

 private:
  const uint16_t* header_ = nullptr;  // two-level formats: d[nr], dmin[nr]
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

// Stored without their offset removed by the packer, though the ISA multiplies signed weights.
template <PackedFormat kFormat>
inline constexpr bool kHasSignedNibbles =
    PackedTraits<kFormat>::kNibbles && PackedTraits<kFormat>::kCodebook == Codebook::kNone &&
    PackedTraits<kFormat>::kOffsetLog2 >= 0 && simd::Dot4<4>::kSigned;

// The weights of depth step `step` (4 values of depth) of vector v, ready to multiply.
template <PackedFormat kFormat, bool kKeepsOffset = false>
EH2O_INLINE simd::I8 load_weights(const uint8_t* quants, size_t step, size_t v) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  constexpr size_t kCols = kGemmQ8Vectors * kLanes;
  if constexpr (!Traits::kNibbles) {
    return load_i8(quants + (step * kCols + v * kLanes) * 4);
  } else {
    const I8 pairs = load_i8(quants + ((step & 3) * kCols + v * kLanes) * 4);
    const I8 values = step < 4 ? low_nibbles(pairs) : high_nibbles(pairs);
    if constexpr (Traits::kCodebook != Codebook::kNone) {
      static constexpr CodebookBytes<kFormat> kTable;
      return look_up(kTable.byte, values);
    } else if constexpr (kHasSignedNibbles<kFormat> && !kKeepsOffset) {
      return sub_i8(values, 1 << Traits::kOffsetLog2);
    } else {
      return values;
    }
  }
}

// Flat: gcc leaves a lambda of some formats out of line, with its accumulators in memory.
template <PackedFormat kFormat>
__attribute__((flatten)) void gemv_q8(float* y, const uint8_t* x, const uint8_t* w, size_t n_records,
                                      size_t n_cols) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  using Dot = Dot4<Traits::kBits>;
  constexpr size_t kVectors = kGemmQ8Vectors;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock, kSteps = Traits::kSubBlock / 4;
  constexpr size_t kStepsAtOnce = Dot::kMaxSteps < kSteps ? Dot::kMaxSteps : kSteps;
  constexpr size_t kXSteps = Dot::kXRows < kStepsAtOnce ? Dot::kXRows : kStepsAtOnce;
  static_assert(kSteps % kStepsAtOnce == 0 && kStepsAtOnce % kXSteps == 0);
  // A correction of the sum takes fewer instructions than one of every weight.
  using Offset = Correction<kFormat, !Dot::kSigned || kHasSignedNibbles<kFormat>>;
  constexpr size_t kChains = kGemvQ8Chains;  // so that the latency of the dot product is hidden

  F32 sum[kVectors];
  unroll<kVectors>([&](auto v) { sum[v] = zero(); });
  RecordReader<kFormat> weights(w);
  for (size_t record = 0; record < n_records; ++record) {
    weights.enter(record);
    const uint8_t* w_quants = weights.quants();
    const float* x_header = reinterpret_cast<const float*>(x);
    const int32_t* x_negated_sum8 = reinterpret_cast<const int32_t*>(x + 8);
    const int8_t* x_quants = reinterpret_cast<const int8_t*>(x + kActivationHeaderPerRow);
    const F32 x_scale = set1(x_header[0]);
    unroll<kSubBlocks>([&](auto sub) {
      int32_t negated_sum8 = x_negated_sum8[0];
      if constexpr (kSubBlocks == 2)
        negated_sum8 = sub == 0 ? x_negated_sum8[1] : negated_sum8 - x_negated_sum8[1];
      I32 dot[kVectors];
      unroll<kVectors>([&](auto v) { dot[v] = Offset::start(negated_sum8); });
      unroll<kSteps / kStepsAtOnce>([&](auto part) {
        typename Dot::Acc acc[2][kVectors];
        unroll<kVectors>([&](auto v) {
          acc[0][v] = Dot::start(dot[v]);
          acc[1][v] = Dot::start(set1_i32(0));
        });
        unroll<kStepsAtOnce / kXSteps>([&](auto group) {
          constexpr size_t kFirst = (sub * kSteps) + part * kStepsAtOnce + group * kXSteps;
          const typename Dot::X values = Dot::load_x(x_quants + 4 * kFirst);
          unroll<kXSteps>([&](auto i) {
            unroll<kVectors>([&](auto v) {
              auto& a = acc[(group * kXSteps + i) % kChains][v];
              a = Dot::template add<i>(a, load_weights<kFormat, true>(w_quants, kFirst + i, v), values);
            });
          });
        });
        unroll<kVectors>([&](auto v) {
          if constexpr (kChains == 2) {
            dot[v] = add_i32(Dot::finish(acc[0][v], dot[v]), Dot::finish(acc[1][v], set1_i32(0)));
          } else {
            dot[v] = Dot::finish(acc[0][v], dot[v]);
          }
        });
      });
      unroll<kVectors>(
          [&](auto v) { sum[v] = mul_add(mul(dot_to_f32(dot[v]), x_scale), weights.scale(sub, v), sum[v]); });
      if constexpr (Traits::kHasMin) {
        const F32 total = set1(kSubBlocks == 1 ? x_header[1] : scaled_sum(x_header[0], negated_sum8));
        unroll<kVectors>([&](auto v) { sum[v] = mul_add(total, weights.min(sub, v), sum[v]); });
      }
    });
    x += kActivationRecordPerRow;
  }
  unroll<kVectors>([&](auto v) {
    const size_t left = n_cols > v * kLanes ? n_cols - v * kLanes : 0;
    store_partial(y + v * kLanes, sum[v], left < kLanes ? left : kLanes);
  });
}

// y: n_cols <= kGemmQ8Columns outputs of one panel. x: activations packed with mr = 1. w: one packed panel.
inline void gemv_f32_q8_qp(PackedFormat format, float* y, const uint8_t* x, const uint8_t* w,
                           size_t n_records, size_t n_cols) {
  switch (format) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return gemv_q8<PackedFormat::name>(y, x, w, n_records, n_cols);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
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
  RecordReader<kFormat> weights(w);
  for (size_t record = 0; record < n_records; ++record) {
    weights.enter(record);
    const uint8_t* w_quants = weights.quants();
    float* out_scale = reinterpret_cast<float*>(out);
    unroll<kVectors>([&](auto v) {
      for (size_t sub = 0; sub < kSubBlocks; ++sub) {
        store(out_scale + sub * kCols + v * kLanes, weights.scale(sub, v));
        if constexpr (Traits::kHasMin) {
          store(out_scale + (kSubBlocks + sub) * kCols + v * kLanes, weights.min(sub, v));
        }
      }
    });
    uint8_t* out_quants = out + 4 * kCols * kSubBlocks * Sizes::kParts;
    if constexpr (kHasMmla) {
      using Dot = Dot4<Traits::kBits>;
      unroll<4>([&](auto step) {
        unroll<kVectors>([&](auto v) {
          const I8 even = load_weights<kFormat>(w_quants, 2 * step, v);
          const I8 odd = load_weights<kFormat>(w_quants, 2 * step + 1, v);
          uint8_t* columns = out_quants + (step * kCols + v * kLanes) * 8;
          store_i8(columns, Dot::low_pair(even, odd));
          store_i8(columns + 4 * kLanes, Dot::high_pair(even, odd));
        });
      });
    } else {
      unroll<8>([&](auto step) {
        unroll<kVectors>([&](auto v) {
          store_i8(out_quants + (step * kCols + v * kLanes) * 4, load_weights<kFormat>(w_quants, step, v));
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
