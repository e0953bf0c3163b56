// Logits of many query rows: kLanes keys at a time become columns, whose products need no sums of lanes. They
// add up in the order of dot_rows (attention_rows-inl.h), so that no bit depends on the number of rows.

namespace edgeh2o::EH2O_ISA {

// Rows that pay for making columns; latent keys, which have the most dimensions, make 36 KB. With fewer lanes
// sums of lanes cost no more: 8 lanes gained nothing.
inline constexpr size_t kLeastColumnRows = 6, kColumnRows = 8, kMaxColumnDim = 576;
template <CacheType kType>
inline constexpr bool kHasKeyColumns = simd::kLanes >= 16 && kType != CacheType::kQ8_0;

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

// columns [head_dim][kLanes]: the keys from `first` on. Fetches `later` keys, and values, which are read
// next.
template <CacheType kType>
void load_key_columns(float* columns, const RowsInPlace& k, size_t first, size_t head_dim,
                      const RowsAhead& later, const RowsAhead& values) {
  using namespace simd;
  constexpr size_t kColumnsAhead = 2 * kLanes;
  static_assert(kLanes % kNeighbourRows == 0);
  const uint8_t* neighbours[kLanes / kNeighbourRows];
  unroll<kLanes / kNeighbourRows>([&](auto i) { neighbours[i] = k.at(first + i * kNeighbourRows); });
  for (size_t dim = 0; dim < head_dim; dim += kLanes) {
    // All at once they would be in the way of the loads.
    const size_t fetched = dim / kLanes * kNeighbourRows;
    if (fetched < kLanes) {
      values.fetch(first + fetched, kNeighbourRows);
      later.fetch(first + kColumnsAhead + fetched, kNeighbourRows);
    }
    F32 block[kLanes];
    unroll<kLanes>([&](auto i) {
      block[i] = load_cached<kType>(neighbours[i / kNeighbourRows] + i % kNeighbourRows * k.row_bytes, dim,
                                    Index<kLanes>{});
    });
    transpose(block);
    unroll<kLanes>([&](auto i) { store(columns + (dim + i) * kLanes, block[i]); });
  }
}

// out: what add_lane(sums, Index<lane>) gives for every lane, added up in the order of store_sums.
template <size_t kRows, size_t kDepth, size_t kLane, typename AddLane>
EH2O_INLINE void sum_lanes(simd::F32 (&out)[kRows], const AddLane& add_lane) {
  using namespace simd;
  if constexpr ((size_t{1} << kDepth) == kLanes) {
    add_lane(out, Index<kLane>{});
  } else {
    F32 other[kRows];
    sum_lanes<kRows, kDepth + 1, kLane>(out, add_lane);
    sum_lanes<kRows, kDepth + 1, kLane + kSumSteps[kDepth]>(other, add_lane);
    unroll<kRows>([&](auto r) { out[r] = add(out[r], other[r]); });
  }
}

template <size_t kRows>
void multiply_columns(float* out, size_t out_stride, const float* q, const float* columns, size_t head_dim) {
  using namespace simd;
  F32 sums[kRows];
  sum_lanes<kRows, 0, 0>(sums, [&](F32(&sum)[kRows], auto lane) EH2O_INLINE_LAMBDA {
    unroll<kRows>([&](auto r) { sum[r] = zero(); });
    for (size_t dim = lane; dim < head_dim; dim += kLanes) {
      const F32 keys = load(columns + dim * kLanes);
      unroll<kRows>([&](auto r) { sum[r] = mul_add(set1(q[r * head_dim + dim]), keys, sum[r]); });
    }
  });
  unroll<kRows>([&](auto r) { store(out + r * out_stride, sums[r]); });
}

// Logits of all rows of a tile, of the first keys that fill columns; returns how many those are.
template <CacheType kType>
size_t score_columns(const AttentionTile& tile, const RowsInPlace& k, size_t n_keys,
                     const RowsAhead& values) {
  using namespace simd;
  alignas(64) float columns[kMaxColumnDim * kLanes];
  size_t key = 0;
  for (; key + kLanes <= n_keys; key += kLanes) {
    load_key_columns<kType>(columns, k, key, tile.key_dim, {k, n_keys}, values);
    for_each_row_block<kColumnRows>(tile.n_rows, [&](size_t row, auto n) {
      multiply_columns<n>(tile.weights + row * tile.weight_stride + key, tile.weight_stride,
                          tile.q + row * tile.key_dim, columns, tile.key_dim);
    });
  }
  return key;
}

}  // namespace edgeh2o::EH2O_ISA
