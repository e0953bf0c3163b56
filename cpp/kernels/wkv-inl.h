// The recurrence of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution"), token
// by token.
#include "kernels/wkv.h"

namespace edgeh2o::EH2O_ISA {

// For every token: S = diag(decays) S - removals (directions^T S) + keys values^T, of the S before; then out
// = S^T queries.
inline void wkv_f32(const WkvSlice& slice) {
  using namespace simd;
  constexpr size_t kVectors = kWkvColumns / kLanes;
  // Independent sums, lest additions wait for each other.
  constexpr size_t kWays = 2;
  static_assert(kWkvColumns % kWays == 0);
  for (size_t t = 0; t < slice.n_tokens; ++t) {
    const size_t at = t * slice.stride;
    const float *decays = slice.decays + at, *keys = slice.keys + at, *directions = slice.directions + at;
    const float *removals = slice.removals + at, *queries = slice.queries + at;
    F32 taken[kWays][kVectors], sums[kWays][kVectors], values[kVectors];
    unroll<kVectors>([&](auto i) {
      values[i] = load(slice.values + at + i * kLanes);
      unroll<kWays>([&](auto way) { taken[way][i] = sums[way][i] = zero(); });
    });
    for (size_t row = 0; row < slice.key_dim; row += kWays) {
      const float* s = slice.state + row * kWkvColumns;
      unroll<kWays>([&](auto way) {
        const F32 direction = set1(directions[row + way]);
        unroll<kVectors>([&](auto i) {
          taken[way][i] = mul_add(load(s + way * kWkvColumns + i * kLanes), direction, taken[way][i]);
        });
      });
    }
    unroll<kVectors>([&](auto i) { taken[0][i] = sub(zero(), add(taken[0][i], taken[1][i])); });
    for (size_t row = 0; row < slice.key_dim; row += kWays) {
      float* s = slice.state + row * kWkvColumns;
      unroll<kWays>([&](auto way) {
        const F32 decay = set1(decays[row + way]), key = set1(keys[row + way]);
        const F32 removal = set1(removals[row + way]), query = set1(queries[row + way]);
        unroll<kVectors>([&](auto i) {
          float* const p = s + way * kWkvColumns + i * kLanes;
          const F32 value = mul_add(removal, taken[0][i], mul_add(key, values[i], mul(decay, load(p))));
          store(p, value);
          sums[way][i] = mul_add(value, query, sums[way][i]);
        });
      });
    }
    unroll<kVectors>(
        [&](auto i) { store(slice.out + t * slice.out_stride + i * kLanes, add(sums[0][i], sums[1][i])); });
  }
}

// Of RWKV-6 (Peng et al. 2024, "Eagle and Finch"), for every token: out = S^T queries + own values; then S =
// diag(decays) S + keys values^T.
inline void wkv6_f32(const Wkv6Slice& slice) {
  using namespace simd;
  constexpr size_t kVectors = kWkvColumns / kLanes;
  constexpr size_t kWays = 2;
  static_assert(kWkvColumns % kWays == 0);
  for (size_t t = 0; t < slice.n_tokens; ++t) {
    const size_t at = t * slice.stride;
    const float *decays = slice.decays + at, *keys = slice.keys + at, *queries = slice.queries + at;
    const F32 own = set1(slice.own[t * slice.own_stride]);
    F32 sums[kWays][kVectors], values[kVectors];
    unroll<kVectors>([&](auto i) {
      values[i] = load(slice.values + at + i * kLanes);
      sums[0][i] = mul(own, values[i]);
      sums[1][i] = zero();
    });
    for (size_t row = 0; row < slice.key_dim; row += kWays) {
      float* s = slice.state + row * kWkvColumns;
      unroll<kWays>([&](auto way) {
        const F32 decay = set1(decays[row + way]), key = set1(keys[row + way]);
        const F32 query = set1(queries[row + way]);
        unroll<kVectors>([&](auto i) {
          float* const p = s + way * kWkvColumns + i * kLanes;
          const F32 before = load(p);
          sums[way][i] = mul_add(before, query, sums[way][i]);
          store(p, mul_add(key, values[i], mul(decay, before)));
        });
      });
    }
    unroll<kVectors>(
        [&](auto i) { store(slice.out + t * slice.out_stride + i * kLanes, add(sums[0][i], sums[1][i])); });
  }
}

// x[i] becomes exp(-exp(x[i] + biases[i])): how the rows of the states of RWKV-6 decay.
inline void key_decays_f32(float* x, const float* biases, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 log = exp(add(load_n(x + i, count), load_n(biases + i, count)));
    store_n(x + i, exp(sub(zero(), log)), count);
  });
}

}  // namespace edgeh2o::EH2O_ISA
