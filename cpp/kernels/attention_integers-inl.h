// Attention of a tile of query rows to one piece of keys in integers of 8 or 16 bits: see attention_tile.h
// for the layout.
//
// A weight is rounded to kLevels levels of the largest of its row and block, so that what is far below a
// row's maximum is not lost block by block.
//
// In 8 bits a logit is q k = q mean + q (k - mean): softmax needs the difference of keys only, and less their
// mean they round finer (as in SageAttention, Zhang et al. 2024). Queries and these differences are rounded
// after a Hadamard matrix (integer_panels-inl.h). In 16 bits queries and keys are rounded as they are.
//
// Bounds, besides the rounding of float sums. With the units u_q of a row's queries, u_k of a key and u_v of
// a value (a largest absolute value / the largest integer), and q' and k' what of queries and keys is
// rounded:
// - logits are off by at most e = u_q / 2 sum|k'| + u_k / 2 sum|q'|, with k' as it is rounded;
// - weights, of the largest in their row and block, by at most w (2^(e + e') - 1) + 1/2 level + w 8e-5, where
//   e' is the error of the logit of that largest one;
// - outputs before they are divided by the sum of weights: by the sum of these errors times |v|, and of
//   weights times u_v / 2.
// The sum of weights is that of the rounded ones, so that an output stays a mean of values.

namespace edgeh2o::EH2O_ISA {

// Blocks of values that all rows of a tile pass while they are in the level-1 cache.
inline constexpr size_t kLevelBlocksAtOnce = 4;

// Of queries and keys, or of weights and values.
template <typename Integers, bool kAreScores, size_t kWord>
EH2O_INLINE typename Integers::Acc add_product(typename Integers::Acc sum, typename Integers::X words,
                                               simd::I8 columns) {
  if constexpr (kAreScores) {
    return Integers::template add_scores<kWord>(sum, words, columns);
  } else {
    return Integers::template add_values<kWord>(sum, words, columns);
  }
}

// sum += the products of kRows rows of n_words words with the columns of a panel.
template <typename Integers, bool kAreScores, size_t kRows, size_t kVectors>
EH2O_INLINE void add_integer_products(typename Integers::Acc (&sum)[kRows][kVectors], const uint8_t* rows,
                                      size_t row_bytes, const uint8_t* panel, size_t n_words) {
  using namespace simd;
  constexpr size_t kVectorBytes = kLanes * 4;
  size_t word = 0;
  if constexpr (Integers::kWords > 1) {
    for (; word + Integers::kWords <= n_words; word += Integers::kWords, rows += 4 * Integers::kWords) {
      typename Integers::X x[kRows];
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA { x[r] = Integers::load_x(rows + r * row_bytes); });
      unroll<Integers::kWords>([&](auto i) EH2O_INLINE_LAMBDA {
        I8 columns[kVectors];
        unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { columns[v] = load_i8(panel + v * kVectorBytes); });
        unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
          unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
            sum[r][v] = add_product<Integers, kAreScores, i>(sum[r][v], x[r], columns[v]);
          });
        });
        panel += kVectors * kVectorBytes;
      });
    }
  }
  for (; word < n_words; ++word, rows += 4, panel += kVectors * kVectorBytes) {
    I8 columns[kVectors];
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { columns[v] = load_i8(panel + v * kVectorBytes); });
    unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
      const typename Integers::X words = Integers::load_word(rows + r * row_bytes);
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
        sum[r][v] = add_product<Integers, kAreScores, 0>(sum[r][v], words, columns[v]);
      });
    });
  }
}

template <typename Integers>
EH2O_INLINE typename Integers::Acc load_start(const float* word) {
  int32_t bits;
  __builtin_memcpy(&bits, word, sizeof(bits));
  return Integers::start(bits);
}

// Of a row: where its blocks of levels lie, and what stands behind them.
template <typename Integers>
struct LevelRows {
  static constexpr size_t kBlockWords = kLevelKeys / kIntegerLayout<Integers>.per_word;

  LevelRows(const AttentionTile& tile, const AttentionPiece& piece)
      : n_blocks((piece.n_keys + kLevelKeys - 1) / kLevelKeys), tile(tile) {}
  uint8_t* levels(size_t row, size_t block) const {
    return reinterpret_cast<uint8_t*>(tile.weights + row * tile.weight_stride + block * kBlockWords);
  }
  float* units(size_t row) const { return tile.weights + row * tile.weight_stride + n_blocks * kBlockWords; }
  float* starts(size_t row) const { return units(row) + n_blocks; }

