// How weights lie in memory after packing. Shared by the packer (baseline code) and the kernels (per ISA),
// hence types and constants only.
//
// A matrix [n_out][depth] is cut into panels of nr outputs. A float panel is [depth][nr]. A quantised panel
// is a sequence of records, one per 32 weights of depth:
//   two-level formats, in front of every 8th record:  f16 d[nr], f16 dmin[nr] if kHasMin
//   scale:  f16 d[nr], f16 m[nr] if kHasMin           (one level), or
//           u8 (s8 if not kHasMin) scale[32 / kSubBlock][nr], u8 min[nr] if kHasMin    (two levels)
//   quants: u8[4][nr][4], low nibble: depth 4 j + i, high nibble: depth 4 j + i + 16   (kNibbles), or
//           [8][nr][4], depth 4 j + i
// A weight is scale * (q - 2^kOffsetLog2) + min. 8-bit quants are stored with the offset removed (signed)
// where the ISA multiplies signed weights (PackLayout::signed_formats).
//
// Activations are packed in tiles of mr rows, one record per 32 values of depth:
//   f32 d[mr], f32 sum[mr] (d times the sum of the quants), s32 negated_sum8[2][mr] (-8 times the sum of all
//   quants, and of the first 16), s8[8][mr][4]
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
  kQ8_0
};
inline constexpr size_t kPackedFormats = 11;

inline constexpr size_t kBlock = 32;        // depth of one record
inline constexpr size_t kSuperRecords = 8;  // records that share a two-level header

template <PackedFormat>
struct PackedTraits;

#define EH2O_PACKED_TRAITS(format, bits, offset_log2, has_min, sub_block, two_level) \
  template <>                                                                        \
  struct PackedTraits<PackedFormat::format> {                                        \
    static constexpr int kBits = bits;                                               \
    static constexpr bool kNibbles = bits == 4;                                      \
    static constexpr int kOffsetLog2 = offset_log2; /* -1: no offset */              \
    static constexpr bool kHasMin = has_min;                                         \
    static constexpr size_t kSubBlock = sub_block;                                   \
    static constexpr bool kTwoLevel = two_level;                                     \
  };
EH2O_PACKED_TRAITS(kQ4_0, 4, 3, false, 32, false)
EH2O_PACKED_TRAITS(kQ4_1, 4, -1, true, 32, false)
EH2O_PACKED_TRAITS(kQ4_K, 4, -1, true, 32, true)
EH2O_PACKED_TRAITS(kQ5_0, 5, 4, false, 32, false)
EH2O_PACKED_TRAITS(kQ5_1, 5, -1, true, 32, false)
EH2O_PACKED_TRAITS(kQ5_K, 5, -1, true, 32, true)
EH2O_PACKED_TRAITS(kQ6_K, 6, 5, false, 16, true)
EH2O_PACKED_TRAITS(kQ8_0, 8, 7, false, 32, false)
#undef EH2O_PACKED_TRAITS

// Bytes of the parts of a packed panel of nr columns.
template <PackedFormat kFormat>
struct PackedSizes {
  using Traits = PackedTraits<kFormat>;
  static constexpr size_t kHeaderPerColumn = Traits::kTwoLevel ? (Traits::kHasMin ? 4 : 2) : 0;
  static constexpr size_t kScalesPerColumn =
      (Traits::kTwoLevel ? 32 / Traits::kSubBlock : 2) + (Traits::kHasMin ? (Traits::kTwoLevel ? 1 : 2) : 0);
  static constexpr size_t kQuantsPerColumn = Traits::kNibbles ? 16 : 32;
  static constexpr size_t kRecordPerColumn = kScalesPerColumn + kQuantsPerColumn;
  static constexpr size_t kSuperPerColumn = kHeaderPerColumn + kSuperRecords * kRecordPerColumn;
  // An unpacked record, as the matrix kernel reads it: f32 scales, f32 mins, u8 or s8 quants[8][nr][4], or
  // [4][nr][8] where the ISA multiplies matrices.
  static constexpr size_t kUnpackedPerColumn = 4 * (32 / Traits::kSubBlock) + (Traits::kHasMin ? 4 : 0) + 32;
};

// Bytes per row and record of packed activations.
inline constexpr size_t kActivationHeaderPerRow = 16;
inline constexpr size_t kActivationRecordPerRow = kActivationHeaderPerRow + kBlock;

#define EH2O_QUANTISED_FORMATS(X) X(kQ4_0) X(kQ4_1) X(kQ4_K) X(kQ5_0) X(kQ5_1) X(kQ5_K) X(kQ6_K) X(kQ8_0)

}  // namespace edgeh2o
