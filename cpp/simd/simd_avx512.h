// AVX-512 (f, bw, dq, vl) with VNNI: 16 float lanes; int8 dot products by vpdpbusd (unsigned x signed). With
// AVX512_BF16, products of bf16 pairs.
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

// Sum over 4 neighbouring bytes of w * x into int32 lanes. kBits: bits of the weights' values.
// kSigned: the weights are signed; otherwise they are unsigned and carry an offset that the caller corrects
// by the initial value, which start() or finish() adds.
template <int kBits>
struct Dot4 {
  static constexpr bool kSigned = false;
  using Acc = __m512i;
  // The 4 bytes of kXRows rows, one row after another; kXRows divides kGemmQ8Rows and the 4 or 8 steps of a
  // sub-block, which the vector product takes for rows.
  using X = const int8_t*;
  static constexpr size_t kXRows = 2;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    int32_t four;
    __builtin_memcpy(&four, x + 4 * kRow, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
  }
  static constexpr size_t kMaxSteps = 8;  // calls of add between start() and finish()
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

// vpdpwssd multiplies the low word of a lane, which holds the product whatever bias stands above it, by the
// scale, and the high word by 0.
struct WordDot {
  static EH2O_INLINE F32 to_f32(I32 sum) { return _mm512_cvtepi32_ps(sum); }
  static EH2O_INLINE I32 load(const uint8_t* scales) { return load_i8(scales); }
  static EH2O_INLINE void store(uint8_t* p, I32 scales) { store_i8(p, scales); }
  static constexpr bool kHasPairs = false;
  static EH2O_INLINE I32 add(I32 dot, I8 w, const int8_t* x) { return Dot4<8>::add<0>(dot, w, x); }
  static EH2O_INLINE I32 add_parts(I32 a, I32 b) { return add_i32(a, b); }
  static EH2O_INLINE I32 add_scaled(I32 sum, I32 dot, I32 scale) {
    return _mm512_dpwssd_epi32(sum, dot, scale);
  }
  static EH2O_INLINE I32 load_scales(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_maskz_mov_epi16(0x55555555, wide);
  }
  template <int kFrom>
  static EH2O_INLINE I32 load_nibbles(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return kFrom == 4 ? _mm512_srli_epi32(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi32(0xf));
  }
  static EH2O_INLINE I32 mul_words(I32 a, I32 b) { return _mm512_mullo_epi16(a, b); }
  static EH2O_INLINE I32 join_words(I32 low, I32 high) {
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
  template <size_t kRows>
  static EH2O_INLINE I32 join_sums(const int32_t* low, const int32_t* high) {
    const __m512i last = _mm512_maskz_loadu_epi32(first_lanes(kRows), high);
    return _mm512_mask_mov_epi16(_mm512_slli_epi32(last, 16), 0x55555555,
                                 _mm512_maskz_loadu_epi32(first_lanes(kRows), low));
  }
  // Two bytes at a time: what a product carries or borrows goes where its neighbour expects it.
  static constexpr bool kScalesBytes = true;
  template <int kOffset, int kNewOffset>
  static EH2O_INLINE I8 scale_bytes(I8 values, I32 scale) {
    if constexpr (kOffset != 0) values = _mm512_sub_epi16(values, _mm512_set1_epi16(kOffset * 257));
    values = _mm512_mullo_epi16(values, scale);
    return kNewOffset == 0 ? values : _mm512_add_epi16(values, _mm512_set1_epi16(kNewOffset * 257));
  }
};

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

// Blocks of 32 signed bytes times numbers of 16 bits.
// out[w] lane i: bytes 4 w to 4 w + 3 of the row at row(i), of kLanes rows.
template <typename Row>
EH2O_INLINE void load_columns(I8 (&out)[8], const Row& row) {
  __m512i t[8];
  unroll<2>([&](auto group) {  // rows i and i + 4 in the halves of a register
    __m512i r[4];
    unroll<4>([&](auto i) {
      const auto load_half = [&](size_t at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(at)));
      };
      const __m256i low = load_half(8 * group + i), high = load_half(8 * group + i + 4);
      r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    });
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]),
                  c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    t[4 * group] = _mm512_unpacklo_epi64(a, c);
    t[4 * group + 1] = _mm512_unpackhi_epi64(a, c);
    t[4 * group + 2] = _mm512_unpacklo_epi64(b, d);
    t[4 * group + 3] = _mm512_unpackhi_epi64(b, d);
  });
  unroll<4>([&](auto i) {
    out[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
  });
}
// Vectors from kFirst on of a block's 32 columns; every lane: a column of 4 rows. order_block makes of two
// such vectors of sums those that are kBlockOrder among the columns.
template <size_t kFirst>
EH2O_INLINE void load_interleaved(I8 (&out)[2], const uint8_t* const (&rows)[4]) {
  static_assert(kFirst == 0);
  __m256i r[4];
  unroll<4>([&](auto i) { r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i])); });
  __m512i pair[2];
  unroll<2>([&](auto i) {
    pair[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1])),
                                 _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]), 1);
  });
  out[0] = _mm512_unpacklo_epi16(pair[0], pair[1]);
  out[1] = _mm512_unpackhi_epi16(pair[0], pair[1]);
}
inline constexpr size_t kBlockOrder[] = {0, 1};
EH2O_INLINE void order_block(F32 (&v)[2]) {
  const F32 halves[2] = {_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd)};
  unroll<2>([&](auto i) { v[i] = _mm512_shuffle_f32x4(halves[i], halves[i], 0xd8); });
}
// Sums over the 4 bytes of every lane, times 4 numbers of 8 bytes in all that store_x has written: their high
// and their low bytes. vpdpbusd takes an unsigned and a signed factor.
struct BlockDot {
  // Not __m512i: gcc 12 keeps a sum of a loop twice if its type changes with every product.
  struct Acc {
    __v16si high, low;
  };
  static EH2O_INLINE __m512i broadcast(const uint8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
  }
  static EH2O_INLINE F32 finish(Acc acc) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32((__m512i)acc.high, 8), (__m512i)acc.low));
  }
  // numbers: bytes 0 and 1 of every lane.
  static EH2O_INLINE void store_bytes(uint8_t* out, __m512i numbers) {
    const __m512i order = _mm512_set4_epi32(0, 0, 0x0c080400, 0x0d090501);
    const __m512i words = _mm512_shuffle_epi8(numbers, order);
    const __m512i packed = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), words);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(packed));
  }
};
// Keys plus 128 are the unsigned factor: sums start from what that adds.
struct KeyDot : BlockDot {
  static constexpr size_t kStartBytes = 8;
  static EH2O_INLINE Acc start(const uint8_t* of_block) {
    return {(__v16si)broadcast(of_block), (__v16si)broadcast(of_block + 4)};
  }
  static EH2O_INLINE I8 widen(I8 v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
  static EH2O_INLINE Acc add(Acc acc, I8 keys, const uint8_t* x) {
    return {(__v16si)_mm512_dpbusd_epi32((__m512i)acc.high, keys, broadcast(x)),
            (__v16si)_mm512_dpbusd_epi32((__m512i)acc.low, keys, broadcast(x + 4))};
  }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) {
    const __m512i numbers = _mm512_cvtps_epi32(v);  // the low byte counts as signed
    store_bytes(out, _mm512_mask_blend_epi8(0x2222222222222222, numbers,
                                            _mm512_add_epi32(numbers, _mm512_set1_epi32(128))));
  }
  static EH2O_INLINE void store_start(uint8_t* out, const uint8_t* x) {
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), load_i8(x));
    const __m256i four = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m128i two = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    const __m128i sum = _mm_add_epi32(two, _mm_unpackhi_epi64(two, two));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_mullo_epi32(sum, _mm_set1_epi32(-128)));
  }
};
// Weights are not negative.
struct ValueDot : BlockDot {
  static EH2O_INLINE Acc start() { return {__v16si{}, __v16si{}}; }
  static EH2O_INLINE I8 widen(I8 v) { return v; }
  static EH2O_INLINE Acc add(Acc acc, I8 values, const uint8_t* x) {
    return {(__v16si)_mm512_dpbusd_epi32((__m512i)acc.high, broadcast(x), values),
            (__v16si)_mm512_dpbusd_epi32((__m512i)acc.low, broadcast(x + 4), values)};
  }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) { store_bytes(out, _mm512_cvtps_epi32(v)); }
};

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/bytes_avx512.h"
