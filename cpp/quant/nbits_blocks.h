// Blocks of the MatMulNBits of ONNX, as those of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

// A matrix of `rows` rows of n_inputs values each, a multiple of 32, as MatMulNBits has them: in blocks of
// block_size values, a multiple of 32, with a scale each. A row of quants takes quant_stride bytes, 16 with
// values 2i and 2i + 1 or 32 unsigned ones for 32 values. `zero_points`, one of 4 bits for every block, may
// be null; a row of them takes zero_stride bytes.
struct NBitsMatrix {
  const uint8_t* quants;
  const float* scales;
  const uint8_t* zero_points;
  size_t rows, n_inputs, block_size, n_blocks, quant_stride, zero_stride;
  int bits;  // 4, or 8 without zero_points
};

// Bytes of a row in GGUF: of Q4_0, Q4_1 (with zero points) or Q8_0.
size_t held_row_bytes(const NBitsMatrix& matrix);

// Writes the rows to `out`, in parallel; scales, and the products with their zero points, in half precision.
// False, with some rows unwritten, if a scale is neither 0 nor of that range, which also holds for products.
bool join_nbits_rows(const NBitsMatrix& matrix, uint8_t* out);

}  // namespace edgeh2o
