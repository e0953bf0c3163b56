#include "quant/nbits_blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/half.h"
#include "base/parallel.h"
#include "quant/packed_format.h"

namespace edgeh2o {
namespace {

constexpr size_t kTaskBlocks = 16384;
// The normal numbers of half precision, up to what 15 times as much still is.
constexpr float kLeastScale = 0x1p-14f, kLargestScale = 65504.0f / 16;

bool is_held(float scale) {
  const float size = std::fabs(scale);
  return size == 0.0f || (size >= kLeastScale && size <= kLargestScale);  // no NaN is
}

// The bytes of x as the low halves of 16 bits each.
uint64_t spread(uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  return (x | x << 8) & 0x00ff00ff00ff00ffu;
}

// GGUF has values i and i + 16 in a byte, MatMulNBits 2i and 2i + 1.
void pair_halves(const uint8_t* quants, uint8_t* out) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0fu;
  uint64_t first, second;
  std::memcpy(&first, quants, 8);
  std::memcpy(&second, quants + 8, 8);
  const uint64_t even = (first & kLow) | (second & kLow) << 4, odd = (first >> 4 & kLow) | (second & ~kLow);
  for (int half = 0; half < 2; ++half) {
    const uint64_t pairs = spread(even >> 32 * half & 0xffffffffu) | spread(odd >> 32 * half & 0xffffffffu)
                                                                         << 8;
    std::memcpy(out + 8 * half, &pairs, 8);
  }
}

void join_quants(const uint8_t* quants, uint8_t* out, int bits) {
  if (bits == 4) return pair_halves(quants, out);
  for (size_t k = 0; k < kBlock; ++k) out[k] = quants[k] ^ 0x80;
}

bool join_row(const NBitsMatrix& matrix, size_t row, uint8_t* out) {
  const uint8_t* quants = matrix.quants + row * matrix.quant_stride;
  const float* scales = matrix.scales + row * matrix.n_blocks;
  const size_t quant_bytes = kBlock / 8 * static_cast<size_t>(matrix.bits);
  for (size_t block = 0; block < matrix.n_blocks; ++block) {
    float scale;  // of a file, at any address
    std::memcpy(&scale, scales + block, sizeof(scale));
    if (!is_held(scale)) return false;
    const uint16_t half = f16_from_f32(scale);
    uint16_t offset = 0;
    if (matrix.zero_points) {
      const uint8_t both = matrix.zero_points[row * matrix.zero_stride + block / 2];
      offset = f16_from_f32(-scale * static_cast<float>(block % 2 ? both >> 4 : both & 15));
    }
    const size_t end = std::min(matrix.n_inputs, (block + 1) * matrix.block_size);
    for (size_t i = block * matrix.block_size; i < end; i += kBlock) {
      std::memcpy(out, &half, 2);
      out += 2;
      if (matrix.zero_points) {
        std::memcpy(out, &offset, 2);
        out += 2;
      }
      join_quants(quants, out, matrix.bits);
      quants += quant_bytes;
      out += quant_bytes;
    }
  }
  return true;
}

}  // namespace

size_t held_row_bytes(const NBitsMatrix& matrix) {
  const size_t scale_bytes = matrix.zero_points ? 4 : 2;
  return matrix.n_inputs / kBlock * (scale_bytes + kBlock / 8 * static_cast<size_t>(matrix.bits));
}

bool join_nbits_rows(const NBitsMatrix& matrix, uint8_t* out) {
  const size_t row_bytes = held_row_bytes(matrix);
  const size_t n_rows = std::max<size_t>(1, kTaskBlocks / (matrix.n_inputs / kBlock));
  std::atomic<bool> are_held{true};
  parallel_for(ceil_div(matrix.rows, n_rows), [&](size_t task, size_t) {
    const size_t end = std::min(matrix.rows, (task + 1) * n_rows);
    for (size_t row = task * n_rows; row < end; ++row) {
      if (!join_row(matrix, row, out + row * row_bytes)) return are_held.store(false);
    }
  });
  return are_held;
}

}  // namespace edgeh2o