  size_t n_blocks;
  const AttentionTile& tile;
};

// units(row)[block] = q mean for n <= kVectors * kLanes rows, whose queries are the lanes of q, and kBlocks
// blocks, whose means are mean_stride floats apart. q: [kVectors][dim][kLanes].
template <size_t kVectors, size_t kBlocks>
EH2O_INLINE void multiply_means(float* out, size_t out_stride, const float* q, const float* mean,
                                size_t mean_stride, size_t n, size_t dim) {
  using namespace simd;
  F32 sum[kBlocks][kVectors];
  unroll<kBlocks>([&](auto b) EH2O_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { sum[b][v] = zero(); });
  });
  for (size_t i = 0; i < dim; ++i) {
    F32 x[kVectors];
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { x[v] = load(q + (v * dim + i) * kLanes); });
    unroll<kBlocks>([&](auto b) EH2O_INLINE_LAMBDA {
      const F32 m = set1(mean[b * mean_stride + i]);
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { sum[b][v] = mul_add(x[v], m, sum[b][v]); });
    });
  }
  alignas(64) float products[kBlocks][kVectors * kLanes];
  unroll<kBlocks>([&](auto b) EH2O_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { store(products[b] + v * kLanes, sum[b][v]); });
  });
  for (size_t row = 0; row < n; ++row) {
    for (size_t b = 0; b < kBlocks; ++b) out[row * out_stride + b] = products[b][row];
  }
}

// Of n rows, kVectors vectors, from `row` on, and blocks [first_block, n_blocks).
template <typename Bytes, size_t kVectors>
__attribute__((noinline)) void multiply_row_means(const AttentionTile& tile, const AttentionPiece& piece,
                                                  size_t row, size_t n, size_t first_block, size_t n_blocks) {
  using simd::kLanes;
  constexpr IntegerLayout kLayout = kIntegerLayout<Bytes>;
  const size_t dim = tile.key_dim, q_stride = kLayout.query_words(dim);
  const size_t mean_stride = kLevelKeys * kLayout.key_words(dim);
  const float *floats = tile.q + dim / 4 + 2 + row * q_stride, *means = piece.k + kLevelKeys * (dim / 4 + 1);
  alignas(64) float q[kMaxByteDim * kVectors * kLanes];
  for (size_t v = 0; v < kVectors; ++v) {
    load_lanes(q + v * dim * kLanes, dim, [&](size_t i, size_t d, auto count) EH2O_INLINE_LAMBDA {
      const size_t r = v * kLanes + i;
      return r < n ? load_n(floats + r * q_stride + d, count) : simd::zero();
    });
  }
  float* out = LevelRows<Bytes>(tile, piece).units(row);
  size_t block = first_block;
  for (; block + 4 <= n_blocks; block += 4) {
    multiply_means<kVectors, 4>(out + block, tile.weight_stride, q, means + block * mean_stride, mean_stride,
                                n, dim);
  }
  for (; block < n_blocks; ++block) {
    multiply_means<kVectors, 1>(out + block, tile.weight_stride, q, means + block * mean_stride, mean_stride,
                                n, dim);
  }
}

// What a row block (kGemmF32Rows rows) sees of the blocks of a piece.
struct LevelBlocks {
  LevelBlocks(const VisibleKeys& visible, size_t row)
      : begin(visible.hidden_from_row(row) / kLevelKeys),
        end((visible.keys_of_row_block(row) + kLevelKeys - 1) / kLevelKeys) {}
  size_t begin, end;
};

// Whether logits become others before their softmax.
EH2O_INLINE bool changes_logits(const AttentionTile& tile, const AttentionPiece& piece) {
  return tile.soft_cap > 0.0f || piece.biases != nullptr || tile.slopes != nullptr;
}

