// The most an ISA can do: chains of independent products in registers. What the matmul and attention kernels
// reach is stated as a share of it (bench/kernels.py).

namespace edgeh2o::EH2O_ISA {

// Hides a value from the optimiser, which would else move the products of constants out of the loop.
template <typename V>
EH2O_INLINE void hide(V& v) {
  if constexpr (std::is_class_v<V>) {  // clang has no registers for them
    asm volatile("" : "+m"(v));
  } else {
#if defined(__x86_64__)
    asm volatile("" : "+v"(v));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(v));
#endif
  }
}

// Of products in f32, or of words of two values. Returns the number of multiplications and additions; out:
// [kLanes].
template <typename Products>
uint64_t peak_float(float* out, size_t n_rounds) {
  using namespace simd;
  constexpr size_t kChains = 12;
  F32 sum[kChains];
  unroll<kChains>([&](auto i) { sum[i] = set1(static_cast<float>(i)); });
  F32 a = load(out), b = set1(0.5f);
  for (size_t round = 0; round < n_rounds; ++round) {
    hide(b);
    unroll<kChains>([&](auto i) { sum[i] = Products::multiply_add(a, b, sum[i]); });
  }
  unroll<kChains - 1>([&](auto i) { sum[0] = add(sum[0], sum[i + 1]); });
  store(out, sum[0]);
  return static_cast<uint64_t>(n_rounds) * kChains * kLanes * 2 * Products::kValuesPerWord;
}

// Reads n_bytes, a multiple of 512, in order, as fast as memory gives them. Returns a sum of some of them, so
// that they are read indeed.
inline float peak_read(const float* values, size_t n_bytes, size_t bytes_ahead) {
  using namespace simd;
  constexpr size_t kChains = 8;
  F32 sum[kChains];
  unroll<kChains>([&](auto i) { sum[i] = zero(); });
  for (const float* end = values + n_bytes / sizeof(float); values < end; values += kChains * kLanes) {
    if (bytes_ahead > 0) {
      const auto* ahead = reinterpret_cast<const uint8_t*>(values) + bytes_ahead;
      for (size_t i = 0; i < kChains * kLanes * sizeof(float); i += 64) __builtin_prefetch(ahead + i, 0, 2);
    }
    unroll<kChains>([&](auto i) { sum[i] = add(sum[i], load(values + i * kLanes)); });
  }
  unroll<kChains - 1>([&](auto i) { sum[0] = add(sum[0], sum[i + 1]); });
  float lanes[kLanes];
  store(lanes, sum[0]);
  return lanes[0];
}

// Products of 8-bit activations with weights of kBits, widened to int32 as often as the ISA must.
template <int kBits>
uint64_t peak_q8(float* out, size_t n_rounds) {
  using namespace simd;
  using Dot = Dot4<kBits>;
  constexpr size_t kSteps = kBlock / 4, kChains = 12;
  I32 sum[kChains];
  unroll<kChains>([&](auto i) { sum[i] = set1_i32(static_cast<int32_t>(i)); });
  alignas(64) int8_t bytes[64 * kChains] = {};
  asm volatile("" : : "r"(bytes) : "memory");  // not known to be 0
  I8 w = load_i8(bytes);
  if constexpr (kHasMmla) {
    I8 x = load_i8(bytes);
    for (size_t round = 0; round < n_rounds; ++round) {
      unroll<kSteps>(
          [&](auto) { unroll<kChains>([&](auto i) { sum[i] = Dot::multiply_pairs(sum[i], x, w); }); });
    }
  } else {
    constexpr size_t kStepsAtOnce = Dot::kMaxSteps < kSteps ? Dot::kMaxSteps : kSteps;
    for (size_t round = 0; round < n_rounds * (kSteps / kStepsAtOnce); ++round) {
      typename Dot::Acc acc[kChains];
      unroll<kChains>([&](auto i) { acc[i] = Dot::start(sum[i]); });
      unroll<kStepsAtOnce>([&](auto) {
        hide(w);
        unroll<kChains>(
            [&](auto i) { acc[i] = Dot::template add<0>(acc[i], w, Dot::load_x(bytes + 64 * i)); });
      });
      unroll<kChains>([&](auto i) { sum[i] = Dot::finish(acc[i], sum[i]); });
    }
  }
  unroll<kChains>(
      [&](auto i) { store(out, add(load(out), mul_dot(sum[i], set1(1.0f), set1(-12582912.0f)))); });
  constexpr size_t kPerProduct = kLanes * (kHasMmla ? 8 : 4) * 2;
  return static_cast<uint64_t>(n_rounds) * kSteps * kChains * kPerProduct;
}

// Of what attention in integers multiplies.
template <typename Integers>
uint64_t peak_integers(float* out, size_t n_rounds) {
  if constexpr (kAreBytes<Integers>) {
    return peak_q8<8>(out, n_rounds);
  } else {
    using namespace simd;
    constexpr size_t kChains = 12;
    typename Integers::Acc sum[kChains];
    unroll<kChains>([&](auto i) { sum[i] = Integers::start(i); });
    alignas(64) uint8_t words[64 * kChains] = {};
    asm volatile("" : : "r"(words) : "memory");  // not known to be 0
    I8 columns = load_i8(words);
    for (size_t round = 0; round < n_rounds; ++round) {
      hide(columns);
      unroll<kChains>([&](auto i) {
        sum[i] = Integers::template add_scores<0>(sum[i], Integers::load_x(words + 64 * i), columns);
      });
    }
    unroll<kChains>([&](auto i) { store(out, add(load(out), Integers::to_f32(sum[i]))); });
    return static_cast<uint64_t>(n_rounds) * kChains * kLanes * 2 * kIntegerLayout<Integers>.per_word;
  }
}

}  // namespace edgeh2o::EH2O_ISA
