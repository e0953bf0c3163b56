// NEON: 4 float lanes.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd/unroll.h"

namespace edgeh2o::EH2O_ISA::simd {

using F32 = float32x4_t;
using I32 = int32x4_t;
using I8 = int8x16_t;

inline constexpr size_t kLanes = 4;
#ifdef __ARM_FEATURE_MATMUL_INT8
inline constexpr bool kHasMmla = true;
#else
inline constexpr bool kHasMmla = false;
#endif
inline constexpr bool kHasLaneMulAdd = true;
// Dot products start at the bits of 1.5 * 2^23: as a float the sum is 1.5 * 2^23 + dot while |dot| < 2^22.
inline constexpr int32_t kDotBias = 0x4b400000;
// Not preferred: no processor has been timed.
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
inline constexpr bool kHasBf16 = true, kPrefersBf16 = false;
#else
inline constexpr bool kHasBf16 = false, kPrefersBf16 = false;
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
inline constexpr bool kHasF16 = true;
#else
inline constexpr bool kHasF16 = false;
#endif
inline constexpr bool kHasHalfColumns = false;
struct HalfColumns;
inline constexpr bool kHasWordDot = false;
struct WordDot;
inline constexpr bool kSplitsBytes = false;
inline constexpr size_t kGemmQ8Rows = 4, kGemmQ8Vectors = 2;
inline constexpr size_t kGemvRows = 4, kGemvFloatRows = 4;  // that a matrix-vector kernel takes at once
inline constexpr size_t kQ8Chains = 1;  // accumulators are forwarded, and several records are in flight
inline constexpr size_t kGemmF32Rows = 8, kGemmF32Vectors = 2;

EH2O_INLINE F32 zero() { return vdupq_n_f32(0.0f); }
EH2O_INLINE F32 set1(float x) { return vdupq_n_f32(x); }
EH2O_INLINE F32 keep(F32 v) { return v; }  // for what takes a register, not a load for every product
EH2O_INLINE F32 load(const float* p) { return vld1q_f32(p); }
EH2O_INLINE void store(float* p, F32 v) { vst1q_f32(p, v); }
EH2O_INLINE F32 load_partial(const float* p, size_t n) {
  if (n >= kLanes) return vld1q_f32(p);
  const F32 none = zero();
  if (n == 0) return none;
  if (n == 1) return vld1q_lane_f32(p, none, 0);
  const F32 two = vcombine_f32(vld1_f32(p), vget_low_f32(none));
  return n == 2 ? two : vld1q_lane_f32(p + 2, two, 2);
}
EH2O_INLINE void store_partial(float* p, F32 v, size_t n) {
  if (n >= kLanes) return vst1q_f32(p, v);
  if (n & 2) vst1_f32(p, vget_low_f32(v));
  if (n == 1) vst1q_lane_f32(p, v, 0);
  if (n == 3) vst1q_lane_f32(p + 2, v, 2);
}
EH2O_INLINE F32 keep_first(F32 v, size_t n, F32 fill) {
  const uint32x4_t index = {0, 1, 2, 3};
  return vbslq_f32(vcltq_u32(index, vdupq_n_u32(static_cast<uint32_t>(n))), v, fill);
}

EH2O_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
EH2O_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
EH2O_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
EH2O_INLINE F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
EH2O_INLINE F32 mul_add(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
// a's lane I times b, plus c.
template <size_t I>
EH2O_INLINE F32 mul_add_lane(Index<I>, F32 a, F32 b, F32 c) {
  return vfmaq_laneq_f32(c, b, a, I);
}
EH2O_INLINE F32 max(F32 a, F32 b) { return vmaxq_f32(a, b); }
EH2O_INLINE F32 min(F32 a, F32 b) { return vminq_f32(a, b); }
EH2O_INLINE F32 abs(F32 a) { return vabsq_f32(a); }
EH2O_INLINE F32 round_nearest(F32 a) { return vrndnq_f32(a); }
EH2O_INLINE F32 scale_by_pow2(F32 v, F32 n) {
  // Two factors, so that n down to -252 and up to 254 stays inside the exponent field.
  const I32 exponent = vcvtq_s32_f32(n), half = vshrq_n_s32(exponent, 1), bias = vdupq_n_s32(127);
  const I32 a = vshlq_n_s32(vaddq_s32(half, bias), 23);
  const I32 b = vshlq_n_s32(vaddq_s32(vsubq_s32(exponent, half), bias), 23);
  return vmulq_f32(vmulq_f32(v, vreinterpretq_f32_s32(a)), vreinterpretq_f32_s32(b));
}
// The same where v, 2^n and the result are normal numbers.
EH2O_INLINE F32 scale_by_pow2_normal(F32 v, F32 n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}
EH2O_INLINE float reduce_add(F32 v) { return vaddvq_f32(v); }  // (v0 + v1) + (v2 + v3)
EH2O_INLINE float reduce_max(F32 v) { return vmaxvq_f32(v); }

// rows[i] lane j becomes rows[j] lane i.
EH2O_INLINE void transpose(F32 (&rows)[kLanes]) {
  const float32x4x2_t a = vtrnq_f32(rows[0], rows[1]), b = vtrnq_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  rows[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  rows[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  rows[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

EH2O_INLINE F32 load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
EH2O_INLINE F32 set1_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_dup_u16(p))); }
EH2O_INLINE void store_f16(uint16_t* p, F32 v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
struct Halves {
  using V = float16x8_t;
  static EH2O_INLINE V zero() { return vreinterpretq_f16_u16(vdupq_n_u16(0)); }
  static EH2O_INLINE V load(const uint16_t* p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }
  static EH2O_INLINE V set1(const uint16_t* p) { return vreinterpretq_f16_u16(vld1q_dup_u16(p)); }
  static EH2O_INLINE V mul_add(V a, V b, V c) { return vfmaq_f16(c, a, b); }
  // gcc 12 does not keep `a` in the lower 16 registers, where its lanes can be named, and copies every lane.
  template <size_t I>
  static EH2O_INLINE V mul_lane(Index<I>, V a, V b) {
    V c;
    __asm__("fmul %0.8h, %1.8h, %2.h[%3]" : "=w"(c) : "w"(b), "x"(a), "i"(I));
    return c;
  }
  template <size_t I>
  static EH2O_INLINE V mul_add_lane(Index<I>, V a, V b, V c) {
    __asm__("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(c) : "w"(b), "x"(a), "i"(I));
    return c;
  }
  static EH2O_INLINE F32 low(V v) { return vcvt_f32_f16(vget_low_f16(v)); }
  static EH2O_INLINE F32 high(V v) { return vcvt_high_f32_f16(v); }
  static EH2O_INLINE V from_words(F32 words) { return vreinterpretq_f16_f32(words); }
  static EH2O_INLINE F32 to_words(V v) { return vreinterpretq_f32_f16(v); }
  static EH2O_INLINE F32 narrow(F32 low, F32 high) {
    return to_words(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
  }
};
#else
struct Halves;
#endif
EH2O_INLINE F32 load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
EH2O_INLINE F32 narrow_bf16(F32 low, F32 high) {
  return vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
EH2O_INLINE F32 interleave_bf16(F32 even, F32 odd) {
  return narrow_bf16(vzip1q_f32(even, odd), vzip2q_f32(even, odd));
}
EH2O_INLINE F32 mul_add_bf16(F32 a, F32 b, F32 c) {
  return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
template <size_t I>
EH2O_INLINE F32 mul_add_bf16_lane(Index<I>, F32 a, F32 b, F32 c) {
  return vbfdotq_laneq_f32(c, vreinterpretq_bf16_f32(b), vreinterpretq_bf16_f32(a), I);
}
#endif
EH2O_INLINE uint8x8_t load_4_bytes(const void* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return vcreate_u8(four);
}
EH2O_INLINE F32 load_u8(const uint8_t* p) {
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p)))));
}
EH2O_INLINE F32 load_s8(const int8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p))))));
}
// The 4 bits from kFrom on of kLanes bytes.
template <int kFrom>
EH2O_INLINE F32 load_u4(const uint8_t* p) {
  const uint8x8_t bytes = load_4_bytes(p);
  const uint8x8_t bits = kFrom == 4 ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(0xf));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bits))));
}
EH2O_INLINE void store_s8(int8_t* p, F32 v) {
  const int16x4_t i16 = vqmovn_s32(vcvtq_s32_f32(v));
  const int8x8_t i8 = vqmovn_s16(vcombine_s16(i16, i16));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(i8), 0);
  __builtin_memcpy(p, &four, 4);
}

