// The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), token by token.
#include "kernels/delta_net.h"

namespace edgeh2o::EH2O_ISA {

// For every token: S *= decay; d = rate * (v - S^T k); S += k d^T; out = S^T q. The decay is a number, or one
// of every row of S (Kimi Linear, 2025).
//
// The new state is not read again: with S the one before, out = (decay * S)^T q + (q . k) d, so that both
// products are made in one pass over S, and the update in another. Decays of rows go into q and k for the
// first.
template <bool kByRow>
EH2O_INLINE void delta_net_tokens(const DeltaSlice& slice) {
  using namespace simd;
  constexpr size_t kVectors = kDeltaColumns / kLanes;
  // Independent sums, lest additions wait for each other.
  constexpr size_t kWays = kVectors >= 4 ? 1 : 2;
  float decayed_q[kByRow ? kMaxDeltaKeyDim : 1], decayed_k[kByRow ? kMaxDeltaKeyDim : 1];
  for (size_t t = 0; t < slice.n_tokens; ++t) {
    const float *q = slice.q + t * slice.qk_stride, *k = slice.k + t * slice.qk_stride;
    const float *v = slice.v + t * slice.v_stride, *decays = slice.decays + t * slice.decay_stride;
    F32 products = zero();
    for_each_vector(slice.key_dim, [&](size_t i, auto count) {
      const F32 q_part = load_n(q + i, count), k_part = load_n(k + i, count);
      products = mul_add(q_part, k_part, products);
      if constexpr (kByRow) {
        const F32 decay = load_n(decays + i, count);
        store_n(decayed_q + i, mul(q_part, decay), count);
        store_n(decayed_k + i, mul(k_part, decay), count);
      }
    });
    const float *q_rows = kByRow ? decayed_q : q, *k_rows = kByRow ? decayed_k : k;
    F32 by_k[kWays][kVectors], by_q[kWays][kVectors];
    for (size_t way = 0; way < kWays; ++way) {
      for (size_t i = 0; i < kVectors; ++i) by_k[way][i] = by_q[way][i] = zero();
    }
    for (size_t row = 0; row < slice.key_dim; row += kWays) {
      for (size_t way = 0; way < kWays; ++way) {
        const F32 k_row = set1(k_rows[row + way]), q_row = set1(q_rows[row + way]);
        const float* s = slice.state + (row + way) * kDeltaColumns;
        for (size_t i = 0; i < kVectors; ++i) {
          const F32 value = load(s + i * kLanes);
          by_k[way][i] = mul_add(value, k_row, by_k[way][i]);
          by_q[way][i] = mul_add(value, q_row, by_q[way][i]);
        }
      }
    }
    const F32 rate = set1(slice.rates[t * slice.rate_stride]), q_by_k = set1(reduce_add(products));
    const auto decayed = [&](F32 x) { return kByRow ? x : mul(set1(decays[0]), x); };
    F32 d[kVectors];
    for (size_t i = 0; i < kVectors; ++i) {
      if constexpr (kWays == 2) {
        by_k[0][i] = add(by_k[0][i], by_k[1][i]);
        by_q[0][i] = add(by_q[0][i], by_q[1][i]);
      }
      d[i] = mul(rate, sub(load(v + i * kLanes), decayed(by_k[0][i])));
      store(slice.out + t * slice.out_stride + i * kLanes, mul_add(q_by_k, d[i], decayed(by_q[0][i])));
    }
    for (size_t row = 0; row < slice.key_dim; ++row) {
      const F32 k_row = set1(k[row]), decay = set1(decays[kByRow ? row : 0]);
      float* s = slice.state + row * kDeltaColumns;
      for (size_t i = 0; i < kVectors; ++i) {
        store(s + i * kLanes, mul_add(k_row, d[i], mul(decay, load(s + i * kLanes))));
      }
    }
  }
}

inline void delta_net_f32(const DeltaSlice& slice) {
  if (slice.decays_by_row) {
    delta_net_tokens<true>(slice);
  } else {
    delta_net_tokens<false>(slice);
  }
}

}  // namespace edgeh2o::EH2O_ISA
