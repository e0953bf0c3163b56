// Attention of a tile of query rows to one piece of keys, merge of two softmax states, column sums.

namespace edgeh2o::EH2O_ISA {

// Keys whose values stay in the level-1 cache while all rows of a tile pass: 128 x 32 floats are 16 KB.
inline constexpr size_t kAttentionKeyBlock = 128;

// Which keys of a piece each query of a tile sees: [hidden_from_query, keys_of_query). Both ends move by one
// key from query to query.
class VisibleKeys {
 public:
  VisibleKeys(const AttentionTile& tile, const AttentionPiece& piece)
      : n_rows_(static_cast<uint32_t>(tile.n_rows)),
        group_size_(static_cast<uint32_t>(tile.group_size)),
        n_keys_(piece.n_keys),
        n_visible_(piece.n_visible),
        n_hidden_(piece.n_hidden) {}

  size_t keys_of_query(size_t query) const {
    const ptrdiff_t n = n_visible_ + static_cast<ptrdiff_t>(query);
    if (n <= 0) return 0;
    return static_cast<size_t>(n) < n_keys_ ? static_cast<size_t>(n) : n_keys_;
  }
  size_t hidden_from_query(size_t query) const {
    const ptrdiff_t n = n_hidden_ + static_cast<ptrdiff_t>(query);
    return n <= 0 ? 0 : static_cast<size_t>(n);
  }
  size_t hidden_from_row(size_t row) const {
    return hidden_from_query(static_cast<uint32_t>(row) / group_size_);
  }
  // Of the last row in the block of kGemmF32Rows rows that begins at first_row.
  size_t keys_of_row_block(size_t first_row) const {
    const uint32_t last = static_cast<uint32_t>(first_row + simd::kGemmF32Rows - 1);
    return keys_of_query((last < n_rows_ ? last : n_rows_ - 1) / group_size_);
  }
  size_t keys_of_last_row() const { return keys_of_query((n_rows_ - 1) / group_size_); }
  // Whether n_rows rows from first_row on exist and see n_keys keys from first_key on.
  bool see_all(size_t first_row, size_t n_rows, size_t first_key, size_t n_keys) const {
    const size_t last_row = first_row + n_rows - 1;
    return last_row < n_rows_ &&
           first_key + n_keys <= keys_of_query(static_cast<uint32_t>(first_row) / group_size_) &&
           hidden_from_row(last_row) <= first_key;
  }
  // First row, rounded down to a whole block, that sees `key`.
  size_t first_row_of_key(size_t key) const {
    const ptrdiff_t query = static_cast<ptrdiff_t>(key) + 1 - n_visible_;
    return query <= 0 ? 0
                      : static_cast<size_t>(query) * group_size_ / simd::kGemmF32Rows * simd::kGemmF32Rows;
  }
  // Past the last row, rounded up to a whole block, from which `key` is not hidden.
  size_t end_row_of_key(size_t key, size_t n_padded) const {
    const ptrdiff_t n_queries = static_cast<ptrdiff_t>(key) + 1 - n_hidden_;
    if (n_queries <= 0) return 0;
    if (static_cast<size_t>(n_queries) >= n_padded) return n_padded;
    const size_t row = static_cast<size_t>(n_queries) * group_size_ + simd::kGemmF32Rows - 1;
    return row >= n_padded ? n_padded : row / simd::kGemmF32Rows * simd::kGemmF32Rows;
  }

