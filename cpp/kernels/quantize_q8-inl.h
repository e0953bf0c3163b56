// Activations to 8 bits: per row and 32 values, d = max|x| / 127 and q = rint(x / d), in the packed layout
// that the quantised matrix kernels read (quant/packed_format.h).
#include "quant/packed_format.h"

namespace edgeh2o::EH2O_ISA {

// out: one tile of tile_rows rows, depth / 32 records. x: [n_rows][x_stride], n_rows <= tile_rows; missing
// rows become zeros. depth is a multiple of 32.
inline void quantize_q8p_f32(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t tile_rows,
                             size_t depth) {
  using namespace simd;
  constexpr size_t kVectors = kBlock / kLanes;
  for (size_t k = 0; k < depth; k += kBlock) {
    float* scale = reinterpret_cast<float*>(out);
    float* sum = scale + tile_rows;
    int32_t* negated_sum8 = reinterpret_cast<int32_t*>(sum + tile_rows);
    int8_t* quants = reinterpret_cast<int8_t*>(negated_sum8 + 2 * tile_rows);
    for (size_t row = 0; row < tile_rows; ++row) {
      int8_t q[kBlock] = {};
      float d = 0.0f;
      int32_t first_half = 0, total = 0;
      if (row < n_rows) {
        F32 values[kVectors];
        unroll<kVectors>([&](auto v) { values[v] = load(x + row * x_stride + k + v * kLanes); });
        F32 largest = zero();
        unroll<kVectors>([&](auto v) { largest = max(largest, abs(values[v])); });
        const float max_abs = reduce_max(largest);
        const float inverse = 127.0f / max_abs;
        if (!(inverse > __FLT_MAX__)) {  // otherwise a block of zeros, or of values too small to matter
          d = max_abs / 127.0f;
          // Sums of integers below 2^24 are exact in f32.
          F32 halves[2] = {zero(), zero()};
          unroll<kVectors>([&](auto v) {
            const F32 rounded = round_nearest(mul(values[v], set1(inverse)));
            store_s8(q + v * kLanes, rounded);
            constexpr size_t kHalf = v * 2 / kVectors;
            halves[kHalf] = add(halves[kHalf], rounded);
          });
          first_half = static_cast<int32_t>(reduce_add(halves[0]));
          total = first_half + static_cast<int32_t>(reduce_add(halves[1]));
        }
      }
      scale[row] = d;
      sum[row] = d * static_cast<float>(total);
      negated_sum8[row] = -8 * total;
      negated_sum8[tile_rows + row] = -8 * first_half;
      for (size_t step = 0; step < kBlock / 4; ++step) {
        __builtin_memcpy(quants + (step * tile_rows + row) * 4, q + 4 * step, 4);
      }
    }
    out += kActivationRecordPerRow * tile_rows;
  }
}

}  // namespace edgeh2o::EH2O_ISA
