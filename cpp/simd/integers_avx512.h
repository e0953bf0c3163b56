// Products of integers for attention (kernels/attention_integers-inl.h): of bytes by vpdpbusd, unsigned times
// signed, of numbers of 16 bits by vpdpwssd.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

struct IntegerLanes {
  static constexpr size_t kWords = 1;  // that an X holds of a row
  // Not __m512i: gcc 12 keeps a sum of a loop twice if its type changes with every product.
  using Acc = __v16si;
  using X = __m512i;
  static EH2O_INLINE Acc start(int32_t x) { return (Acc)_mm512_set1_epi32(x); }
  static EH2O_INLINE X load_x(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  static EH2O_INLINE X load_word(const uint8_t* p) { return load_x(p); }
  static EH2O_INLINE F32 to_f32(Acc sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
  // Four maxima, of the lanes of a, b, c and d.
  static EH2O_INLINE void store_maxima(float* p, F32 a, F32 b, F32 c, F32 d) {
    const F32 ab = max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)),
              cd = max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F32 four = max(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 two = _mm256_max_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(p, _mm_max_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }
  // A constant, of which p has four.
  static EH2O_INLINE F32 addend(const float* p) { return set1(*p); }
  // The integers nearest to v, or -20 * 2^23 if that is more; that for NaN, too.
  static EH2O_INLINE Acc round_above(F32 v) {
    return (Acc)_mm512_max_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(-20 * (1 << 23)));
  }
  // 1 + m 2^-23 for the low 23 bits m.
  static EH2O_INLINE F32 one_and_fraction(Acc t) {
    // (t & fraction) | one
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32((__m512i)t, _mm512_set1_epi32(0x7fffff),
                                                         _mm512_set1_epi32(0x3f800000), 0xea));
  }
  // The number whose bits are those of v plus t.
  static EH2O_INLINE F32 add_to_bits(F32 v, Acc t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), (__m512i)t));
  }
};

struct Bytes : IntegerLanes {
  // Added to the bytes of keys and of values: the keys are the unsigned factor, and so are the weights.
  static constexpr int32_t kKeyOffset = 128, kValueOffset = 0;
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return (Acc)_mm512_dpbusd_epi32((__m512i)sum, keys, queries);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return (Acc)_mm512_dpbusd_epi32((__m512i)sum, weights, values);
  }
  // Lane i: the low bytes of v[0][i] to v[3][i], rounded to nearest even.
  static EH2O_INLINE I8 round_words(const F32 (&v)[4]) {
    const __m512i low = _mm512_set1_epi32(0xff);
    __m512i word = _mm512_and_si512(_mm512_cvtps_epi32(v[0]), low);
    unroll<3>([&](auto i) {
      const __m512i byte = _mm512_and_si512(_mm512_cvtps_epi32(v[i + 1]), low);
      word = _mm512_or_si512(word, _mm512_slli_epi32(byte, 8 * (i + 1)));
    });
    return word;
  }
  // 64 values in [0, 255], rounded to nearest even, what is not a number to 0; lanes that add up to their
  // sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[4]) {
    __m512i words[4];
    unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { words[i] = _mm512_cvtps_epi32(v[i]); });
    const __m512i packed =
        _mm512_packus_epi16(_mm512_packus_epi32(words[0], words[1]), _mm512_packus_epi32(words[2], words[3]));
    // Packing stays within 128-bit lanes: each now has 4 bytes of every vector.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, packed));
    return (Acc)_mm512_dpbusd_epi32(_mm512_setzero_si512(), packed, _mm512_set1_epi8(1));
  }
};
inline constexpr bool kHasBytes = true;

struct Shorts : IntegerLanes {
  static constexpr int32_t kValueOffset = 0;
  static EH2O_INLINE Acc add_products(Acc sum, X row, I8 columns) {
    return (Acc)_mm512_dpwssd_epi32((__m512i)sum, row, columns);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return add_products(sum, queries, keys);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return add_products(sum, weights, values);
  }
  // What was packed within 128-bit lanes, in order.
  static EH2O_INLINE __m512i in_order(__m512i packed) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
  }
  // Lane i: v[0][i] and v[1][i], rounded to nearest even.
  static EH2O_INLINE I8 round_words(const F32 (&v)[2]) {
    return _mm512_mask_mov_epi16(_mm512_slli_epi32(_mm512_cvtps_epi32(v[1]), 16), 0x55555555,
                                 _mm512_cvtps_epi32(v[0]));
  }
  // The numbers of low, then those of high, rounded to nearest even.
  static EH2O_INLINE F32 join_rounded(F32 low, F32 high) {
    const __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));
    return _mm512_castsi512_ps(in_order(packed));
  }
  // 64 values in [0, 32767], rounded to nearest even, what is not a number to 0; lanes that add up to their
  // sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[4]) {
    Acc sums = start(0);
    unroll<2>([&](auto half) EH2O_INLINE_LAMBDA {
      const __m512i packed =
          _mm512_packus_epi32(_mm512_cvtps_epi32(v[2 * half]), _mm512_cvtps_epi32(v[2 * half + 1]));
      sums = add_products(sums, packed, _mm512_set1_epi16(1));
      _mm512_storeu_si512(p + 64 * half, in_order(packed));
    });
    return sums;
  }
  static EH2O_INLINE F32 load_levels(const uint8_t* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words));
  }
};
inline constexpr bool kHasShorts = true;

}  // namespace edgeh2o::EH2O_ISA::simd
