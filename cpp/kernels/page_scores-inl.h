// Logits of query rows against blocks of values that lie channel by channel: kKvBlock pages (or keys) of one
// channel are one block of q8_0. See sparse/page_bounds.h.

namespace edgeh2o::EH2O_ISA {

// One block, kRows query rows: out [kRows][out_stride]. Fetches what lies `ahead` bytes further: a block is
// longer than the 4 KiB at whose end processors stop to fetch by themselves.
template <size_t kRows>
void score_block(float* out, size_t out_stride, const float* q, size_t q_stride, const int32_t* channels,
                 size_t n_channels, const uint8_t* block, size_t ahead) {
  using namespace simd;
  constexpr size_t kVectors = kKvBlock / kLanes, kTogether = kVectors < 2 ? kVectors : 2;
  for (size_t first = 0; first < kKvBlock; first += kTogether * kLanes) {
    F32 sum[kRows][kTogether];
    unroll<kRows>([&](auto r) { unroll<kTogether>([&](auto i) { sum[r][i] = zero(); }); });
    for (size_t i = 0; i < n_channels; ++i) {
      const size_t channel = channels ? static_cast<size_t>(channels[i]) : i;
      const uint8_t* row = block + channel * kKvBlockBytes;
      if (first == 0) __builtin_prefetch(row + ahead);
      F32 values[kTogether];
      unroll<kTogether>([&](auto j) {
        values[j] = load_cached<CacheType::kQ8_0>(row, first + j * kLanes, Index<kLanes>{});
      });
      unroll<kRows>([&](auto r) {
        const F32 query = set1(q[r * q_stride + channel]);
        unroll<kTogether>([&](auto j) { sum[r][j] = mul_add(query, values[j], sum[r][j]); });
      });
    }
    unroll<kRows>([&](auto r) {
      unroll<kTogether>([&](auto j) { store(out + r * out_stride + first + j * kLanes, sum[r][j]); });
    });
  }
}

// out [n_rows][out_stride]: of every query row q [n_channels_of_q], its products with all pages of n_blocks
// blocks [width][kKvBlockBytes]. channels: those that count, ascending, or null: the first n_channels.
inline void score_blocks_f32(float* out, size_t out_stride, const float* q, size_t q_stride, size_t n_rows,
                             const int32_t* channels, size_t n_channels, const void* blocks, size_t n_blocks,
                             size_t width) {
  constexpr size_t kMostRows = 4;
  const size_t block_bytes = width * kKvBlockBytes;
  for (size_t block = 0; block < n_blocks; ++block) {
    const uint8_t* values = static_cast<const uint8_t*>(blocks) + block * block_bytes;
    for (size_t row = 0; row < n_rows; row += kMostRows) {
      simd::with_constant<kMostRows>(n_rows - row < kMostRows ? n_rows - row : kMostRows, [&](auto rows) {
        score_block<rows>(out + row * out_stride + block * kKvBlock, out_stride, q + row * q_stride, q_stride,
                          channels, n_channels, values, block_bytes);
      });
    }
  }
}

}  // namespace edgeh2o::EH2O_ISA
