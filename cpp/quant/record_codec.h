// Reads one record (32 weights) of a row of GGUF blocks: raw unsigned quants and the raw bits of its scales.
#pragma once

#include <cstring>

#include "quant/block_formats.h"
#include "quant/packed_format.h"

namespace edgeh2o {

struct Record {
  uint16_t d, m;    // one level: scale and min; two levels: the scale and min of the super-block, as f16 bits
  uint8_t fine[2];  // two levels: scale of each sub-block (s8 bits for Q6_K)
  uint8_t fine_min;    // two levels with a min
  uint8_t quants[32];  // unsigned, offset not removed
};

template <typename Block>
Block read_block(const uint8_t* row, size_t index) {
  Block block;
  std::memcpy(&block, row + index * sizeof(Block), sizeof(Block));
  return block;
}

inline void split_nibbles(uint8_t* quants, const uint8_t* qs) {
  for (int i = 0; i < 16; ++i) {
    quants[i] = qs[i] & 0xf;
    quants[i + 16] = qs[i] >> 4;
  }
}

inline void add_fifth_bits(uint8_t* quants, const uint8_t* qh) {
  for (int i = 0; i < 32; ++i) quants[i] |= static_cast<uint8_t>((qh[i / 8] >> (i % 8) & 1) << 4);
}

// 6-bit scale and min number `s` of the 8 that Q4_K and Q5_K keep in 12 bytes.
inline void read_scale_min(const uint8_t* scales, size_t s, uint8_t* scale, uint8_t* min) {
  if (s < 4) {
    *scale = scales[s] & 63;
    *min = scales[s + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((scales[s + 4] & 0xf) | (scales[s - 4] >> 6 << 4));
    *min = static_cast<uint8_t>((scales[s + 4] >> 4) | (scales[s] >> 6 << 4));
  }
}

// Sub-blocks 2 j and 2 j + 1 share 32 bytes: low and high nibbles.
inline void read_k_nibbles(uint8_t* quants, const uint8_t* qs, size_t s) {
  const uint8_t* pair = qs + s / 2 * 32;
  for (int i = 0; i < 32; ++i) quants[i] = s % 2 ? pair[i] >> 4 : pair[i] & 0xf;
}

template <PackedFormat kFormat>
Record read_record(const uint8_t* row, size_t record) {
  Record r{};
  if constexpr (kFormat == PackedFormat::kQ4_0) {
    const auto block = read_block<BlockQ4_0>(row, record);
    r.d = block.d;
    split_nibbles(r.quants, block.qs);
  } else if constexpr (kFormat == PackedFormat::kQ4_1) {
    const auto block = read_block<BlockQ4_1>(row, record);
    r.d = block.d;
    r.m = block.m;
    split_nibbles(r.quants, block.qs);
  } else if constexpr (kFormat == PackedFormat::kQ5_0) {
    const auto block = read_block<BlockQ5_0>(row, record);
    r.d = block.d;
    split_nibbles(r.quants, block.qs);
    add_fifth_bits(r.quants, block.qh);
  } else if constexpr (kFormat == PackedFormat::kQ5_1) {
    const auto block = read_block<BlockQ5_1>(row, record);
    r.d = block.d;
    r.m = block.m;
    split_nibbles(r.quants, block.qs);
    add_fifth_bits(r.quants, block.qh);
  } else if constexpr (kFormat == PackedFormat::kQ8_0) {
    const auto block = read_block<BlockQ8_0>(row, record);
    r.d = block.d;
    for (int i = 0; i < 32; ++i) r.quants[i] = static_cast<uint8_t>(block.qs[i] + 128);
  } else {
    const size_t s = record % kSuperRecords;
    if constexpr (kFormat == PackedFormat::kQ4_K) {
      const auto block = read_block<BlockQ4_K>(row, record / kSuperRecords);
      r.d = block.d;
      r.m = block.dmin;
      read_scale_min(block.scales, s, &r.fine[0], &r.fine_min);
      read_k_nibbles(r.quants, block.qs, s);
    } else if constexpr (kFormat == PackedFormat::kQ5_K) {
      const auto block = read_block<BlockQ5_K>(row, record / kSuperRecords);
      r.d = block.d;
      r.m = block.dmin;
      read_scale_min(block.scales, s, &r.fine[0], &r.fine_min);
      read_k_nibbles(r.quants, block.qs, s);
      for (int i = 0; i < 32; ++i) r.quants[i] |= static_cast<uint8_t>((block.qh[i] >> s & 1) << 4);
    } else {
      static_assert(kFormat == PackedFormat::kQ6_K);
      // Each half of 128 weights: 64 bytes of low nibbles and 32 bytes with two high bits for each of 4
      // groups.
      const auto block = read_block<BlockQ6_K>(row, record / kSuperRecords);
      const size_t half = s / 4, group = s % 4;
      const uint8_t* ql = block.ql + half * 64 + (group % 2) * 32;
      const uint8_t* qh = block.qh + half * 32;
      r.d = block.d;
      for (int i = 0; i < 32; ++i) {
        const int low = group < 2 ? ql[i] & 0xf : ql[i] >> 4;
        r.quants[i] = static_cast<uint8_t>(low | (qh[i] >> (2 * group) & 3) << 4);
      }
      r.fine[0] = static_cast<uint8_t>(block.scales[s * 2]);
      r.fine[1] = static_cast<uint8_t>(block.scales[s * 2 + 1]);
    }
  }
  return r;
}

}  // namespace edgeh2o
