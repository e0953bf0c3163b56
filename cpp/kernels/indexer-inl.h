// The scores by which a query of DeepSeek sparse attention chooses what it reads: its lightning indexer.

namespace edgeh2o::EH2O_ISA {

// Scores of keys for one query: out[key] = sum over its heads of weights[head] * max(0, q[head] . k[key])
// (DeepSeek-V3.2, 2025, equation 1). q: [n_heads][key_dim]; panels: keys as pack_keys of f32 has them,
// [ceil(n_keys / nr)][key_dim][nr]. A key's score depends neither on n_keys nor on where it lies.
inline void index_scores_f32(float* out, const float* q, const float* weights, size_t n_heads,
                             const float* panels, size_t n_keys, size_t key_dim) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors, kHeads = 4 * kGemmF32Rows;
  float products[kHeads * kGemmF32Columns];
  for (size_t key = 0; key < n_keys; key += kGemmF32Columns, panels += key_dim * kGemmF32Columns) {
    F32 sum[kVectors];
    unroll<kVectors>([&](auto v) { sum[v] = zero(); });
    for (size_t first = 0; first < n_heads; first += kHeads) {
      const size_t n = n_heads - first < kHeads ? n_heads - first : kHeads;
      gemm_f32_rows<F32Products, kGemmF32Rows>(products, kGemmF32Columns, q + first * key_dim, key_dim,
                                               panels, kGemmF32Columns, n, kGemmF32Columns, key_dim, false);
      for (size_t head = 0; head < n; ++head) {
        const F32 weight = set1(weights[first + head]);
        unroll<kVectors>([&](auto v) {
          const F32 product = load(products + head * kGemmF32Columns + v * kLanes);
          sum[v] = mul_add(weight, max(zero(), product), sum[v]);  // the second operand, where one is NaN
        });
      }
    }
    store_tile_row<kVectors>(out + key, sum, n_keys - key);
  }
}

}  // namespace edgeh2o::EH2O_ISA
