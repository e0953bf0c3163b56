// One row of activations times packed weights, read in the order in which they lie in memory: the decode path
// is bound by memory bandwidth, so weights are unpacked in registers.
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// f32 scale (and min) of kGemmQ8Columns columns for one record.
template <PackedFormat kFormat>
struct ScaleReader {
  using Traits = PackedTraits<kFormat>;
  static constexpr size_t kCols = simd::kGemmQ8Vectors * simd::kLanes;
  static constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock;
  const uint16_t* header;  // two-level formats: d[nr], dmin[nr]
  const uint8_t* record;

  EH2O_INLINE simd::F32 scale(size_t sub, size_t v) const {
    const size_t column = v * simd::kLanes;
    if constexpr (Traits::kTwoLevel) {
      const simd::F32 d = simd::load_f16(header + column);
      const uint8_t* fine = record + sub * kCols + column;
      if constexpr (Traits::kHasMin) {
        return simd::mul(d, simd::load_u8(fine));
      } else {
        return simd::mul(d, simd::load_s8(reinterpret_cast<const int8_t*>(fine)));
      }
    } else {
      return simd::load_f16(reinterpret_cast<const uint16_t*>(record) + column);
    }
  }
  EH2O_INLINE simd::F32 min(size_t v) const {
    const size_t column = v * simd::kLanes;
    if constexpr (Traits::kTwoLevel) {
      const simd::F32 dmin = simd::load_f16(header + kCols + column);
      return simd::mul(simd::sub(simd::zero(), dmin), simd::load_u8(record + kSubBlocks * kCols + column));
    } else {
      return simd::load_f16(reinterpret_cast<const uint16_t*>(record) + kCols + column);
    }
  }
};

// The weights of depth step `step` (4 values of depth) of vector v, ready to multiply.
template <PackedFormat kFormat>
EH2O_INLINE simd::I8 load_weights(const uint8_t* quants, size_t step, size_t v) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  constexpr size_t kCols = kGemmQ8Vectors * kLanes;
  if constexpr (!Traits::kNibbles) {
    return load_i8(quants + (step * kCols + v * kLanes) * 4);
  } else {
    const I8 pairs = load_i8(quants + ((step & 3) * kCols + v * kLanes) * 4);
    const I8 values = step < 4 ? low_nibbles(pairs) : high_nibbles(pairs);
    if constexpr (Dot4<4>::kSigned && Traits::kOffsetLog2 >= 0) {
      return sub_i8(values, 1 << Traits::kOffsetLog2);
    } else {
      return values;
    }
  }
}

template <PackedFormat kFormat>
void gemv_q8(float* y, const uint8_t* x, const uint8_t* w, size_t n_records, size_t n_cols) {
  using namespace simd;
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  using Dot = Dot4<Traits::kBits>;
  constexpr size_t kVectors = kGemmQ8Vectors, kCols = kGemmQ8Columns;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock, kSteps = Traits::kSubBlock / 4;
  constexpr size_t kStepsAtOnce = Dot::kMaxSteps < kSteps ? Dot::kMaxSteps : kSteps;
  constexpr size_t kXSteps = Dot::kXRows < kStepsAtOnce ? Dot::kXRows : kStepsAtOnce;
  static_assert(kSteps % kStepsAtOnce == 0 && kStepsAtOnce % kXSteps == 0);

  F32 sum[kVectors];
  unroll<kVectors>([&](auto v) { sum[v] = zero(); });
  ScaleReader<kFormat> scales{nullptr, nullptr};
  for (size_t record = 0; record < n_records; ++record) {
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        scales.header = reinterpret_cast<const uint16_t*>(w);
        w += Sizes::kHeaderPerColumn * kCols;
      }
    }
    scales.record = w;
    const uint8_t* w_quants = w + Sizes::kScalesPerColumn * kCols;
    const float* x_header = reinterpret_cast<const float*>(x);
    const int32_t* x_negated_sum8 = reinterpret_cast<const int32_t*>(x + 8);
    const int8_t* x_quants = reinterpret_cast<const int8_t*>(x + kActivationHeaderPerRow);
    const F32 x_scale = set1(x_header[0]);
    unroll<kSubBlocks>([&](auto sub) {
      int32_t negated_sum8 = x_negated_sum8[0];
      if constexpr (kSubBlocks == 2)
        negated_sum8 = sub == 0 ? x_negated_sum8[1] : negated_sum8 - x_negated_sum8[1];
      I32 dot[kVectors];
      unroll<kVectors>([&](auto v) { dot[v] = Correction<kFormat>::start(negated_sum8); });
      unroll<kSteps / kStepsAtOnce>([&](auto part) {
        // Two chains of accumulators, so that the latency of the dot product is hidden.
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
              auto& a = acc[(group * kXSteps + i) % 2][v];
              a = Dot::template add<i>(a, load_weights<kFormat>(w_quants, kFirst + i, v), values);
            });
          });
        });
        unroll<kVectors>([&](auto v) {
          dot[v] = add_i32(Dot::finish(acc[0][v], dot[v]), Dot::finish(acc[1][v], set1_i32(0)));
        });
      });
      unroll<kVectors>(
          [&](auto v) { sum[v] = mul_add(mul(dot_to_f32(dot[v]), x_scale), scales.scale(sub, v), sum[v]); });
    });
    if constexpr (Traits::kHasMin) {
      const F32 x_total = set1(x_header[1]);
      unroll<kVectors>([&](auto v) { sum[v] = mul_add(x_total, scales.min(v), sum[v]); });
    }
    w += Sizes::kRecordPerColumn * kCols;
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
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock;
  ScaleReader<kFormat> scales{nullptr, nullptr};
  for (size_t record = 0; record < n_records; ++record) {
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        scales.header = reinterpret_cast<const uint16_t*>(w);
        w += Sizes::kHeaderPerColumn * kCols;
      }
    }
    scales.record = w;
    const uint8_t* w_quants = w + Sizes::kScalesPerColumn * kCols;
    float* out_scale = reinterpret_cast<float*>(out);
    unroll<kVectors>([&](auto v) {
      for (size_t sub = 0; sub < kSubBlocks; ++sub) {
        store(out_scale + sub * kCols + v * kLanes, scales.scale(sub, v));
      }
      if constexpr (Traits::kHasMin) store(out_scale + kSubBlocks * kCols + v * kLanes, scales.min(v));
    });
    uint8_t* out_quants = out + 4 * kCols * (kSubBlocks + (Traits::kHasMin ? 1 : 0));
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
    w += Sizes::kRecordPerColumn * kCols;
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
