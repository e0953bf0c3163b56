// The selective scan of Mamba-1 (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State
// Spaces"), token by token.
#include "kernels/selective_scan.h"

namespace edgeh2o::EH2O_ISA {

// log(1 + exp(x)) as max(x, 0) + log1p(u), u = exp(-|x|), where log1p(u) = 2 atanh(u / (u + 2)): the argument
// is at most 1 / 3, so that seven terms of the series have every bit.
EH2O_INLINE simd::F32 softplus(simd::F32 x) {
  using namespace simd;
  const F32 u = exp(sub(zero(), abs(x)));
  const F32 s = div(u, add(u, set1(2.0f))), square = mul(s, s);
  F32 p = set1(2.0f / 13.0f);
  p = mul_add(p, square, set1(2.0f / 11.0f));
  p = mul_add(p, square, set1(2.0f / 9.0f));
  p = mul_add(p, square, set1(2.0f / 7.0f));
  p = mul_add(p, square, set1(2.0f / 5.0f));
  p = mul_add(p, square, set1(2.0f / 3.0f));
  p = mul_add(p, square, set1(2.0f));
  return mul_add(s, p, max(zero(), x));  // the second operand, where one is NaN
}

// 2^x, relative error < 2e-7, for x from -126 to 126, which it is held to: a decay of 2^-126 leaves nothing.
EH2O_INLINE simd::F32 exp2_normal(simd::F32 x) {
  using namespace simd;
  x = max(set1(-126.0f), min(set1(126.0f), x));
  const F32 n = round_nearest(x), r = sub(x, n);
  // Minimax of the relative error over [-1/2, 1/2] among those that are 1 at 0: what lasts does so.
  F32 p = set1(1.326472731e-3f);
  p = mul_add(p, r, set1(9.671512991e-3f));
  p = mul_add(p, r, set1(5.550733581e-2f));
  p = mul_add(p, r, set1(2.402224243e-1f));
  p = mul_add(p, r, set1(6.931470037e-1f));
  p = mul_add(p, r, set1(1.0f));
  return scale_by_pow2_normal(p, n);
}

// For every token and channel: rate = softplus(step); s = exp(a * rate) * s + b * (rate * x), of all its
// states; out = sum of c * s, + skip * x.
//
// A few states of every channel stay in registers for a block of tokens. Tokens of a block: what is read of
// them again for every few states fits a level-1 cache.
inline void selective_scan_f32(const ScanSlice& slice) {
  using namespace simd;
  constexpr size_t kBlock = 64, kVectors = kScanChannels / kLanes;
  constexpr size_t kRows = kVectors == 1 ? 8 : 4;
  // Independent sums, lest additions wait for each other.
  constexpr size_t kSums = kVectors == 1 ? 2 : 1;
  float inputs[kBlock][kScanChannels], sums[kBlock][kScanChannels], rates[kBlock][kScanChannels];
  F32 skip[kVectors];
  unroll<kVectors>([&](auto i) { skip[i] = slice.skips ? load(slice.skips + i * kLanes) : zero(); });
  for (size_t begin = 0; begin < slice.n_tokens; begin += kBlock) {
    const size_t n = slice.n_tokens - begin < kBlock ? slice.n_tokens - begin : kBlock;
    for (size_t t = 0; t < n; ++t) {
      unroll<kVectors>([&](auto i) {
        const F32 x = load(slice.x + (begin + t) * slice.x_stride + i * kLanes);
        const F32 rate = softplus(load(slice.steps + (begin + t) * slice.step_stride + i * kLanes));
        store(rates[t] + i * kLanes, rate);
        store(inputs[t] + i * kLanes, mul(x, rate));
        store(sums[t] + i * kLanes, mul(x, skip[i]));
      });
    }
    for (size_t row = 0; row < slice.state_dim; row += kRows) {
      float* state = slice.state + row * kScanChannels;
      const float *b = slice.b + begin * slice.bc_stride + row, *c = slice.c + begin * slice.bc_stride + row;
      float logs[kRows][kScanChannels];  // of what decays by a rate of 1, to base 2
      F32 s[kRows][kVectors];
      unroll<kRows>([&](auto r) {
        unroll<kVectors>([&](auto i) {
          const size_t at = (row + r) * kScanChannels + i * kLanes;
          store(logs[r] + i * kLanes, mul(load(slice.a + at), set1(1.44269504088896341f)));
          s[r][i] = load(slice.state + at);
        });
      });
      for (size_t t = 0; t < n; ++t, b += slice.bc_stride, c += slice.bc_stride) {
        F32 rate[kVectors], x[kVectors], sum[kSums][kVectors];
        unroll<kVectors>([&](auto i) {
          rate[i] = load(rates[t] + i * kLanes);
          x[i] = load(inputs[t] + i * kLanes);
          sum[0][i] = load(sums[t] + i * kLanes);
        });
        unroll<kRows>([&](auto r) {
          const F32 write = set1(b[r]), read = set1(c[r]);
          unroll<kVectors>([&](auto i) {
            F32& value = s[r][i];
            const F32 decay = exp2_normal(mul(rate[i], load(logs[r] + i * kLanes)));
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
          store(sums[t] + i * kLanes, kSums == 2 ? add(sum[0][i], sum[kSums - 1][i]) : sum[0][i]);
        });
      }
      unroll<kRows>([&](auto r) {
        unroll<kVectors>([&](auto i) { store(state + r * kScanChannels + i * kLanes, s[r][i]); });
      });
    }
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = 0; i < kScanChannels; i += kLanes) {
        store(slice.out + (begin + t) * slice.out_stride + i, load(sums[t] + i));
      }
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
