// Logits of many query rows: keys become columns, whose products need no sums of lanes. They add up in the
// order of dot_rows (attention_rows-inl.h), so that no bit depends on the number of rows.

namespace edgeh2o::EH2O_ISA {

// Rows that pay for making columns; latent keys, which have the most dimensions, make 36 KB.
inline constexpr size_t kLeastColumnRows = 6, kColumnRows = 6, kMaxColumnDim = 576;
template <CacheType kType>
inline constexpr bool kHasKeyColumns = kType == CacheType::kF16&& simd::kHasHalfColumns;

inline bool take_columns(size_t n_rows, size_t head_dim) {
  return n_rows >= kLeastColumnRows && head_dim <= kMaxColumnDim && head_dim % simd::kLanes == 0;
}

// Calls f(first, Index<n>) for blocks of at most kMost rows, of about the same size.
template <size_t kMost, typename F>
EH2O_INLINE void for_each_row_block(size_t n_rows, const F& f) {
  size_t n_blocks = (n_rows + kMost - 1) / kMost;
  for (size_t row = 0; row < n_rows; --n_blocks) {
    const size_t n = (n_rows - row + n_blocks - 1) / n_blocks;
    simd::with_constant<kMost>(n, [&](auto rows) { f(row, rows); });
    row += n;
  }
}

// columns [head_dim][Columns::kRows]: the keys from `first` on. Fetches `later` keys, and values, which are
// read next.
template <typename Columns>
void load_key_columns(uint16_t* columns, const RowsInPlace& k, size_t first, size_t head_dim,
                      const RowsAhead& later) {
  constexpr size_t kKeys = Columns::kRows, kKeysAhead = kKeys;
  static_assert(kKeys % kNeighbourRows == 0);
  const uint8_t* neighbours[kKeys / kNeighbourRows];
  simd::unroll<kKeys / kNeighbourRows>([&](auto i) { neighbours[i] = k.at(first + i * kNeighbourRows); });
  for (size_t dim = 0; dim < head_dim; dim += Columns::kDepth) {
    // All at once they would be in the way of the loads.
    const size_t fetched = dim / Columns::kDepth * kNeighbourRows;
    if (fetched < kKeys) {
      later.fetch(first + kKeysAhead + fetched, kNeighbourRows);
    }
    Columns::load(columns + dim * kKeys, [&](size_t i) EH2O_INLINE_LAMBDA {
      const uint8_t* row = neighbours[i / kNeighbourRows] + i % kNeighbourRows * k.row_bytes;
      return row + dim * sizeof(uint16_t);
    });
  }
}

// out: what add_lane(sums, Index<lane>) gives for every lane, added up in the order of store_sums.
template <size_t kSums, size_t kDepth, size_t kLane, typename AddLane>
EH2O_INLINE void sum_lanes(simd::F32 (&out)[kSums], const AddLane& add_lane) {
  using namespace simd;
  if constexpr ((size_t{1} << kDepth) == kLanes) {
    add_lane(out, Index<kLane>{});
  } else {
    F32 other[kSums];
    sum_lanes<kSums, kDepth + 1, kLane>(out, add_lane);
    sum_lanes<kSums, kDepth + 1, kLane + kSumSteps[kDepth]>(other, add_lane);
    unroll<kSums>([&](auto i) { out[i] = add(out[i], other[i]); });
  }
}

// Flat: gcc leaves a lambda of 6 rows out of line, with its sums in memory.
template <typename Columns, size_t kRows>
__attribute__((flatten)) void multiply_columns(float* out, size_t out_stride, const float* q,
                                               const uint16_t* columns, size_t head_dim,
                                               const RowsAhead& values, size_t first) {
  using namespace simd;
  constexpr size_t kKeys = Columns::kRows, kVectors = kKeys / kLanes;
  F32 sums[kRows * kVectors];
  sum_lanes<kRows * kVectors, 0, 0>(sums, [&](F32(&sum)[kRows * kVectors], auto lane) EH2O_INLINE_LAMBDA {
    unroll<kRows * kVectors>([&](auto i) { sum[i] = zero(); });
    values.fetch(first + lane * (kKeys / kLanes), kKeys / kLanes);
    for (size_t dim = lane; dim < head_dim; dim += kLanes) {
      F32 keys[kVectors];
      unroll<kVectors>([&](auto v) { keys[v] = load_f16(columns + dim * kKeys + v * kLanes); });
      unroll<kRows>([&](auto r) {
        const F32 query = keep(set1(q[r * head_dim + dim]));
        unroll<kVectors>([&](auto v) {
          F32& to = sum[r * kVectors + v];
          to = mul_add(query, keys[v], to);
        });
      });
    }
  });
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto v) { store(out + r * out_stride + v * kLanes, sums[r * kVectors + v]); });
  });
}

// Logits of all rows of a tile, of the first keys that fill columns; returns how many those are.
template <typename Columns>
size_t score_columns(const AttentionTile& tile, const RowsInPlace& k, size_t n_keys,
                     const RowsAhead& values) {
  alignas(64) uint16_t columns[kMaxColumnDim * Columns::kRows];
  size_t key = 0;
  for (; key + Columns::kRows <= n_keys; key += Columns::kRows) {
    load_key_columns<Columns>(columns, k, key, tile.key_dim, {k, n_keys});
    for_each_row_block<kColumnRows>(tile.n_rows, [&](size_t row, auto n) {
      multiply_columns<Columns, n>(tile.weights + row * tile.weight_stride + key, tile.weight_stride,
                                   tile.q + row * tile.key_dim, columns, tile.key_dim,
                                   row == 0 ? values : RowsAhead{}, key);
    });
  }
  return key;
}

}  // namespace edgeh2o::EH2O_ISA
