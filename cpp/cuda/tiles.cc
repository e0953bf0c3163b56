#include "cuda/tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "base/parallel.h"
#include "quant/record_codec.h"

namespace edgeh2o::cuda {
namespace {

// What a quant of the file becomes: its code on the device, scale * code + min where the format has minima.
template <PackedFormat kFormat>
int device_code(int q) {
  using Traits = PackedTraits<kFormat>;
  if constexpr (Traits::kCodebook != Codebook::kNone) {
    return codebook_value(Traits::kCodebook, static_cast<size_t>(q));
  } else if constexpr (kFormat == PackedFormat::kQ4_0) {
    return q;  // the kernel subtracts 8
  } else if constexpr (kFormat == PackedFormat::kQ3_K) {
    return q + 4;  // likewise: q - 4
  } else if constexpr (Traits::kOffsetLog2 >= 0) {
    return q - (1 << Traits::kOffsetLog2);
  } else {
    return q;
  }
}

// Scale and minimum of each sub-block of a record.
template <PackedFormat kFormat>
void read_scales(const Record& r, float* scale, float* min) {
  using Traits = PackedTraits<kFormat>;
  const float d = (Traits::kBf16Scale ? f32_from_bf16(r.d) : f32_from_f16(r.d)) * Traits::kUnit,
              m = f32_from_f16(r.m);
  for (size_t sub = 0; sub < kBlock / Traits::kSubBlock; ++sub) {
    if constexpr (!Traits::kTwoLevel) {
      scale[sub] = d;
      min[sub] = m;
    } else {
      scale[sub] = d * static_cast<float>(Traits::kHasMin ? r.fine[sub] : static_cast<int8_t>(r.fine[sub]));
      const float unit = Traits::kMinOfScale ? 0.125f * scale[sub] : m;
      min[sub] = Traits::kHasMin ? -unit * static_cast<float>(r.fine_min[sub]) : 0.0f;
    }
  }
}

// Which kind of tiles holds a quantised format.
template <PackedFormat kFormat>
constexpr WeightFormat tile_format() {
  using Traits = PackedTraits<kFormat>;
  constexpr bool is_small = Traits::kSubBlock == 16;
  if constexpr (Traits::kBits == 4) {
    if constexpr (Traits::kHasMin) return is_small ? WeightFormat::kQ4SmallMin : WeightFormat::kQ4Min;
    return is_small ? WeightFormat::kQ4Small : WeightFormat::kQ4;
  } else {
    static_assert(!(Traits::kHasMin && is_small));
    if constexpr (Traits::kHasMin) return WeightFormat::kQ8Min;
    return is_small ? WeightFormat::kQ8Small : WeightFormat::kQ8;
  }
}

// Where byte `k` of the tile's depth lies for output `row` of a panel: as tiled_weight of the kernels.
template <int kBits>
void put_code(uint8_t* tile, size_t row, size_t k, int code) {
  const size_t half = row / 8, lane = row % 8 * 4 + k % 16 / 4, b = k / 32, is_high = k % 32 / 16,
               byte = k % 4;
  if constexpr (kBits == 4) {
    tile[lane * 16 + half * 8 + b * 4 + byte] |= static_cast<uint8_t>(code << (4 * is_high));
  } else {
    tile[half * 512 + lane * 16 + b * 8 + is_high * 4 + byte] = static_cast<uint8_t>(code);
  }
}

// The power of two that brings the largest scale to [2^12, 2^13), where f16 is precise.
float row_factor(float largest) {
  if (!(largest > 0.0f) || !std::isfinite(largest)) return 1.0f;
  return std::ldexp(1.0f, std::max(std::ilogb(largest) - 12, -126));
}

template <PackedFormat kFormat>
void pack_row(const uint8_t* data, size_t n_records, size_t row, uint8_t* values, uint16_t* scales,
              float* factor) {
  using Device = WeightTraits<tile_format<kFormat>()>;
  constexpr size_t kSubBlocks = kBlock / PackedTraits<kFormat>::kSubBlock;
  constexpr auto kBlocks = static_cast<size_t>(Device::kBlocks);
  float scale[2], min[2], largest = 0.0f;
  for (size_t record = 0; record < n_records; ++record) {
    read_scales<kFormat>(read_record<kFormat>(data, record), scale, min);
    for (size_t sub = 0; sub < kSubBlocks; ++sub) {
      largest = std::max({largest, std::fabs(scale[sub]), std::fabs(min[sub])});
    }
  }
  *factor = row_factor(largest);
  for (size_t record = 0; record < n_records; ++record) {
    const Record r = read_record<kFormat>(data, record);
    read_scales<kFormat>(r, scale, min);
    const size_t tile = record / 2, first = record % 2 * kSubBlocks;
    uint16_t* parts = scales + (tile * kPanelRows + row) * Device::kParts + first;
    for (size_t sub = 0; sub < kSubBlocks; ++sub) {
      parts[sub] = f16_from_f32(scale[sub] / *factor);
      if (Device::kHasMin) parts[kBlocks + sub] = f16_from_f32(min[sub] / *factor);
    }
    uint8_t* out = values + tile * Device::kTileBytes;
    for (size_t k = 0; k < kBlock; ++k) {
      put_code<Device::kBits>(out, row, record % 2 * kBlock + k, device_code<kFormat>(r.quants[k]));
    }
  }
}

using PackRow = void (*)(const uint8_t*, size_t, size_t, uint8_t*, uint16_t*, float*);

PackRow row_packer(PackedFormat format) {
  switch (format) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return &pack_row<PackedFormat::name>;
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return nullptr;
  }
}

// What the traits say of a format that is known when the program runs; of floats nothing.
struct TileKind {
  const char *gemm, *gemm_tall;
  size_t tile_bytes, n_parts;
};

TileKind tile_kind(WeightFormat format) {
  switch (format) {
#define EH2O_CASE(tiled, name, bits, block, has_min)                   \
  case WeightFormat::tiled:                                            \
    return {"gemm_" #name, block == 32 ? "gemm_tall_" #name : nullptr, \
            WeightTraits<WeightFormat::tiled>::kTileBytes, WeightTraits<WeightFormat::tiled>::kParts};
    EH2O_TILED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return {"", nullptr, 0, 0};
  }
}

size_t element_bytes(WeightFormat format) { return format == WeightFormat::kF32 ? 4 : 2; }

}  // namespace

