// AVX2 + FMA + F16C: 8 float lanes. int8 dot products by vpmaddubsw, or by vpdpbusd where AVX-VNNI is
// compiled in.
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

EH2O_INLINE __m256i broadcast_4(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

#ifdef __AVXVNNI__

template <int kBits>
struct Dot4 {
  static constexpr bool kSigned = false;
  using Acc = __m256i;
  using X = const int8_t*;
  static constexpr size_t kXRows = 1;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    return _mm256_dpbusd_avx_epi32(acc, w, broadcast_4(x + 4 * kRow));
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

#else

// Unsigned weights of kBits <= 6 bits: the int16 pair sums of kMaxSteps products stay below 2^15
// (8 * 2 * 15 * 128, 4 * 2 * 31 * 128, 2 * 2 * 63 * 128), so that one widening add serves them all.
template <int kBits>
struct Dot4 {
  static_assert(kBits >= 4 && kBits <= 6);
  static constexpr bool kSigned = false;
  using Acc = __m256i;
  using X = const int8_t*;
  static constexpr size_t kXRows = 1;
  static EH2O_INLINE Acc start(I32) { return _mm256_setzero_si256(); }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, broadcast_4(x + 4 * kRow)));
  }
  static constexpr size_t kMaxSteps = size_t{1} << (7 - kBits);
  // init + kFactor times the sum.
  template <int kFactor = 1>
  static EH2O_INLINE I32 finish(Acc acc, I32 init) {
    return _mm256_add_epi32(init, _mm256_madd_epi16(acc, _mm256_set1_epi16(kFactor)));
  }
};

// Signed 8-bit weights: |w| * (x with w's sign). |-128| is 128 as unsigned and x is within +-127, so that a
// pair sum is at most 2 * 128 * 127 < 2^15.
template <>
struct Dot4<8> {
  static constexpr bool kSigned = true;
  using Acc = __m256i;
  using X = const int8_t*;
  static constexpr size_t kXRows = 1;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    const __m256i signed_x = _mm256_sign_epi8(broadcast_4(x + 4 * kRow), w);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_x);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

#endif

// With AVX-VNNI the low word of a lane holds the product, whatever bias stands above it, and is multiplied by
// the scale, the high word by 0. Else both words hold a part.
struct WordDot {
  static EH2O_INLINE F32 to_f32(I32 sum) { return _mm256_cvtepi32_ps(sum); }
  static EH2O_INLINE I32 load(const uint8_t* scales) { return load_i8(scales); }
  static EH2O_INLINE void store(uint8_t* p, I32 scales) { store_i8(p, scales); }
#ifdef __AVXVNNI__
  static constexpr bool kHasPairs = false;
  static EH2O_INLINE I32 add(I32 dot, I8 w, const int8_t* x) { return Dot4<8>::add<0>(dot, w, x); }
  static EH2O_INLINE I32 add_parts(I32 a, I32 b) { return add_i32(a, b); }
  static EH2O_INLINE I32 add_scaled(I32 sum, I32 dot, I32 scale) {
    return _mm256_dpwssd_avx_epi32(sum, dot, scale);
  }
  static EH2O_INLINE I32 spread(__m256i low) { return low; }
  template <size_t kRows>
  static EH2O_INLINE I32 join_sums(const int32_t* low, const int32_t* high) {
    return join_words(load_i8(low), load_i8(high));
  }
  static constexpr bool kScalesBytes = true;  // two at a time, as in simd_avx512.h
  template <int kOffset, int kNewOffset>
  static EH2O_INLINE I8 scale_bytes(I8 values, I32 scale) {
    values = _mm256_mullo_epi16(_mm256_sub_epi16(values, _mm256_set1_epi16(kOffset * 257)), scale);
    return _mm256_add_epi16(values, _mm256_set1_epi16(kNewOffset * 257));
  }
#else
  static constexpr bool kHasPairs = true;
  static EH2O_INLINE I32 add(I32 dot, I8 w, const int8_t* x) {
    return _mm256_add_epi16(dot, _mm256_maddubs_epi16(w, broadcast_4(x)));
  }
  static EH2O_INLINE I32 add_parts(I32 a, I32 b) { return _mm256_add_epi16(a, b); }
  static EH2O_INLINE I32 add_scaled(I32 sum, I32 dot, I32 scale) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(dot, scale));
  }
  static EH2O_INLINE I32 spread(__m256i low) { return _mm256_or_si256(low, _mm256_slli_epi32(low, 16)); }
  template <size_t kRows>
  static EH2O_INLINE I32 join_sums(const int32_t* low, const int32_t* high) {
    const __m256i first = load_i8(low), last = load_i8(high);
    return _mm256_blend_epi16(_mm256_add_epi16(first, _mm256_srli_epi32(first, 16)),
                              _mm256_add_epi16(last, _mm256_slli_epi32(last, 16)), 0xaa);
  }
  static constexpr bool kScalesBytes = false;  // they would not add up in 16 bits
  // Both words of every lane times 2^-kShift.
  template <int kShift>
  static EH2O_INLINE I32 shift_right(I32 a) {
    return _mm256_srai_epi16(a, kShift);
  }
  // Of 16 bytes the sum of bytes 4 i and 4 i + 1, and of 4 i + 2 and 4 i + 3.
  static EH2O_INLINE void sum_pairs(int16_t (&sums)[2], const int8_t* bytes) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    __m128i words = _mm_maddubs_epi16(_mm_set1_epi8(1), all);
    words = _mm_add_epi16(words, _mm_srli_si128(words, 8));
    words = _mm_add_epi16(words, _mm_srli_si128(words, 4));
    const int32_t both = _mm_cvtsi128_si32(words);
    __builtin_memcpy(sums, &both, sizeof(both));
  }
