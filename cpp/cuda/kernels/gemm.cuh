// Matrix times matrix on tensor cores: 64 or 128 rows of activations by 64 outputs a block, 64 of depth a
// stage. All that the inner loop reads comes by asynchronous copies, scales too.
//
// The sums of a block of 32 (or 16) need a scale each, which bounds the kernel rather than the products. An
// accumulator that starts at the bits of 1.5 * 2^23 is a float of that plus the sum: one fma takes the offset
// away and scales, exactly but for its rounding, since scales of weights are f16 (13 bits with the offset).
#pragma once

#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

inline constexpr int kGemmThreads = 128, kGemmOutputs = kGemmTile;
inline constexpr int kGemmPanels = kGemmOutputs / kPanelRows;
inline constexpr int32_t kMagicBits = 0x4B400000;
inline constexpr float kMagic = 12582912.0f;

// Where the parts of a stage begin: activations, weights, scales of rows [rows][2], scales of weights.
template <WeightFormat kFormat, int kRows>
struct GemmStage {
  using Traits = WeightTraits<kFormat>;
  static constexpr int kTiles = kRows * kTileDepth;
  static constexpr int kRowScales = kTiles + kGemmPanels * Traits::kTileBytes;
  static constexpr int kScales = kRowScales + kRows * 2 * 4;
  static constexpr int kPanelScaleBytes = kPanelRows * Traits::kParts * 2;
  static constexpr int kBytes = kScales + kGemmPanels * kPanelScaleBytes;
};

// Where piece `piece` (16 bytes) of a row of activations lies in a stage: rows of ldmatrix in different
// banks.
EH2O_DEVICE int swizzled(int row, int piece) { return row * kTileDepth + ((piece ^ (row >> 1 & 3)) << 4); }

