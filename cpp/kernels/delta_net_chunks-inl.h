// The gated delta rule in chunks of tokens (Yang, Kautz, Hatamizadeh 2024, section 3.3; of decays by row
// "Kimi Linear", 2025): what kernels/delta_net-inl.h computes, as products of small matrices.
#include "kernels/delta_net.h"

namespace edgeh2o::EH2O_ISA {

// Of tokens i and j of a chunk let D[i][j] be the product of the decays behind j up to i: a number, or one of
// every row. With S the state before the chunk and D[i] the product from its beginning, what token i adds to
// the state is k_i u_i^T with
//   u_i = rate_i (v_i - S^T D[i] k_i - sum over j < i of (k_i . D[i][j] k_j) u_j),
// and then out_i = S^T D[i] q_i + sum over j <= i of (q_i . D[i][j] k_j) u_j, and the state behind the chunk
// is D[n - 1] S + sum over j of D[n - 1][j] k_j u_j^T. Decays are at most 1: no product of them overflows,
// and none is divided by.
template <typename Scores>
struct DeltaChunk {
  static constexpr size_t kRows = DeltaScores::kRows, kVectors = DeltaScores::kVectors,
                          kColumns = DeltaScores::kColumns;
  using Tile = DeltaScores::Tile;

  const DeltaSlice& slice;
  Scores scores;

  DeltaChunk(const DeltaSlice& whole, size_t first, size_t n, float* scratch)
      : slice(whole), scores(whole, first, n, scratch) {}

  template <typename F>
  static EH2O_INLINE void for_each(const F& f) {
    DeltaScores::for_each(f);
  }

  // u of kRows tokens from `row` on, by those of the tokens before: forward substitution.
  void find_updates(size_t row, const float* state, const float* v, float* u) const {
    using namespace simd;
    const float* rates = scores.rates + row;
    Tile sum;
    DeltaScores::clear(sum);
    add_products<F32Products, kRows>(sum, scores.reading_key(row), scores.reading_stride(), state,
                                     kDeltaColumns, slice.key_dim);
    scores.decay_read(sum, row);
    for_each([&](auto r, auto i) {
      const F32 value = load(v + (row + r) * slice.v_stride + i * kLanes);
      sum[r][i] = mul(set1(rates[r]), sub(value, sum[r][i]));
    });
    const float* factors = scores.writes + row * kDeltaTokens;
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
    DeltaScores::clear(sum);
    add_products<F32Products, kRows>(sum, scores.reading_query(row), scores.reading_stride(), state,
                                     kDeltaColumns, slice.key_dim);
    scores.decay_read(sum, row);
    add_products<F32Products, kRows>(sum, scores.reads + row * kDeltaTokens, kDeltaTokens, u, kDeltaColumns,
                                     row + kRows);
    for_each([&](auto r, auto i) { store(out + (row + r) * slice.out_stride + i * kLanes, sum[r][i]); });
  }

  void advance(float* state, float* u) const {
    using namespace simd;
    scores.decay_updates(u);
    for (size_t row = 0; row < slice.key_dim; row += kRows) {
      float* rows = state + row * kDeltaColumns;
      Tile sum;
      for_each([&](auto r, auto i) {
        sum[r][i] = mul(set1(scores.state_decay(row + r)), load(rows + r * kDeltaColumns + i * kLanes));
      });
      add_products<F32Products, kRows>(sum, scores.keys + row * kDeltaTokens, kDeltaTokens, u, kDeltaColumns,
                                       scores.n_tokens);
      for_each([&](auto r, auto i) { store(rows + r * kDeltaColumns + i * kLanes, sum[r][i]); });
    }
  }

  void run(size_t n_slices) const {
    for (size_t i = 0; i < n_slices; ++i) {
      for (size_t col = 0; col < kDeltaColumns; col += kColumns) {
        float *state = slice.state + i * slice.key_dim * kDeltaColumns + col, *u = scores.updates + col;
        const size_t column = i * kDeltaColumns + col;
        for (size_t row = 0; row < scores.n_tokens; row += kRows) {
          find_updates(row, state, slice.v + scores.begin * slice.v_stride + column, u);
          find_outputs(row, state, u, slice.out + scores.begin * slice.out_stride + column);
        }
        advance(state, u);
      }
    }
  }
};

// n_slices neighbouring slices of a head, of which slice is the first. Tokens that fill no tile go one by
// one.
inline void delta_net_chunks_f32(const DeltaSlice& slice, size_t n_slices, float* scratch) {
  const size_t n_in_chunks = slice.n_tokens - slice.n_tokens % DeltaScores::kRows;
  for (size_t begin = 0; begin < n_in_chunks; begin += kDeltaTokens) {
    const size_t n = n_in_chunks - begin < kDeltaTokens ? n_in_chunks - begin : kDeltaTokens;
    if (slice.decays_by_row) {
      DeltaChunk<RowScores>(slice, begin, n, scratch).run(n_slices);
    } else {
      DeltaChunk<HeadScores>(slice, begin, n, scratch).run(n_slices);
    }
  }
  if (n_in_chunks == slice.n_tokens) return;
  for (size_t i = 0; i < n_slices; ++i) {
    DeltaSlice rest = slice;
    rest.n_tokens -= n_in_chunks;
    rest.q += n_in_chunks * slice.qk_stride;
    rest.k += n_in_chunks * slice.qk_stride;
    rest.v += n_in_chunks * slice.v_stride + i * kDeltaColumns;
    rest.decays += n_in_chunks * slice.decay_stride;
    rest.rates += n_in_chunks * slice.rate_stride;
    rest.state += i * slice.key_dim * kDeltaColumns;
    rest.out += n_in_chunks * slice.out_stride + i * kDeltaColumns;
    delta_net_f32(rest);
  }
}

}  // namespace edgeh2o::EH2O_ISA