// Soft cap, biases and slopes of a row block's logits, units[row] * x[row] + offsets[row], for a block of
// keys: of a row that has such, x becomes the logit, with a unit of 1 and no offset. Keys that a row does not
// see get -inf.
template <size_t kRows>
__attribute__((noinline)) void mask_integer_logits(float (&x)[kRows][kLevelKeys], float* units,
                                                   float* offsets, const AttentionTile& tile,
                                                   const AttentionPiece& piece, const VisibleKeys& visible,
                                                   size_t first_row, size_t first_key) {
  const uint32_t group_size = static_cast<uint32_t>(tile.group_size);
  size_t query = static_cast<uint32_t>(first_row) / group_size, head = first_row - query * group_size;
  const auto in_block = [&](size_t key) {
    return key <= first_key ? 0 : key - first_key < kLevelKeys ? key - first_key : kLevelKeys;
  };
  for (size_t r = 0; r < kRows; ++r) {
    const bool exists = first_row + r < tile.n_rows;
    const size_t begin = in_block(visible.hidden_from_query(query));
    const size_t end = exists ? in_block(visible.keys_of_query(query)) : 0;
    if (!exists) units[r] = 1.0f;
    if (begin < end && changes_logits(tile, piece)) {
      for (size_t i = begin; i < end; ++i) x[r][i] = units[r] * x[r][i] + offsets[r];
      if (tile.soft_cap > 0.0f) soft_cap_f32(x[r] + begin, tile.soft_cap, end - begin);
      if (piece.biases) blend_row(x[r] + begin, piece.biases + first_key + begin, 1.0f, kLog2E, end - begin);
      if (tile.slopes) {
        const ptrdiff_t distance = piece.distance + static_cast<ptrdiff_t>(query);
        subtract_distances(x[r] + begin, tile.slopes[head],
                           distance - static_cast<ptrdiff_t>(first_key + begin), end - begin);
      }
      units[r] = 1.0f;
      offsets[r] = 0.0f * offsets[r];  // NaN stays
    }
    for (size_t i = 0; i < begin; ++i) x[r][i] = -__builtin_inff();
    for (size_t i = end; i < kLevelKeys; ++i) x[r][i] = -__builtin_inff();
    if (++head == group_size) ++query, head = 0;
  }
}

// Levels, maxima (as units) and sums of levels (as starts) of a row block and a block of keys; units have
// what multiply_row_means leaves there.
template <typename Integers>
__attribute__((noinline)) void score_level_block(const AttentionTile& tile, const AttentionPiece& piece,
                                                 const VisibleKeys& visible, size_t first_row, size_t block) {
  using namespace simd;
  constexpr size_t kRows = kGemmF32Rows, kVectors = kGemmF32Vectors;
  constexpr IntegerLayout kLayout = kIntegerLayout<Integers>;
  const size_t dim = tile.key_dim, n_words = dim / kLayout.per_word, q_stride = kLayout.query_words(dim);
  const size_t first_key = block * kLevelKeys;
  const float* q = tile.q + first_row * q_stride;
  const float* k = piece.k + first_key * kLayout.key_words(dim);
  const float* units = k + kLevelKeys * n_words;
  const LevelRows<Integers> weights(tile, piece);
  float *out = weights.units(first_row) + block, *starts = weights.starts(first_row) + block;
  alignas(64) float x[kRows][kLevelKeys];  // logits are units * x + offsets
  float row_units[kRows], offsets[kRows];
  for (size_t r = 0; r < kRows; ++r) {
    row_units[r] = q[r * q_stride + n_words];
    // Keys of 16 bits have no mean. All units of a block are NaN if one of its keys is not finite.
    offsets[r] = kAreBytes<Integers> ? out[r * tile.weight_stride] : 0.0f * (row_units[r] + units[0]);
  }
  const size_t n_seen = visible.keys_of_row_block(first_row) - first_key;  // the others are masked
  for (size_t col = 0; col < kLevelKeys && col < n_seen; col += kGemmF32Columns) {
    typename Integers::Acc sum[kRows][kVectors];
    unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
        sum[r][v] = load_start<Integers>(q + r * q_stride + n_words + 1);
      });
    });
    add_integer_products<Integers, true>(sum, reinterpret_cast<const uint8_t*>(q), q_stride * sizeof(float),
                                         reinterpret_cast<const uint8_t*>(k + col * n_words), n_words);
    unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
      const F32 unit = load(units + col + v * kLanes);
      unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
        store(x[r] + col + v * kLanes, mul(Integers::to_f32(sum[r][v]), unit));
      });
    });
  }
  if (changes_logits(tile, piece) || !visible.see_all(first_row, kRows, first_key, kLevelKeys)) {
    mask_integer_logits<kRows>(x, row_units, offsets, tile, piece, visible, first_row, first_key);
  }
  float maxima[kRows], sums[kRows];
  weigh_block<Integers, kRows>(weights.levels(first_row, block), tile.weight_stride * sizeof(float), maxima,
                               sums, x, row_units);
  for (size_t r = 0; r < kRows; ++r) {
    // The offset is NaN where queries or keys are not finite, which a maximum may lose.
    out[r * tile.weight_stride] =
        maxima[r] + (__builtin_isfinite(offsets[r]) ? offsets[r] : __builtin_nanf(""));
    starts[r * tile.weight_stride] = sums[r];
  }
}

