// What the gated delta rule in chunks (kernels/delta_net_chunks-inl.h) needs of a chunk's queries, keys and
// gates, whatever the values: products of tokens, and how much of the state they read and leave.
#include "kernels/delta_net.h"

namespace edgeh2o::EH2O_ISA {

struct DeltaScores {
  static constexpr size_t kRows = simd::kGemmF32Rows >= 8 ? 8 : simd::kGemmF32Rows >= 4 ? 4 : 2;
  static constexpr size_t kVectors = simd::kGemmF32Vectors, kColumns = kGemmF32Columns;
  static_assert(kRows <= kLeastDeltaTokens && kDeltaTokens % kRows == 0 && kDeltaTokens % kColumns == 0 &&
                kDeltaColumns % kColumns == 0);
  using Tile = simd::F32[kRows][kVectors];

  const DeltaSlice& slice;
  size_t begin, n_tokens;  // n_tokens: a multiple of kRows
  float* keys;             // [key_dim][kDeltaTokens]: transposed
  float* writes;           // [kDeltaTokens][kDeltaTokens]: -rate_i k_i . D[i][j] k_j
  float* reads;            // [kDeltaTokens][kDeltaTokens]: q_i . D[i][j] k_j
  float* updates;          // [kDeltaTokens][kDeltaColumns]: u_i
  float* rest;             // of the scratch
  float rates[kDeltaTokens];

  DeltaScores(const DeltaSlice& whole, size_t first, size_t n, float* scratch)
      : slice(whole), begin(first), n_tokens(n), keys(scratch) {
    writes = keys + slice.key_dim * kDeltaTokens;
    reads = writes + kDeltaTokens * kDeltaTokens;
    updates = reads + kDeltaTokens * kDeltaTokens;
    rest = updates + kDeltaTokens * kDeltaColumns;
    for (size_t i = 0; i < n; ++i) rates[i] = slice.rates[(begin + i) * slice.rate_stride];
  }

  const float* key(size_t token) const { return slice.k + (begin + token) * slice.qk_stride; }
  const float* query(size_t token) const { return slice.q + (begin + token) * slice.qk_stride; }
  const float* decay(size_t token) const { return slice.decays + (begin + token) * slice.decay_stride; }

  template <typename F>
  static EH2O_INLINE void for_each(const F& f) {
    simd::unroll<kRows>([&](auto r) { simd::unroll<kVectors>([&](auto v) { f(r, v); }); });
  }
  static EH2O_INLINE void clear(Tile& sum) {
    for_each([&](auto r, auto v) { sum[r][v] = simd::zero(); });
  }
  // Products of kRows rows of queries or keys with those of the keys from `col` on.
  EH2O_INLINE void multiply_keys(Tile& sum, const float* rows, size_t stride, size_t col) const {
    clear(sum);
    add_products<F32Products, kRows>(sum, rows, stride, keys + col, kDeltaTokens, slice.key_dim);
  }
};

// A head decays as a whole: D are numbers, which products are multiplied by.
struct HeadScores : DeltaScores {
  float decays[kDeltaTokens], decays_to_end[kDeltaTokens];

  HeadScores(const DeltaSlice& whole, size_t first, size_t n, float* scratch)
      : DeltaScores(whole, first, n, scratch) {
    find_decays();
    transpose_keys();
    find_scores();
  }

  // What reads the state, and what that is multiplied by.
  const float* reading_key(size_t token) const { return key(token); }
  const float* reading_query(size_t token) const { return query(token); }
  size_t reading_stride() const { return slice.qk_stride; }
  EH2O_INLINE void decay_read(Tile& sum, size_t row) const {
    for_each([&](auto r, auto i) { sum[r][i] = simd::mul(simd::set1(decays[row + r]), sum[r][i]); });
  }
  // The same of what goes into it, in place, and of a row of the state.
  EH2O_INLINE void decay_updates(float* u) const {
    using namespace simd;
    for (size_t token = 0; token < n_tokens; ++token) {
      for (size_t i = 0; i < kColumns; i += kLanes) {
        float* value = u + token * kDeltaColumns + i;
        store(value, mul(set1(decays_to_end[token]), load(value)));
      }
    }
  }
  float state_decay(size_t) const { return decays[n_tokens - 1]; }

