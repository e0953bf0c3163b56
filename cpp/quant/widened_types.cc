#include "quant/widened_types.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "base/check.h"
#include "base/half.h"
#include "base/parallel.h"
#include "quant/block_formats.h"
#include "quant/iq_grids.h"

namespace edgeh2o {
namespace {

struct BlockQ1_0 {  // 128 weights: d where the bit is set, else -d
  f16_bits d;
  uint8_t qs[16];
};
struct BlockQ2_0 {  // 64 weights: d * (q - 1)
  f16_bits d;
  uint8_t qs[16];
};
struct BlockTQ2_0 {  // 256 weights: d * (q - 1), a byte of the first half has numbers 32 apart
  uint8_t qs[64];
  f16_bits d;
};
struct BlockTQ1_0 {  // the same of digits to the base 3, five to a byte, and four to one of the last
  uint8_t qs[48], qh[4];
  f16_bits d;
};
struct BlockNVFP4 {  // 4 sub-blocks of 16: scale[s] * kE2m1Values[q] / 2; nibbles of halves of a sub-block
  uint8_t scales[4];
  uint8_t qs[32];
};
// Weights from grids: w = +-d * (1 + 2 scale[s]) * unit * one of the magnitudes of a group, 8 sub-blocks of
// 32 or 16 of 16 with a scale of 4 bits each.
struct BlockIQ3_S {  // groups of 4 with 9 bits, sub-blocks of 32
  f16_bits d;
  uint8_t qs[64], qh[8], signs[32], scales[4];
};
// Four times 7 bits for the signs of 8 weights, the eighth of which makes their number even; 4 bits of scale.
struct SignsAndScale {
  uint8_t bytes[4];
  uint32_t bits() const {
    return uint32_t{bytes[0]} | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
  }
};
struct BlockIQ3_XXS {  // groups of 4 with 8 bits
  f16_bits d;
  uint8_t qs[64];
  SignsAndScale rest[8];
};
struct BlockIQ2_XXS {  // groups of 8 with 8 bits, sub-blocks of 32
  f16_bits d;
  struct {
    uint8_t qs[4];
    SignsAndScale rest;
  } subs[8];
};
struct BlockIQ2_XS {  // groups of 8 with 9 bits, 7 bits of signs above them; sub-blocks of 16
  f16_bits d;
  u16_le qs[32];
  uint8_t scales[8];
};
struct BlockIQ2_S {  // groups of 8 with 10 bits, two of them in qh; sub-blocks of 16
  f16_bits d;
  uint8_t qs[32], signs[32], qh[8], scales[8];
};
// Weights of a grid of -1, 0 and 1: w = d * (1 + 2 scale[s]) * (g +- 1/8), groups of 8 with 11 bits, 3 of
// them in qh.
struct BlockIQ1_S {  // sub-blocks of 32: above the high bits 3 of scale, and whether to take 1/8 off
  f16_bits d;
  uint8_t qs[32];
  u16_le qh[8];
};
struct BlockIQ1_M {  // sub-blocks of 16, groups of 8 with a sign of 1/8 each; d in the top bits of the scales
  uint8_t qs[32], qh[16];
  u16_le scales[4];
};
static_assert(sizeof(BlockQ1_0) == 18 && sizeof(BlockQ2_0) == 18);
static_assert(sizeof(BlockTQ2_0) == 66 && sizeof(BlockTQ1_0) == 54);
static_assert(sizeof(BlockNVFP4) == 36 && sizeof(BlockIQ3_S) == 110 && sizeof(BlockIQ3_XXS) == 98);
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56);

// Quants of `bits` bits that are `offset` less; as Q4_0, which has them plus 8.
template <typename Block, int kBits, typename Level>
void widen_to_q4_0(const uint8_t* in, uint8_t* out, const Level& level) {
  const auto& block = *reinterpret_cast<const Block*>(in);
  auto* held = reinterpret_cast<BlockQ4_0*>(out);
  constexpr size_t kPerByte = 8 / kBits, kBlocks = sizeof(block.qs) * kPerByte / kBlock;
  for (size_t b = 0; b < kBlocks; ++b) {
    held[b].d = block.d;
    for (size_t i = 0; i < 16; ++i) {
      const auto nibble = [&](size_t at) {
        const int q = block.qs[at / kPerByte] >> (kBits * (at % kPerByte)) & ((1 << kBits) - 1);
        return 8 + level(q);
      };
      held[b].qs[i] = static_cast<uint8_t>(nibble(b * kBlock + i) | nibble(b * kBlock + i + 16) << 4);
    }
  }
}

void widen_q1_0(const uint8_t* in, uint8_t* out) {
  widen_to_q4_0<BlockQ1_0, 1>(in, out, [](int q) { return 2 * q - 1; });
}

void widen_q2_0(const uint8_t* in, uint8_t* out) {
  widen_to_q4_0<BlockQ2_0, 2>(in, out, [](int q) { return q - 1; });
}

// Weight number k of blocks of zeros, d * (q - 1).
void put_ternary(BlockQ4_0* held, size_t k, int q) {
  uint8_t& byte = held[k / kBlock].qs[k % 16];
  byte = static_cast<uint8_t>(byte | (7 + q) << (k % kBlock / 16 * 4));
}

void widen_tq2_0(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockTQ2_0*>(in);
  auto* held = reinterpret_cast<BlockQ4_0*>(out);
  for (size_t b = 0; b < 256 / kBlock; ++b) held[b].d = block.d;
  for (size_t k = 0; k < 256; ++k) {
    put_ternary(held, k, block.qs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3);
  }
}

// Bytes are fractions of 256, whose digits come one after another by a multiplication.
void widen_tq1_0(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockTQ1_0*>(in);
  auto* held = reinterpret_cast<BlockQ4_0*>(out);
  for (size_t b = 0; b < 256 / kBlock; ++b) held[b].d = block.d;
  size_t k = 0;
  const auto put = [&](const uint8_t* bytes, size_t n_bytes, size_t n_digits) {
    uint8_t power = 1;
    for (size_t digit = 0; digit < n_digits; ++digit, power = static_cast<uint8_t>(3 * power)) {
      for (size_t i = 0; i < n_bytes; ++i) {
        put_ternary(held, k++, static_cast<uint8_t>(bytes[i] * power) * 3 >> 8);
      }
    }
  };
  put(block.qs, 32, 5);
  put(block.qs + 32, 16, 5);
  put(block.qh, 4, 4);
}

// Half of an unsigned 8-bit float: 4 bits of exponent, bias 7, 3 of fraction; 0x7f is zero, the sign unused.
float half_of_ue4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (bits == 0x7f) return 0.0f;
  return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -10)
                       : std::ldexp(static_cast<float>(8 + fraction), exponent - 11);
}