WeightFormat device_format(PackedFormat format) {
  switch (format) {
    case PackedFormat::kF32:
      return WeightFormat::kF32;
    case PackedFormat::kF16:
      return WeightFormat::kF16;
    case PackedFormat::kBF16:
      return WeightFormat::kBF16;
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return tile_format<PackedFormat::name>();
      EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
  }
  return WeightFormat::kF32;
}

const char* multiply_kernel(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "multiply_f32";
    case WeightFormat::kF16:
      return "multiply_f16";
    case WeightFormat::kBF16:
      return "multiply_bf16";
#define EH2O_CASE(tiled, name, bits, block, has_min) \
  case WeightFormat::tiled:                          \
    return "multiply_" #name;
      EH2O_TILED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
  }
  return "";
}

GemmKernel gemm_kernel(WeightFormat format, size_t n_rows, size_t n_out, size_t n_processors) {
  const TileKind kind = tile_kind(format);
  const size_t n_tall_blocks = ceil_div(n_rows, kGemmTallRows) * ceil_div(n_out, kGemmTile);
  const bool is_tall = kind.gemm_tall && n_rows > kGemmTile && n_tall_blocks >= 2 * n_processors;
  const size_t rows = is_tall ? kGemmTallRows : kGemmTile;
  // Of a stage: activations and their scales, weights and theirs.
  const size_t panel = kind.tile_bytes + kPanelRows * kind.n_parts * sizeof(uint16_t);
  const size_t stage = rows * (kTileDepth + kTileDepth / 32 * sizeof(float)) + kGemmTile / kPanelRows * panel;
  return {is_tall ? kind.gemm_tall : kind.gemm, rows, kGemmStages * stage};
}

TileSizes::TileSizes(WeightFormat format, size_t rows, size_t cols)
    : n_panels(rows), n_tiles(0), value_bytes(cols * element_bytes(format)), scale_bytes(0) {
  if (!is_tiled(format)) return;
  const TileKind kind = tile_kind(format);
  n_panels = ceil_div(rows, kPanelRows);
  n_tiles = ceil_div(cols, kTileDepth);
  value_bytes = n_tiles * kind.tile_bytes;
  scale_bytes = n_tiles * kPanelRows * kind.n_parts * sizeof(uint16_t);
}

void pack_panels(const FormatInfo& info, const uint8_t* data, size_t rows, size_t cols,
                 const int32_t* row_order, size_t first, size_t count, uint8_t* values, uint16_t* scales,
                 float* factors) {
  const WeightFormat format = device_format(info.format);
  const TileSizes sizes(format, rows, cols);
  const size_t row_bytes = cols / info.block_values * info.block_bytes;
  const auto source = [&](size_t row) {
    return data + (row_order ? static_cast<size_t>(row_order[row]) : row) * row_bytes;
  };
  if (!is_tiled(format)) {
    parallel_for(count, [&](size_t i, size_t) {
      std::memcpy(values + i * sizes.value_bytes, source(first + i), sizes.value_bytes);
    });
    return;
  }
  const PackRow pack = row_packer(info.format);
  parallel_for(count, [&](size_t i, size_t) {
    uint8_t* const panel = values + i * sizes.value_bytes;
    uint16_t* const panel_scales = scales + i * sizes.scale_bytes / sizeof(uint16_t);
    std::memset(panel, 0, sizes.value_bytes);
    std::memset(panel_scales, 0, sizes.scale_bytes);
    for (size_t row = 0; row < kPanelRows; ++row) {
      const size_t output = (first + i) * kPanelRows + row;
      float* const factor = factors + i * kPanelRows + row;
      *factor = 0.0f;
      if (output >= rows) continue;
      pack(source(output), cols / kBlock, row, panel, panel_scales, factor);
    }
  });
}

}  // namespace edgeh2o::cuda
