// Weights of a GGUF file in the layout of the device (cuda/kernels/arguments.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/kernels/arguments.h"
#include "quant/packed_matrix.h"

namespace edgeh2o::cuda {

WeightFormat device_format(PackedFormat format);

// The kernel that multiplies with weights of a format.
const char* multiply_kernel(WeightFormat format);
// The kernel of matrix products with tiles: rows and shared memory of a block. More rows at a time unpack and
// scale a weight less often, where enough blocks are left for all processors. Both give the same bits.
struct GemmKernel {
  const char* name;
  size_t block_rows, shared_bytes;
};
GemmKernel gemm_kernel(WeightFormat format, size_t n_rows, size_t n_out, size_t n_processors);

constexpr bool is_tiled(WeightFormat format) { return format >= WeightFormat::kQ4; }

// Bytes of the parts of a matrix [rows][cols]. A panel is 16 rows of tiles, one row of floats.
struct TileSizes {
  TileSizes(WeightFormat format, size_t rows, size_t cols);

  size_t n_panels, n_tiles;         // tiles: of a panel, 0 for floats
  size_t value_bytes, scale_bytes;  // of a panel
  size_t factor_bytes() const { return scale_bytes > 0 ? n_panels * kPanelRows * sizeof(float) : 0; }
  size_t n_bytes() const { return n_panels * (value_bytes + scale_bytes) + factor_bytes(); }
};

// Packs panels [first, first + count) in parallel: values [count][value_bytes], scales [count][scale_bytes],
// factors [count][16]; the latter two are null for floats. data, row_order: as in PackedMatrix, checked
// already. Scales of two levels become one, rounded to f16 (2^-11 of it at most); all others are exact.
void pack_panels(const FormatInfo& info, const uint8_t* data, size_t rows, size_t cols,
                 const int32_t* row_order, size_t first, size_t count, uint8_t* values, uint16_t* scales,
                 float* factors);

}  // namespace edgeh2o::cuda