// From maxima and sums of the blocks: units of levels, m and l.
template <typename Integers>
void finish_levels(const AttentionTile& tile, const AttentionPiece& piece, const VisibleKeys& visible,
                   size_t n_padded) {
  using namespace simd;
  const LevelRows<Integers> weights(tile, piece);
  size_t begin = 0, n = 0;
  for (size_t row = 0; row < n_padded; ++row) {
    if (row % kGemmF32Rows == 0) {
      const LevelBlocks range(visible, row);
      begin = range.begin;
      n = range.begin < range.end ? range.end - range.begin : 0;
    }
    float *units = weights.units(row) + begin, *sums = weights.starts(row) + begin;
    F32 top = set1(-__builtin_inff()), total = zero();
    for_each_vector(n, [&](size_t i, auto count) EH2O_INLINE_LAMBDA {
      const F32 maximum = load_n(units + i, count);
      top = max(top, std::is_same_v<decltype(count), size_t> ? keep_first(maximum, count, top) : maximum);
    });
    const float m = reduce_max(top);
    const bool sees_nothing = m == -__builtin_inff();
    for_each_vector(n, [&](size_t i, auto count) EH2O_INLINE_LAMBDA {
      const F32 power = exp2_nonpositive(sub(load_n(units + i, count), set1(sees_nothing ? 0.0f : m)));
      F32 unit = mul(power, set1(1.0f / kLevels<Integers>));
      if (std::is_same_v<decltype(count), size_t>) unit = keep_first(unit, count, zero());
      store_n(units + i, unit, count);
      total = mul_add(unit, load_n(sums + i, count), total);
    });
    if (row < tile.n_rows) {
      tile.m[row] = m;
      tile.l[row] = reduce_add(total);
    }
    if constexpr (Integers::kValueOffset != 0) {
      for (size_t i = 0; i < n; ++i) {
        const int32_t start = -Integers::kValueOffset * static_cast<int32_t>(sums[i]);
        __builtin_memcpy(sums + i, &start, sizeof(start));
      }
    } else {
      __builtin_memset(sums, 0, n * sizeof(float));
    }
  }
}

// o += the values of the first n_keys keys of a block, or some more, columns of one panel, for a row block.
template <typename Integers>
__attribute__((noinline)) void add_integer_values(float* o, size_t o_stride,
                                                  const LevelRows<Integers>& weights, size_t row,
                                                  size_t block, const float* panel, const float* value_units,
                                                  size_t n_keys) {
  using namespace simd;
  constexpr size_t kRows = kGemmF32Rows, kVectors = kGemmF32Vectors;
  constexpr size_t kPerWord = kIntegerLayout<Integers>.per_word, kStepKeys = kPerWord * Integers::kWords;
  const size_t n_words =
      n_keys < kLevelKeys ? (n_keys + kStepKeys - 1) / kStepKeys * Integers::kWords : kLevelKeys / kPerWord;
  const size_t stride = weights.tile.weight_stride;
  const float *units = weights.units(row) + block, *starts = weights.starts(row) + block;
  typename Integers::Acc sum[kRows][kVectors];
  unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
    unroll<kVectors>([&](auto v)
                         EH2O_INLINE_LAMBDA { sum[r][v] = load_start<Integers>(starts + r * stride); });
  });
  add_integer_products<Integers, false>(sum, weights.levels(row, block), stride * sizeof(float),
                                        reinterpret_cast<const uint8_t*>(panel), n_words);
  unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
    const F32 value_unit = load(value_units + v * kLanes);
    unroll<kRows>([&](auto r) EH2O_INLINE_LAMBDA {
      float* out = o + r * o_stride + v * kLanes;
      const F32 part = mul(Integers::to_f32(sum[r][v]), value_unit);
      store(out, mul_add(part, set1(units[r * stride]), load(out)));
    });
  });
}

