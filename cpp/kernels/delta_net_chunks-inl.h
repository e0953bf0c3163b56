// The gated delta rule in chunks of tokens (Yang, Kautz, Hatamizadeh 2024, section 3.3): what
// kernels/delta_net-inl.h computes, as products of small matrices.
#include "kernels/delta_net.h"

namespace edgeh2o::EH2O_ISA {

// Of tokens i and j of a chunk let D[i][j] be the product of the decays behind j up to i. With S the state
// before the chunk and D[i] the product from its beginning, what token i adds to the state is k_i u_i^T with
//   u_i = rate_i (v_i - D[i] S^T k_i - sum over j < i of D[i][j] (k_i . k_j) u_j),
// and then out_i = D[i] S^T q_i + sum over j <= i of D[i][j] (q_i . k_j) u_j, and the state behind the chunk
// is D[n - 1] S + sum over j of D[n - 1][j] k_j u_j^T. Decays are at most 1: no product of them overflows,
// and none is divided by.
struct DeltaChunk {
  static constexpr size_t kRows = simd::kGemmF32Rows >= 8 ? 8 : simd::kGemmF32Rows >= 4 ? 4 : 2;
  static constexpr size_t kVectors = simd::kGemmF32Vectors, kColumns = kGemmF32Columns;
  static_assert(kRows <= kLeastDeltaTokens && kDeltaTokens % kRows == 0 && kDeltaTokens % kColumns == 0 &&
                kDeltaColumns % kColumns == 0);
  using Tile = simd::F32[kRows][kVectors];

  const DeltaSlice& slice;
  size_t begin, n_tokens;  // n_tokens: a multiple of kRows
  float* keys;             // [key_dim][kDeltaTokens]: transposed
  float* writes;           // [kDeltaTokens][kDeltaTokens]: -rate_i D[i][j] (k_i . k_j)
  float* reads;            // [kDeltaTokens][kDeltaTokens]: D[i][j] (q_i . k_j)
  float* updates;          // [kDeltaTokens][kDeltaColumns]: u_i; in the end D[n - 1][i] u_i
  float decays[kDeltaTokens], decays_to_end[kDeltaTokens], rates[kDeltaTokens];

  DeltaChunk(const DeltaSlice& whole, size_t first, size_t n, float* scratch)
      : slice(whole), begin(first), n_tokens(n), keys(scratch) {
    writes = keys + slice.key_dim * kDeltaTokens;
    reads = writes + kDeltaTokens * kDeltaTokens;
    updates = reads + kDeltaTokens * kDeltaTokens;
  }

  const float* key(size_t token) const { return slice.k + (begin + token) * slice.qk_stride; }
  const float* query(size_t token) const { return slice.q + (begin + token) * slice.qk_stride; }

  template <typename F>
  static EH2O_INLINE void for_each(const F& f) {
    simd::unroll<kRows>([&](auto r) { simd::unroll<kVectors>([&](auto v) { f(r, v); }); });
  }
  static EH2O_INLINE void clear(Tile& sum) {
    for_each([&](auto r, auto v) { sum[r][v] = simd::zero(); });
  }

  // Gates, and D in reads.
  void find_decays() {
    using namespace simd;
    float from_begin = 1;
    for (size_t i = 0; i < n_tokens; ++i) {
      const size_t gate = (begin + i) * slice.gate_stride;
      const float decay = slice.decays[gate];
      from_begin *= decay;
      decays[i] = from_begin;
      rates[i] = slice.rates[gate];
      float* row = reads + i * kDeltaTokens;
      for (size_t j = 0; j < kDeltaTokens; j += kLanes) {
        store(row + j, i == 0 ? zero() : mul(set1(decay), load(row - kDeltaTokens + j)));
      }
      row[i] = 1;
    }
    const float* last = reads + (n_tokens - 1) * kDeltaTokens;
    for (size_t j = 0; j < n_tokens; ++j) decays_to_end[j] = last[j];
  }

  void transpose_keys() {
    using namespace simd;
    for (size_t token = 0; token < n_tokens; token += kLanes) {
      for (size_t dim = 0; dim < slice.key_dim; dim += kLanes) {
        F32 block[kLanes];
        for (size_t i = 0; i < kLanes; ++i) {
          block[i] = token + i < n_tokens ? load(key(token + i) + dim) : zero();
        }
        transpose(block);
        for (size_t i = 0; i < kLanes; ++i) store(keys + (dim + i) * kDeltaTokens + token, block[i]);
      }
    }
  }

  // Products of keys and queries with the keys of tokens up to theirs, times decays.
  void find_scores() {
    using namespace simd;
    for (size_t row = 0; row < n_tokens; row += kRows) {
      for (size_t col = 0; col < row + kRows; col += kColumns) {
        const size_t at = row * kDeltaTokens + col;
        Tile sum;
        clear(sum);
        add_products<F32Products, kRows>(sum, key(row), slice.qk_stride, keys + col, kDeltaTokens,
                                         slice.key_dim);
        for_each([&](auto r, auto v) {
          const size_t place = at + r * kDeltaTokens + v * kLanes;
          store(writes + place, mul(mul(load(reads + place), set1(-rates[row + r])), sum[r][v]));
        });
        clear(sum);
        add_products<F32Products, kRows>(sum, query(row), slice.qk_stride, keys + col, kDeltaTokens,
                                         slice.key_dim);
        for_each([&](auto r, auto v) {
          float* place = reads + at + r * kDeltaTokens + v * kLanes;
          store(place, mul(load(place), sum[r][v]));
        });
      }
    }
  }

