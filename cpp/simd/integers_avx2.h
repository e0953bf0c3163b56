// Products of integers for attention (kernels/attention_integers-inl.h). Those of bytes where AVX-VNNI is
// compiled in: without it they take as many instructions as products of f32, since pairs of vpmaddubsw
// saturate. Those of 16 bits by vpmaddwd, whose additions have a port of their own, or by vpdpwssd.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

struct IntegerLanes {
  static constexpr size_t kWords = 1;  // that an X holds of a row
  // Not __m256i: gcc 12 keeps a sum of a loop twice if its type changes with every product.
  using Acc = __v8si;
  using X = __m256i;
  static EH2O_INLINE Acc start(int32_t x) { return (Acc)_mm256_set1_epi32(x); }
  static EH2O_INLINE X load_x(const uint8_t* p) { return broadcast_4(reinterpret_cast<const int8_t*>(p)); }
  static EH2O_INLINE X load_word(const uint8_t* p) { return load_x(p); }
  static EH2O_INLINE F32 to_f32(Acc sum) { return _mm256_cvtepi32_ps((__m256i)sum); }
  // Four maxima, of the lanes of a, b, c and d.
  static EH2O_INLINE void store_maxima(float* p, F32 a, F32 b, F32 c, F32 d) {
    const F32 ab = max(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
              cd = max(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const F32 four = max(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(p, _mm_max_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
  }
  // A constant, of which p has four.
  static EH2O_INLINE F32 addend(const float* p) { return set1(*p); }
  // The integers nearest to v, or -20 * 2^23 if that is more; that for NaN, too.
  static EH2O_INLINE Acc round_above(F32 v) {
    return (Acc)_mm256_max_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(-20 * (1 << 23)));
  }
  // 1 + m 2^-23 for the low 23 bits m.
  static EH2O_INLINE F32 one_and_fraction(Acc t) {
    const __m256i fraction = _mm256_and_si256((__m256i)t, _mm256_set1_epi32(0x7fffff));
    return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3f800000)));
  }
  // The number whose bits are those of v plus t.
  static EH2O_INLINE F32 add_to_bits(F32 v, Acc t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), (__m256i)t));
  }
};

#ifdef __AVXVNNI__

struct Bytes : IntegerLanes {
  // Added to the bytes of keys and of values: the keys are the unsigned factor, and so are the weights.
  static constexpr int32_t kKeyOffset = 128, kValueOffset = 0;
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return (Acc)_mm256_dpbusd_avx_epi32((__m256i)sum, keys, queries);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return (Acc)_mm256_dpbusd_avx_epi32((__m256i)sum, weights, values);
  }
  // Lane i: the low bytes of v[0][i] to v[3][i], rounded to nearest even.
  static EH2O_INLINE I8 round_words(const F32 (&v)[4]) {
    const __m256i low = _mm256_set1_epi32(0xff);
    __m256i word = _mm256_and_si256(_mm256_cvtps_epi32(v[0]), low);
    unroll<3>([&](auto i) {
      const __m256i byte = _mm256_and_si256(_mm256_cvtps_epi32(v[i + 1]), low);
      word = _mm256_or_si256(word, _mm256_slli_epi32(byte, 8 * (i + 1)));
    });
    return word;
  }
  // 64 values in [0, 255], rounded to nearest even, what is not a number to 0; lanes that add up to their
  // sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[8]) {
    __m256i sums = _mm256_setzero_si256();
    unroll<2>([&](auto half) EH2O_INLINE_LAMBDA {
      __m256i words[4];
      unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { words[i] = _mm256_cvtps_epi32(v[4 * half + i]); });
      const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(words[0], words[1]),
                                                 _mm256_packus_epi32(words[2], words[3]));
      sums = _mm256_dpbusd_avx_epi32(sums, packed, _mm256_set1_epi8(1));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * half),
                          _mm256_permutevar8x32_epi32(packed, order));
    });
    return (Acc)sums;
  }
};
inline constexpr bool kHasBytes = true;

#else

struct Bytes;
inline constexpr bool kHasBytes = false;

#endif

struct Shorts : IntegerLanes {
  static constexpr int32_t kValueOffset = 0;
  static EH2O_INLINE Acc add_products(Acc sum, X row, I8 columns) {
#ifdef __AVXVNNI__
    return (Acc)_mm256_dpwssd_avx_epi32((__m256i)sum, row, columns);
#else
    return sum + (Acc)_mm256_madd_epi16(row, columns);
#endif
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return add_products(sum, queries, keys);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return add_products(sum, weights, values);
  }
  // Lane i: v[0][i] and v[1][i], rounded to nearest even.
  static EH2O_INLINE I8 round_words(const F32 (&v)[2]) {
    return _mm256_blend_epi16(_mm256_cvtps_epi32(v[0]), _mm256_slli_epi32(_mm256_cvtps_epi32(v[1]), 16),
                              0xaa);
  }
  // The numbers of low, then those of high, rounded to nearest even.
  static EH2O_INLINE F32 join_rounded(F32 low, F32 high) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    return _mm256_castsi256_ps(_mm256_permute4x64_epi64(packed, 0xd8));
  }
  // 64 values in [0, 32767], rounded to nearest even, what is not a number to 0; lanes that add up to their
  // sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[8]) {
    Acc sums = start(0);
    unroll<4>([&](auto quarter) EH2O_INLINE_LAMBDA {
      const __m256i packed =
          _mm256_packus_epi32(_mm256_cvtps_epi32(v[2 * quarter]), _mm256_cvtps_epi32(v[2 * quarter + 1]));
      sums = add_products(sums, packed, _mm256_set1_epi16(1));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32 * quarter),
                          _mm256_permute4x64_epi64(packed, 0xd8));
    });
    return sums;
  }
  static EH2O_INLINE F32 load_levels(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
};
inline constexpr bool kHasShorts = true;

}  // namespace edgeh2o::EH2O_ISA::simd
