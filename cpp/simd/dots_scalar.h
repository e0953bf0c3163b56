// Dot products of the reference: of bytes with bytes, and with numbers of 16 bits.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

// Bytes of both parities as numbers of 16 bits, which hold their product with a byte too: |255 * -128| <
// 2^15.
struct BytePairs {
  Vector<int16_t> even, odd;
};
EH2O_INLINE BytePairs pairs_u8(I8 v) {
  const Vector<uint16_t> pairs = as<uint16_t>(v.byte);
  return {as<int16_t>(pairs & 0xff), as<int16_t>(pairs >> 8)};
}
EH2O_INLINE BytePairs pairs_s8(I8 v) {
  const Vector<int16_t> pairs = as<int16_t>(v.byte);
  return {as<int16_t>(as<uint16_t>(v.byte) << 8) >> 8, pairs >> 8};
}
// The four bytes at p in every lane.
EH2O_INLINE I8 set1_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return {as<uint8_t>(set1_i32(word).lane)};
}
EH2O_INLINE I32 add_halves(I32 sum, Vector<int16_t> v) {
  return {sum.lane + (as<int32_t>(as<uint32_t>(v) << 16) >> 16) + (as<int32_t>(v) >> 16)};
}
// Sums over the four bytes of every lane.
EH2O_INLINE I32 add_products(I32 sum, BytePairs a, BytePairs b) {
  return add_halves(add_halves(sum, a.even * b.even), a.odd * b.odd);
}

// Unsigned weights, as on the x86 targets, so that the offset correction is tested by the reference too. Of
// at most 6 bits, kMaxSteps times two products add up in 16 bits, as with AVX2.
template <int kBits>
struct Dot4 {
  static_assert(kBits >= 4 && kBits <= 6);
  static constexpr bool kSigned = false;
  using Acc = BytePairs;
  using X = const int8_t*;
  static constexpr size_t kXRows = kGemmQ8Rows;
  static EH2O_INLINE Acc start(I32) { return {Vector<int16_t>{}, Vector<int16_t>{}}; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    const BytePairs weights = pairs_u8(w), values = pairs_s8(set1_word(x + 4 * kRow));
    return {acc.even + weights.even * values.even, acc.odd + weights.odd * values.odd};
  }
  static constexpr size_t kMaxSteps = size_t{1} << (7 - kBits);
  static EH2O_INLINE I32 finish(Acc acc, I32 init) { return add_halves(init, acc.even + acc.odd); }
};

template <>
struct Dot4<8> {
  static constexpr bool kSigned = false;
  using Acc = I32;
  using X = const int8_t*;
  static constexpr size_t kXRows = kGemmQ8Rows;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    return add_products(acc, pairs_u8(w), pairs_s8(set1_word(x + 4 * kRow)));
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

// Dot products that fit 16 bits (kernels/gemm_words-inl.h), of unsigned weights as Dot4's, times scales of 16
// bits. They begin with what a lane holds; all but their low 16 bits may be anything: a scale is 0 there.
struct WordDot {
  // Whether a lane holds two parts of the product, 16 bits each, and starts with these
  // (quant/packed_format.h).
  static constexpr bool kHasPairs = false;
  static EH2O_INLINE F32 to_f32(I32 sum) { return mul_dot(sum, set1(1.0f), zero()); }
  static EH2O_INLINE I32 load(const uint8_t* scales) { return load_vector<I32>(scales); }
  static EH2O_INLINE void store(uint8_t* p, I32 scales) { store_vector(p, scales); }
  static EH2O_INLINE I32 add(I32 dot, I8 w, const int8_t* x) { return Dot4<8>::add<0>(dot, w, x); }
  static EH2O_INLINE I32 add_parts(I32 a, I32 b) { return add_i32(a, b); }
  static EH2O_INLINE I32 add_scaled(I32 sum, I32 dot, I32 scale) {
    return {sum.lane + extend(dot) * extend(scale) + (dot.lane >> 16) * (scale.lane >> 16)};
  }
  // kLanes signed bytes as add_scaled takes them.
  static EH2O_INLINE I32 load_scales(const uint8_t* p) {
    return from_lanes<I32>(
        [&](size_t i) { return int32_t{static_cast<uint16_t>(static_cast<int8_t>(p[i]))}; });
  }
  // The 4 bits from kFrom on of kLanes bytes, likewise.
  template <int kFrom>
  static EH2O_INLINE I32 load_nibbles(const uint8_t* p) {
    return from_lanes<I32>([&](size_t i) { return p[i] >> kFrom & 0xf; });
  }
  // Word by word, of nibbles.
  static EH2O_INLINE I32 mul_words(I32 a, I32 b) { return {a.lane * b.lane}; }
  // The low words of both; where a lane has one word of a scale, the same twice is a scale of bytes.
  static EH2O_INLINE I32 join_words(I32 low, I32 high) {
    return {(low.lane & 0xffff) | as<int32_t>(as<uint32_t>(high.lane) << 16)};
  }
  // Of kRows starts of packed activations, minus 32 times a sum, low ones and high ones: both as words. Reads
  // kLanes of each at most, which a record has behind them.
  template <size_t kRows>
  static EH2O_INLINE I32 join_sums(const int32_t* low, const int32_t* high) {
    return join_words(load_vector<I32>(low), load_vector<I32>(high));
  }
  // Whether the ISA has products of unsigned bytes that use all 8 bits, and scale_bytes:
  // (value - kOffset) * scale + kNewOffset, which fits a byte.
  static constexpr bool kScalesBytes = true;
  template <int kOffset, int kNewOffset>
  static EH2O_INLINE I8 scale_bytes(I8 values, I32 scale) {
    const Vector<uint16_t> words =
        (as<uint16_t>(values.byte) - static_cast<uint16_t>(kOffset * 257)) * as<uint16_t>(scale.lane);
    return {as<uint8_t>(words + static_cast<uint16_t>(kNewOffset * 257))};
  }

