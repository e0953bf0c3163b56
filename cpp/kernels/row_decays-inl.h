// How the rows of the states of a delta net decay by themselves (Kimi Linear, 2025).

namespace edgeh2o::EH2O_ISA {

// x[i] becomes exp(log_floor * sigmoid(a * (x[i] + biases[i]))), or, of a log_floor of 0,
// exp(a * softplus(x[i] + biases[i])); a is not above 0 there.
inline void row_decays_f32(float* x, const float* biases, float a, float log_floor, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 step = add(load_n(x + i, count), load_n(biases + i, count));
    const F32 log = log_floor < 0 ? div(set1(log_floor), add(set1(1.0f), exp(mul(set1(-a), step))))
                                  : mul(set1(a), softplus(step));
    store_n(x + i, exp(log), count);
  });
}

}  // namespace edgeh2o::EH2O_ISA
