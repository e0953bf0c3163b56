// Plain C++ with 4 lanes: the reference that every other ISA is compared with. Compiled without
// vectorisation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/unroll.h"

namespace edgeh2o::EH2O_ISA::simd {

inline constexpr size_t kLanes = 4;
inline constexpr bool kHasMmla = false;
inline constexpr bool kHasLaneMulAdd = false;
inline constexpr int32_t kDotBias = 0;
// Words of two bf16, the value of the lower depth in the low half:
//   mul_add_bf16(a, b, c)        c + both products, accumulated in f32
//   narrow_bf16(low, high)       2 kLanes values to kLanes words, in their order
//   interleave_bf16(even, odd)   word i: even[i], odd[i]
inline constexpr bool kHasBf16 = true;
// Faster than f32 products, as far as is known.
inline constexpr bool kPrefersBf16 = false;
// Halves (below) exists.
inline constexpr bool kHasF16 = true;
// WordDot (dots_scalar.h) exists.
inline constexpr bool kHasWordDot = true;
inline constexpr size_t kGemmQ8Rows = 2, kGemmQ8Vectors = 2;
inline constexpr size_t kGemvRows = 3;  // that a matrix-vector kernel takes at once
inline constexpr size_t kGemvQ8Chains = 2;
inline constexpr size_t kGemmF32Rows = 2, kGemmF32Vectors = 2;

struct F32 {
  float lane[kLanes];
};
struct I32 {
  int32_t lane[kLanes];
};
struct I8 {
  uint8_t byte[4 * kLanes];
};

template <typename V, typename F>
EH2O_INLINE V from_lanes(const F& f) {
  V v;
  for (size_t i = 0; i < kLanes; ++i) v.lane[i] = f(i);
  return v;
}

EH2O_INLINE F32 set1(float x) {
  return from_lanes<F32>([&](size_t) { return x; });
}
EH2O_INLINE F32 zero() { return set1(0.0f); }
EH2O_INLINE F32 load(const float* p) {
  return from_lanes<F32>([&](size_t i) { return p[i]; });
}
EH2O_INLINE void store(float* p, F32 v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
EH2O_INLINE F32 load_partial(const float* p, size_t n) {
  return from_lanes<F32>([&](size_t i) { return i < n ? p[i] : 0.0f; });
}
EH2O_INLINE void store_partial(float* p, F32 v, size_t n) { std::memcpy(p, v.lane, n * sizeof(float)); }
EH2O_INLINE F32 keep_first(F32 v, size_t n, F32 fill) {
  return from_lanes<F32>([&](size_t i) { return i < n ? v.lane[i] : fill.lane[i]; });
}

EH2O_INLINE F32 add(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] + b.lane[i]; });
}
EH2O_INLINE F32 sub(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] - b.lane[i]; });
}
EH2O_INLINE F32 mul(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] * b.lane[i]; });
}
EH2O_INLINE F32 div(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] / b.lane[i]; });
}
EH2O_INLINE F32 mul_add(F32 a, F32 b, F32 c) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
EH2O_INLINE F32 max(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
EH2O_INLINE F32 min(F32 a, F32 b) {
  return from_lanes<F32>([&](size_t i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
EH2O_INLINE F32 abs(F32 a) {
  return from_lanes<F32>([&](size_t i) { return std::fabs(a.lane[i]); });
}
EH2O_INLINE F32 round_nearest(F32 a) {
  return from_lanes<F32>([&](size_t i) { return std::nearbyintf(a.lane[i]); });
}
EH2O_INLINE F32 scale_by_pow2(F32 v, F32 n) {
  return from_lanes<F32>([&](size_t i) { return std::ldexp(v.lane[i], static_cast<int>(n.lane[i])); });
}
// The same where v, 2^n and the result are normal numbers.
EH2O_INLINE F32 scale_by_pow2_normal(F32 v, F32 n) {
  return from_lanes<F32>([&](size_t i) {
    int32_t bits;
    std::memcpy(&bits, &v.lane[i], 4);
    bits += static_cast<int32_t>(n.lane[i]) * (1 << 23);
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  });
}
EH2O_INLINE float reduce_add(F32 v) { return (v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3]); }
EH2O_INLINE float reduce_max(F32 v) {
  float result = v.lane[0];
  for (size_t i = 1; i < kLanes; ++i) result = v.lane[i] > result ? v.lane[i] : result;
  return result;
}

// rows[i] lane j becomes rows[j] lane i.
EH2O_INLINE void transpose(F32 (&rows)[kLanes]) {
  for (size_t i = 0; i < kLanes; ++i)
    for (size_t j = 0; j < i; ++j) std::swap(rows[i].lane[j], rows[j].lane[i]);
}

// IEEE half to single by bit moves; denormals are normalised by a float subtraction.
EH2O_INLINE float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = rest << 13;
  if (rest >= 0x7c00) {
    bits += 0x70000000;  // infinity and NaN keep an all-ones exponent
  } else if (rest >= 0x0400) {
    bits += 0x38000000;
  } else {
    bits += 0x38800000;
    float value;
    std::memcpy(&value, &bits, 4);
    value -= 6.103515625e-05f;  // 2^-14
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even, overflow to infinity.
EH2O_INLINE uint16_t f32_to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // below 2^-14: let the float adder round to units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - 0x1c000));
}

EH2O_INLINE F32 load_f16(const uint16_t* p) {
  return from_lanes<F32>([&](size_t i) { return f16_to_f32(p[i]); });
}
EH2O_INLINE F32 set1_f16(const uint16_t* p) { return set1(f16_to_f32(*p)); }
EH2O_INLINE void store_f16(uint16_t* p, F32 v) {
  for (size_t i = 0; i < kLanes; ++i) p[i] = f32_to_f16(v.lane[i]);
}

// A further rounding, to f16, then rounds x itself (Boldo and Melquiond 2008).
EH2O_INLINE float round_to_odd(double x) {
  float nearest = static_cast<float>(x);
  if (nearest == x) return nearest;
  uint32_t bits;
  std::memcpy(&bits, &nearest, 4);
  if (bits % 2 == 0) bits += std::fabs(nearest) < std::fabs(x) ? 1 : -1;
  std::memcpy(&nearest, &bits, 4);
  return nearest;
}

// Vectors of 2 kLanes f16 whose products are added in f16.
struct Halves {
  struct V {
    uint16_t lane[2 * kLanes];
  };
  template <typename F>
  static EH2O_INLINE V from_lanes(const F& f) {
    V v;
    for (size_t i = 0; i < 2 * kLanes; ++i) v.lane[i] = f(i);
    return v;
  }
  static EH2O_INLINE V zero() {
    return from_lanes([](size_t) { return uint16_t{0}; });
  }
  static EH2O_INLINE V load(const uint16_t* p) {
    return from_lanes([&](size_t i) { return p[i]; });
  }
  static EH2O_INLINE V set1(const uint16_t* p) {
    return from_lanes([&](size_t) { return *p; });
  }
  static EH2O_INLINE V mul_add(V a, V b, V c) {
    return from_lanes([&](size_t i) {
      return f32_to_f16(
          round_to_odd(double{f16_to_f32(a.lane[i])} * f16_to_f32(b.lane[i]) + f16_to_f32(c.lane[i])));
    });
  }
  // a's lane I times b; plus c.
  template <size_t I>
  static EH2O_INLINE V mul_lane(Index<I> i, V a, V b) {
    return mul_add_lane(i, a, b, zero());
  }
  template <size_t I>
  static EH2O_INLINE V mul_add_lane(Index<I>, V a, V b, V c) {
    return mul_add(set1(a.lane + I), b, c);
  }
  // The first and the last kLanes values.
  static EH2O_INLINE F32 low(V v) { return load_f16(v.lane); }
  static EH2O_INLINE F32 high(V v) { return load_f16(v.lane + kLanes); }
  // Two to a word, in their order.
  static EH2O_INLINE V from_words(F32 words) {
    V v;
    std::memcpy(&v, &words, sizeof(v));
    return v;
  }
  static EH2O_INLINE F32 to_words(V v) {
    F32 words;
    std::memcpy(&words, &v, sizeof(words));
    return words;
  }
  static EH2O_INLINE F32 narrow(F32 low, F32 high) {
    V v;
    store_f16(v.lane, low);
    store_f16(v.lane + kLanes, high);
    return to_words(v);
  }
};

EH2O_INLINE F32 load_bf16(const uint16_t* p) {
  return from_lanes<F32>([&](size_t i) {
    const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  });
}
// Round to nearest even; the bits of NaN stay those of a NaN.
EH2O_INLINE uint32_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
EH2O_INLINE F32 interleave_bf16(F32 even, F32 odd) {
  return from_lanes<F32>([&](size_t i) {
    const uint32_t bits = f32_to_bf16(odd.lane[i]) << 16 | f32_to_bf16(even.lane[i]);
    float word;
    std::memcpy(&word, &bits, 4);
    return word;
  });
}
EH2O_INLINE F32 narrow_bf16(F32 low, F32 high) {
  F32 even, odd;
  for (size_t i = 0; i < kLanes; ++i) {
    const F32& half = i < kLanes / 2 ? low : high;
    even.lane[i] = half.lane[2 * i % kLanes];
    odd.lane[i] = half.lane[2 * i % kLanes + 1];
  }
  return interleave_bf16(even, odd);
}
EH2O_INLINE F32 mul_add_bf16(F32 a, F32 b, F32 c) {
  return from_lanes<F32>([&](size_t i) {
    uint32_t x, y;
    std::memcpy(&x, &a.lane[i], 4);
    std::memcpy(&y, &b.lane[i], 4);
    const uint32_t halves[4] = {x << 16, y << 16, x & 0xffff0000, y & 0xffff0000};
    float value[4];
    std::memcpy(value, halves, 16);
    return c.lane[i] + value[0] * value[1] + value[2] * value[3];
  });
}
EH2O_INLINE F32 load_u8(const uint8_t* p) {
  return from_lanes<F32>([&](size_t i) { return static_cast<float>(p[i]); });
}
EH2O_INLINE F32 load_s8(const int8_t* p) {
  return from_lanes<F32>([&](size_t i) { return static_cast<float>(p[i]); });
}
// The 4 bits from kFrom on of kLanes bytes.
template <int kFrom>
EH2O_INLINE F32 load_u4(const uint8_t* p) {
  return from_lanes<F32>([&](size_t i) { return static_cast<float>(p[i] >> kFrom & 0xf); });
}
EH2O_INLINE void store_s8(int8_t* p, F32 v) {
  for (size_t i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(v.lane[i]);
}

// 16 values in [-128, 127], rounded to nearest even; returns their sum.
EH2O_INLINE int32_t store_rounded_s8(int8_t* p, const F32 (&v)[4]) {
  int32_t sum = 0;
  for (size_t i = 0; i < 16; ++i) {
    p[i] = static_cast<int8_t>(__builtin_rintf(v[i / kLanes].lane[i % kLanes]));
    sum += p[i];
  }
  return sum;
}

EH2O_INLINE I32 set1_i32(int32_t x) {
  return from_lanes<I32>([&](size_t) { return x; });
}
EH2O_INLINE I32 add_i32(I32 a, I32 b) {
  return from_lanes<I32>([&](size_t i) { return a.lane[i] + b.lane[i]; });
}
template <int N>
EH2O_INLINE I32 shift_left_i32(I32 a) {
  return from_lanes<I32>([&](size_t i) { return a.lane[i] * (1 << N); });
}
EH2O_INLINE I32 dot_bias() { return set1_i32(0); }
EH2O_INLINE F32 mul_dot(I32 dot, F32 scale, F32) {
  return from_lanes<F32>([&](size_t i) { return static_cast<float>(dot.lane[i]) * scale.lane[i]; });
}

EH2O_INLINE I8 load_i8(const void* p) {
  I8 v;
  std::memcpy(v.byte, p, sizeof(v.byte));
  return v;
}
EH2O_INLINE void store_i8(void* p, I8 v) { std::memcpy(p, v.byte, sizeof(v.byte)); }
// Bits [kFrom, kFrom + kBits) of every byte, moved to bit kTo on; the others are 0.
template <int kFrom, int kBits, int kTo>
EH2O_INLINE I8 take_bits(I8 v) {
  for (uint8_t& byte : v.byte) byte = static_cast<uint8_t>((byte >> kFrom & ((1 << kBits) - 1)) << kTo);
  return v;
}
EH2O_INLINE I8 or_i8(I8 a, I8 b) {
  for (size_t i = 0; i < sizeof(a.byte); ++i) a.byte[i] |= b.byte[i];
  return a;
}
EH2O_INLINE I8 look_up(const uint8_t* table, I8 index) {
  for (uint8_t& byte : index.byte) byte = table[byte];
  return index;
}

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/bytes_scalar.h"
#include "simd/dots_scalar.h"