// As F16: a scale has 4 significant bits, a value 2, and their exponents are small.
void widen_nvfp4(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockNVFP4*>(in);
  auto* halves = reinterpret_cast<u16_le*>(out);
  for (size_t i = 0; i < 64; ++i) {
    const size_t sub = i / 16, place = i % 16;
    const int q = block.qs[8 * sub + place % 8] >> (place / 8 * 4) & 15;
    const uint16_t bits = f16_from_f32(half_of_ue4m3(block.scales[sub]) *
                                       static_cast<float>(codebook_value(Codebook::kE2m1, q)));
    halves[i] = {static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8)};
  }
}

// Scale number `s` of those that are 4 bits of bytes.
uint8_t odd_scale(const uint8_t* scales, size_t s) {
  return static_cast<uint8_t>(1 + 2 * (scales[s / 2] >> (s % 2 * 4) & 15));
}

// 8 signs of which 7 bits are there: the number of ones is even.
int signs_of_seven(uint32_t bits) {
  const uint32_t seven = bits & 127;
  return static_cast<int>(seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7);
}

// Group number `group` of 4 weights, of 3 bits and a sign each, into a block of zeros.
void put_group_of_4(BlockHeldIQ3& held, size_t group, int magnitudes, int signs) {
  for (size_t j = 0; j < 4; ++j) {
    const size_t k = 4 * (group % 8) + j;
    const int code = (magnitudes >> (3 * j) & 7) | (signs >> j & 1) << 3;
    uint8_t& byte = held.qs[group / 8 * 16 + k % 16];
    byte = static_cast<uint8_t>(byte | code << k / 16 * 4);
  }
}

void widen_iq3_s(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ3_S*>(in);
  auto& held = *new (out) BlockHeldIQ3{};
  held.d = block.d;
  for (size_t s = 0; s < 8; ++s) held.scales[s] = odd_scale(block.scales, s);
  for (size_t group = 0; group < 64; ++group) {
    const int high = block.qh[group / 8] >> group % 8 & 1;
    put_group_of_4(held, group, kIq3sGrid[block.qs[group] | high << 8],
                   block.signs[group / 2] >> group % 2 * 4);
  }
}

void widen_iq3_xxs(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ3_XXS*>(in);
  auto& held = *new (out) BlockHeldIQ3{};
  held.d = block.d;
  for (size_t s = 0; s < 8; ++s) {
    const uint32_t rest = block.rest[s].bits();
    held.scales[s] = static_cast<uint8_t>(1 + 2 * (rest >> 28));
    for (size_t i = 0; i < 8; ++i) {
      put_group_of_4(held, 8 * s + i, kIq3XxsGrid[block.qs[8 * s + i]],
                     signs_of_seven(rest >> i / 2 * 7) >> i % 2 * 4);
    }
  }
}

