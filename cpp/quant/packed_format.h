// How weights lie in memory after packing. Shared by the packer (baseline code) and the kernels (per ISA),
// hence types and constants only.
//
// A matrix [n_out][depth] is cut into panels of nr outputs. A float panel is [depth][nr]. A quantised panel
// is a sequence of records, one per 32 weights of depth:
//   two-level formats, in front of every 8th record:  f16 d[nr], f16 dmin[nr] if kHasMin, not kMinOfScale
//   scale:  f16 d[nr] (bf16 if kBf16Scale), f16 m[nr] if kHasMin                       (one level), or
//           u8 (s8 if not kHasMin) scale[32 / kSubBlock][nr], u8 min[32 / kSubBlock][nr] if kHasMin, or both
//           in one byte, the scale low and the min high (kNibbleScales), the latter in eighths of minus the
//           scale where kMinOfScale
//   quants: a plane of their low 8, 4 or 2 bits, then one of the 1 or 2 bits above these. A plane of B bits
//           is u8[B][nr][4]: bits B (s / B) and on of [s % B][nr][i] belong to depth 4 s + i, s < 8.
// A weight is scale * (q - 2^kOffsetLog2) + min, or scale * codebook[q] * codebook_unit where the format has
// a codebook: its values plus 2^kOffsetLog2 take the place of q when a kernel has looked them up. 8-bit
// quants are stored with the offset removed (signed) where the ISA multiplies signed weights
// (PackLayout::signed_formats).
//
// Activations are packed in tiles of mr rows, one record per 32 values of depth:
//   f32 d[mr], f32 sum[mr] (d times the sum of the quants), s32 starts[4][mr], s8[8][mr][4]
// starts are where dot products with unsigned weights begin: the ISA's kDotBias minus 8 and 128 times the sum
// of all quants, and minus 32 times that of the first 16 and of the last 16. Where a lane holds two parts of
// a product (PackLayout::has_pairs) all but the first are pairs of s16, without a bias, of the quants 4 i, 4
// i + 1 and of 4 i + 2, 4 i + 3; the second is minus 16 times their sum.
//
// 32 values share a scale; or 256, where a weight's format asks for it (PackLayout::scale_block): then
// products with 16 times 6 or 32 times 5 bits of weights, without their offset, fit 16 bits, because the
// scale is such that the magnitudes of 16 quants do not add up to more than kMostOf16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

enum class PackedFormat : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ4_K,
  kQ5_0,
  kQ5_1,
  kQ5_K,
  kQ6_K,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kHeldIQ2,  // types of files with grids, as widened_types.cc holds them
  kHeldIQ3_S,
  kHeldIQ3_XXS,
  kHeldIQ1_S,
  kHeldIQ1_M
};
inline constexpr size_t kPackedFormats = static_cast<size_t>(PackedFormat::kHeldIQ1_M) + 1;

// Files keep packed matrices: to be raised with every change of how one lies in memory, of what is held as
// what (widened_types.cc), and of the order of PackedFormat. tests/kernels/test_packed_layout.py tells when.
inline constexpr uint32_t kPackedLayoutVersion = 1;

inline constexpr size_t kBlock = 32;        // depth of one record
inline constexpr size_t kSuperRecords = 8;  // records that share a two-level header
inline constexpr size_t kSuperBlock = kBlock * kSuperRecords;
inline constexpr int kMostOf16 = 1023;

// What 4 stored bits stand for where the levels are not evenly spaced.
enum class Codebook : uint8_t { kNone, kIq4, kE2m1, kIq2, kIq3S, kIq3Xxs, kIq1 };
inline constexpr size_t kCodebookSize = 16;

