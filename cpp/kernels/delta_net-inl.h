// The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), token by token.
#include "kernels/delta_net.h"

namespace edgeh2o::EH2O_ISA {

// For every token: S *= decay; d = rate * (v - S^T k); S += k d^T; out = S^T q.
//
// The new state is not read again: with S the one before, out = decay * S^T q + (q . k) d, so that both
// products are made in one pass over S, and the update in another.
inline void delta_net_f32(const DeltaSlice& slice) {
  using namespace simd;
  constexpr size_t kVectors = kDeltaColumns / kLanes;
  // Independent sums, lest additions wait for each other.
  constexpr size_t kWays = kVectors >= 4 ? 1 : 2;
  for (size_t t = 0; t < slice.n_tokens; ++t) {
    const float *q = slice.q + t * slice.qk_stride, *k = slice.k + t * slice.qk_stride;
    const float* v = slice.v + t * slice.v_stride;
    F32 by_k[kWays][kVectors], by_q[kWays][kVectors];
    for (size_t way = 0; way < kWays; ++way) {
      for (size_t i = 0; i < kVectors; ++i) by_k[way][i] = by_q[way][i] = zero();
    }
    for (size_t row = 0; row < slice.key_dim; row += kWays) {
      for (size_t way = 0; way < kWays; ++way) {
        const F32 k_row = set1(k[row + way]), q_row = set1(q[row + way]);
        const float* s = slice.state + (row + way) * kDeltaColumns;
        for (size_t i = 0; i < kVectors; ++i) {
          const F32 value = load(s + i * kLanes);
          by_k[way][i] = mul_add(value, k_row, by_k[way][i]);
          by_q[way][i] = mul_add(value, q_row, by_q[way][i]);
        }
      }
    }
    F32 products = zero();
    for_each_vector(slice.key_dim, [&](size_t i, auto count) {
      products = mul_add(load_n(q + i, count), load_n(k + i, count), products);
    });
    const F32 decay = set1(slice.decays[t * slice.gate_stride]),
              rate = set1(slice.rates[t * slice.gate_stride]);
    const F32 q_by_k = set1(reduce_add(products));
    F32 d[kVectors];
    for (size_t i = 0; i < kVectors; ++i) {
      if constexpr (kWays == 2) {
        by_k[0][i] = add(by_k[0][i], by_k[1][i]);
        by_q[0][i] = add(by_q[0][i], by_q[1][i]);
      }
      d[i] = mul(rate, sub(load(v + i * kLanes), mul(decay, by_k[0][i])));
      store(slice.out + t * slice.out_stride + i * kLanes, mul_add(q_by_k, d[i], mul(decay, by_q[0][i])));
    }
    for (size_t row = 0; row < slice.key_dim; ++row) {
      const F32 k_row = set1(k[row]);
      float* s = slice.state + row * kDeltaColumns;
      for (size_t i = 0; i < kVectors; ++i) {
        store(s + i * kLanes, mul_add(k_row, d[i], mul(decay, load(s + i * kLanes))));
      }
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
