// Writes scales and single quants into blocks of GGUF files.
#pragma once

#include "base/half.h"
#include "quant/block_formats.h"

namespace edgeh2o {

inline u16_le le16(uint16_t bits) { return {static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8)}; }
inline u16_le le16_from_f32(float value) { return le16(f16_from_f32(value)); }

// Quant i of a block of zeros, from 0 to 63: each half of 128 weights has 4 groups of 32, as read_record has
// it.
inline void put_q6(BlockQ6_K& block, size_t i, int q) {
  const size_t half = i / 128, group = i / 32 % 4, column = i % 32;
  uint8_t& low = block.ql[half * 64 + group % 2 * 32 + column];
  uint8_t& high = block.qh[half * 32 + column];
  low = static_cast<uint8_t>(low | (q & 15) << group / 2 * 4);
  high = static_cast<uint8_t>(high | q >> 4 << 2 * group);
}

}  // namespace edgeh2o