 private:
  // D goes to reads.
  void find_decays() {
    using namespace simd;
    float from_begin = 1;
    for (size_t i = 0; i < n_tokens; ++i) {
      from_begin *= *decay(i);
      decays[i] = from_begin;
      float* row = reads + i * kDeltaTokens;
      for (size_t j = 0; j < kDeltaTokens; j += kLanes) {
        store(row + j, i == 0 ? zero() : mul(set1(*decay(i)), load(row - kDeltaTokens + j)));
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

  void find_scores() {
    using namespace simd;
    for (size_t row = 0; row < n_tokens; row += kRows) {
      for (size_t col = 0; col < row + kRows; col += kColumns) {
        const size_t at = row * kDeltaTokens + col;
        Tile sum;
        multiply_keys(sum, key(row), slice.qk_stride, col);
        for_each([&](auto r, auto v) {
          const size_t place = at + r * kDeltaTokens + v * kLanes;
          store(writes + place, mul(mul(load(reads + place), set1(-rates[row + r])), sum[r][v]));
        });
        multiply_keys(sum, query(row), slice.qk_stride, col);
        for_each([&](auto r, auto v) {
          float* place = reads + at + r * kDeltaTokens + v * kLanes;
          store(place, mul(load(place), sum[r][v]));
        });
      }
    }
  }
};

// Rows decay by themselves: D are vectors, which go into queries and keys. Between tokens of two blocks of
// kRows, D is the product of the decays behind the key up to the beginning of the query's block, and those
// from there on: both are products of decays. Keys decay from block to block, and are in the end what they
// leave behind the chunk. Within a block D is made token by token.
struct RowScores : DeltaScores {
  // Tokens whose keys are transposed together: their columns are whole vectors.
  static constexpr size_t kGroup = kRows > simd::kLanes ? kRows : simd::kLanes;
  static_assert(kGroup <= kMostDeltaKeys && kDeltaTokens % kGroup == 0 && kGroup % kRows == 0 &&
                kGroup % simd::kLanes == 0);
  float* decayed_keys;     // [kDeltaTokens][key_dim]: by the decays from the beginning of the chunk
  float* decayed_queries;  // the same
  float* recent;           // [kGroup][key_dim]: keys of a group, by those behind them
  float* of_block;         // [key_dim]: the product of its decays
  float* from_begin;       // [key_dim]: the product of those of the blocks before, or of all

  RowScores(const DeltaSlice& whole, size_t first, size_t n, float* scratch)
      : DeltaScores(whole, first, n, scratch) {
    const size_t dim = slice.key_dim;
    decayed_keys = rest;
    decayed_queries = decayed_keys + kDeltaTokens * dim;
    recent = decayed_queries + kDeltaTokens * dim;
    of_block = recent + kGroup * dim;
    from_begin = of_block + dim;
    for (size_t i = 0; i < dim; ++i) from_begin[i] = 1;
    for (size_t row = 0; row < n_tokens; row += kRows) {
      decay_block(row);
      if (row > 0) find_scores(row);
      find_own_scores(row);
      append_keys(row);
      end_block(row);
    }
  }

  const float* reading_key(size_t token) const { return decayed_keys + token * slice.key_dim; }
  const float* reading_query(size_t token) const { return decayed_queries + token * slice.key_dim; }
  size_t reading_stride() const { return slice.key_dim; }
  EH2O_INLINE void decay_read(Tile&, size_t) const {}
  EH2O_INLINE void decay_updates(float*) const {}
  float state_decay(size_t row) const { return from_begin[row]; }

 private:
  template <typename F>
  EH2O_INLINE void for_each_part(const F& f) const {  // key_dim is a multiple of kLanes
    for (size_t i = 0; i < slice.key_dim; i += simd::kLanes) f(i);
  }

  // Queries and keys, by the decays from the beginning of the block.
  void decay_block(size_t row) {
    using namespace simd;
    for_each_part([&](size_t i) {
      F32 product = set1(1.0f);
      for (size_t token = row; token < row + kRows; ++token) {
        product = mul(product, load(decay(token) + i));
        store(decayed_keys + token * slice.key_dim + i, mul(product, load(key(token) + i)));
        store(decayed_queries + token * slice.key_dim + i, mul(product, load(query(token) + i)));
      }
      store(of_block + i, product);
    });
  }

  // With the keys of the blocks before.
  void find_scores(size_t row) {
    using namespace simd;
    for (size_t col = 0; col < row; col += kColumns) {
      const size_t at = row * kDeltaTokens + col;
      Tile sum;
      multiply_keys(sum, reading_key(row), slice.key_dim, col);
      for_each([&](auto r, auto v) {
        store(writes + at + r * kDeltaTokens + v * kLanes, mul(set1(-rates[row + r]), sum[r][v]));
      });
      multiply_keys(sum, reading_query(row), slice.key_dim, col);
      for_each([&](auto r, auto v) { store(reads + at + r * kDeltaTokens + v * kLanes, sum[r][v]); });
    }
  }

  // Within the block, whose keys go to recent.
  void find_own_scores(size_t row) {
    using namespace simd;
    float* own = recent + row % kGroup * slice.key_dim;
    unroll<kRows>([&](auto r) {
      const float *q = query(row + r), *k = key(row + r), *decays = decay(row + r);
      F32 by_k[kRows], by_q[kRows];
      unroll<kRows>([&](auto j) { by_k[j] = by_q[j] = zero(); });
      for_each_part([&](size_t i) {
        const F32 q_part = load(q + i), k_part = load(k + i), decay = load(decays + i);
        unroll<kRows>([&](auto j) {
          if constexpr (j < r) {
            float* place = own + j * slice.key_dim + i;
            const F32 left = mul(decay, load(place));
            store(place, left);
            by_k[j] = mul_add(left, k_part, by_k[j]);
            by_q[j] = mul_add(left, q_part, by_q[j]);
          }
        });
        by_q[r] = mul_add(k_part, q_part, by_q[r]);
        store(own + r * slice.key_dim + i, k_part);
      });
      const size_t at = (row + r) * kDeltaTokens + row;
      unroll<kRows>([&](auto j) {
        if constexpr (j < r) writes[at + j] = -rates[row + r] * reduce_add(by_k[j]);
        reads[at + j] = j <= r ? reduce_add(by_q[j]) : 0.0f;
      });
    });
  }

  // Keys of the blocks before decay by the block; then those of its group are transposed, what is not there
  // yet included, which nothing reads.
  void append_keys(size_t row) {
    using namespace simd;
    const size_t n_before = row % kGroup, group = row - n_before;
    for (size_t dim = 0; dim < slice.key_dim; ++dim) {
      float* its = keys + dim * kDeltaTokens;
      const F32 decay = set1(of_block[dim]);
      for (size_t i = 0; i < group; i += kLanes) store(its + i, mul(decay, load(its + i)));
    }
    for_each_part([&](size_t dim) {
      const F32 decay = load(of_block + dim);
      for (size_t token = 0; token < n_before; ++token) {
        float* place = recent + token * slice.key_dim + dim;
        store(place, mul(decay, load(place)));
      }
      for (size_t token = 0; token < kGroup; token += kLanes) {
        F32 block[kLanes];
        unroll<kLanes>([&](auto i) { block[i] = load(recent + (token + i) * slice.key_dim + dim); });
        transpose(block);
        unroll<kLanes>([&](auto i) { store(keys + (dim + i) * kDeltaTokens + group + token, block[i]); });
      }
    });
  }

  // From the beginning of the block to that of the chunk.
  void end_block(size_t row) {
    using namespace simd;
    for_each_part([&](size_t i) {
      const F32 before = load(from_begin + i);
      if (row > 0) {
        for (size_t token = row; token < row + kRows; ++token) {
          for (float* rows : {decayed_keys, decayed_queries}) {
            float* place = rows + token * slice.key_dim + i;
            store(place, mul(before, load(place)));
          }
        }
      }
      store(from_begin + i, mul(before, load(of_block + i)));
    });
  }
};

}  // namespace edgeh2o::EH2O_ISA