// 16 values in [-128, 127], rounded to nearest even; returns their sum.
EH2O_INLINE int32_t store_rounded_s8(int8_t* p, const F32 (&v)[4]) {
  const int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v[0])), vmovn_s32(vcvtnq_s32_f32(v[1]))),
                  high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(v[2])), vmovn_s32(vcvtnq_s32_f32(v[3])));
  const int8x16_t bytes = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
  vst1q_s8(p, bytes);
  return vaddlvq_s8(bytes);
}

EH2O_INLINE I32 set1_i32(int32_t x) { return vdupq_n_s32(x); }
EH2O_INLINE I32 add_i32(I32 a, I32 b) { return vaddq_s32(a, b); }
EH2O_INLINE I32 keep(I32 v) { return v; }
#ifdef __ARM_FEATURE_DOTPROD
// As a load: the compiler would keep the constant and copy it into every accumulator, which takes one of the
// two arithmetic pipes (a twelfth of the matrix product's work there) while the load pipes have room.
EH2O_INLINE I32 dot_bias() {
  alignas(16) static constexpr int32_t kBias[4] = {kDotBias, kDotBias, kDotBias, kDotBias};
  I32 bias;
  __asm__ volatile("ldr %q0, %1" : "=w"(bias) : "m"(kBias));
  return bias;
}
#else
EH2O_INLINE I32 dot_bias() { return vdupq_n_s32(kDotBias); }
#endif
// dot * scale of a dot product that started at kDotBias; negated_bias: -1.5 * 2^23 * scale.
EH2O_INLINE F32 mul_dot(I32 dot, F32 scale, F32 negated_bias) {
  return vfmaq_f32(negated_bias, vreinterpretq_f32_s32(dot), scale);
}

