// Dot products of AVX-512: of bytes with bytes by vpdpbusd (unsigned x signed), and with numbers of 16 bits.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

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
