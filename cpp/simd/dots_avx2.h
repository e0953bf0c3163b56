// Dot products of AVX2: of bytes with bytes, by vpmaddubsw, or by vpdpbusd where AVX-VNNI is compiled in, and
// with numbers of 16 bits.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

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
