#include "quant/nbits_blocks.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kTaskBlocks = 16384;

// GGUF has values i and i + 16 in a byte, MatMulNBits 2i and 2i + 1.
void pair_halves(const uint8_t* quants, uint8_t* out) {
  for (size_t i = 0; i < 8; ++i) {
    const uint8_t first = quants[i], second = quants[i + 8];
    out[2 * i] = static_cast<uint8_t>((first & 15) | (second << 4));
    out[2 * i + 1] = static_cast<uint8_t>((first >> 4) | (second & 0xF0));
  }
}

void join_block(const NBitsBlocks& blocks, size_t i, uint8_t* out) {
  std::memcpy(out, blocks.scales + i, 2);
  out += 2;
  if (blocks.bits == 8) {
    for (size_t k = 0; k < 32; ++k) out[k] = blocks.quants[32 * i + k] ^ 0x80;
    return;
  }
  if (blocks.offsets) {
    std::memcpy(out, blocks.offsets + i, 2);
    out += 2;
  }
  pair_halves(blocks.quants + 16 * i, out);
}

}  // namespace

size_t held_block_bytes(const NBitsBlocks& blocks) {
  return 2 + (blocks.offsets ? 2 : 0) + (blocks.bits == 8 ? 32 : 16);
}

void join_nbits_blocks(const NBitsBlocks& blocks, uint8_t* out) {
  const size_t n_bytes = held_block_bytes(blocks),
               n_tasks = (blocks.n_blocks + kTaskBlocks - 1) / kTaskBlocks;
  parallel_for(n_tasks, [&](size_t task, size_t) {
    const size_t end = std::min(blocks.n_blocks, (task + 1) * kTaskBlocks);
    for (size_t i = task * kTaskBlocks; i < end; ++i) join_block(blocks, i, out + i * n_bytes);
  });
}

}  // namespace edgeh2o
