// exp(x) by range reduction to [-ln2/2, ln2/2] and a degree-6 polynomial (Cephes expf); relative error <
// 2e-7.

namespace edgeh2o::EH2O_ISA {

EH2O_INLINE simd::F32 exp(simd::F32 x) {
  using namespace simd;
  // Below -104 the result is 0, above 89 infinity; the operand order lets NaN through.
  x = max(set1(-104.0f), min(set1(90.0f), x));
  const F32 n = round_nearest(mul(x, set1(1.44269504088896341f)));
  F32 r = mul_add(n, set1(-0.693359375f), x);
  r = mul_add(n, set1(2.12194440e-4f), r);
  F32 p = set1(1.9875691500e-4f);
  p = mul_add(p, r, set1(1.3981999507e-3f));
  p = mul_add(p, r, set1(8.3334519073e-3f));
  p = mul_add(p, r, set1(4.1665795894e-2f));
  p = mul_add(p, r, set1(1.6666665459e-1f));
  p = mul_add(p, r, set1(5.0000001201e-1f));
  p = add(mul_add(mul(r, r), p, r), set1(1.0f));
  return scale_by_pow2(p, n);
}

}  // namespace edgeh2o::EH2O_ISA
