// Softmax of attention logits in base 2: logits are scaled by log2(e) beforehand, so that exp(x - max) is one
// power of two and saves the range reduction's products.

namespace edgeh2o::EH2O_ISA {

// 2^x for x <= 0, relative error < 2e-7. The floor 2^-87 = 6e-27 is nothing beside the 1 of a row's maximum,
// and keeps products with values free of denormals, which many processors multiply a hundred times slower.
// NaN stays NaN.
EH2O_INLINE simd::F32 exp2_nonpositive(simd::F32 x) {
  using namespace simd;
  x = max(set1(-87.0f), x);
  const F32 n = round_nearest(x), r = sub(x, n);
  // Minimax polynomial of 2^r on [-1/2, 1/2] with value 1 at 0.
  F32 p = set1(1.3264727262e-3f);
  p = mul_add(p, r, set1(9.6715127104e-3f));
  p = mul_add(p, r, set1(5.5507337437e-2f));
  p = mul_add(p, r, set1(2.4022242084e-1f));
  p = mul_add(p, r, set1(6.9314697760e-1f));
  p = mul_add(p, r, set1(1.0f));
  return scale_by_pow2_normal(p, n);
}

// Turns logits x[n] into 2^(x - max) in place; sets the maximum and the sum.
EH2O_INLINE void softmax_row(float* x, size_t n, float* maximum, float* sum) {
  using namespace simd;
  constexpr size_t kChains = 4, kStep = kChains * kLanes;
  const F32 lowest = set1(-__builtin_inff());
  F32 top[kChains], total[kChains];
  unroll<kChains>([&](auto c) { top[c] = lowest, total[c] = zero(); });
  const size_t n_steps = n / kStep * kStep;
  for (size_t i = 0; i < n_steps; i += kStep) {
    unroll<kChains>([&](auto c) { top[c] = max(top[c], load(x + i + c * kLanes)); });
  }
  for_each_vector(n - n_steps, [&](size_t i, auto count) {
    const F32 v = load_n(x + n_steps + i, count);
    top[0] = max(top[0], std::is_same_v<decltype(count), size_t> ? keep_first(v, count, lowest) : v);
  });
  *maximum = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));

  const F32 shift = set1(*maximum);
  for (size_t i = 0; i < n_steps; i += kStep) {
    unroll<kChains>([&](auto c) {
      float* p = x + i + c * kLanes;
      const F32 weight = exp2_nonpositive(sub(load(p), shift));
      store(p, weight);
      total[c] = add(total[c], weight);
    });
  }
  for_each_vector(n - n_steps, [&](size_t i, auto count) {
    const F32 weight = exp2_nonpositive(sub(load_n(x + n_steps + i, count), shift));
    store_n(x + n_steps + i, weight, count);
    total[0] =
        add(total[0], std::is_same_v<decltype(count), size_t> ? keep_first(weight, count, zero()) : weight);
  });
  *sum = reduce_add(add(add(total[0], total[1]), add(total[2], total[3])));
}

}  // namespace edgeh2o::EH2O_ISA
