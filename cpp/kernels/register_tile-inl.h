// Rows of the outputs that a matrix kernel sums up in registers.

namespace edgeh2o::EH2O_ISA {

// A row of a register tile: what is at `c`, n_cols values followed by zeros; and back.
template <size_t kVectors>
EH2O_INLINE void load_tile_row(simd::F32 (&sum)[kVectors], const float* c, size_t n_cols) {
  using namespace simd;
  unroll<kVectors>([&](auto v) {
    const size_t left = n_cols > v * kLanes ? n_cols - v * kLanes : 0;
    sum[v] = left >= kLanes ? load(c + v * kLanes) : left > 0 ? load_partial(c + v * kLanes, left) : zero();
  });
}
template <size_t kVectors>
EH2O_INLINE void store_tile_row(float* c, const simd::F32 (&sum)[kVectors], size_t n_cols) {
  using namespace simd;
  unroll<kVectors>([&](auto v) {
    const size_t left = n_cols > v * kLanes ? n_cols - v * kLanes : 0;
    if (left >= kLanes) {
      store(c + v * kLanes, sum[v]);
    } else if (left > 0) {
      store_partial(c + v * kLanes, sum[v], left);
    }
  });
}

}  // namespace edgeh2o::EH2O_ISA
