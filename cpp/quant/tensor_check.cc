#include "quant/tensor_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "quant/block_formats.h"
#include "quant/packed_format.h"

namespace edgeh2o {
namespace {

template <typename T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

constexpr uint16_t kF16Exponent = 0x7c00, kBf16Exponent = 0x7f80;
constexpr uint32_t kF32Exponent = 0x7f800000;

// Is a float of type T at one of `offsets` NaN or infinite? Both have an exponent of ones alone.
template <typename T, size_t... kOffsets>
bool has_bad_float(const uint8_t* block, T exponent) {
  return (((read<T>(block + kOffsets) & exponent) == exponent) || ...);
}

template <typename IsBad>
std::optional<size_t> find_first(const uint8_t* data, size_t n_blocks, size_t block_bytes,
                                 const IsBad& is_bad) {
  for (size_t i = 0; i < n_blocks; ++i) {
    if (is_bad(data + i * block_bytes)) return i;
  }
  return std::nullopt;
}

// The shared exponent of 255 is NaN; the two below it overflow together with large values.
bool is_bad_mxfp4(const uint8_t* p) {
  const auto block = read<BlockMXFP4>(p);
  if (block.e < 253) return false;
  int largest = 0;
  for (const uint8_t pair : block.qs) {
    for (const size_t q : {pair & 0xf, pair >> 4}) {
      largest = std::max(largest, std::abs(codebook_value(Codebook::kE2m1, q)));
    }
  }
  return block.e == 255 || !std::isfinite(std::ldexp(static_cast<float>(largest), block.e - 128));
}

}  // namespace

std::optional<size_t> find_bad_block(const FormatInfo& info, const uint8_t* data, size_t n_bytes) {
  EH2O_CHECK(n_bytes % info.block_bytes == 0, n_bytes, " bytes are not whole ", info.type_name, " blocks of ",
             info.block_bytes);
  const auto find = [&](const auto& is_bad) {
    return find_first(data, n_bytes / info.block_bytes, info.block_bytes, is_bad);
  };
#define EH2O_ONE_SCALE(name)                                                     \
  case PackedFormat::k##name:                                                    \
    return find([](const uint8_t* p) {                                           \
      return has_bad_float<uint16_t, offsetof(Block##name, d)>(p, kF16Exponent); \
    });
#define EH2O_TWO_SCALES(name, second)                                                                        \
  case PackedFormat::k##name:                                                                                \
    return find([](const uint8_t* p) {                                                                       \
      return has_bad_float<uint16_t, offsetof(Block##name, d), offsetof(Block##name, second)>(p,             \
                                                                                              kF16Exponent); \
    });
  switch (info.format) {
    EH2O_ONE_SCALE(Q4_0)
    EH2O_ONE_SCALE(Q5_0)
    EH2O_ONE_SCALE(Q8_0)
    EH2O_ONE_SCALE(Q3_K)
    EH2O_ONE_SCALE(Q6_K)
    EH2O_ONE_SCALE(IQ4_NL)
    EH2O_ONE_SCALE(IQ4_XS)
    EH2O_ONE_SCALE(HeldIQ2)
    EH2O_ONE_SCALE(HeldIQ3_S)
    EH2O_ONE_SCALE(HeldIQ3_XXS)
    EH2O_ONE_SCALE(HeldIQ1_S)
    EH2O_ONE_SCALE(HeldIQ1_M)
    EH2O_TWO_SCALES(Q4_1, m)
    EH2O_TWO_SCALES(Q5_1, m)
    EH2O_TWO_SCALES(Q2_K, dmin)
    EH2O_TWO_SCALES(Q4_K, dmin)
    EH2O_TWO_SCALES(Q5_K, dmin)
    case PackedFormat::kMXFP4:
      return find(is_bad_mxfp4);
    case PackedFormat::kF32:
      return find([](const uint8_t* p) { return has_bad_float<uint32_t, 0>(p, kF32Exponent); });
    case PackedFormat::kF16:
      return find([](const uint8_t* p) { return has_bad_float<uint16_t, 0>(p, kF16Exponent); });
    case PackedFormat::kBF16:
      return find([](const uint8_t* p) { return has_bad_float<uint16_t, 0>(p, kBf16Exponent); });
  }
#undef EH2O_ONE_SCALE
#undef EH2O_TWO_SCALES
  return std::nullopt;
}

}  // namespace edgeh2o