  // u of kRows tokens from `row` on, by those of the tokens before: forward substitution.
  void find_updates(size_t row, const float* state, const float* v, float* u) const {
    using namespace simd;
    Tile sum;
    clear(sum);
    add_products<F32Products, kRows>(sum, key(row), slice.qk_stride, state, kDeltaColumns, slice.key_dim);
    for_each([&](auto r, auto i) {
      const F32 value = load(v + (row + r) * slice.v_stride + i * kLanes);
      sum[r][i] = mul(set1(rates[row + r]), sub(value, mul(set1(decays[row + r]), sum[r][i])));
    });
    const float* factors = writes + row * kDeltaTokens;
    add_products<F32Products, kRows>(sum, factors, kDeltaTokens, u, kDeltaColumns, row);
    unroll<kRows>([&](auto r) {
      unroll<kVectors>([&](auto i) { store(u + (row + r) * kDeltaColumns + i * kLanes, sum[r][i]); });
      unroll<kRows>([&](auto later) {
        if constexpr (later > r) {
          const F32 factor = set1(factors[later * kDeltaTokens + row + r]);
          unroll<kVectors>([&](auto i) { sum[later][i] = mul_add(factor, sum[r][i], sum[later][i]); });
        }
      });
    });
  }

  void find_outputs(size_t row, const float* state, const float* u, float* out) const {
    using namespace simd;
    Tile sum;
    clear(sum);
    add_products<F32Products, kRows>(sum, query(row), slice.qk_stride, state, kDeltaColumns, slice.key_dim);
    for_each([&](auto r, auto i) { sum[r][i] = mul(set1(decays[row + r]), sum[r][i]); });
    add_products<F32Products, kRows>(sum, reads + row * kDeltaTokens, kDeltaTokens, u, kDeltaColumns,
                                     row + kRows);
    for_each([&](auto r, auto i) { store(out + (row + r) * slice.out_stride + i * kLanes, sum[r][i]); });
  }

  void advance(float* state, float* u) const {
    using namespace simd;
    for (size_t token = 0; token < n_tokens; ++token) {
      for (size_t i = 0; i < kColumns; i += kLanes) {
        float* value = u + token * kDeltaColumns + i;
        store(value, mul(set1(decays_to_end[token]), load(value)));
      }
    }
    const F32 decay = set1(decays[n_tokens - 1]);
    for (size_t row = 0; row < slice.key_dim; row += kRows) {
      float* rows = state + row * kDeltaColumns;
      Tile sum;
      for_each([&](auto r, auto i) { sum[r][i] = mul(decay, load(rows + r * kDeltaColumns + i * kLanes)); });
      add_products<F32Products, kRows>(sum, keys + row * kDeltaTokens, kDeltaTokens, u, kDeltaColumns,
                                       n_tokens);
      for_each([&](auto r, auto i) { store(rows + r * kDeltaColumns + i * kLanes, sum[r][i]); });
    }
  }

  void run(size_t n_slices) {
    find_decays();
    transpose_keys();
    find_scores();
    for (size_t i = 0; i < n_slices; ++i) {
      for (size_t col = 0; col < kDeltaColumns; col += kColumns) {
        float* state = slice.state + i * slice.key_dim * kDeltaColumns + col;
        const size_t column = i * kDeltaColumns + col;
        for (size_t row = 0; row < n_tokens; row += kRows) {
          find_updates(row, state, slice.v + begin * slice.v_stride + column, updates + col);
          find_outputs(row, state, updates + col, slice.out + begin * slice.out_stride + column);
        }
        advance(state, updates + col);
      }
    }
  }
};

// n_slices neighbouring slices of a head, of which slice is the first. Tokens that fill no tile go one by
// one.
inline void delta_net_chunks_f32(const DeltaSlice& slice, size_t n_slices, float* scratch) {
  const size_t n_in_chunks = slice.n_tokens - slice.n_tokens % DeltaChunk::kRows;
  for (size_t begin = 0; begin < n_in_chunks; begin += kDeltaTokens) {
    const size_t n = n_in_chunks - begin < kDeltaTokens ? n_in_chunks - begin : kDeltaTokens;
    DeltaChunk(slice, begin, n, scratch).run(n_slices);
  }
  if (n_in_chunks == slice.n_tokens) return;
  for (size_t i = 0; i < n_slices; ++i) {
    DeltaSlice rest = slice;
    rest.n_tokens -= n_in_chunks;
    rest.q += n_in_chunks * slice.qk_stride;
    rest.k += n_in_chunks * slice.qk_stride;
    rest.v += n_in_chunks * slice.v_stride + i * kDeltaColumns;
    rest.decays += n_in_chunks * slice.gate_stride;
    rest.rates += n_in_chunks * slice.gate_stride;
    rest.state += i * slice.key_dim * kDeltaColumns;
    rest.out += n_in_chunks * slice.out_stride + i * kDeltaColumns;
    delta_net_f32(rest);
  }
}

}  // namespace edgeh2o::EH2O_ISA
