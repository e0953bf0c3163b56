// Blocks of the MatMulNBits of ONNX, as those of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

// A matrix of n_blocks blocks of 32 values, all rows one after the other: the quants as MatMulNBits has them
// (16 bytes with values 2i and 2i + 1, or 32 bytes of unsigned values), and a scale per block in half
// precision. `offsets`, what is added to every value of a block, may be null.
struct NBitsBlocks {
  const uint8_t* quants;
  const uint16_t *scales, *offsets;
  size_t n_blocks;
  int bits;  // 4 or 8
};

// Bytes of a block in GGUF: of Q4_0, Q4_1 (with offsets) or Q8_0.
size_t held_block_bytes(const NBitsBlocks& blocks);

// Writes them to `out`, in parallel.
void join_nbits_blocks(const NBitsBlocks& blocks, uint8_t* out);

}  // namespace edgeh2o
