// Products of bytes for attention (kernels/attention_integers-inl.h) by sdot and udot: both factors signed,
// or both unsigned.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

#ifdef __ARM_FEATURE_DOTPROD

struct Bytes {
  // Added to the bytes of keys and of values: queries and keys are signed, weights and values unsigned.
  static constexpr int32_t kKeyOffset = 0, kValueOffset = 128;
  static constexpr size_t kWords = 4;  // that an X holds of a row
  using Acc = int32x4_t;
  using X = int8x16_t;
  static EH2O_INLINE Acc start(int32_t x) { return vdupq_n_s32(x); }
  static EH2O_INLINE X load_x(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static EH2O_INLINE X load_word(const uint8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_scores(Acc sum, X queries, I8 keys) {
    return vdotq_laneq_s32(sum, keys, queries, kWord);
  }
  template <size_t kWord>
  static EH2O_INLINE Acc add_values(Acc sum, X weights, I8 values) {
    return vreinterpretq_s32_u32(vdotq_laneq_u32(vreinterpretq_u32_s32(sum), vreinterpretq_u8_s8(values),
                                                 vreinterpretq_u8_s8(weights), kWord));
  }
  static EH2O_INLINE F32 to_f32(Acc sum) { return vcvtq_f32_s32(sum); }
  // Lane i: the low bytes of v[0][i] to v[3][i], rounded to nearest even.
  static EH2O_INLINE I8 round_words(const F32 (&v)[4]) {
    const uint32x4_t low = vdupq_n_u32(0xff);
    const auto round = [](F32 x) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x)); };
    uint32x4_t word = vandq_u32(round(v[0]), low);
    word = vorrq_u32(word, vshlq_n_u32(vandq_u32(round(v[1]), low), 8));
    word = vorrq_u32(word, vshlq_n_u32(vandq_u32(round(v[2]), low), 16));
    return vreinterpretq_s8_u32(vorrq_u32(word, vshlq_n_u32(round(v[3]), 24)));
  }
  // 64 values in [0, 255], rounded to nearest even, what is not a number to 0; lanes that add up to their
  // sum.
  static EH2O_INLINE Acc store_rounded(uint8_t* p, const F32 (&v)[16]) {
    uint32x4_t sums = vdupq_n_u32(0);
    unroll<4>([&](auto quarter) {
      uint16x8_t halves[2];
      unroll<2>([&](auto i) {
        halves[i] = vuzp1q_u16(vreinterpretq_u16_u32(vcvtnq_u32_f32(v[4 * quarter + 2 * i])),
                               vreinterpretq_u16_u32(vcvtnq_u32_f32(v[4 * quarter + 2 * i + 1])));
      });
      const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(halves[0]), vreinterpretq_u8_u16(halves[1]));
      vst1q_u8(p + 16 * quarter, bytes);
      sums = vdotq_u32(sums, bytes, vdupq_n_u8(1));
    });
    return vreinterpretq_s32_u32(sums);
  }
  // Four maxima, of the lanes of a, b, c and d.
  static EH2O_INLINE void store_maxima(float* p, F32 a, F32 b, F32 c, F32 d) {
    store(p, vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d)));
  }
  // A constant, of which p has four. As a load: the compiler would copy it for every product that is added to
  // it, which takes one of the two arithmetic pipes.
  static EH2O_INLINE F32 addend(const float* p) {
    F32 v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*reinterpret_cast<const float(*)[4]>(p)));
    return v;
  }
  // The integers nearest to v, or -20 * 2^23 if that is more; NaN becomes 0.
  static EH2O_INLINE Acc round_above(F32 v) {
    return vmaxq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(-20 * (1 << 23)));
  }
  // 1 + m 2^-23 for the low 23 bits m.
  static EH2O_INLINE F32 one_and_fraction(Acc t) {
    return vbslq_f32(vdupq_n_u32(0x7fffff), vreinterpretq_f32_s32(t), vdupq_n_f32(1.0f));
  }
  // The number whose bits are those of v plus t.
  static EH2O_INLINE F32 add_to_bits(F32 v, Acc t) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), t));
  }
};
inline constexpr bool kHasBytes = true;

#else

struct Bytes;
inline constexpr bool kHasBytes = false;

#endif

struct Shorts;
inline constexpr bool kHasShorts = false;

}  // namespace edgeh2o::EH2O_ISA::simd
