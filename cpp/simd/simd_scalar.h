// C++ without intrinsics, 4 lanes: the reference that every other ISA is compared with, and what a processor
// without AVX2 runs. Its vectors are the compiler's, which are registers where every processor of the kind
// has them (SSE2, NEON): arrays of lanes were 9 times slower there, and took 2.6 times as long to compile.
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
inline constexpr bool kHasHalfColumns = false;
struct HalfColumns;
// WordDot (dots_scalar.h) exists.
inline constexpr bool kHasWordDot = true;
inline constexpr bool kSplitsBytes = false;
inline constexpr size_t kGemmQ8Rows = 2, kGemmQ8Vectors = 2;
inline constexpr size_t kGemvRows = 2, kGemvFloatRows = 2;  // that a matrix-vector kernel takes at once
inline constexpr size_t kQ8Chains = 2;
inline constexpr size_t kGemmF32Rows = 2, kGemmF32Vectors = 2;

static_assert(kLanes == 4, "lanes are written out below");

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(4 * kLanes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

struct F32 {
  Vector<float> lane;
};
struct I32 {
  Vector<int32_t> lane;
};
struct I8 {
  Vector<uint8_t> byte;
};

// The same bits as vectors of other numbers.
template <typename T, typename V>
EH2O_INLINE Vector<T> as(V v) {
  return reinterpret_cast<Vector<T>>(v);
}
template <typename V, typename F>
EH2O_INLINE V from_lanes(const F& f) {
  return V{{f(0), f(1), f(2), f(3)}};
}
template <typename V, typename T>
EH2O_INLINE V load_vector(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <typename V>
EH2O_INLINE void store_vector(void* p, const V& v) {
  std::memcpy(p, &v, sizeof(v));
}

EH2O_INLINE F32 set1(float x) { return F32{{x, x, x, x}}; }
EH2O_INLINE F32 zero() { return set1(0.0f); }
EH2O_INLINE F32 keep(F32 v) { return v; }  // for what takes a register, not a load for every product
EH2O_INLINE F32 load(const float* p) { return load_vector<F32>(p); }
EH2O_INLINE void store(float* p, F32 v) { store_vector(p, v); }
EH2O_INLINE F32 load_partial(const float* p, size_t n) {
  F32 v = zero();
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
EH2O_INLINE void store_partial(float* p, F32 v, size_t n) { std::memcpy(p, &v, n * sizeof(float)); }
EH2O_INLINE F32 keep_first(F32 v, size_t n, F32 fill) {
  return from_lanes<F32>([&](size_t i) { return i < n ? v.lane[i] : fill.lane[i]; });
}

EH2O_INLINE F32 add(F32 a, F32 b) { return {a.lane + b.lane}; }
EH2O_INLINE F32 sub(F32 a, F32 b) { return {a.lane - b.lane}; }
EH2O_INLINE F32 mul(F32 a, F32 b) { return {a.lane * b.lane}; }
EH2O_INLINE F32 div(F32 a, F32 b) { return {a.lane / b.lane}; }
EH2O_INLINE F32 mul_add(F32 a, F32 b, F32 c) { return {a.lane * b.lane + c.lane}; }
EH2O_INLINE F32 max(F32 a, F32 b) { return {a.lane > b.lane ? a.lane : b.lane}; }
EH2O_INLINE F32 min(F32 a, F32 b) { return {a.lane < b.lane ? a.lane : b.lane}; }
EH2O_INLINE F32 abs(F32 a) { return {as<float>(as<int32_t>(a.lane) & 0x7fffffff)}; }
// To even, with the sign of a.
EH2O_INLINE F32 round_nearest(F32 a) {
  const Vector<float> kShift = set1(8388608.0f).lane;  // 2^23: above it floats are integers
  const Vector<float> size = abs(a).lane;
  const Vector<float> rounded = size < kShift ? size + kShift - kShift : size;
  return {as<float>(as<int32_t>(rounded) | (as<int32_t>(a.lane) & INT32_MIN))};
}
EH2O_INLINE F32 scale_by_pow2(F32 v, F32 n) {
  return from_lanes<F32>([&](size_t i) { return std::ldexp(v.lane[i], static_cast<int>(n.lane[i])); });
}
// The same where v, 2^n and the result are normal numbers.
EH2O_INLINE F32 scale_by_pow2_normal(F32 v, F32 n) {
  const Vector<int32_t> exponents = __builtin_convertvector(n.lane, Vector<int32_t>) * (1 << 23);
  return {as<float>(as<int32_t>(v.lane) + exponents)};
}
EH2O_INLINE float reduce_add(F32 v) { return (v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3]); }
EH2O_INLINE float reduce_max(F32 v) {
  float result = v.lane[0];
  for (size_t i = 1; i < kLanes; ++i) result = v.lane[i] > result ? v.lane[i] : result;
  return result;
}

// rows[i] lane j becomes rows[j] lane i.
EH2O_INLINE void transpose(F32 (&rows)[kLanes]) {
  const F32 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  for (size_t i = 0; i < kLanes; ++i) rows[i] = F32{{a.lane[i], b.lane[i], c.lane[i], d.lane[i]}};
}

// IEEE half to single by bit moves; denormals are normalised by a float subtraction.
EH2O_INLINE F32 f16_to_f32(Vector<int32_t> half) {
  const Vector<int32_t> sign = (half & 0x8000) << 16, rest = half & 0x7fff, bits = rest << 13;
  const Vector<int32_t> tiny = as<int32_t>(as<float>(bits + 0x38800000) - 6.103515625e-05f);  // 2^-14
  // Infinity and NaN keep an exponent of ones.
  const Vector<int32_t> normal = bits + (rest >= 0x7c00 ? 0x70000000 : 0x38000000);
  return {as<float>(sign | (rest < 0x0400 ? tiny : normal))};
}

// Round to nearest even, overflow to infinity.
EH2O_INLINE Vector<int32_t> f32_to_f16(F32 value) {
  const Vector<int32_t> all = as<int32_t>(value.lane), bits = all & 0x7fffffff;
  const Vector<int32_t> sign = all >> 16 & 0x8000, nan = (bits >> 13 & 0x3ff) | 0x7e00;
  // Below 2^-14: the float adder rounds to units of 2^-24.
  const Vector<int32_t> tiny = as<int32_t>(as<float>(bits) + 0.5f) - 0x3f000000;
  const Vector<int32_t> normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - 0x1c000;
  const Vector<int32_t> finite = bits < 0x38800000 ? tiny : normal;
  return sign | (bits > 0x7f800000 ? nan : bits >= 0x477ff000 ? 0x7c00 : finite);
}

EH2O_INLINE Vector<int32_t> load_u16(const uint16_t* p) { return Vector<int32_t>{p[0], p[1], p[2], p[3]}; }
EH2O_INLINE void store_u16(uint16_t* p, Vector<int32_t> v) {
  for (size_t i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(v[i]);
}
EH2O_INLINE F32 load_f16(const uint16_t* p) { return f16_to_f32(load_u16(p)); }
EH2O_INLINE F32 set1_f16(const uint16_t* p) { return f16_to_f32(Vector<int32_t>{} + *p); }
EH2O_INLINE void store_f16(uint16_t* p, F32 v) { store_u16(p, f32_to_f16(v)); }

// a b + c of numbers that were f16, so that a further rounding, to f16, rounds the exact sum: the last bit of
// what is not exact is odd (Boldo and Melquiond 2008). The product is exact.
EH2O_INLINE F32 mul_add_to_odd(F32 a, F32 b, F32 c) {
  const Vector<float> product = a.lane * b.lane, sum = product + c.lane;
  const Vector<float> added = sum - product, error = (product - (sum - added)) + (c.lane - added);  // Knuth
  const Vector<int32_t> bits = as<int32_t>(sum), error_bits = as<int32_t>(error);
  const Vector<int32_t> away = (bits ^ error_bits) < 0 ? -1 : 1;
  const Vector<int32_t> is_even = (bits & 1) == 0, is_inexact = (error > 0) | (error < 0);
  return {as<float>(bits + (away & is_even & is_inexact))};
}

// Vectors of 2 kLanes f16 whose products are added in f16.
struct Halves {
  struct V {
    F32 half[2];  // as f32
  };
  static EH2O_INLINE V zero() { return {{simd::zero(), simd::zero()}}; }
  static EH2O_INLINE V load(const uint16_t* p) { return {{load_f16(p), load_f16(p + kLanes)}}; }
  static EH2O_INLINE V set1(const uint16_t* p) { return {{set1_f16(p), set1_f16(p)}}; }
  static EH2O_INLINE V mul_add(V a, V b, V c) {
    for (size_t i = 0; i < 2; ++i) {
      c.half[i] = f16_to_f32(f32_to_f16(mul_add_to_odd(a.half[i], b.half[i], c.half[i])));
    }
    return c;
  }
  // a's lane I times b; plus c.
  template <size_t I>
  static EH2O_INLINE V mul_lane(Index<I> i, V a, V b) {
    return mul_add_lane(i, a, b, zero());
  }
  template <size_t I>
  static EH2O_INLINE V mul_add_lane(Index<I>, V a, V b, V c) {
    const F32 lane = simd::set1(a.half[I / kLanes].lane[I % kLanes]);
    return mul_add({{lane, lane}}, b, c);
  }
  // The first and the last kLanes values.
  static EH2O_INLINE F32 low(V v) { return v.half[0]; }
  static EH2O_INLINE F32 high(V v) { return v.half[1]; }
  // Two to a word, in their order.
  static EH2O_INLINE V from_words(F32 words) {
    uint16_t lanes[2 * kLanes];
    store_vector(lanes, words);
    return load(lanes);
  }
  static EH2O_INLINE F32 to_words(V v) { return narrow(v.half[0], v.half[1]); }
  static EH2O_INLINE F32 narrow(F32 low, F32 high) {
    uint16_t lanes[2 * kLanes];
    store_f16(lanes, low);
    store_f16(lanes + kLanes, high);
    return load_vector<F32>(lanes);
  }
};

EH2O_INLINE F32 load_bf16(const uint16_t* p) { return {as<float>(load_u16(p) << 16)}; }
// Round to nearest even; the bits of NaN stay those of a NaN.
EH2O_INLINE Vector<int32_t> f32_to_bf16(F32 value) {
  const Vector<uint32_t> bits = as<uint32_t>(value.lane);
  const Vector<int32_t> is_nan = as<int32_t>(bits & 0x7fffffff) > 0x7f800000;
  return as<int32_t>(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EH2O_INLINE F32 interleave_bf16(F32 even, F32 odd) {
  return {as<float>(f32_to_bf16(odd) << 16 | f32_to_bf16(even))};
}
EH2O_INLINE F32 narrow_bf16(F32 low, F32 high) {
  const F32 even{{low.lane[0], low.lane[2], high.lane[0], high.lane[2]}};
  const F32 odd{{low.lane[1], low.lane[3], high.lane[1], high.lane[3]}};
  return interleave_bf16(even, odd);
}
EH2O_INLINE F32 mul_add_bf16(F32 a, F32 b, F32 c) {
  const Vector<int32_t> x = as<int32_t>(a.lane), y = as<int32_t>(b.lane);
  constexpr int32_t kHigh = -0x10000;
  return {c.lane + as<float>(x << 16) * as<float>(y << 16) + as<float>(x & kHigh) * as<float>(y & kHigh)};
}
template <typename T>
EH2O_INLINE F32 load_small(const T* p) {
  return {__builtin_convertvector((Vector<int32_t>{p[0], p[1], p[2], p[3]}), Vector<float>)};
}
EH2O_INLINE F32 load_u8(const uint8_t* p) { return load_small(p); }
EH2O_INLINE F32 load_s8(const int8_t* p) { return load_small(p); }
// The 4 bits from kFrom on of kLanes bytes.
template <int kFrom>
EH2O_INLINE F32 load_u4(const uint8_t* p) {
  const Vector<int32_t> bytes = {p[0], p[1], p[2], p[3]};
  return {__builtin_convertvector(bytes >> kFrom & 0xf, Vector<float>)};
}
EH2O_INLINE Vector<int32_t> to_i32(F32 v) { return __builtin_convertvector(v.lane, Vector<int32_t>); }
EH2O_INLINE void store_s8(int8_t* p, F32 v) {
  const Vector<int32_t> words = to_i32(v);
  for (size_t i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(words[i]);
}

// 16 values in [-128, 127], rounded to nearest even; returns their sum.
EH2O_INLINE int32_t store_rounded_s8(int8_t* p, const F32 (&v)[4]) {
  Vector<int32_t> sums = {};
  for (size_t i = 0; i < 4; ++i) {
    const F32 rounded = round_nearest(v[i]);
    store_s8(p + i * kLanes, rounded);
    sums += to_i32(rounded);
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

EH2O_INLINE I32 set1_i32(int32_t x) { return I32{{x, x, x, x}}; }
EH2O_INLINE I32 add_i32(I32 a, I32 b) { return {a.lane + b.lane}; }
EH2O_INLINE I32 keep(I32 v) { return v; }
EH2O_INLINE I32 dot_bias() { return set1_i32(0); }
EH2O_INLINE F32 mul_dot(I32 dot, F32 scale, F32) {
  return {__builtin_convertvector(dot.lane, Vector<float>) * scale.lane};
}

EH2O_INLINE I8 load_i8(const void* p) { return load_vector<I8>(static_cast<const uint8_t*>(p)); }
EH2O_INLINE void store_i8(void* p, I8 v) { store_vector(p, v); }
// Bits [kFrom, kFrom + kBits) of every byte, moved to bit kTo on; the others are 0. By pairs of bytes, since
// few processors shift single ones.
template <int kFrom, int kBits, int kTo>
EH2O_INLINE I8 take_bits(I8 v) {
  constexpr uint16_t kMask = ((1 << kBits) - 1) * 0x0101;
  return {as<uint8_t>((as<uint16_t>(v.byte) >> kFrom & kMask) << kTo)};
}
EH2O_INLINE I8 or_i8(I8 a, I8 b) { return {a.byte | b.byte}; }
EH2O_INLINE I8 look_up(const uint8_t* table, I8 index) {
  uint8_t byte[4 * kLanes];
  for (size_t i = 0; i < sizeof(byte); ++i) byte[i] = table[index.byte[i]];
  return load_i8(byte);
}

}  // namespace edgeh2o::EH2O_ISA::simd

#include "simd/dots_scalar.h"
//
#include "simd/integers_scalar.h"