// Four codes 0 to 15, less 8.
EH2O_DEVICE uint32_t less_eight(uint32_t codes) {
  return ((codes | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

// The products of 16 rows and 8 outputs over a block of depth, as floats of kMagic more: part 0 is 32 of
// depth, 1 and 2 are its halves.
template <int kPart>
EH2O_DEVICE void multiply_block(float (&out)[4], const uint32_t (&rows)[4], uint32_t low, uint32_t high) {
  int32_t sums[4];
  if constexpr (kPart == 0) {
    mma_s8(sums, rows, low, high, kMagicBits);
  } else if constexpr (kPart == 1) {
    mma_s8_half(sums, rows[0], rows[1], low, kMagicBits);
  } else {
    mma_s8_half(sums, rows[2], rows[3], high, kMagicBits);
  }
  EH2O_UNROLL
  for (int e = 0; e < 4; ++e) out[e] = float_of_bits(static_cast<uint32_t>(sums[e]));
}

// What a warp adds up: 16 kM rows by 32 outputs as kM x 4 fragments.
template <int kM>
struct GemmSums {
  float sums[kM][4][4];
};

// Adds the products of one block of the rows' scales d. scales: of the lane's first output of every fragment.
template <WeightFormat kFormat, int kPart, int kM>
EH2O_DEVICE void add_block(GemmSums<kM>& acc, const uint32_t (&rows)[kM][4], const float (&d)[kM][2],
                           const uint32_t (&low)[4], const uint32_t (&high)[4],
                           const uint16_t* const (&scales)[4], int part) {
  using Traits = WeightTraits<kFormat>;
  float totals[kM][2] = {};
  if constexpr (Traits::kHasMin) {  // sums of the activations: products with ones
    EH2O_UNROLL
    for (int i = 0; i < kM; ++i) {
      float ones[4];
      multiply_block<kPart>(ones, rows[i], 0x01010101u, 0x01010101u);
      EH2O_UNROLL
      for (int h = 0; h < 2; ++h) totals[i][h] = d[i][h] * (ones[2 * h] - kMagic);
    }
  }
  EH2O_UNROLL
  for (int j = 0; j < 4; ++j) {
    float scale[2], offset[2], min[2] = {};
    EH2O_UNROLL
    for (int e = 0; e < 2; ++e) {
      scale[e] = f32_from_f16(scales[j][e * Traits::kParts + part]);
      offset[e] = -kMagic * scale[e];
      if constexpr (Traits::kHasMin)
        min[e] = f32_from_f16(scales[j][e * Traits::kParts + Traits::kBlocks + part]);
    }
    EH2O_UNROLL
    for (int i = 0; i < kM; ++i) {
      float products[4];
      multiply_block<kPart>(products, rows[i], low[j], high[j]);
      EH2O_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float scaled = multiply_add(products[e], scale[e % 2], offset[e % 2]);
        float sum = multiply_add(scaled, d[i][e / 2], acc.sums[i][j][e]);
        if constexpr (Traits::kHasMin) sum = multiply_add(totals[i][e / 2], min[e % 2], sum);
        acc.sums[i][j][e] = sum;
      }
    }
  }
}

template <WeightFormat kFormat, int kRows>
EH2O_DEVICE void gemm_tiles(const MultiplyArguments& a) {
  using Traits = WeightTraits<kFormat>;
  using Stage = GemmStage<kFormat, kRows>;
  EH2O_SHARED_MEMORY;
  constexpr int kTilePieces = Traits::kTileBytes / 16, kScalePieces = Stage::kPanelScaleBytes / 16,
                kM = kRows / 32;
  const int t = thread_index(), lane = t % kWarpSize, warp = t / kWarpSize;
  const int n_rows = static_cast<int>(a.n_rows), n_tiles = static_cast<int>(a.w.n_tiles);
  const int n_panels = static_cast<int>((a.w.n_out + kPanelRows - 1) / kPanelRows);
  const int first_panel = block_x() * kGemmPanels, first_row = block_y() * kRows;
  const auto row_of = [&](int row) {
    return static_cast<size_t>(row < n_rows ? row : n_rows - 1);
  };  // what is beyond is not stored
  const auto tile_of = [&](int panel, int tile) {
    return static_cast<size_t>(panel < n_panels ? panel : n_panels - 1) * a.w.n_tiles +
           static_cast<size_t>(tile);
  };

  const auto load = [&](int tile) {
    if (tile < n_tiles) {
      uint8_t* const stage = shared_memory + tile % kGemmStages * Stage::kBytes;
      EH2O_NO_UNROLL
      for (int i = t; i < kRows * 4; i += kGemmThreads) {
        const int row = i / 4, piece = i % 4;
        copy_async16(stage + swizzled(row, piece),
                     a.xq.q + row_of(first_row + row) * a.xq.padded + tile * kTileDepth + piece * 16);
      }
      for (int i = t; i < kGemmPanels * kTilePieces; i += kGemmThreads) {
        const size_t from = tile_of(first_panel + i / kTilePieces, tile) * Traits::kTileBytes;
        copy_async16(stage + Stage::kTiles + i * 16,
                     static_cast<const uint8_t*>(a.w.values) + from + i % kTilePieces * 16);
      }
      for (int row = t; row < kRows; row += kGemmThreads) {
        copy_async8(stage + Stage::kRowScales + row * 8,
                    a.xq.d + row_of(first_row + row) * (a.xq.padded / 32) + 2 * tile);
      }
      for (int i = t; i < kGemmPanels * kScalePieces; i += kGemmThreads) {
        const size_t from = tile_of(first_panel + i / kScalePieces, tile) * kPanelRows * Traits::kParts;
        copy_async16(stage + Stage::kScales + i * 16, a.w.scales + from + i % kScalePieces * 8);
      }
    }
    copy_async_commit();
  };

  // The warp's rows and panels.
  const int warp_row = warp % 2 * (16 * kM), warp_panel = warp / 2 * 2;
  GemmSums<kM> acc = {};
  for (int stage = 0; stage < kGemmStages - 1; ++stage) load(stage);
  EH2O_NO_UNROLL
  for (int tile = 0; tile < n_tiles; ++tile) {
    copy_async_wait<kGemmStages - 2>();
    sync_block();  // this tile is there for all, and the one before it read by all
    load(tile + kGemmStages - 1);
    const uint8_t* const stage = shared_memory + tile % kGemmStages * Stage::kBytes;
    const uint8_t* const tiles = stage + Stage::kTiles;
    const auto* const row_scales = reinterpret_cast<const float*>(stage + Stage::kRowScales);
    const uint16_t* scales[4];
    EH2O_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int output = (warp_panel + j / 2) * kPanelRows + j % 2 * 8 + lane % 4 * 2;
      scales[j] = reinterpret_cast<const uint16_t*>(stage + Stage::kScales) + output * Traits::kParts;
    }
    EH2O_NO_UNROLL
    for (int b = 0; b < 2; ++b) {
      uint32_t rows[kM][4], low[4], high[4];
      float d[kM][2];
      EH2O_UNROLL
      for (int i = 0; i < kM; ++i) {
        load_matrix4(rows[i], stage + swizzled(warp_row + i * 16 + lane % 16, 2 * b + lane / 16));
        EH2O_UNROLL
        for (int h = 0; h < 2; ++h) d[i][h] = row_scales[2 * (warp_row + i * 16 + h * 8 + lane / 4) + b];
      }
      EH2O_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint8_t* const words = tiles + (warp_panel + j / 2) * Traits::kTileBytes + 16 * lane;
        if constexpr (Traits::kBits == 4) {
          const uint32_t both = *reinterpret_cast<const uint32_t*>(words + j % 2 * 8 + b * 4);
          low[j] = both & 0x0f0f0f0fu;
          high[j] = both >> 4 & 0x0f0f0f0fu;
          if (!Traits::kHasMin) low[j] = less_eight(low[j]), high[j] = less_eight(high[j]);
        } else {
          const auto* const pair = reinterpret_cast<const Words2*>(words + j % 2 * 512 + b * 8);
          low[j] = pair->x, high[j] = pair->y;
        }
      }
      if constexpr (Traits::kBlock == 32) {
        add_block<kFormat, 0>(acc, rows, d, low, high, scales, b);
      } else {
        add_block<kFormat, 1>(acc, rows, d, low, high, scales, 2 * b);
        add_block<kFormat, 2>(acc, rows, d, low, high, scales, 2 * b + 1);
      }
    }
  }
  EH2O_UNROLL
  for (int i = 0; i < kM; ++i) {
    EH2O_UNROLL
    for (int j = 0; j < 4; ++j) {
      EH2O_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = first_row + warp_row + i * 16 + e / 2 * 8 + lane / 4;
        const uint32_t output = static_cast<uint32_t>((first_panel + warp_panel + j / 2) * kPanelRows +
                                                      j % 2 * 8 + lane % 4 * 2 + e % 2);
        if (row >= n_rows || output >= a.w.n_out) continue;
        float sum = acc.sums[i][j][e] * a.w.row_factors[output];
        if (a.bias) sum += a.bias[output];
        float* const out = a.out + static_cast<size_t>(row) * a.out_stride + output;
        *out = a.accumulates ? *out + sum : sum;
      }
    }
  }
}

// For up to 64 rows, and for more.
#define EH2O_GEMM(format, name, bits, block, has_min)                    \
  EH2O_KERNEL(gemm_##name, MultiplyArguments, kGemmThreads) {            \
    gemm_tiles<WeightFormat::format, kGemmTile>(a);                      \
  }                                                                      \
  EH2O_KERNEL_OF(gemm_tall_##name, MultiplyArguments, kGemmThreads, 2) { \
    gemm_tiles<WeightFormat::format, kGemmTallRows>(a);                  \
  }
EH2O_TILED_FORMATS(EH2O_GEMM)
#undef EH2O_GEMM

}  // namespace edgeh2o::cuda