// Group number `group` of 8 weights, of 2 bits each, into zeros.
void put_crumbs(uint8_t* qs, size_t group, int crumbs) {
  const size_t s = group / 4, first = group % 4 * 8;
  for (size_t j = 0; j < 8; ++j) {
    uint8_t& low = qs[s / 4 * 32 + first + j];
    low = static_cast<uint8_t>(low | (crumbs >> (2 * j) & 3) << s % 4 * 2);
  }
}

// The same with a sign each, into a block of zeros: what is 8 bytes of each plane.
void put_group_of_8(BlockHeldIQ2& held, size_t group, int magnitudes, int signs) {
  put_crumbs(held.qs, group, magnitudes);
  const size_t s = group / 4, first = group % 4 * 8;
  for (size_t j = 0; j < 8; ++j) {
    uint8_t& high = held.hmask[first + j];
    high = static_cast<uint8_t>(high | (signs >> j & 1) << s);
  }
}

void widen_iq2_xxs(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ2_XXS*>(in);
  auto& held = *new (out) BlockHeldIQ2{};
  held.d = block.d;
  for (size_t s = 0; s < 8; ++s) {
    const uint32_t rest = block.subs[s].rest.bits();
    held.scales[2 * s] = held.scales[2 * s + 1] = static_cast<uint8_t>(1 + 2 * (rest >> 28));
    for (size_t i = 0; i < 4; ++i) {
      put_group_of_8(held, 4 * s + i, kIq2XxsGrid[block.subs[s].qs[i]], signs_of_seven(rest >> 7 * i));
    }
  }
}

void widen_iq2_xs(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ2_XS*>(in);
  auto& held = *new (out) BlockHeldIQ2{};
  held.d = block.d;
  for (size_t s = 0; s < 16; ++s) held.scales[s] = odd_scale(block.scales, s);
  for (size_t group = 0; group < 32; ++group) {
    const uint32_t q = block.qs[group];
    put_group_of_8(held, group, kIq2XsGrid[q & 511], signs_of_seven(q >> 9));
  }
}

void widen_iq2_s(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ2_S*>(in);
  auto& held = *new (out) BlockHeldIQ2{};
  held.d = block.d;
  for (size_t s = 0; s < 16; ++s) held.scales[s] = odd_scale(block.scales, s);
  for (size_t group = 0; group < 32; ++group) {
    const int high = block.qh[group / 4] >> group % 4 * 2 & 3;
    put_group_of_8(held, group, kIq2SGrid[block.qs[group] | high << 8], block.signs[group]);
  }
}

void widen_iq1_s(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ1_S*>(in);
  auto& held = *new (out) BlockHeldIQ1_S{};
  held.d = block.d;
  for (size_t s = 0; s < 8; ++s) {
    const uint32_t qh = block.qh[s];
    held.scales[s] = static_cast<uint8_t>((1 + 2 * (qh >> 12 & 7)) | (qh >> 15 ? 9 : 7) << 4);
    for (size_t i = 0; i < 4; ++i) {
      put_crumbs(held.qs, 4 * s + i, kIq1Grid[block.qs[4 * s + i] | (qh >> 3 * i & 7) << 8]);
    }
  }
}

void widen_iq1_m(const uint8_t* in, uint8_t* out) {
  const auto& block = *reinterpret_cast<const BlockIQ1_M*>(in);
  auto& held = *new (out) BlockHeldIQ1_M{};
  uint32_t d = 0;
  for (size_t i = 0; i < 4; ++i) d |= (uint32_t{block.scales[i]} >> 12) << 4 * i;
  held.d = {static_cast<uint8_t>(d), static_cast<uint8_t>(d >> 8)};
  for (size_t s = 0; s < 16; ++s) {
    held.scales[s] = static_cast<uint8_t>(1 + 2 * (block.scales[s / 4] >> s % 4 * 3 & 7));
  }
  for (size_t group = 0; group < 32; ++group) {
    const uint32_t high = block.qh[group / 2] >> group % 2 * 4;
    put_group_of_8(held, group, kIq1Grid[block.qs[group] | (high & 7) << 8], high & 8 ? 255 : 0);
  }
}

}  // namespace

