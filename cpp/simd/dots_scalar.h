// Dot products of the reference: of bytes with bytes, and with numbers of 16 bits.
#pragma once

namespace edgeh2o::EH2O_ISA::simd {

// Unsigned weights, as on the x86 targets, so that the offset correction is tested by the reference too.
template <int kBits>
struct Dot4 {
  static constexpr bool kSigned = false;
  using Acc = I32;
  using X = const int8_t*;
  static constexpr size_t kXRows = kGemmQ8Rows;
  static EH2O_INLINE Acc start(I32 init) { return init; }
  static EH2O_INLINE X load_x(const int8_t* p) { return p; }
  template <size_t kRow>
  static EH2O_INLINE Acc add(Acc acc, I8 w, X x) {
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t k = 0; k < 4; ++k) acc.lane[i] += w.byte[4 * i + k] * x[4 * kRow + k];
    return acc;
  }
  static constexpr size_t kMaxSteps = 8;
  static EH2O_INLINE I32 finish(Acc acc, I32) { return acc; }
};

// Dot products that fit 16 bits (kernels/gemm_words-inl.h), of unsigned weights as Dot4's, times scales of 16
// bits. They begin with what a lane holds; all but their low 16 bits may be anything.
struct WordDot {
  // Whether a lane holds two parts of the product, 16 bits each, and starts with these
  // (quant/packed_format.h).
  static constexpr bool kHasPairs = false;
  static EH2O_INLINE F32 to_f32(I32 sum) { return mul_dot(sum, set1(1.0f), zero()); }
  static EH2O_INLINE I32 load(const uint8_t* scales) {
    I32 v;
    std::memcpy(v.lane, scales, sizeof(v.lane));
    return v;
  }
  static EH2O_INLINE void store(uint8_t* p, I32 scales) { std::memcpy(p, scales.lane, sizeof(scales.lane)); }
  static EH2O_INLINE I32 add(I32 dot, I8 w, const int8_t* x) { return Dot4<4>::add<0>(dot, w, x); }
  static EH2O_INLINE I32 add_parts(I32 a, I32 b) { return add_i32(a, b); }
  static EH2O_INLINE I32 add_scaled(I32 sum, I32 dot, I32 scale) {
    return from_lanes<I32>([&](size_t i) {
      return sum.lane[i] + static_cast<int16_t>(dot.lane[i]) * static_cast<int16_t>(scale.lane[i]);
    });
  }
  // kLanes signed bytes as add_scaled takes them.
  static EH2O_INLINE I32 load_scales(const uint8_t* p) {
    return from_lanes<I32>(
        [&](size_t i) { return int32_t{static_cast<uint16_t>(static_cast<int8_t>(p[i]))}; });
  }
};

// Four sums, of the lanes of a, b, c and d.
EH2O_INLINE void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  store(p, F32{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)});
}

// Blocks of 32 signed bytes times numbers of 16 bits.
// out[w] lane i: bytes 4 w to 4 w + 3 of row i of kLanes rows.
EH2O_INLINE void load_columns(I8 (&out)[8], const uint8_t* rows, size_t stride) {
  for (size_t w = 0; w < 8; ++w)
    for (size_t i = 0; i < kLanes; ++i) std::memcpy(out[w].byte + 4 * i, rows + i * stride + 4 * w, 4);
}
// Every lane of out: a column of 4 rows, in the order that store_block undoes.
EH2O_INLINE void load_interleaved(I8 (&out)[8], const uint8_t* const (&rows)[4]) {
  for (size_t i = 0; i < 32; ++i)
    for (size_t k = 0; k < 4; ++k) out[i / kLanes].byte[i % kLanes * 4 + k] = rows[k][i];
}
EH2O_INLINE void store_block(float* p, const F32 (&v)[8]) {
  for (size_t i = 0; i < 8; ++i) store(p + i * kLanes, v[i]);
}
// Sums over the 4 bytes of every lane, times 4 numbers of 8 bytes in all that store_x has written.
struct BlockDot {
  using Bytes = I8;
  using Acc = I32;
  static EH2O_INLINE Acc start() { return set1_i32(0); }
  static EH2O_INLINE Bytes widen(I8 v) { return v; }
  static EH2O_INLINE Acc add(Acc acc, Bytes v, const uint8_t* x) {
    int16_t numbers[4];
    std::memcpy(numbers, x, sizeof(numbers));
    for (size_t i = 0; i < 4 * kLanes; ++i)
      acc.lane[i / 4] += static_cast<int8_t>(v.byte[i]) * numbers[i % 4];
    return acc;
  }
  static EH2O_INLINE F32 finish(Acc acc) { return mul_dot(acc, set1(1.0f), zero()); }
  static EH2O_INLINE void store_x(uint8_t* out, F32 v) {
    for (size_t i = 0; i < kLanes; ++i) {
      const auto number = static_cast<int16_t>(std::nearbyintf(v.lane[i]));
      std::memcpy(out + 2 * i, &number, 2);
    }
  }
};

}  // namespace edgeh2o::EH2O_ISA::simd
