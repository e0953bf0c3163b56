// Quantised blocks as GGUF files hold them (little endian). Values: see the comment of each block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

// Two bytes in the file's order, so that blocks have no alignment and are read where they lie.
struct u16_le {
  uint8_t low, high;
  constexpr operator uint16_t() const { return static_cast<uint16_t>(low | high << 8); }
};
using f16_bits = u16_le;

struct BlockQ4_0 {  // w = d * (q - 8); byte i holds q[i] low, q[i + 16] high
  f16_bits d;
  uint8_t qs[16];
};
struct BlockQ4_1 {  // w = d * q + m
  f16_bits d, m;
  uint8_t qs[16];
};
struct BlockQ5_0 {  // w = d * (q - 16); bit i of qh is the fifth bit of q[i]
  f16_bits d;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct BlockQ5_1 {  // w = d * q + m
  f16_bits d, m;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct BlockQ8_0 {  // w = d * q
  f16_bits d;
  int8_t qs[32];
};
struct BlockQ4_K {  // 8 sub-blocks of 32: w = d * scale[s] * q - dmin * min[s]; 6-bit scales and mins
  f16_bits d, dmin;
  uint8_t scales[12];
  uint8_t qs[128];
};
struct BlockQ5_K {
  f16_bits d, dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
struct BlockQ6_K {  // 16 sub-blocks of 16: w = d * scale[s] * (q - 32)
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  f16_bits d;
};
struct BlockQ2_K {  // 16 sub-blocks of 16: w = d * (scales & 15) * q - dmin * (scales >> 4)
  uint8_t scales[16];
  uint8_t qs[64];
  f16_bits d, dmin;
};
struct BlockQ3_K {  // 16 sub-blocks of 16: w = d * (scale[s] - 32) * (q - 4); 6-bit scales, hmask holds bit 2
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  f16_bits d;
};
struct BlockIQ4_NL {  // w = d * kIq4Values[q], nibbles as in Q4_0
  f16_bits d;
  uint8_t qs[16];
};
struct BlockIQ4_XS {  // 8 sub-blocks of 32: w = d * (scale[s] - 32) * kIq4Values[q]; 6-bit scales
  f16_bits d;
  u16_le scales_h;
  uint8_t scales_l[4];
  uint8_t qs[128];
};
struct BlockMXFP4 {  // w = 2^(e - 128) * kE2m1Values[q], nibbles as in Q4_0
  uint8_t e;
  uint8_t qs[16];
};

// Of weights from grids, as they are held: what takes a table to find has been looked up.
struct BlockHeldIQ2 {  // 16 sub-blocks of 16: w = d * scale[s] * kIq2Values[q] / 8; 3-bit quants as in Q3_K
  f16_bits d;
  uint8_t scales[16];
  uint8_t hmask[32];
  uint8_t qs[64];
};
struct BlockHeldIQ3 {  // 8 sub-blocks of 32: w = d * scale[s] * value[q] * unit, nibbles as in IQ4_XS
  f16_bits d;
  uint8_t scales[8];
  uint8_t qs[128];
};
struct BlockHeldIQ1_S {  // 8 sub-blocks of 32: w = d * scale[s] * (q - min[s] / 8), in the nibbles of
                         // scales[s]
  f16_bits d;
  uint8_t scales[8];
  uint8_t qs[64];
};
using BlockHeldIQ1_M = BlockHeldIQ2;  // with kIq1Values
using BlockHeldIQ3_S = BlockHeldIQ3;
using BlockHeldIQ3_XXS = BlockHeldIQ3;

static_assert(sizeof(BlockQ4_0) == 18);
static_assert(sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockQ2_K) == 84);
static_assert(sizeof(BlockQ3_K) == 110);
static_assert(sizeof(BlockIQ4_NL) == 18);
static_assert(sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockMXFP4) == 17);
static_assert(sizeof(BlockHeldIQ2) == 114);
static_assert(sizeof(BlockHeldIQ3) == 138);
static_assert(sizeof(BlockHeldIQ1_S) == 74);

}  // namespace edgeh2o
