// AVX-512 (f, bw, dq, vl) with VNNI: 16 float lanes. With AVX512_BF16, products of bf16 pairs.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/unroll.h"

namespace edgeh2o::EH2O_ISA::simd {

using F32 = __m512;
using I32 = __m512i;
using I8 = __m512i;

inline constexpr size_t kLanes = 16;
inline constexpr bool kHasMmla = false;
inline constexpr bool kHasLaneMulAdd = false;
// Dot products start at the bits of 1.5 * 2^23: as a float the sum is 1.5 * 2^23 + dot while |dot| < 2^22.
inline constexpr int32_t kDotBias = 0x4b400000;
#ifdef __AVX512BF16__
inline constexpr bool kHasBf16 = true, kPrefersBf16 = true;
#else
inline constexpr bool kHasBf16 = false, kPrefersBf16 = false;
#endif
inline constexpr bool kHasF16 = false;
struct Halves;
inline constexpr bool kHasHalfColumns = true;
inline constexpr bool kHasWordDot = true;
inline constexpr bool kSplitsBytes = false;
// Register tiles (rows x vectors of columns), the largest that leaves the weights in registers.
inline constexpr size_t kGemmQ8Rows = 6, kGemmQ8Vectors = 2;
// Rows that a matrix-vector kernel takes at once, whose dot products stay in registers, if their sums do not.
inline constexpr size_t kGemvRows = 8, kGemvFloatRows = 8;
inline constexpr size_t kQ8Chains = 2;
inline constexpr size_t kGemmF32Rows = 12, kGemmF32Vectors = 2;

EH2O_INLINE F32 zero() { return _mm512_setzero_ps(); }
EH2O_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
// In a register: gcc would load what was broadcast again for every product.
EH2O_INLINE F32 keep(F32 v) {
  asm("" : "+v"(v));
  return v;
}
EH2O_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
EH2O_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
EH2O_INLINE __mmask16 first_lanes(size_t n) { return static_cast<__mmask16>((1u << n) - 1); }
EH2O_INLINE F32 load_partial(const float* p, size_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
EH2O_INLINE void store_partial(float* p, F32 v, size_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
// Lanes from n on become `fill`.
EH2O_INLINE F32 keep_first(F32 v, size_t n, F32 fill) { return _mm512_mask_mov_ps(fill, first_lanes(n), v); }

EH2O_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
EH2O_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
EH2O_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
EH2O_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
EH2O_INLINE F32 mul_add(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
EH2O_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
EH2O_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
EH2O_INLINE F32 abs(F32 a) { return _mm512_abs_ps(a); }
EH2O_INLINE F32 round_nearest(F32 a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// v * 2^n for integral n; n may be below -126 (the result becomes 0 or denormal).
EH2O_INLINE F32 scale_by_pow2(F32 v, F32 n) { return _mm512_scalef_ps(v, n); }
// The same where v, 2^n and the result are normal numbers.
EH2O_INLINE F32 scale_by_pow2_normal(F32 v, F32 n) { return _mm512_scalef_ps(v, n); }
EH2O_INLINE float reduce_add(F32 v) { return _mm512_reduce_add_ps(v); }
EH2O_INLINE float reduce_max(F32 v) { return _mm512_reduce_max_ps(v); }

// rows[i] lane j becomes rows[j] lane i.
EH2O_INLINE void transpose(F32 (&rows)[kLanes]) {
  F32 t[kLanes];
  // Within 128-bit lanes: pairs, then quadruples.
  unroll<4>([&](auto i) {
    constexpr size_t k = 4 * i;
    const F32 a = _mm512_unpacklo_ps(rows[k], rows[k + 1]), b = _mm512_unpackhi_ps(rows[k], rows[k + 1]);
    const F32 c = _mm512_unpacklo_ps(rows[k + 2], rows[k + 3]),
              d = _mm512_unpackhi_ps(rows[k + 2], rows[k + 3]);
    t[k] = _mm512_shuffle_ps(a, c, 0x44);
    t[k + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[k + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[k + 3] = _mm512_shuffle_ps(b, d, 0xee);
  });
  // t[4 q + i] holds, in lane block b, column 4 b + i of rows 4 q to 4 q + 3.
  unroll<4>([&](auto i) {
    const F32 a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x44), b = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xee);
    const F32 c = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x44),
              d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xee);
    rows[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[4 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[8 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
  });
}

EH2O_INLINE F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
EH2O_INLINE F32 set1_f16(const uint16_t* p) { return _mm512_set1_ps(_cvtsh_ss(*p)); }
EH2O_INLINE void store_f16(uint16_t* p, F32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Rows of 16-bit values, to columns.
struct HalfColumns {
  static constexpr size_t kRows = 2 * kLanes, kDepth = 8;
  // out [kDepth][kRows]: the first values of the row at row(i), for every i.
  template <typename Row>
  static EH2O_INLINE void load(uint16_t* out, const Row& row) {
    // Lane block b holds rows 8 b to 8 b + 7: r[i] the values of one, t[i] of two, r[i] of four.
    __m512i r[8], t[8];
    unroll<8>([&](auto i) {
      const auto part = [&](size_t at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(at))); };
      const __m512i first = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(i + 8), 1);
      r[i] = _mm512_inserti32x4(_mm512_inserti32x4(first, part(i + 16), 2), part(i + 24), 3);
    });
    unroll<4>([&](auto i) {
      t[2 * i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    });
    unroll<2>([&](auto i) {
      unroll<2>([&](auto half) {
        const __m512i a = t[4 * i + half], b = t[4 * i + half + 2];
        r[4 * i + 2 * half] = _mm512_unpacklo_epi32(a, b);
        r[4 * i + 2 * half + 1] = _mm512_unpackhi_epi32(a, b);
      });
    });
    unroll<4>([&](auto i) {
      _mm512_storeu_si512(out + 2 * i * kRows, _mm512_unpacklo_epi64(r[i], r[4 + i]));
      _mm512_storeu_si512(out + (2 * i + 1) * kRows, _mm512_unpackhi_epi64(r[i], r[4 + i]));
    });
  }
};
EH2O_INLINE F32 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#ifdef __AVX512BF16__
EH2O_INLINE F32 interleave_bf16(F32 even, F32 odd) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even)),
                high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
  return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
EH2O_INLINE F32 narrow_bf16(F32 low, F32 high) { return (F32)_mm512_cvtne2ps_pbh(high, low); }
EH2O_INLINE F32 mul_add_bf16(F32 a, F32 b, F32 c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif
EH2O_INLINE F32 load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
EH2O_INLINE F32 load_s8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// The 4 bits from kFrom on of kLanes bytes.
template <int kFrom>
EH2O_INLINE F32 load_u4(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, kFrom), _mm512_set1_epi32(0xf)));
}
// Integral values in [-128, 127] to kLanes bytes.
EH2O_INLINE void store_s8(int8_t* p, F32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}

// 16 values in [-128, 127], rounded to nearest even; returns their sum.
EH2O_INLINE int32_t store_rounded_s8(int8_t* p, const F32 (&v)[1]) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[0]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  // Sums of 8 unsigned bytes each, of values + 128.
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

EH2O_INLINE I32 set1_i32(int32_t x) { return _mm512_set1_epi32(x); }
EH2O_INLINE I32 add_i32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
EH2O_INLINE I32 keep(I32 v) {
  asm volatile("" : "+v"(v));
  return v;
}
EH2O_INLINE I32 dot_bias() { return set1_i32(kDotBias); }
// dot * scale of a dot product that started at kDotBias; negated_bias: -1.5 * 2^23 * scale.
EH2O_INLINE F32 mul_dot(I32 dot, F32 scale, F32 negated_bias) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(dot), scale, negated_bias);
}

