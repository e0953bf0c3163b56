// Dot products of NEON: of bytes with bytes, by smull and sadalp, by sdot where the dot product extension is
// compiled in, and for matrix products by smmla where the int8 matrix extension is; and with numbers of 16
// bits.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

#ifdef __ARM_FEATURE_DOTPROD

template <int kBits>
struct Dot4 {
  static constexpr bool kSigned = true;
  using Acc = int32x4_t;
  using X = int8x16_t;
  static constexpr size_t kXRows = 4;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return vld1q_s8(p); }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    return vdotq_laneq_s32(acc, w, x, kRow);
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
#ifdef __ARM_FEATURE_MATMUL_INT8
  // a, b: 4 rows (or columns) of 4 values at two neighbouring steps of depth. The first two and the last two
  // with 8 values each:
  static EH2O_INLINE I8 low_pair(I8 a, I8 b) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
  }
  static EH2O_INLINE I8 high_pair(I8 a, I8 b) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
  }
  // Lanes: row 0 column 0, row 0 column 1, row 1 column 0, row 1 column 1.
  static EH2O_INLINE I32 multiply_pairs(I32 acc, I8 rows, I8 columns) {
    return vmmlaq_s32(acc, rows, columns);
  }
  // One row of two such results that are neighbours.
  static EH2O_INLINE I32 first_row(I32 a, I32 b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
  static EH2O_INLINE I32 second_row(I32 a, I32 b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
#endif
};

#else

// Weights of kBits <= 6 bits, signed or not: int16 sums of kMaxSteps products stay below 2^15 (4 * 63 * 127),
// and with one neighbour too where kBits <= 5 (8 * 2 * 15 * 127, 4 * 2 * 31 * 127).
template <int kBits>
struct Dot4 {
  static_assert(kBits >= 4 && kBits <= 6);
  static constexpr bool kSigned = true;
  struct Acc {
    int16x8_t low, high;
  };
  using X = int8x16_t;
  static constexpr size_t kXRows = 4;
  static EH2O_INLINE Acc start(I32) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  static EH2O_INLINE X load_x(const int8_t* p) { return vld1q_s8(p); }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    const int8x16_t row = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), kRow));
    return {vmlal_s8(acc.low, vget_low_s8(w), vget_low_s8(row)), vmlal_high_s8(acc.high, w, row)};
  }
  static constexpr size_t kMaxSteps = kBits == 4 ? 8 : 4;
  static EH2O_INLINE I32 finish(Acc acc, I32 init) {
    if constexpr (kBits <= 5) return vpadalq_s16(init, vpaddq_s16(acc.low, acc.high));
    return vaddq_s32(init, vpaddq_s32(vpaddlq_s16(acc.low), vpaddlq_s16(acc.high)));
  }
};

// The sum of two products, 2 * 128 * 127, is below 2^15.
template <>
struct Dot4<8> {
  static constexpr bool kSigned = true;
  using Acc = int32x4_t;
  using X = int8x16_t;
  static constexpr size_t kXRows = 4;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return vld1q_s8(p); }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    const int8x16_t row = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), kRow));
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(row)), high = vmull_high_s8(w, row);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

#endif

// Blocks of 32 signed bytes times numbers of 16 bits.
// out[w] lane i: bytes 4 w to 4 w + 3 of the row at row(i), of kLanes rows.
template <typename Row>
EH2O_INLINE void load_columns(I8 (&out)[8], const Row& row) {
  unroll<2>([&](auto half) {
    F32 words[4];
    unroll<4>([&](auto i) { words[i] = vreinterpretq_f32_s8(load_i8(row(i) + 16 * half)); });
    transpose(words);
    unroll<4>([&](auto i) { out[4 * half + i] = vreinterpretq_s8_f32(words[i]); });
  });
}
// Vectors from kFirst on of a block's 32 columns; every lane: a column of 4 rows. order_block makes of sums
// of such vectors those that are kBlockOrder among the columns.
template <size_t kFirst, size_t kVectors>
EH2O_INLINE void load_interleaved(I8 (&out)[kVectors], const uint8_t* const (&rows)[4]) {
  static_assert(kFirst % 2 == 0 && kVectors % 2 == 0);
  unroll<kVectors / 2>([&](auto i) {
    constexpr size_t kPair = kFirst / 2 + i;  // of 8 columns
    I8 r[4];
    unroll<4>([&](auto row) { r[row] = load_i8(rows[row] + 16 * (kPair / 2)); });
    int16x8_t pair[2];
    unroll<2>([&](auto j) {
      pair[j] = vreinterpretq_s16_s8(kPair % 2 ? vzip2q_s8(r[2 * j], r[2 * j + 1])
                                               : vzip1q_s8(r[2 * j], r[2 * j + 1]));
    });
    out[2 * i] = vreinterpretq_s8_s16(vzip1q_s16(pair[0], pair[1]));
    out[2 * i + 1] = vreinterpretq_s8_s16(vzip2q_s16(pair[0], pair[1]));
  });
}
inline constexpr size_t kBlockOrder[] = {0, 1, 2, 3, 4, 5, 6, 7};
template <size_t kVectors>
EH2O_INLINE void order_block(F32 (&)[kVectors]) {}
// Sums over the 4 bytes of every lane, times 4 numbers of 8 bytes in all that store_x has written: their high
// bytes, rounded, and their low bytes, signed.
struct BlockDot {
  using Bytes = I8;
  struct Acc {
    I32 high, low;
  };
  static EH2O_INLINE Acc start() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static EH2O_INLINE Bytes widen(I8 v) { return v; }
#ifdef __ARM_FEATURE_DOTPROD
  static EH2O_INLINE Acc add(Acc acc, Bytes v, const uint8_t* x) {
    const int8x8_t halves = vld1_s8(reinterpret_cast<const int8_t*>(x));
    return {vdotq_lane_s32(acc.high, v, halves, 0), vdotq_lane_s32(acc.low, v, halves, 1)};
  }
#else
  static EH2O_INLINE I32 add_half(I32 acc, Bytes v, I8 x) {
    const int16x8_t low = vmull_s8(vget_low_s8(v), vget_low_s8(x)), high = vmull_high_s8(v, x);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
  }
  static EH2O_INLINE Acc add(Acc acc, Bytes v, const uint8_t* x) {
    const int32x2_t halves = vreinterpret_s32_u8(vld1_u8(x));
    return {add_half(acc.high, v, vreinterpretq_s8_s32(vdupq_lane_s32(halves, 0))),
            add_half(acc.low, v, vreinterpretq_s8_s32(vdupq_lane_s32(halves, 1)))};
  }
#endif
  static EH2O_INLINE F32 finish(Acc acc) {
    return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(acc.high, 8), acc.low));
  }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) {
    const int16x4_t numbers = vqmovn_s32(vcvtnq_s32_f32(v));
    const int16x8_t both = vcombine_s16(numbers, numbers);
    const int8x8_t high = vrshrn_n_s16(both, 8), low = vmovn_s16(both);
    vst1_u8(out, vreinterpret_u8_s32(vzip1_s32(vreinterpret_s32_s8(high), vreinterpret_s32_s8(low))));
  }
  // Of a block of keys: sums start from 0.
  static constexpr size_t kStartBytes = 0;
  static EH2O_INLINE Acc start(const uint8_t*) { return start(); }
  static EH2O_INLINE void store_start(uint8_t*, const uint8_t*) {}
};
using KeyDot = BlockDot;
using ValueDot = BlockDot;

}  // namespace edgeh2o::EH2O_ISA::simd