constexpr int codebook_value(Codebook codebook, size_t index) {
  constexpr int8_t kIq4Values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  constexpr int8_t kE2m1Values[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
  constexpr int8_t kIq2Values[] = {8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0};     // sign above
  constexpr int8_t kIq1Values[] = {-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0};  // 8 (q - 1) +- 1
  constexpr int8_t kIq3SValues[] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
  constexpr int8_t kIq3XxsValues[] = {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31};
  switch (codebook) {
    case Codebook::kIq4:
      return kIq4Values[index];
    case Codebook::kIq2:
      return kIq2Values[index];
    case Codebook::kIq3S:
      return kIq3SValues[index];
    case Codebook::kIq3Xxs:
      return kIq3XxsValues[index];
    case Codebook::kIq1:
      return kIq1Values[index];
    default:
      return kE2m1Values[index];
  }
}

// What the values are counted in: a power of two that half precision could not take into a small scale.
constexpr float codebook_unit(Codebook codebook) {
  if (codebook == Codebook::kIq2 || codebook == Codebook::kIq1) return 0.125f;
  return codebook == Codebook::kIq3Xxs ? 0.5f : 1.0f;
}

template <PackedFormat>
struct PackedTraits;

// bits: of what is multiplied, after the codebook; stored: of the quants in memory.
#define EH2O_PACKED_TRAITS(format, bits, stored, offset_log2, has_min, sub_block, two_level, codebook) \
  template <>                                                                                          \
  struct PackedTraits<PackedFormat::format> {                                                          \
    static constexpr int kBits = bits;                                                                 \
    static constexpr int kLowBits = stored >= 8 ? 8 : stored >= 4 ? 4 : 2;                             \
    static constexpr int kHighBits = stored - kLowBits;                                                \
    static constexpr int kOffsetLog2 = offset_log2; /* -1: no offset */                                \
    static constexpr bool kHasMin = has_min;                                                           \
    static constexpr size_t kSubBlock = sub_block;                                                     \
    static constexpr bool kTwoLevel = two_level;                                                       \
    static constexpr bool kNibbleScales = two_level && stored == 2;                                    \
    static constexpr bool kMinOfScale = kNibbleScales && sub_block == 32;                              \
    static constexpr Codebook kCodebook = Codebook::codebook;                                          \
    static constexpr float kUnit = codebook_unit(kCodebook);                                           \
    static constexpr bool kBf16Scale = kCodebook == Codebook::kE2m1;                                   \
  };
EH2O_PACKED_TRAITS(kQ4_0, 4, 4, 3, false, 32, false, kNone)
EH2O_PACKED_TRAITS(kQ4_1, 4, 4, -1, true, 32, false, kNone)
EH2O_PACKED_TRAITS(kQ4_K, 4, 4, -1, true, 32, true, kNone)
EH2O_PACKED_TRAITS(kQ5_0, 5, 5, 4, false, 32, false, kNone)
EH2O_PACKED_TRAITS(kQ5_1, 5, 5, -1, true, 32, false, kNone)
EH2O_PACKED_TRAITS(kQ5_K, 5, 5, -1, true, 32, true, kNone)
EH2O_PACKED_TRAITS(kQ6_K, 6, 6, 5, false, 16, true, kNone)
EH2O_PACKED_TRAITS(kQ8_0, 8, 8, 7, false, 32, false, kNone)
EH2O_PACKED_TRAITS(kQ2_K, 4, 2, -1, true, 16, true, kNone)
EH2O_PACKED_TRAITS(kQ3_K, 4, 3, 2, false, 16, true, kNone)
EH2O_PACKED_TRAITS(kIQ4_NL, 8, 4, 7, false, 32, false, kIq4)
EH2O_PACKED_TRAITS(kIQ4_XS, 8, 4, 7, false, 32, true, kIq4)
EH2O_PACKED_TRAITS(kMXFP4, 5, 4, 4, false, 32, false, kE2m1)
EH2O_PACKED_TRAITS(kHeldIQ2, 8, 3, 7, false, 16, true, kIq2)
EH2O_PACKED_TRAITS(kHeldIQ3_S, 5, 4, 4, false, 32, true, kIq3S)
EH2O_PACKED_TRAITS(kHeldIQ3_XXS, 6, 4, 5, false, 32, true, kIq3Xxs)
EH2O_PACKED_TRAITS(kHeldIQ1_S, 4, 2, -1, true, 32, true, kNone)
EH2O_PACKED_TRAITS(kHeldIQ1_M, 5, 3, 4, false, 16, true, kIq1)
#undef EH2O_PACKED_TRAITS

#define EH2O_QUANTISED_FORMATS(X) \
  X(kQ4_0)                        \
  X(kQ4_1)                        \
  X(kQ4_K)                        \
  X(kQ5_0)                        \
  X(kQ5_1)                        \
  X(kQ5_K)                        \
  X(kQ6_K)                        \
  X(kQ8_0)                        \
  X(kQ2_K)                        \
  X(kQ3_K)                        \
  X(kIQ4_NL)                      \
  X(kIQ4_XS) X(kMXFP4) X(kHeldIQ2) X(kHeldIQ3_S) X(kHeldIQ3_XXS) X(kHeldIQ1_S) X(kHeldIQ1_M)

// Bytes of the parts of a packed panel of nr columns.
template <PackedFormat kFormat>
struct PackedSizes {
  using Traits = PackedTraits<kFormat>;
  static constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock;
  static constexpr size_t kParts = Traits::kHasMin ? 2 : 1;  // scales, and mins alike
  static constexpr size_t kHeaderPerColumn = Traits::kTwoLevel ? (Traits::kMinOfScale ? 2 : 2 * kParts) : 0;
  static constexpr size_t kScalesPerColumn =
      Traits::kNibbleScales ? kSubBlocks : (Traits::kTwoLevel ? kSubBlocks : 2) * kParts;
  static constexpr size_t kLowPerColumn = 4 * Traits::kLowBits;
  static constexpr size_t kQuantsPerColumn = kLowPerColumn + 4 * Traits::kHighBits;
  static constexpr size_t kRecordPerColumn = kScalesPerColumn + kQuantsPerColumn;
  static constexpr size_t kSuperPerColumn = kHeaderPerColumn + kSuperRecords * kRecordPerColumn;
};

// A panel as the matrix kernel of an ISA reads it, unpacked: records of u8 or s8 quants[8][nr][4], or
// [4][nr][8] where the ISA multiplies matrices, each behind its scales.
enum class Unpacked : uint8_t {
  kFloats,  // f32 scales[kSubBlocks][nr], f32 mins alike
  // Where activations share a scale by 256. In front of every 8th record: f32 d[nr], f32 dmin[nr] / 32.
  kWords,  // s32 scales[kSubBlocks][nr]; with a min s32 pairs[nr], the min of the first 16 in the low half
  kBytes,  // quants times their scale, plus kByteOffset without a min; pairs alike
  // As kFloats, but 8-bit quants, unsigned, in planes of their low and high 4 bits, u8[2][8][nr][4].
  kNibbles
};
inline constexpr int kByteOffset = 127;

// Whether quants times their scale fit a byte: of 2 bits times 4, and of 3 bits times 6, both signed.
template <PackedFormat kFormat>
inline constexpr bool kFitsBytes =
    kFormat == PackedFormat::kQ2_K || kFormat == PackedFormat::kQ3_K || kFormat == PackedFormat::kHeldIQ1_S;

// Bytes of the parts of an unpacked panel.
template <PackedFormat kFormat, Unpacked kKind>
struct UnpackedSizes {
  using Packed = PackedSizes<kFormat>;
  static constexpr bool kHasFloats = kKind == Unpacked::kFloats || kKind == Unpacked::kNibbles;
  static constexpr size_t kPairsPerColumn = !kHasFloats && Packed::kParts == 2 ? 4 : 0;
  static constexpr size_t kScalesPerColumn = kHasFloats ? 4 * Packed::kSubBlocks * Packed::kParts
                                             : kKind == Unpacked::kWords ? 4 * Packed::kSubBlocks
                                                                         : 0;
  static constexpr size_t kQuantsFrom = kScalesPerColumn + kPairsPerColumn;  // per column
  static constexpr size_t kRecordPerColumn = kQuantsFrom + (kKind == Unpacked::kNibbles ? 64 : 32);
  static constexpr size_t kHeaderPerColumn = kHasFloats ? 0 : 4 * Packed::kParts;
  static constexpr size_t kSuperPerColumn = kHeaderPerColumn + kSuperRecords * kRecordPerColumn;
};

// Bytes per column of a super-block of any format; kBytes takes less than kWords, kFloats than kNibbles.
constexpr size_t max_unpacked_super_per_column() {
  size_t largest = 0;
  const auto include = [&](size_t size) { largest = size > largest ? size : largest; };
#define EH2O_MAX(name)                                                                   \
  include(UnpackedSizes<PackedFormat::name, PackedTraits<PackedFormat::name>::kBits == 8 \
                                                ? Unpacked::kNibbles                     \
                                                : Unpacked::kFloats>::kSuperPerColumn);  \
  include(UnpackedSizes<PackedFormat::name, Unpacked::kWords>::kSuperPerColumn);
  EH2O_QUANTISED_FORMATS(EH2O_MAX)
#undef EH2O_MAX
  return largest;
}

// Bytes per row and record of packed activations.
inline constexpr size_t kActivationHeaderPerRow = 24;
inline constexpr size_t kActivationRecordPerRow = kActivationHeaderPerRow + kBlock;
// Rows of the smallest tile of a matrix-vector kernel that has room for n <= 8: above 4 they are even, as
// code of 5 or 7 rows would hardly be faster.
constexpr size_t vector_tile_rows(size_t n) { return n <= 4 ? n : n + n % 2; }

}  // namespace edgeh2o
