// Row-wise kernels: norms, rotary embedding, gated activation, additions, f16 storage. `n` may be any
// length.

namespace edgeh2o::EH2O_ISA {

// Calls f(offset, count) for whole vectors (count = kLanes) and once for the tail.
template <typename F>
EH2O_INLINE void for_each_vector(size_t n, const F& f) {
  size_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes) f(i, simd::Index<simd::kLanes>{});
  if (i < n) f(i, n - i);
}

template <typename Count>
EH2O_INLINE simd::F32 load_n(const float* p, Count count) {
  if constexpr (std::is_same_v<Count, size_t>) {
    return simd::load_partial(p, count);
  } else {
    return simd::load(p);
  }
}

template <typename Count>
EH2O_INLINE void store_n(float* p, simd::F32 v, Count count) {
  if constexpr (std::is_same_v<Count, size_t>) {
    simd::store_partial(p, v, count);
  } else {
    simd::store(p, v);
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019); all [n].
inline void rms_norm_f32(float* out, const float* x, const float* weight, size_t n, float eps) {
  using namespace simd;
  F32 squares = zero();
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 v = load_n(x + i, count);
    squares = mul_add(v, v, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(n);
  const F32 scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(out + i, mul(mul(load_n(x + i, count), scale), load_n(weight + i, count)), count);
  });
}

// Of [n] numbers; the squares are those of the differences from the mean, so that a large one costs no
// digits.
struct Moments {
  float mean, squares;
};
EH2O_INLINE Moments find_moments(const float* x, size_t n) {
  using namespace simd;
  F32 sum = zero(), squares = zero();
  for_each_vector(n, [&](size_t i, auto count) { sum = add(sum, load_n(x + i, count)); });
  const float mean = reduce_add(sum) / static_cast<float>(n);
  const F32 shift = set1(mean);
  for_each_vector(n, [&](size_t i, auto count) {
    F32 v = sub(load_n(x + i, count), shift);
    if constexpr (std::is_same_v<decltype(count), size_t>) v = keep_first(v, count, zero());
    squares = mul_add(v, v, squares);
  });
  return {mean, reduce_add(squares)};
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba, Kiros and Hinton 2016); all [n], bias
// may be null.
inline void layer_norm_f32(float* out, const float* x, const float* weight, const float* bias, size_t n,
                           float eps) {
  using namespace simd;
  const Moments found = find_moments(x, n);
  const F32 shift = set1(found.mean);
  const F32 scale = set1(1.0f / __builtin_sqrtf(found.squares / static_cast<float>(n) + eps));
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 v = mul(mul(sub(load_n(x + i, count), shift), scale), load_n(weight + i, count));
    store_n(out + i, bias ? add(v, load_n(bias + i, count)) : v, count);
  });
}

// Rotates the pairs (x[i], x[i + n_pairs]) of one head in place (Su et al. 2021, half-split layout).
inline void rope_f32(float* x, const float* cos, const float* sin, size_t n_pairs) {
  using namespace simd;
  for_each_vector(n_pairs, [&](size_t i, auto count) {
    const F32 a = load_n(x + i, count), b = load_n(x + n_pairs + i, count);
    const F32 c = load_n(cos + i, count), s = load_n(sin + i, count);
    store_n(x + i, sub(mul(a, c), mul(b, s)), count);
    store_n(x + n_pairs + i, mul_add(a, s, mul(b, c)), count);
  });
}

// out = gate / (1 + exp(-gate)) * up (SwiGLU, Shazeer 2020); out may be gate.
inline void swiglu_f32(float* out, const float* gate, const float* up, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 g = load_n(gate + i, count);
    const F32 silu = div(g, add(set1(1.0f), exp(sub(zero(), g))));
    store_n(out + i, mul(silu, load_n(up + i, count)), count);
  });
}

// out = gelu(gate) * up (GEGLU, Shazeer 2020) with the tanh form of GELU, written as gate * sigmoid(2 u),
// u = sqrt(2 / pi) * (gate + 0.044715 gate^3) (Hendrycks and Gimpel 2016); out may be gate.
inline void geglu_f32(float* out, const float* gate, const float* up, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 g = load_n(gate + i, count);
    const F32 cubic = mul_add(mul(mul(g, g), set1(0.044715f)), g, g);
    const F32 gelu = div(g, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216f)))));
    store_n(out + i, mul(gelu, load_n(up + i, count)), count);
  });
}

// out = gelu(x), as in geglu_f32; `unused` is there for the shape of a gate. out may be x.
inline void gelu_f32(float* out, const float* x, const float* unused, size_t n) {
  using namespace simd;
  (void)unused;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 g = load_n(x + i, count);
    const F32 cubic = mul_add(mul(mul(g, g), set1(0.044715f)), g, g);
    store_n(out + i, div(g, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216f))))), count);
  });
}

