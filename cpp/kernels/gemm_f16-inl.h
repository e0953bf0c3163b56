// Products of f16 for attention. Where fmla adds in f16 (Cortex-A76: no widening fmlal), sums are kept short
// and added up in f32.

namespace edgeh2o::EH2O_ISA {

// Terms of a sum in f16, which is off by 2^-11 of each of its partial sums at most. Twice as many make the
// error of logits three times as large; half as many spare a quarter of it and cost a fifth of a Cortex-A76's
// cycles.
inline constexpr size_t kF16Terms = 32;

template <typename Halves>
struct F16Products {
  static constexpr size_t kValuesPerWord = 2, kDepthPerWord = 1;
  static constexpr bool kAreShort = true;
  using V = typename Halves::V;
  template <typename Vector>
  static EH2O_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return Halves::to_words(
        Halves::mul_add(Halves::from_words(a), Halves::from_words(b), Halves::from_words(c)));
  }
  static EH2O_INLINE simd::F32 narrow(simd::F32 low, simd::F32 high) { return Halves::narrow(low, high); }
  static EH2O_INLINE simd::F32 load_values(const float* words, size_t i) {
    return simd::load_f16(reinterpret_cast<const uint16_t*>(words) + i);
  }
  static EH2O_INLINE void store_columns(float* panel, size_t i, simd::F32 columns) {
    simd::store_f16(reinterpret_cast<uint16_t*>(panel) + i, columns);
  }

  // C[kRows][nr] (+)= A[kRows][depth] * B[depth][nr] of f16 values, nr = kGemmF32Columns.
  template <size_t kRows>
  static EH2O_INLINE void multiply_tile(float* c, size_t c_stride, const float* a, size_t a_stride,
                                        const float* b, size_t depth, bool accumulate) {
    using namespace simd;
    const auto *row = reinterpret_cast<const uint16_t*>(a), *column = reinterpret_cast<const uint16_t*>(b);
    const size_t row_stride = a_stride * kValuesPerWord;
    V sum[kRows];
    for (; depth >= kF16Terms; depth -= kF16Terms) {
      unroll<kF16Terms / kStep>([&](auto i) EH2O_INLINE_LAMBDA {
        add_step<i == 0>(sum, row + i * kStep, row_stride, column + i * kStep * kStep);
      });
      add_sums(c, c_stride, sum, accumulate);
      accumulate = true;
      row += kF16Terms;
      column += kF16Terms * kStep;
    }
    if (depth == 0) return;
    unroll<kRows>([&](auto r) { sum[r] = Halves::zero(); });
    for (; depth >= kStep; depth -= kStep, row += kStep, column += kStep * kStep) {
      add_step<false>(sum, row, row_stride, column);
    }
    for (; depth > 0; --depth, ++row, column += kStep) {
      const V columns = Halves::load(column);
      unroll<kRows>(
          [&](auto r) { sum[r] = Halves::mul_add(Halves::set1(row + r * row_stride), columns, sum[r]); });
    }
    add_sums(c, c_stride, sum, accumulate);
  }

 private:
  static constexpr size_t kStep = 2 * simd::kLanes;  // terms of a vector of A
  static_assert(kStep == kGemmF32Columns && kF16Terms % kStep == 0);

  // sum (+)= kStep terms.
  template <bool kIsFirst, size_t kRows>
  static EH2O_INLINE void add_step(V (&sum)[kRows], const uint16_t* row, size_t row_stride,
                                   const uint16_t* column) {
    using namespace simd;
    V rows[kRows];
    unroll<kRows>([&](auto r) { rows[r] = Halves::load(row + r * row_stride); });
    unroll<kStep>([&](auto i) EH2O_INLINE_LAMBDA {
      const V columns = Halves::load(column + i * kStep);
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
        if constexpr (kIsFirst && i == 0) {
          sum[r] = Halves::mul_lane(i, rows[r], columns);
        } else {
          sum[r] = Halves::mul_add_lane(i, rows[r], columns, sum[r]);
        }
      });
    });
  }

  template <size_t kRows>
  static EH2O_INLINE void add_sums(float* c, size_t c_stride, const V (&sum)[kRows], bool accumulate) {
    using namespace simd;
    unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
      float* out = c + r * c_stride;
      const F32 low = Halves::low(sum[r]), high = Halves::high(sum[r]);
      store(out, accumulate ? add(load(out), low) : low);
      store(out + kLanes, accumulate ? add(load(out + kLanes), high) : high);
    });
  }
};

}  // namespace edgeh2o::EH2O_ISA