#endif
  static EH2O_INLINE I32 load_scales(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return spread(_mm256_and_si256(wide, _mm256_set1_epi32(0xffff)));
  }
  template <int kFrom>
  static EH2O_INLINE I32 load_nibbles(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return spread(kFrom == 4 ? _mm256_srli_epi32(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi32(0xf)));
  }
  static EH2O_INLINE I32 mul_words(I32 a, I32 b) { return _mm256_mullo_epi16(a, b); }
  static EH2O_INLINE I32 join_words(I32 low, I32 high) {
    return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
  }
};

// Four sums, of the lanes of a, b, c and d: that of half of the lanes, plus that of the lanes kSumSteps[0]
// further; both likewise by kSumSteps[1], and so on.
inline constexpr size_t kSumSteps[] = {4, 1, 2};
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
            cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const F32 sums = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

// Blocks of 32 signed bytes times numbers of 16 bits.
// out[w] lane i: bytes 4 w to 4 w + 3 of the row at row(i), of kLanes rows.
template <typename Row>
EH2O_INLINE void load_columns(I8 (&out)[8], const Row& row) {
  __m256i t[8];
  unroll<2>([&](auto group) {
    __m256i r[4];
    unroll<4>(
        [&](auto i) { r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(4 * group + i))); });
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]),
                  c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    t[4 * group] = _mm256_unpacklo_epi64(a, c);
    t[4 * group + 1] = _mm256_unpackhi_epi64(a, c);
    t[4 * group + 2] = _mm256_unpacklo_epi64(b, d);
    t[4 * group + 3] = _mm256_unpackhi_epi64(b, d);
  });
  unroll<4>([&](auto i) {
    out[i] = _mm256_permute2x128_si256(t[i], t[4 + i], 0x20);
    out[4 + i] = _mm256_permute2x128_si256(t[i], t[4 + i], 0x31);
  });
}
// Vectors from kFirst on of a block's 32 columns; every lane: a column of 4 rows. order_block makes of sums
// of such vectors those that are kBlockOrder among the columns.
template <size_t kFirst, size_t kVectors>
EH2O_INLINE void load_interleaved(I8 (&out)[kVectors], const uint8_t* const (&rows)[4]) {
  static_assert(kFirst % 2 == 0 && kVectors % 2 == 0);
  __m256i r[4];
  unroll<4>([&](auto i) { r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i])); });
  unroll<kVectors / 2>([&](auto i) {
    constexpr bool kIsHigh = kFirst / 2 + i == 1;
    __m256i pair[2];
    unroll<2>([&](auto j) {
      pair[j] = kIsHigh ? _mm256_unpackhi_epi8(r[2 * j], r[2 * j + 1])
                        : _mm256_unpacklo_epi8(r[2 * j], r[2 * j + 1]);
    });
    out[2 * i] = _mm256_unpacklo_epi16(pair[0], pair[1]);
    out[2 * i + 1] = _mm256_unpackhi_epi16(pair[0], pair[1]);
  });
}
inline constexpr size_t kBlockOrder[] = {0, 2, 1, 3};
template <size_t kVectors>
EH2O_INLINE void order_block(F32 (&v)[kVectors]) {
  unroll<kVectors / 2>([&](auto i) {
    const F32 low = _mm256_permute2f128_ps(v[2 * i], v[2 * i + 1], 0x20),
              high = _mm256_permute2f128_ps(v[2 * i], v[2 * i + 1], 0x31);
    v[2 * i] = low;
    v[2 * i + 1] = high;
  });
}
// Sums over the 4 bytes of every lane, times 4 numbers of 8 bytes in all that store_x has written.
struct BlockDot {
  struct Bytes {
    __m256i even, odd;
  };
  using Acc = __m256i;
  static EH2O_INLINE Acc start() { return _mm256_setzero_si256(); }
  static EH2O_INLINE Bytes widen(I8 v) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
  }
  static EH2O_INLINE __m256i broadcast(const uint8_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    return _mm256_set1_epi32(two);
  }
  static EH2O_INLINE Acc add(Acc acc, Bytes v, const uint8_t* x) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(_mm256_dpwssd_avx_epi32(acc, v.even, broadcast(x)), v.odd,
                                   broadcast(x + 4));
#else
    const __m256i even = _mm256_madd_epi16(v.even, broadcast(x)),
                  odd = _mm256_madd_epi16(v.odd, broadcast(x + 4));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
  }
  static EH2O_INLINE F32 finish(Acc acc) { return _mm256_cvtepi32_ps(acc); }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) {
    const __m256i pairs = _mm256_shuffle_epi32(_mm256_cvtps_epi32(v), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_packs_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
  // Of a block of keys: sums start from 0.
  static constexpr size_t kStartBytes = 0;
  static EH2O_INLINE Acc start(const uint8_t*) { return start(); }
  static EH2O_INLINE void store_start(uint8_t*, const uint8_t*) {}
};
using KeyDot = BlockDot;
using ValueDot = BlockDot;

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/bytes_avx2.h"