EH2O_INLINE I8 load_i8(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }
EH2O_INLINE void store_i8(void* p, I8 v) { vst1q_s8(static_cast<int8_t*>(p), v); }
// Bits [kFrom, kFrom + kBits) of every byte, moved to bit kTo on; the others are 0.
template <int kFrom, int kBits, int kTo>
EH2O_INLINE I8 take_bits(I8 v) {
  uint8x16_t bits = vreinterpretq_u8_s8(v);
  if constexpr (kFrom > kTo) bits = vshrq_n_u8(bits, kFrom - kTo);
  if constexpr (kFrom < kTo) bits = vshlq_n_u8(bits, kTo - kFrom);
  constexpr bool kShiftLeavesThem = (kFrom + kBits == 8 && kTo == 0) || (kTo + kBits == 8 && kFrom == 0);
  if constexpr (!kShiftLeavesThem) bits = vandq_u8(bits, vdupq_n_u8(((1 << kBits) - 1) << kTo));
  return vreinterpretq_s8_u8(bits);
}
EH2O_INLINE I8 or_i8(I8 a, I8 b) { return vorrq_s8(a, b); }
EH2O_INLINE I8 look_up(const uint8_t* table, I8 index) {
  return vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s8(index)));
}
EH2O_INLINE I8 sub_i8(I8 v, int8_t x) { return vsubq_s8(v, vdupq_n_s8(x)); }

// Four sums, of the lanes of a, b, c and d: that of half of the lanes, plus that of the lanes kSumSteps[0]
// further; both likewise by kSumSteps[1], and so on.
inline constexpr size_t kSumSteps[] = {2, 1};
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  store(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/dots_neon.h"
//
#include "simd/integers_neon.h"