// xIELU (Huang and Schlag 2024): p x^2 + beta x where x > 0, else n (exp(min(x, eps)) - 1 - x) + beta x, with
// p and n positive; out may be x. Near 0 what exp - 1 loses is small beside beta x.
inline void xielu_f32(float* out, const float* x, float p, float n, float beta, float eps, size_t size) {
  using namespace simd;
  const F32 one = set1(1.0f), most = set1(eps);
  for_each_vector(size, [&](size_t i, auto count) {
    const F32 v = load_n(x + i, count);
    const F32 above = max(v, zero()), below = min(v, zero());
    // 1 where x < 0, else 0: what is left of a positive x would be exp(eps) - 1.
    const F32 is_below = min(mul(below, set1(-1e38f)), one);
    const F32 curve = mul(sub(sub(exp(min(below, most)), one), below), is_below);
    const F32 sum = mul_add(mul(above, above), set1(p), mul(curve, set1(n)));
    store_n(out + i, mul_add(v, set1(beta), sum), count);
  });
}

// out = g / (1 + exp(-1.702 g)) * (u + 1) with g = min(gate, 7) and u = up in [-7, 7] (gpt-oss); out may be
// gate.
inline void swiglu_clamped_f32(float* out, const float* gate, const float* up, size_t n) {
  using namespace simd;
  const F32 high = set1(7.0f), low = set1(-7.0f), one = set1(1.0f);
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 g = min(high, load_n(gate + i, count));  // the second operand, where one is NaN
    const F32 u = max(low, min(high, load_n(up + i, count)));
    const F32 swish = div(g, add(one, exp(mul(g, set1(-1.702f)))));
    store_n(out + i, mul(swish, add(u, one)), count);
  });
}

// out = max(gate, 0) * up (ReGLU, Shazeer 2020); out may be gate. The square of ReLU has x twice.
inline void reglu_f32(float* out, const float* gate, const float* up, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 g = max(zero(), load_n(gate + i, count));  // the second operand, where one is NaN
    store_n(out + i, mul(g, load_n(up + i, count)), count);
  });
}

// x = max(x - mean - n_stds * std, 0), with the mean and the standard deviation (of a sample) of its n > 1
// numbers: of a gate whose numbers are normally distributed a known share is left (Gemma 3n).
inline void cut_off_f32(float* x, float n_stds, size_t n) {
  using namespace simd;
  const Moments found = find_moments(x, n);
  const float variance = found.squares / static_cast<float>(n - 1);
  const F32 cutoff = set1(found.mean + n_stds * __builtin_sqrtf(variance));
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(x + i, max(zero(), sub(load_n(x + i, count), cutoff)), count);  // the second, where one is NaN
  });
}

// x = cap * tanh(x / cap) (Bello et al. 2016), as cap - 2 cap / (exp(2 x / cap) + 1).
inline void soft_cap_f32(float* x, float cap, size_t n) {
  using namespace simd;
  const F32 scale = set1(2.0f / cap), limit = set1(cap), range = set1(-2.0f * cap), one = set1(1.0f);
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 power = exp(mul(load_n(x + i, count), scale));
    store_n(x + i, add(limit, div(range, add(power, one))), count);
  });
}

inline void add_f32(float* out, const float* x, size_t n) {
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(out + i, simd::add(load_n(out + i, count), load_n(x + i, count)), count);
  });
}

// out = a * b; out may be either.
inline void multiply_f32(float* out, const float* a, const float* b, size_t n) {
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(out + i, simd::mul(load_n(a + i, count), load_n(b + i, count)), count);
  });
}

// out = up / (1 + exp(-gate)); out may be either. silu(x) has x twice.
inline void gate_f32(float* out, const float* gate, const float* up, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 divisor = add(set1(1.0f), exp(sub(zero(), load_n(gate + i, count))));
    store_n(out + i, div(load_n(up + i, count), divisor), count);
  });
}

// A convolution of n channels at one token: out = sum over j of weights[j * weight_stride] * taps[j], all
// [n]; out may be one of the taps.
inline void convolve_f32(float* out, const float* const* taps, const float* weights, size_t weight_stride,
                         size_t n_taps, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    F32 sum = zero();
    for (size_t j = 0; j < n_taps; ++j) {
      sum = mul_add(load_n(taps[j] + i, count), load_n(weights + j * weight_stride + i, count), sum);
    }
    store_n(out + i, sum, count);
  });
}

inline void scale_f32(float* out, const float* x, float factor, size_t n) {
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(out + i, simd::mul(load_n(x + i, count), simd::set1(factor)), count);
  });
}

inline void store_f16_f32(uint16_t* out, const float* x, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    if constexpr (std::is_same_v<decltype(count), size_t>) {
      uint16_t tail[kLanes];
      store_f16(tail, load_partial(x + i, count));
      __builtin_memcpy(out + i, tail, count * sizeof(uint16_t));
    } else {
      store_f16(out + i, load(x + i));
    }
  });
}

inline void load_f32_f16(float* out, const uint16_t* x, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    if constexpr (std::is_same_v<decltype(count), size_t>) {
      uint16_t tail[kLanes] = {};
      __builtin_memcpy(tail, x + i, count * sizeof(uint16_t));
      store_partial(out + i, load_f16(tail), count);
    } else {
      store(out + i, load_f16(x + i));
    }
  });
}

}  // namespace edgeh2o::EH2O_ISA
