// Reads one record (32 weights) of a row of GGUF blocks: raw unsigned quants and the raw bits of its scales.
#pragma once

#include <cstddef>
#include <cstring>

#include "quant/block_formats.h"
#include "quant/packed_format.h"

namespace edgeh2o {

struct Record {
  uint16_t d, m;        // one level: scale and min; two levels: those of the super-block; bits as packed
  uint8_t fine[2];      // two levels: scale of each sub-block (s8 bits where there is no min)
  uint8_t fine_min[2];  // two levels with a min, or in eighths of the scale (kMinOfScale)
  uint8_t quants[32];   // unsigned, offset not removed; the index into the codebook where there is one
};

// A block of a row, where it lies: blocks of one byte's alignment, so that any address will do.
template <typename Block>
const Block& block_at(const uint8_t* row, size_t index) {
  static_assert(alignof(Block) == 1);
  return reinterpret_cast<const Block*>(row)[index];
}

// Into 32 quants, from bit `to` on: kBits bits of each of 32 bytes, from bit `from` on.
template <int kBits>
inline void add_bits(uint8_t* quants, const uint8_t* in, size_t from, size_t to) {
  constexpr uint64_t kMask = 0x0101010101010101u * ((1u << kBits) - 1);
  for (int i = 0; i < 4; ++i) {  // 8 bytes at a time: what a shift brings over from a neighbour is masked
    uint64_t source, sum;
    std::memcpy(&source, in + 8 * i, 8);
    std::memcpy(&sum, quants + 8 * i, 8);
    sum |= (source >> from & kMask) << to;
    std::memcpy(quants + 8 * i, &sum, 8);
  }
}

inline void split_nibbles(uint8_t* quants, const uint8_t* qs) {
  for (int i = 0; i < 16; ++i) {
    quants[i] = qs[i] & 0xf;
    quants[i + 16] = qs[i] >> 4;
  }
}

inline void add_fifth_bits(uint8_t* quants, const uint8_t* qh) {
  for (int i = 0; i < 4; ++i) {
    // Byte j of the product keeps bit j of qh[i] where it stands; adding 0x7f moves it to the top.
    const uint64_t bits = qh[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t fifth = ((bits + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
    uint64_t sum;
    std::memcpy(&sum, quants + 8 * i, 8);
    sum |= fifth;
    std::memcpy(quants + 8 * i, &sum, 8);
  }
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

// 6-bit scale number `s` of the 16 that Q3_K keeps in 12 bytes: 4 low bits of two scales a byte, then the
// high bits of four.
inline int read_q3_scale(const uint8_t* scales, size_t s) {
  const int low = s < 8 ? scales[s] & 0xf : scales[s - 8] >> 4;
  return low | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4;
}

// Two bits of 32 weights: group `s % 4` of the bytes that half `s / 4` of the super-block shares.
inline void read_crumbs(uint8_t* quants, const uint8_t* qs, size_t s) {
  add_bits<2>(quants, qs + s / 4 * 32, 2 * (s % 4), 0);
}

// The bf16 bits of 2^(e - 128); exact for every e, denormal for 0 and 1.
inline uint16_t bf16_from_e8m0(uint8_t e) { return static_cast<uint16_t>(e < 2 ? 0x20 << e : (e - 1) << 7); }

// Sub-blocks 2 j and 2 j + 1 share 32 bytes: low and high nibbles.
inline void read_k_nibbles(uint8_t* quants, const uint8_t* qs, size_t s) {
  add_bits<4>(quants, qs + s / 2 * 32, s % 2 * 4, 0);
}

template <PackedFormat kFormat>
Record read_record(const uint8_t* row, size_t record) {
  Record r{};
  if constexpr (kFormat == PackedFormat::kQ4_0) {
    const auto& block = block_at<BlockQ4_0>(row, record);
    r.d = block.d;
    split_nibbles(r.quants, block.qs);
  } else if constexpr (kFormat == PackedFormat::kQ4_1) {
    const auto& block = block_at<BlockQ4_1>(row, record);
    r.d = block.d;
    r.m = block.m;
    split_nibbles(r.quants, block.qs);
  } else if constexpr (kFormat == PackedFormat::kQ5_0) {
    const auto& block = block_at<BlockQ5_0>(row, record);
    r.d = block.d;
    split_nibbles(r.quants, block.qs);
    add_fifth_bits(r.quants, block.qh);
  } else if constexpr (kFormat == PackedFormat::kQ5_1) {
    const auto& block = block_at<BlockQ5_1>(row, record);
    r.d = block.d;
    r.m = block.m;
    split_nibbles(r.quants, block.qs);
    add_fifth_bits(r.quants, block.qh);
  } else if constexpr (kFormat == PackedFormat::kQ8_0) {
    const auto& block = block_at<BlockQ8_0>(row, record);
    r.d = block.d;
    for (int i = 0; i < 32; ++i) r.quants[i] = static_cast<uint8_t>(block.qs[i] + 128);
  } else if constexpr (kFormat == PackedFormat::kIQ4_NL) {
    const auto& block = block_at<BlockIQ4_NL>(row, record);
    r.d = block.d;
    split_nibbles(r.quants, block.qs);
  } else if constexpr (kFormat == PackedFormat::kMXFP4) {
    const auto& block = block_at<BlockMXFP4>(row, record);
    r.d = bf16_from_e8m0(block.e);
    split_nibbles(r.quants, block.qs);
  } else {
    const size_t s = record % kSuperRecords;
    if constexpr (kFormat == PackedFormat::kQ4_K) {
      const auto& block = block_at<BlockQ4_K>(row, record / kSuperRecords);
      r.d = block.d;
      r.m = block.dmin;
      read_scale_min(block.scales, s, &r.fine[0], &r.fine_min[0]);
      read_k_nibbles(r.quants, block.qs, s);
    } else if constexpr (kFormat == PackedFormat::kQ5_K) {
      const auto& block = block_at<BlockQ5_K>(row, record / kSuperRecords);
      r.d = block.d;
      r.m = block.dmin;
      read_scale_min(block.scales, s, &r.fine[0], &r.fine_min[0]);
      read_k_nibbles(r.quants, block.qs, s);
      add_bits<1>(r.quants, block.qh, s, 4);
    } else if constexpr (kFormat == PackedFormat::kQ2_K) {
      const auto& block = block_at<BlockQ2_K>(row, record / kSuperRecords);
      r.d = block.d;
      r.m = block.dmin;
      read_crumbs(r.quants, block.qs, s);
      for (size_t sub = 0; sub < 2; ++sub) {
        r.fine[sub] = block.scales[2 * s + sub] & 0xf;
        r.fine_min[sub] = block.scales[2 * s + sub] >> 4;
      }
    } else if constexpr (kFormat == PackedFormat::kQ3_K) {
      const auto& block = block_at<BlockQ3_K>(row, record / kSuperRecords);
      r.d = block.d;
      read_crumbs(r.quants, block.qs, s);
      add_bits<1>(r.quants, block.hmask, s, 2);
      for (size_t sub = 0; sub < 2; ++sub) {
        r.fine[sub] = static_cast<uint8_t>(read_q3_scale(block.scales, 2 * s + sub) - 32);
      }
    } else if constexpr (kFormat == PackedFormat::kIQ4_XS) {
      const auto& block = block_at<BlockIQ4_XS>(row, record / kSuperRecords);
      r.d = block.d;
      split_nibbles(r.quants, block.qs + 16 * s);
      const int low = block.scales_l[s / 2] >> (4 * (s % 2)) & 0xf, high = block.scales_h >> (2 * s) & 3;
      r.fine[0] = static_cast<uint8_t>((low | high << 4) - 32);
    } else if constexpr (kFormat == PackedFormat::kHeldIQ1_S) {
      const auto& block = block_at<BlockHeldIQ1_S>(row, record / kSuperRecords);
      r.d = block.d;
      read_crumbs(r.quants, block.qs, s);
      r.fine[0] = block.scales[s] & 0xf;
      r.fine_min[0] = block.scales[s] >> 4;
    } else if constexpr (kFormat == PackedFormat::kHeldIQ2 || kFormat == PackedFormat::kHeldIQ1_M) {
      const auto& block = block_at<BlockHeldIQ2>(row, record / kSuperRecords);
      r.d = block.d;
      read_crumbs(r.quants, block.qs, s);
      add_bits<1>(r.quants, block.hmask, s, 2);
      for (size_t sub = 0; sub < 2; ++sub) r.fine[sub] = block.scales[2 * s + sub];
    } else if constexpr (kFormat == PackedFormat::kHeldIQ3_S || kFormat == PackedFormat::kHeldIQ3_XXS) {
      const auto& block = block_at<BlockHeldIQ3>(row, record / kSuperRecords);
      r.d = block.d;
      r.fine[0] = block.scales[s];
      split_nibbles(r.quants, block.qs + 16 * s);
    } else {
      static_assert(kFormat == PackedFormat::kQ6_K);
      // Each half of 128 weights: 64 bytes of low nibbles and 32 bytes with two high bits for each of 4
      // groups.
      const auto& block = block_at<BlockQ6_K>(row, record / kSuperRecords);
      const size_t half = s / 4, group = s % 4;
      r.d = block.d;
      add_bits<4>(r.quants, block.ql + half * 64 + group % 2 * 32, group / 2 * 4, 0);
      add_bits<2>(r.quants, block.qh + half * 32, 2 * group, 4);
      r.fine[0] = static_cast<uint8_t>(block.scales[s * 2]);
      r.fine[1] = static_cast<uint8_t>(block.scales[s * 2 + 1]);
    }
  }
  return r;
}

// The 16 bytes of nibbles of a record, where the file holds them in the order that the packed layout has too:
// weight i low and weight i + 16 high in byte i. Null for other formats.
template <PackedFormat kFormat>
const uint8_t* packed_nibbles(const uint8_t* row, size_t record) {
  if constexpr (kFormat == PackedFormat::kQ4_0) {
    return row + record * sizeof(BlockQ4_0) + offsetof(BlockQ4_0, qs);
  } else if constexpr (kFormat == PackedFormat::kQ4_1) {
    return row + record * sizeof(BlockQ4_1) + offsetof(BlockQ4_1, qs);
  } else if constexpr (kFormat == PackedFormat::kIQ4_NL) {
    return row + record * sizeof(BlockIQ4_NL) + offsetof(BlockIQ4_NL, qs);
  } else if constexpr (kFormat == PackedFormat::kMXFP4) {
    return row + record * sizeof(BlockMXFP4) + offsetof(BlockMXFP4, qs);
  } else if constexpr (kFormat == PackedFormat::kIQ4_XS) {
    return row + record / kSuperRecords * sizeof(BlockIQ4_XS) + offsetof(BlockIQ4_XS, qs) +
           record % kSuperRecords * 16;
  } else if constexpr (kFormat == PackedFormat::kHeldIQ3_S || kFormat == PackedFormat::kHeldIQ3_XXS) {
    return row + record / kSuperRecords * sizeof(BlockHeldIQ3) + offsetof(BlockHeldIQ3, qs) +
           record % kSuperRecords * 16;
  } else {
    return nullptr;
  }
}

}  // namespace edgeh2o