const std::vector<WidenedType>& widened_types() {
  static const std::vector<WidenedType> types = {
      {"Q1_0", "Q4_0", 128, sizeof(BlockQ1_0), 4 * sizeof(BlockQ4_0), widen_q1_0},
      {"Q2_0", "Q4_0", 64, sizeof(BlockQ2_0), 2 * sizeof(BlockQ4_0), widen_q2_0},
      {"TQ1_0", "Q4_0", 256, sizeof(BlockTQ1_0), 8 * sizeof(BlockQ4_0), widen_tq1_0},
      {"TQ2_0", "Q4_0", 256, sizeof(BlockTQ2_0), 8 * sizeof(BlockQ4_0), widen_tq2_0},
      {"IQ3_S", "HELD_IQ3_S", 256, sizeof(BlockIQ3_S), sizeof(BlockHeldIQ3_S), widen_iq3_s},
      {"IQ3_XXS", "HELD_IQ3_XXS", 256, sizeof(BlockIQ3_XXS), sizeof(BlockHeldIQ3_XXS), widen_iq3_xxs},
      {"IQ2_S", "HELD_IQ2", 256, sizeof(BlockIQ2_S), sizeof(BlockHeldIQ2), widen_iq2_s},
      {"IQ2_XS", "HELD_IQ2", 256, sizeof(BlockIQ2_XS), sizeof(BlockHeldIQ2), widen_iq2_xs},
      {"IQ2_XXS", "HELD_IQ2", 256, sizeof(BlockIQ2_XXS), sizeof(BlockHeldIQ2), widen_iq2_xxs},
      {"IQ1_S", "HELD_IQ1_S", 256, sizeof(BlockIQ1_S), sizeof(BlockHeldIQ1_S), widen_iq1_s},
      {"IQ1_M", "HELD_IQ1_M", 256, sizeof(BlockIQ1_M), sizeof(BlockHeldIQ1_M), widen_iq1_m},
      {"NVFP4", "F16", 64, sizeof(BlockNVFP4), 64 * sizeof(u16_le), widen_nvfp4},
  };
  return types;
}

namespace {

const WidenedType* find_widened_type(const std::string& type_name) {
  for (const WidenedType& type : widened_types()) {
    if (type_name == type.type_name) return &type;
  }
  return nullptr;
}

}  // namespace

const FormatInfo& find_held_format(const std::string& type_name) {
  const WidenedType* type = find_widened_type(type_name);
  return find_format(type ? type->held_name : type_name);
}

HeldTensor::HeldTensor(const std::string& type_name, const uint8_t* data, size_t n_bytes)
    : info_(&find_held_format(type_name)), data_(data), n_bytes_(n_bytes) {
  const WidenedType* type = find_widened_type(type_name);
  n_file_blocks_ = n_bytes / (type ? type->block_bytes : info_->block_bytes);
  if (!type) return;
  EH2O_CHECK(n_bytes % type->block_bytes == 0, n_bytes, " bytes are not whole ", type_name, " blocks of ",
             type->block_bytes);
  constexpr size_t kBlocksPerTask = 1024;
  const size_t n_blocks = n_bytes / type->block_bytes;
  widened_.resize(n_blocks * type->held_bytes);
  parallel_for(ceil_div(n_blocks, kBlocksPerTask), [&](size_t task, size_t) {
    const size_t end = std::min(n_blocks, (task + 1) * kBlocksPerTask);
    for (size_t i = task * kBlocksPerTask; i < end; ++i) {
      type->widen(data + i * type->block_bytes, widened_.data() + i * type->held_bytes);
    }
  });
  data_ = widened_.data();
  n_bytes_ = widened_.size();
}

TransposedTensor::TransposedTensor(const HeldTensor& held, size_t rows, size_t cols) {
  const FormatInfo& info = held.info();
  const PackedMatrix source(info, 1, false, held.data(), held.n_bytes(), rows, cols, nullptr);
  const bool is_wide = !info.is_quantised && info.format != PackedFormat::kF16;
  const size_t value_bytes = is_wide ? sizeof(float) : sizeof(uint16_t);
  info_ = &find_format(is_wide ? "F32" : "F16");
  data_.resize(rows * cols * value_bytes);
  std::vector<float> row(cols);
  for (size_t i = 0; i < rows; ++i) {
    source.dequantize_row(row.data(), i);
    for (size_t j = 0; j < cols; ++j) {
      const uint16_t half = f16_from_f32(row[j]);
      std::memcpy(data_.data() + (j * rows + i) * value_bytes, is_wide ? static_cast<void*>(&row[j]) : &half,
                  value_bytes);
    }
  }
}

PackedMatrix pack_tensor(const std::string& type_name, const uint8_t* data, size_t n_bytes, size_t rows,
                         size_t cols, size_t panel_cols, bool is_signed) {
  const HeldTensor held(type_name, data, n_bytes);
  return PackedMatrix(held.info(), panel_cols, is_signed, held.data(), held.n_bytes(), rows, cols, nullptr);
}

}  // namespace edgeh2o
