// Cached key and value rows to the f32 panels that attention_tile_f32 reads.

namespace edgeh2o::EH2O_ISA {

template <CacheType kType>
void pack_keys(float* out, const void* rows, const int32_t* positions, size_t n_keys, size_t head_dim) {
  using namespace simd;
  for (size_t key = 0; key < n_keys; key += kGemmF32Columns, out += head_dim * kGemmF32Columns) {
    for (size_t col = 0; col < kGemmF32Columns; col += kLanes) {
      const size_t first = key + col, n_left = first < n_keys ? n_keys - first : 0;
      for_each_vector(head_dim, [&](size_t dim, auto count) {
        F32 block[kLanes];
        if (n_left >= kLanes) {
          unroll<kLanes>([&](auto i) {
            block[i] =
                load_cached<kType>(gathered_row<kType>(rows, positions, first + i, head_dim), dim, count);
          });
        } else {
          for (size_t i = 0; i < kLanes; ++i) {
            block[i] = i < n_left ? load_cached<kType>(
                                        gathered_row<kType>(rows, positions, first + i, head_dim), dim, count)
                                  : zero();
          }
        }
        transpose(block);
        for (size_t j = 0; j < count; ++j) store(out + (dim + j) * kGemmF32Columns + col, block[j]);
      });
    }
  }
}

// out: [ceil(n_keys / nr)][head_dim][nr], columns beyond n_keys are 0. positions: null for rows 0, 1, 2, ...
inline void pack_keys_f32p(CacheType type, float* out, const void* rows, const int32_t* positions,
                           size_t n_keys, size_t head_dim) {
  with_cache_type(type, [&](auto constant) { pack_keys<constant>(out, rows, positions, n_keys, head_dim); });
}

template <CacheType kType>
void pack_values(float* out, size_t panel_stride, const void* rows, const int32_t* positions, size_t n_keys,
                 size_t head_dim) {
  for (size_t key = 0; key < n_keys; ++key, out += kGemmF32Columns) {
    const uint8_t* row = gathered_row<kType>(rows, positions, key, head_dim);
    for_each_vector(head_dim, [&](size_t dim, auto count) {
      float* panel = out + dim / kGemmF32Columns * panel_stride;
      simd::store(panel + dim % kGemmF32Columns, load_cached<kType>(row, dim, count));
    });
  }
}

// out: [ceil(head_dim / nr)][panel_stride], per panel [n_keys][nr]; columns beyond head_dim are unspecified.
inline void pack_values_f32p(CacheType type, float* out, size_t panel_stride, const void* rows,
                             const int32_t* positions, size_t n_keys, size_t head_dim) {
  with_cache_type(type, [&](auto constant) {
    pack_values<constant>(out, panel_stride, rows, positions, n_keys, head_dim);
  });
}

}  // namespace edgeh2o::EH2O_ISA
