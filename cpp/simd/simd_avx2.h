// AVX2 + FMA + F16C: 8 float lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/unroll.h"

namespace edgeh2o::EH2O_ISA::simd {

using F32 = __m256;
using I32 = __m256i;
using I8 = __m256i;

inline constexpr size_t kLanes = 8;
inline constexpr bool kHasMmla = false;
inline constexpr bool kHasLaneMulAdd = false;
// Dot products start at the bits of 1.5 * 2^23: as a float the sum is 1.5 * 2^23 + dot while |dot| < 2^22.
inline constexpr int32_t kDotBias = 0x4b400000;
// 3 x 2 accumulators and their f32 sums fit in 16 registers; 4 x 2 spill (85 against 105 GOP/s on Cascade
// Lake).
inline constexpr bool kHasBf16 = false, kPrefersBf16 = false;
inline constexpr bool kHasF16 = false;
struct Halves;
inline constexpr bool kHasHalfColumns = false;
struct HalfColumns;
inline constexpr bool kHasWordDot = true;
// 8-bit weights as 4 bits and 4 bits: their products add up in 16 bits, and take no signs from weights.
#ifdef __AVXVNNI__
inline constexpr bool kSplitsBytes = false;
#else
inline constexpr bool kSplitsBytes = true;
#endif
inline constexpr size_t kGemmQ8Rows = 3, kGemmQ8Vectors = 2;
inline constexpr size_t kGemvRows = 6, kGemvFloatRows = 6;  // that a matrix-vector kernel takes at once
inline constexpr size_t kQ8Chains = 2;
inline constexpr size_t kGemmF32Rows = 6, kGemmF32Vectors = 2;

EH2O_INLINE F32 zero() { return _mm256_setzero_ps(); }
EH2O_INLINE F32 set1(float x) { return _mm256_set1_ps(x); }
EH2O_INLINE F32 keep(F32 v) { return v; }  // for what takes a register, not a load for every product
EH2O_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
EH2O_INLINE void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
EH2O_INLINE __m256i first_lanes(size_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
EH2O_INLINE F32 load_partial(const float* p, size_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
EH2O_INLINE void store_partial(float* p, F32 v, size_t n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
EH2O_INLINE F32 keep_first(F32 v, size_t n, F32 fill) {
  return _mm256_blendv_ps(fill, v, _mm256_castsi256_ps(first_lanes(n)));
}

EH2O_INLINE F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
EH2O_INLINE F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
EH2O_INLINE F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
EH2O_INLINE F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
EH2O_INLINE F32 mul_add(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
EH2O_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
EH2O_INLINE F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
EH2O_INLINE F32 abs(F32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
EH2O_INLINE F32 round_nearest(F32 a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
EH2O_INLINE F32 scale_by_pow2(F32 v, F32 n) {
  // Two factors, so that n down to -252 and up to 254 stays inside the exponent field.
  const __m256i exponent = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(exponent, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(exponent, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
// The same where v, 2^n and the result are normal numbers.
EH2O_INLINE F32 scale_by_pow2_normal(F32 v, F32 n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), exponent));
}
EH2O_INLINE float reduce_add(F32 v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
EH2O_INLINE float reduce_max(F32 v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// rows[i] lane j becomes rows[j] lane i.
EH2O_INLINE void transpose(F32 (&rows)[kLanes]) {
  F32 t[kLanes];
  unroll<2>([&](auto i) {  // within 128-bit lanes
    constexpr size_t k = 4 * i;
    const F32 a = _mm256_unpacklo_ps(rows[k], rows[k + 1]), b = _mm256_unpackhi_ps(rows[k], rows[k + 1]);
    const F32 c = _mm256_unpacklo_ps(rows[k + 2], rows[k + 3]),
              d = _mm256_unpackhi_ps(rows[k + 2], rows[k + 3]);
    t[k] = _mm256_shuffle_ps(a, c, 0x44);
    t[k + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[k + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[k + 3] = _mm256_shuffle_ps(b, d, 0xee);
  });
  unroll<4>([&](auto i) {
    rows[i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
  });
}

EH2O_INLINE F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EH2O_INLINE F32 set1_f16(const uint16_t* p) { return _mm256_set1_ps(_cvtsh_ss(*p)); }
EH2O_INLINE void store_f16(uint16_t* p, F32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EH2O_INLINE F32 load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
EH2O_INLINE F32 load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
EH2O_INLINE F32 load_s8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The 4 bits from kFrom on of kLanes bytes.
template <int kFrom>
EH2O_INLINE F32 load_u4(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes, kFrom), _mm256_set1_epi32(0xf)));
}
EH2O_INLINE void store_s8(int8_t* p, F32 v) {
  const __m256i i32 = _mm256_cvtps_epi32(v);
  const __m128i i16 = _mm_packs_epi32(_mm256_castsi256_si128(i32), _mm256_extracti128_si256(i32, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(i16, i16));
}

// 16 values in [-128, 127], rounded to nearest even; returns their sum.
EH2O_INLINE int32_t store_rounded_s8(int8_t* p, const F32 (&v)[2]) {
  // Words 0-3, 8-11 | 4-7, 12-15 of the two vectors, put in order.
  const __m256i i16 =
      _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1])), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(i16), _mm256_extracti128_si256(i16, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  // Sums of 8 unsigned bytes each, of values + 128.
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

EH2O_INLINE I32 set1_i32(int32_t x) { return _mm256_set1_epi32(x); }
EH2O_INLINE I32 add_i32(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
EH2O_INLINE I32 keep(I32 v) {
  asm volatile("" : "+x"(v));
  return v;
}
EH2O_INLINE I32 dot_bias() { return set1_i32(kDotBias); }
// dot * scale of a dot product that started at kDotBias; negated_bias: -1.5 * 2^23 * scale.
EH2O_INLINE F32 mul_dot(I32 dot, F32 scale, F32 negated_bias) {
  return _mm256_fmadd_ps(_mm256_castsi256_ps(dot), scale, negated_bias);
}

EH2O_INLINE I8 load_i8(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
EH2O_INLINE void store_i8(void* p, I8 v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
// Bits [kFrom, kFrom + kBits) of every byte, moved to bit kTo on; the others are 0.
template <int kFrom, int kBits, int kTo>
EH2O_INLINE I8 take_bits(I8 v) {
  if constexpr (kFrom > kTo) v = _mm256_srli_epi16(v, kFrom - kTo);
  if constexpr (kFrom < kTo) v = _mm256_slli_epi16(v, kTo - kFrom);
  return _mm256_and_si256(v, _mm256_set1_epi8(((1 << kBits) - 1) << kTo));
}
// v - n in every byte, modulo 256.
EH2O_INLINE I8 sub_i8(I8 v, int n) { return _mm256_sub_epi8(v, _mm256_set1_epi8(static_cast<char>(n))); }
EH2O_INLINE I8 or_i8(I8 a, I8 b) { return _mm256_or_si256(a, b); }
EH2O_INLINE I8 look_up(const uint8_t* table, I8 index) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), index);
}

// Four sums, of the lanes of a, b, c and d: that of half of the lanes, plus that of the lanes kSumSteps[0]
// further; both likewise by kSumSteps[1], and so on.
inline constexpr size_t kSumSteps[] = {4, 1, 2};
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
            cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const F32 sums = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/dots_avx2.h"
//
#include "simd/integers_avx2.h"