// As attention_tile: fills tile.weights, o, m and l.
template <typename Integers>
void attention_integer_tile(const AttentionTile& tile, const AttentionPiece& piece) {
  constexpr IntegerLayout kLayout = kIntegerLayout<Integers>;
  constexpr size_t kRows = simd::kGemmF32Rows, kBlockWords = kLevelKeys / kLayout.per_word;
  const VisibleKeys visible(tile, piece);
  const LevelRows<Integers> weights(tile, piece);
  const size_t n_padded = (tile.n_rows + kRows - 1) / kRows * kRows;
  const size_t n_blocks = (visible.keys_of_last_row() + kLevelKeys - 1) / kLevelKeys;
  const size_t first_block = visible.hidden_from_query(0) / kLevelKeys;
  if constexpr (kAreBytes<Integers>) {
    for (size_t row = 0; row < n_padded; row += 2 * simd::kLanes) {
      const size_t n = n_padded - row;
      if (n > simd::kLanes) {
        multiply_row_means<Integers, 2>(tile, piece, row, n < 2 * simd::kLanes ? n : 2 * simd::kLanes,
                                        first_block, n_blocks);
      } else {
        multiply_row_means<Integers, 1>(tile, piece, row, n, first_block, n_blocks);
      }
    }
  }
  for (size_t block = first_block; block < n_blocks; ++block) {
    const size_t key = block * kLevelKeys, end_row = visible.end_row_of_key(key + kLevelKeys - 1, n_padded);
    for (size_t row = visible.first_row_of_key(key); row < end_row; row += kRows) {
      score_level_block<Integers>(tile, piece, visible, row, block);
    }
  }
  finish_levels<Integers>(tile, piece, visible, n_padded);
  __builtin_memset(tile.o, 0, n_padded * tile.o_stride * sizeof(float));
  const size_t block_words = kLevelKeys * kLayout.value_words(tile.o_stride);
  for (size_t first = first_block; first < n_blocks; first += kLevelBlocksAtOnce) {
    for (size_t col = 0; col < tile.o_stride; col += kGemmF32Columns) {
      for (size_t row = 0; row < n_padded; row += kRows) {
        const LevelBlocks range(visible, row);
        const size_t n_seen = visible.keys_of_row_block(row);
        const size_t end = range.end < first + kLevelBlocksAtOnce ? range.end : first + kLevelBlocksAtOnce;
        for (size_t block = range.begin > first ? range.begin : first; block < end; ++block) {
          const float* v = piece.v + block * block_words;
          add_integer_values<Integers>(tile.o + row * tile.o_stride + col, tile.o_stride, weights, row, block,
                                       v + col * kBlockWords, v + tile.o_stride * kBlockWords + col,
                                       n_seen - block * kLevelKeys);
        }
      }
    }
  }
}

// As column_sums, from the rounded weights, rounded up to whole blocks.
template <typename Integers>
void integer_column_sums(float* sums, const AttentionTile& tile, const AttentionPiece& piece,
                         const float* row_weights) {
  using namespace simd;
  constexpr size_t kVectors = 4, kColumns = kVectors * kLanes, kBytes = 4 / kIntegerLayout<Integers>.per_word;
  const VisibleKeys visible(tile, piece);
  const LevelRows<Integers> weights(tile, piece);
  const size_t n_keys = visible.keys_of_last_row();
  for (size_t block = 0; block * kLevelKeys < n_keys; ++block) {
    for (size_t col = 0; col < kLevelKeys; col += kColumns) {
      F32 sum[2][kVectors];
      unroll<2>([&](auto c) EH2O_INLINE_LAMBDA {
        unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA { sum[c][v] = zero(); });
      });
      const auto add_row = [&](size_t row, auto c) EH2O_INLINE_LAMBDA {
        const F32 factor = set1(row_weights[row] * weights.units(row)[block]);
        const uint8_t* levels = weights.levels(row, block) + col * kBytes;
        unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
          sum[c][v] = mul_add(factor, load_levels<Integers>(levels + v * kLanes * kBytes), sum[c][v]);
        });
      };
      size_t row = visible.first_row_of_key(block * kLevelKeys);
      for (; row + 2 <= tile.n_rows; row += 2)
        unroll<2>([&](auto c) EH2O_INLINE_LAMBDA { add_row(row + c, c); });
      if (row < tile.n_rows) add_row(row, Index<0>{});
      unroll<kVectors>([&](auto v) EH2O_INLINE_LAMBDA {
        float* out = sums + block * kLevelKeys + col + v * kLanes;
        store(out, add(load(out), add(sum[0][v], sum[1][v])));
      });
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
