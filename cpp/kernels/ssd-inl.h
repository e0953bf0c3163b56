// The state-space recurrence of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), token by token.
#include "kernels/ssd.h"

namespace edgeh2o::EH2O_ISA {

// For every token: S = decay * S + b (rate * x)^T; out = S^T c + skip * x.
//
// A few rows of the state stay in registers for a block of tokens, so that a token costs three operations
// per number of the state and no access to it. (The form in chunks has two, and products of the tokens of a
// chunk; but its bits depend on where chunks begin.) Tokens of a block: what is read of them again for every
// few rows fits a level-1 cache.
inline void ssd_f32(const SsdSlice& slice) {
  using namespace simd;
  constexpr size_t kBlock = 64, kVectors = kSsdColumns / kLanes;
  constexpr size_t kRows = kVectors == 1 ? kSsdRows : 4;
  // Independent sums, lest additions wait for each other.
  constexpr size_t kSums = kVectors == 1 ? 4 : 1;
  float inputs[kBlock][kSsdColumns], sums[kBlock][kSsdColumns], decays[kBlock];
  const F32 skip = set1(slice.skip);
  for (size_t begin = 0; begin < slice.n_tokens; begin += kBlock) {
    const size_t n = slice.n_tokens - begin < kBlock ? slice.n_tokens - begin : kBlock;
    for (size_t t = 0; t < n; ++t) {
      const size_t gate = (begin + t) * slice.gate_stride;
      decays[t] = slice.decays[gate];
      const F32 rate = set1(slice.rates[gate]);
      for (size_t i = 0; i < kSsdColumns; i += kLanes) {
        const F32 x = load(slice.x + (begin + t) * slice.stride + i);
        store(inputs[t] + i, mul(x, rate));
        store(sums[t] + i, mul(x, skip));
      }
    }
    for (size_t row = 0; row < slice.state_dim; row += kRows) {
      float* state = slice.state + row * kSsdColumns;
      const float *b = slice.b + begin * slice.stride + row, *c = slice.c + begin * slice.stride + row;
      F32 s[kRows][kVectors];
      unroll<kRows>([&](auto r) {
        unroll<kVectors>([&](auto i) { s[r][i] = load(state + r * kSsdColumns + i * kLanes); });
      });
      for (size_t t = 0; t < n; ++t, b += slice.stride, c += slice.stride) {
        const F32 decay = set1(decays[t]);
        F32 x[kVectors], sum[kSums][kVectors];
        unroll<kVectors>([&](auto i) {
          x[i] = load(inputs[t] + i * kLanes);
          sum[0][i] = load(sums[t] + i * kLanes);
        });
        unroll<kRows>([&](auto r) {
          const F32 write = set1(b[r]), read = set1(c[r]);
          unroll<kVectors>([&](auto i) {
            F32& value = s[r][i];
            value = mul_add(write, x[i], mul(decay, value));
            F32& of = sum[r % kSums][i];
            if constexpr (r > 0 && r < kSums) {
              of = mul(read, value);
            } else {
              of = mul_add(read, value, of);
            }
          });
        });
        unroll<kVectors>([&](auto i) {
          F32 total = sum[0][i];
          if constexpr (kSums == 4) total = add(add(total, sum[1][i]), add(sum[2][i], sum[3][i]));
          store(sums[t] + i * kLanes, total);
        });
      }
      unroll<kRows>([&](auto r) {
        unroll<kVectors>([&](auto i) { store(state + r * kSsdColumns + i * kLanes, s[r][i]); });
      });
    }
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = 0; i < kSsdColumns; i += kLanes) {
        store(slice.out + (begin + t) * slice.out_stride + i, load(sums[t] + i));
      }
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