EH2O_INLINE I8 load_i8(const void* p) { return _mm512_loadu_si512(p); }
EH2O_INLINE void store_i8(void* p, I8 v) { _mm512_storeu_si512(p, v); }
// Bits [kFrom, kFrom + kBits) of every byte, moved to bit kTo on; the others are 0.
template <int kFrom, int kBits, int kTo>
EH2O_INLINE I8 take_bits(I8 v) {
  if constexpr (kFrom > kTo) v = _mm512_srli_epi16(v, kFrom - kTo);
  if constexpr (kFrom < kTo) v = _mm512_slli_epi16(v, kTo - kFrom);
  return _mm512_and_si512(v, _mm512_set1_epi8(((1 << kBits) - 1) << kTo));
}
EH2O_INLINE I8 or_i8(I8 a, I8 b) { return _mm512_or_si512(a, b); }
// table[index] of every byte; table: 16 aligned bytes, index below 16.
EH2O_INLINE I8 look_up(const uint8_t* table, I8 index) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), index);
}

// Four sums, of the lanes of a, b, c and d: that of half of the lanes, plus that of the lanes kSumSteps[0]
// further; both likewise by kSumSteps[1], and so on.
inline constexpr size_t kSumSteps[] = {4, 8, 1, 2};
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)),
            cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)),
                high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const F32 sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/dots_avx512.h"
//
#include "simd/integers_avx512.h"
