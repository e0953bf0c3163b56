// The residual streams of one token: x[k * stride], kStreams of them, each [n].
#include "kernels/streams.h"

namespace edgeh2o::EH2O_ISA {

// x_k += sum over j of weights[k][j] * x_j, of what all of them were before.
inline void predict_streams_f32(float* x, size_t stride, const float* weights, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    F32 before[kStreams];
    for (size_t j = 0; j < kStreams; ++j) before[j] = load_n(x + j * stride + i, count);
    for (size_t k = 0; k < kStreams; ++k) {
      F32 sum = before[k];
      for (size_t j = 0; j < kStreams; ++j) sum = mul_add(before[j], set1(weights[k * kStreams + j]), sum);
      store_n(x + k * stride + i, sum, count);
    }
  });
}

// x_k += weights[k] * (computed - x_0), of the x_0 before.
inline void correct_streams_f32(float* x, size_t stride, const float* computed, const float* weights,
                                size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 error = sub(load_n(computed + i, count), load_n(x + i, count));
    for (size_t k = 0; k < kStreams; ++k) {
      float* const stream = x + k * stride + i;
      store_n(stream, mul_add(error, set1(weights[k]), load_n(stream, count)), count);
    }
  });
}

// x times a factor that gives it the root mean square of `like`; that of x counts as sqrt(1e-5) at least.
inline void match_size_f32(float* x, const float* like, size_t n) {
  using namespace simd;
  F32 squares = zero(), wanted = zero();
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 v = load_n(x + i, count), w = load_n(like + i, count);
    squares = mul_add(v, v, squares);
    wanted = mul_add(w, w, wanted);
  });
  const float size = reduce_add(squares) / static_cast<float>(n);
  const float mean = reduce_add(wanted) / static_cast<float>(n);
  const F32 factor = set1(__builtin_sqrtf(mean / (size < 1e-5f ? 1e-5f : size)));
  for_each_vector(n, [&](size_t i, auto count) { store_n(x + i, mul(load_n(x + i, count), factor), count); });
}

}  // namespace edgeh2o::EH2O_ISA