 private:
  uint32_t n_rows_, group_size_;  // 32 bits: long divisions are slow
  size_t n_keys_;
  ptrdiff_t n_visible_, n_hidden_;
};

// out[i] = a * out[i] + b * x[i]
EH2O_INLINE void blend_row(float* out, const float* x, float a, float b, size_t n) {
  using namespace simd;
  for_each_vector(n, [&](size_t i, auto count) {
    store_n(out + i, mul_add(set1(a), load_n(out + i, count), mul(set1(b), load_n(x + i, count))), count);
  });
}

alignas(64) constexpr float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// logits[i] -= slope * |distance - i|. Distances are exact below 2^24.
EH2O_INLINE void subtract_distances(float* logits, float slope, ptrdiff_t distance, size_t n) {
  using namespace simd;
  static_assert(kLanes <= 16);
  const F32 numbers = load(kLaneNumbers), factor = set1(-slope);
  for_each_vector(n, [&](size_t i, auto count) {
    const F32 first = set1(static_cast<float>(distance - static_cast<ptrdiff_t>(i)));
    store_n(logits + i, mul_add(factor, abs(sub(first, numbers)), load_n(logits + i, count)), count);
  });
}

// C[n_rows][nr] (+)= A[n_rows][depth] * B[depth][nr] for whole row blocks; a_stride is in words. Fixed
// strides of B leave the registers for the pointers to the rows of A.
template <typename Products, bool kAccumulate>
__attribute__((noinline)) void multiply_panel(float* c, size_t c_stride, const float* a, size_t a_stride,
                                              const float* b, size_t n_rows, size_t depth) {
  constexpr size_t kRows = simd::kGemmF32Rows;
  const size_t n_words = (depth + Products::kValuesPerWord - 1) / Products::kValuesPerWord;
  for (size_t row = 0; row < n_rows; row += kRows) {
    float* out = c + row * c_stride;
    const float* rows = a + row * a_stride;
    if constexpr (Products::kAreShort) {
      Products::template multiply_tile<kRows>(out, c_stride, rows, a_stride, b, depth, kAccumulate);
    } else {
      gemm_f32_tile<Products, kRows>(out, c_stride, rows, a_stride, b, kGemmF32Columns, n_words,
                                     kGemmF32Columns, kAccumulate);
    }
  }
}

template <typename Products>
void attention_scores(const AttentionTile& tile, const AttentionPiece& piece, const VisibleKeys& visible,
                      size_t n_padded) {
  const size_t n_keys = visible.keys_of_last_row(), n_words = tile.key_dim / Products::kValuesPerWord;
  const size_t first_key = visible.hidden_from_query(0) / kGemmF32Columns * kGemmF32Columns;
  for (size_t key = first_key; key < n_keys; key += kGemmF32Columns) {
    const size_t row = visible.first_row_of_key(key);
    const size_t end_row = visible.end_row_of_key(key + kGemmF32Columns - 1, n_padded);
    multiply_panel<Products, false>(tile.weights + row * tile.weight_stride + key, tile.weight_stride,
                                    tile.q + row * n_words, n_words, piece.k + key * n_words, end_row - row,
                                    tile.key_dim);
  }
}

// Weights [first, n) of a row, whole panels, to words of what is multiplied, from word first / values per
// word on.
template <typename Products>
EH2O_INLINE void narrow_weights(float* weights, size_t first, size_t n) {
  using namespace simd;
  if constexpr (Products::kValuesPerWord == 2) {
    for (size_t key = first; key < n; key += 2 * kLanes) {
      store(weights + key / 2, Products::narrow(load(weights + key), load(weights + key + kLanes)));
    }
  }
}

// Weights of keys that a row does not see become 0 as far as its row block is read: up to the end of a panel,
// and from the start of a key block.
template <typename Products>
void attention_softmax(const AttentionTile& tile, const AttentionPiece& piece, const VisibleKeys& visible) {
  size_t first_read = 0, n_read = 0;
  for (size_t row = 0, query = 0; row < tile.n_rows; ++query) {
    const size_t n_keys = visible.keys_of_query(query);
    const size_t n_hidden = visible.hidden_from_query(query);
    for (size_t head = 0; head < tile.group_size && row < tile.n_rows; ++head, ++row) {
      float* weights = tile.weights + row * tile.weight_stride;
      if (row % simd::kGemmF32Rows == 0) {
        n_read = (visible.keys_of_row_block(row) + kGemmF32Columns - 1) / kGemmF32Columns * kGemmF32Columns;
        first_read = visible.hidden_from_row(row) / kAttentionKeyBlock * kAttentionKeyBlock;
      }
      if (tile.soft_cap > 0.0f && n_hidden < n_keys) {
        soft_cap_f32(weights + n_hidden, tile.soft_cap, n_keys - n_hidden);
      }
      if (piece.biases) blend_row(weights, piece.biases, 1.0f, kLog2E, n_keys);
      if (tile.slopes && n_hidden < n_keys) {
        const ptrdiff_t distance = piece.distance + static_cast<ptrdiff_t>(query);
        subtract_distances(weights + n_hidden, tile.slopes[head], distance - static_cast<ptrdiff_t>(n_hidden),
                           n_keys - n_hidden);
      }
      if (n_hidden < n_keys) {
        softmax_row(weights + n_hidden, n_keys - n_hidden, tile.m + row, tile.l + row);
      } else {
        tile.m[row] = -__builtin_inff();
        tile.l[row] = 0.0f;
      }
      const size_t n_unseen = n_hidden < n_read ? n_hidden : n_read;
      for (size_t key = first_read; key < n_unseen; ++key) weights[key] = 0.0f;
      for (size_t key = n_keys; key < n_read; ++key) weights[key] = 0.0f;
      narrow_weights<Products>(weights, first_read, n_read);
    }
  }
}

template <typename Products>
void attention_values(const AttentionTile& tile, const AttentionPiece& piece, const VisibleKeys& visible,
                      size_t n_padded) {
  constexpr size_t kPerWord = Products::kValuesPerWord;
  __builtin_memset(tile.o, 0, n_padded * tile.o_stride * sizeof(float));
  const size_t n_keys = visible.keys_of_last_row();
  const size_t first_key = visible.hidden_from_query(0) / kAttentionKeyBlock * kAttentionKeyBlock;
  for (size_t key = first_key; key < n_keys; key += kAttentionKeyBlock) {
    const size_t n_block = n_keys - key < kAttentionKeyBlock ? n_keys - key : kAttentionKeyBlock;
    const size_t first_row = visible.first_row_of_key(key);
    const size_t end_row = visible.end_row_of_key(key + n_block - 1, n_padded);
    for (size_t col = 0; col < tile.o_stride; col += kGemmF32Columns) {
      const float* v =
          piece.v + col / kGemmF32Columns * piece.v_panel_stride + key / kPerWord * kGemmF32Columns;
      const auto multiply = [&](size_t row, size_t n_rows, size_t depth) {
        multiply_panel<Products, true>(tile.o + row * tile.o_stride + col, tile.o_stride,
                                       tile.weights + row * tile.weight_stride + key / kPerWord,
                                       tile.weight_stride, v, n_rows, depth);
      };
      size_t row = first_row;
      while (row < end_row && visible.keys_of_row_block(row) < key + n_block) {  // on the diagonal
        multiply(row, simd::kGemmF32Rows, visible.keys_of_row_block(row) - key);
        row += simd::kGemmF32Rows;
      }
      if (row < end_row) multiply(row, end_row - row, n_block);
    }
  }
}

// Fills tile.weights, o, m and l. A row that sees no key gets m = -inf, l = 0, o = 0.
template <typename Products>
void attention_tile(const AttentionTile& tile, const AttentionPiece& piece) {
  const VisibleKeys visible(tile, piece);
  const size_t n_padded = (tile.n_rows + simd::kGemmF32Rows - 1) / simd::kGemmF32Rows * simd::kGemmF32Rows;
  attention_scores<Products>(tile, piece, visible, n_padded);
  attention_softmax<Products>(tile, piece, visible);
  attention_values<Products>(tile, piece, visible, n_padded);
}

// sums[key] += sum over rows of row_weights[row] * weights[row][key], for the keys that the tile sees,
// rounded up to whole panels. The piece has no window.
template <typename Products>
void column_sums(float* sums, const AttentionTile& tile, const AttentionPiece& piece,
                 const float* row_weights) {
  using namespace simd;
  constexpr size_t kVectors = kGemmF32Vectors, kChains = 4;
  const VisibleKeys visible(tile, piece);
  const size_t n_keys = visible.keys_of_last_row();
  for (size_t key = 0; key < n_keys; key += kGemmF32Columns) {
    F32 sum[kChains][kVectors];
    unroll<kChains>([&](auto c) { unroll<kVectors>([&](auto v) { sum[c][v] = zero(); }); });
    const auto add_row = [&](size_t row, auto c) {
      const F32 factor = set1(row_weights[row]);
      const float* weights = tile.weights + row * tile.weight_stride + key / Products::kValuesPerWord;
      unroll<kVectors>([&](auto v) {
        sum[c][v] = mul_add(factor, Products::load_values(weights, v * kLanes), sum[c][v]);
      });
    };
    size_t row = visible.first_row_of_key(key);
    for (; row + kChains <= tile.n_rows; row += kChains)
      unroll<kChains>([&](auto c) { add_row(row + c, c); });
    for (; row < tile.n_rows; ++row) add_row(row, Index<0>{});
    unroll<kVectors>([&](auto v) {
      const F32 total = add(add(sum[0][v], sum[1][v]), add(sum[2][v], sum[3][v]));
      store(sums + key + v * kLanes, add(load(sums + key + v * kLanes), total));
    });
  }
}

// out[row] = 2^(m_part[row] - m[row]) / l[row]: what turns a part's unnormalised weights into those of (m,
// l).
inline void softmax_factors_f32(float* out, const float* m_part, const float* m, const float* l,
                                size_t n_rows) {
  using namespace simd;
  for_each_vector(n_rows, [&](size_t i, auto count) {
    store_n(out + i,
            div(exp2_nonpositive(sub(load_n(m_part + i, count), load_n(m + i, count))), load_n(l + i, count)),
            count);
  });
}

// Merges the tile's latest piece into the state of its rows (online softmax: Milakov and Gimelshein 2018);
// is_first: the state is empty. The first piece of every row must hold a key that it sees. scratch:
// [2][n_rows].
inline void merge_softmax_f32(const SoftmaxRows& state, const AttentionTile& tile, float* scratch,
                              bool is_first) {
  using namespace simd;
  float *old_factors = scratch, *new_factors = scratch + tile.n_rows;
  for_each_vector(tile.n_rows, [&](size_t i, auto count) {
    const F32 new_m = load_n(tile.m + i, count), new_l = load_n(tile.l + i, count);
    if (is_first) {
      store_n(state.m + i, new_m, count);
      store_n(state.l + i, new_l, count);
      store_n(new_factors + i, div(set1(1.0f), new_l), count);
      return;
    }
    const F32 old_m = load_n(state.m + i, count), m = max(old_m, new_m);
    const F32 old_sum = mul(exp2_nonpositive(sub(old_m, m)), load_n(state.l + i, count)),
              new_scale = exp2_nonpositive(sub(new_m, m));
    const F32 l = mul_add(new_scale, new_l, old_sum);
    store_n(state.m + i, m, count);
    store_n(state.l + i, l, count);
    store_n(old_factors + i, div(old_sum, l), count);
    store_n(new_factors + i, div(new_scale, l), count);
  });
  float* query = state.o;
  for (size_t row = 0; row < tile.n_rows; query += state.o_stride) {
    for (size_t head = 0; head < tile.group_size; ++head, ++row) {
      float* out = query + head * tile.value_dim;
      if (is_first) {
        scale_f32(out, tile.o + row * tile.o_stride, new_factors[row], tile.value_dim);
      } else {
        blend_row(out, tile.o + row * tile.o_stride, old_factors[row], new_factors[row], tile.value_dim);
      }
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
