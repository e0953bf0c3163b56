// Softmax weights of attention in integers (attention_integers-inl.h) as levels: kLevels times the weight of
// a logit by the largest of its row and block, rounded.

namespace edgeh2o::EH2O_ISA {

// Logits less their row's largest are weighed in steps of 2^-23, so that the integer t nearest to one has the
// exponent of its weight above the bits of a fraction.
inline constexpr float kStepsPerOctave = 8388608.0f;  // 2^23

// Of integers of 8 or 16 bits.
template <typename Integers>
inline constexpr IntegerLayout kIntegerLayout = {std::is_same_v<Integers, simd::Shorts> ? size_t{2}
                                                                                        : size_t{4}};
template <typename Integers>
inline constexpr bool kAreBytes = kIntegerLayout<Integers>.are_bytes();

// The levels of a weight; with values of up to kLargestValue, sums of kLevelKeys products stay below 2^31.
template <typename Integers>
inline constexpr float kLevels = kAreBytes<Integers> ? 255.0f : 8191.0f;
template <typename Integers>
inline constexpr float kLog2Levels = kAreBytes<Integers> ? 7.99435344f : 12.9998239f;
template <typename Integers>
inline constexpr float kLargestValue = kAreBytes<Integers> ? 127.0f : 4095.0f;

template <typename Integers>
EH2O_INLINE simd::F32 load_levels(const uint8_t* p) {
  if constexpr (kAreBytes<Integers>) {
    return simd::load_u8(p);
  } else {
    return Integers::load_levels(p);
  }
}

// Of its polynomial, all but the first; four each for Integers::addend.
alignas(16) inline constexpr float kExp2Terms[3][4] = {
    {-0.00400320568f, -0.00400320568f, -0.00400320568f, -0.00400320568f},
    {-0.261113602f, -0.261113602f, -0.261113602f, -0.261113602f},
    {1.22606716f, 1.22606716f, 1.22606716f, 1.22606716f}};
// v[i] becomes 2^(v[i] / kStepsPerOctave) for v[i] < 2^27, relative error < 8e-5; below 2^-20 whatever
// rounds to no level, and so for NaN. With t = 2^23 (n + m), m in [0, 1), the bits of 2^(n + m) are those of
// 1, plus t, plus 2^23 (2^m - 1 - m). What is added last is what 1 + (2^m - 1 - m) / 2, a number below 1, has
// more in its bits than 1: a minimax polynomial. Step by step for four vectors, so that none waits for
// another.
template <typename Integers>
EH2O_INLINE void exp2_steps(simd::F32* v) {
  using namespace simd;
  typename Integers::Acc t[4];
  F32 f[4], p[4];
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { t[i] = Integers::round_above(v[i]); });
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { f[i] = Integers::one_and_fraction(t[i]); });
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA {
    p[i] = mul_add(f[i], set1(0.0390122612f), Integers::addend(kExp2Terms[0]));
  });
  unroll<2>([&](auto term) EH2O_INLINE_LAMBDA {
    unroll<4>([&](auto i)
                  EH2O_INLINE_LAMBDA { p[i] = mul_add(p[i], f[i], Integers::addend(kExp2Terms[1 + term])); });
  });
  unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { v[i] = Integers::add_to_bits(p[i], t[i]); });
}

// Levels of the weights of kRows rows and one block, level_stride bytes apart; the maxima of their logits and
// the sums of their levels. Logits are units[row] * x[row].
template <typename Integers, size_t kRows>
EH2O_INLINE void weigh_block(uint8_t* levels, size_t level_stride, float* maxima, float* sums,
                             const float (&x)[kRows][kLevelKeys], const float* units) {
  using namespace simd;
  constexpr size_t kVectors = kLevelKeys / kLanes, kFours = kRows / 4 * 4;
  float steps[kRows], shifts[kRows];  // of a row's logits: steps * x + shifts
  const auto top_of = [&](size_t row) EH2O_INLINE_LAMBDA {
    F32 top = load(x[row]);
    unroll<kVectors - 1>([&](auto i) EH2O_INLINE_LAMBDA { top = max(top, load(x[row] + (i + 1) * kLanes)); });
    return top;
  };
  for (size_t row = 0; row < kFours; row += 4) {
    Integers::store_maxima(maxima + row, top_of(row), top_of(row + 1), top_of(row + 2), top_of(row + 3));
  }
  for (size_t row = kFours; row < kRows; ++row) maxima[row] = reduce_max(top_of(row));
  for (size_t row = 0; row < kRows; ++row) {
    maxima[row] *= units[row];
    steps[row] = units[row] * kStepsPerOctave;
    shifts[row] = (kLog2Levels<Integers> - maxima[row]) * kStepsPerOctave;
  }
  const auto level = [&](size_t row) EH2O_INLINE_LAMBDA {
    const F32 step = set1(steps[row]), shift = set1(shifts[row]);
    F32 v[kVectors];
    unroll<kVectors>([&](auto i)
                         EH2O_INLINE_LAMBDA { v[i] = mul_add(load(x[row] + i * kLanes), step, shift); });
    unroll<kVectors / 4>([&](auto i) EH2O_INLINE_LAMBDA { exp2_steps<Integers>(v + 4 * i); });
    return Integers::to_f32(Integers::store_rounded(levels + row * level_stride, v));
  };
  for (size_t row = 0; row < kFours; row += 4) {
    F32 sum[4];
    unroll<4>([&](auto i) EH2O_INLINE_LAMBDA { sum[i] = level(row + i); });
    store_sums(sums + row, sum[0], sum[1], sum[2], sum[3]);
  }
  for (size_t row = kFours; row < kRows; ++row) sums[row] = reduce_add(level(row));
}

}  // namespace edgeh2o::EH2O_ISA