 private:
  // The low 16 bits with their sign.
  static EH2O_INLINE Vector<int32_t> extend(I32 v) { return as<int32_t>(as<uint32_t>(v.lane) << 16) >> 16; }
};

// Four sums, of the lanes of a, b, c and d: that of half of the lanes, plus that of the lanes kSumSteps[0]
// further; both likewise by kSumSteps[1], and so on.
inline constexpr size_t kSumSteps[] = {1, 2};
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  store(p, F32{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)});
}

// Blocks of 32 signed bytes times numbers of 16 bits.
// out[w] lane i: bytes 4 w to 4 w + 3 of the row at row(i), of kLanes rows.
template <typename Row>
EH2O_INLINE void load_columns(I8 (&out)[8], const Row& row) {
  for (size_t w = 0; w < 8; ++w) {
    uint8_t column[4 * kLanes];
    for (size_t i = 0; i < kLanes; ++i) std::memcpy(column + 4 * i, row(i) + 4 * w, 4);
    out[w] = load_i8(column);
  }
}
// Vectors from kFirst on of a block's 32 columns; every lane: a column of 4 rows. order_block makes of sums
// of such vectors those that are kBlockOrder among the columns.
template <size_t kFirst, size_t kVectors>
EH2O_INLINE void load_interleaved(I8 (&out)[kVectors], const uint8_t* const (&rows)[4]) {
  for (size_t w = 0; w < kVectors; ++w) {
    uint8_t columns[4 * kLanes];
    for (size_t i = 0; i < 4 * kLanes; ++i) columns[i] = rows[i % 4][(kFirst + w) * kLanes + i / 4];
    out[w] = load_i8(columns);
  }
}
inline constexpr size_t kBlockOrder[] = {0, 1, 2, 3, 4, 5, 6, 7};
template <size_t kVectors>
EH2O_INLINE void order_block(F32 (&)[kVectors]) {}
// Sums over the 4 bytes of every lane, times 4 numbers of 8 bytes in all that store_x has written.
struct BlockDot {
  using Bytes = I8;
  using Acc = I32;
  static EH2O_INLINE Acc start() { return set1_i32(0); }
  static EH2O_INLINE Bytes widen(I8 v) { return v; }
  static EH2O_INLINE Acc add(Acc acc, Bytes v, const uint8_t* x) {
    int16_t numbers[4];
    std::memcpy(numbers, x, sizeof(numbers));
    const Vector<uint32_t> bytes = as<uint32_t>(v.byte);
    for (int k = 0; k < 4; ++k) acc.lane += (as<int32_t>(bytes << (24 - 8 * k)) >> 24) * numbers[k];
    return acc;
  }
  static EH2O_INLINE F32 finish(Acc acc) { return mul_dot(acc, set1(1.0f), zero()); }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) {
    const Vector<int32_t> numbers = to_i32(round_nearest(v));
    for (size_t i = 0; i < kLanes; ++i) {
      const auto number = static_cast<int16_t>(numbers[i]);
      std::memcpy(out + 2 * i, &number, 2);
    }
  }
  // Of a block of keys: sums start from 0.
  static constexpr size_t kStartBytes = 0;
  static EH2O_INLINE Acc start(const uint8_t*) { return start(); }
  static EH2O_INLINE void store_start(uint8_t*, const uint8_t*) {}
};
using KeyDot = BlockDot;
using ValueDot = BlockDot;

}  // namespace edgeh2o::EH2O_ISA::simd
