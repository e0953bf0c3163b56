// Products of bytes for attention (kernels/attention_integers-inl.h). An instruction set that has them sets
// kHasBytes; the others declare Bytes only.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

struct Bytes {
  // Added to the bytes of keys and of values, which are signed without and unsigned with 128. Queries are
  // signed if keys are not, or if both are; weights are unsigned.
  static constexpr int32_t kKeyOffset = 128, kValueOffset = 0;
  static constexpr size_t kWords = 1;  // of 4 bytes, that an X holds of a row
  struct X {
    uint8_t byte[4 * kWords];
  };
  using Acc = I32;
  static EH2O_INLINE Acc start(int32_t x) { return set1_i32(x); }
  static EH2O_INLINE X load_x(const uint8_t* p) {
    X x;
    std::memcpy(x.byte, p, sizeof(x.byte));
    return x;
  }
  // One word, which add_scores<0> and add_values<0> take.
  static EH2O_INLINE X load_word(const uint8_t* p) { return load_x(p); }
  // sum + products of word kWord of a row of queries, or weights, with the bytes of every lane.
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return add_products(sum, pairs_u8(keys), pairs_s8(set1_word(queries.byte + 4 * kWord)));
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return add_products(sum, pairs_u8(set1_word(weights.byte + 4 * kWord)), pairs_s8(values));
  }
  static EH2O_INLINE F32 to_f32(Acc sum) { return mul_dot(sum, set1(1.0f), zero()); }
  // Lane i: the low bytes of v[0][i] to v[3][i], rounded to nearest even. What is not finite becomes 0.
  static EH2O_INLINE I8 round_words(const F32 (&v)[4]) {
    Vector<int32_t> words = {};
    for (int i = 0; i < 4; ++i) words |= round(v[i]) << 8 * i;
    return {as<uint8_t>(words)};
  }
  // 64 values in [0, 255], rounded to nearest even, what is not finite to 0; lanes that add up to their sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[64 / kLanes]) {
    Acc sums = start(0);
    for (size_t i = 0; i < 64 / kLanes; ++i) {
      const Vector<int32_t> bytes = round(v[i]);
      sums.lane += bytes;
      for (size_t j = 0; j < kLanes; ++j) p[i * kLanes + j] = static_cast<uint8_t>(bytes[j]);
    }
    return sums;
  }
  // Four maxima, of the lanes of a, b, c and d.
  static EH2O_INLINE void store_maxima(float* p, F32 a, F32 b, F32 c, F32 d) {
    const float maxima[4] = {reduce_max(a), reduce_max(b), reduce_max(c), reduce_max(d)};
    std::memcpy(p, maxima, sizeof(maxima));
  }
  // A constant, of which p has four.
  static EH2O_INLINE F32 addend(const float* p) { return set1(*p); }
  // The integers nearest to v, or -20 * 2^23 if that is more; that for NaN, too.
  static EH2O_INLINE Acc round_above(F32 v) {
    return {to_i32(round_nearest(max(v, set1(-20.0f * (1 << 23)))))};
  }
  // 1 + m 2^-23 for the low 23 bits m.
  static EH2O_INLINE F32 one_and_fraction(Acc t) { return {as<float>((t.lane & 0x7fffff) | 0x3f800000)}; }
  // The number whose bits are those of v plus t.
  static EH2O_INLINE F32 add_to_bits(F32 v, Acc t) { return {as<float>(as<int32_t>(v.lane) + t.lane)}; }

 private:
  static EH2O_INLINE Vector<int32_t> round(F32 v) {
    const Vector<int32_t> is_finite = v.lane - v.lane == 0;
    return to_i32(round_nearest(v)) & is_finite & 0xff;
  }
};
inline constexpr bool kHasBytes = true;

struct Shorts;
inline constexpr bool kHasShorts = false;

}  // namespace edgeh2o::EH2O_ISA::simd
