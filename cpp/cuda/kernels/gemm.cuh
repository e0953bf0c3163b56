// Matrix times matrix on tensor cores: 64 rows of activations by 64 outputs a block, 64 of depth a stage.
//
// The sums of a block of 32 (or 16) need a scale each, which bounds the kernel rather than the products. An
// accumulator that starts at the bits of 1.5 * 2^23 is a float of that plus the sum: one fma takes the offset
// away and scales, exactly but for its rounding, since scales of weights are f16 (13 bits with the offset).
#pragma once

#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

inline constexpr int kGemmThreads = 128, kGemmRows = kGemmTile, kGemmOutputs = kGemmTile;
inline constexpr int kGemmPanels = kGemmOutputs / kPanelRows;
inline constexpr int32_t kMagicBits = 0x4B400000;
inline constexpr float kMagic = 12582912.0f;

template <WeightFormat kFormat>
EH2O_DEVICE constexpr int gemm_stage_bytes() {
  return kGemmRows * kTileDepth + kGemmPanels * WeightTraits<kFormat>::kTileBytes;
}

// Where piece `piece` (16 bytes) of a row of activations lies in a stage: rows of ldmatrix in different
// banks.
EH2O_DEVICE int swizzled(int row, int piece) { return row * kTileDepth + ((piece ^ (row >> 1 & 3)) << 4); }

// Four codes 0 to 15, less 8.
EH2O_DEVICE uint32_t less_eight(uint32_t codes) {
  return ((codes | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
}

// What a warp adds up: 32 rows by 32 outputs as 2 x 4 fragments.
struct GemmSums {
  float sums[2][4][4];
};

// Adds the products of one block of a row's scale d: low and high halves of 32 of depth, or one of them.
template <WeightFormat kFormat>
EH2O_DEVICE void add_block(GemmSums& acc, const uint32_t (&rows)[2][4], const float (&d)[2][2],
                           const uint32_t (&low)[4], const uint32_t (&high)[4],
                           const uint16_t* const (&scales)[4], int part) {
  using Traits = WeightTraits<kFormat>;
  float totals[2][2] = {};
  if constexpr (Traits::kHasMin) {  // sums of the activations: products with ones, of those halves that count
    EH2O_UNROLL
    for (int i = 0; i < 2; ++i) {
      int32_t ones[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
      const bool has_low = Traits::kBlock == 32 || part % 2 == 0,
                 has_high = Traits::kBlock == 32 || part % 2 == 1;
      mma_s8(ones, rows[i], has_low ? 0x01010101u : 0u, has_high ? 0x01010101u : 0u);
      EH2O_UNROLL
      for (int h = 0; h < 2; ++h) {
        totals[i][h] = d[i][h] * (float_of_bits(static_cast<uint32_t>(ones[2 * h])) - kMagic);
      }
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
    for (int i = 0; i < 2; ++i) {
      int32_t products[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
      mma_s8(products, rows[i], low[j], high[j]);
      EH2O_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float scaled =
            multiply_add(float_of_bits(static_cast<uint32_t>(products[e])), scale[e % 2], offset[e % 2]);
        float sum = multiply_add(scaled, d[i][e / 2], acc.sums[i][j][e]);
        if constexpr (Traits::kHasMin) sum = multiply_add(totals[i][e / 2], min[e % 2], sum);
        acc.sums[i][j][e] = sum;
      }
    }
  }
}

template <WeightFormat kFormat>
EH2O_DEVICE void gemm_tiles(const MultiplyArguments& a) {
  using Traits = WeightTraits<kFormat>;
  EH2O_SHARED_MEMORY;
  constexpr int kStageBytes = gemm_stage_bytes<kFormat>(), kTilePieces = Traits::kTileBytes / 16;
  const int t = thread_index(), lane = t % kWarpSize, warp = t / kWarpSize;
  const int n_rows = static_cast<int>(a.n_rows), n_tiles = static_cast<int>(a.w.n_tiles);
  const int n_panels = static_cast<int>((a.w.n_out + kPanelRows - 1) / kPanelRows);
  const int first_panel = block_x() * kGemmPanels, first_row = block_y() * kGemmRows;
  const auto row_of = [&](int row) {
    return row < n_rows ? row : n_rows - 1;
  };  // what is beyond is not stored
  const auto panel_of = [&](int panel) { return panel < n_panels ? panel : n_panels - 1; };

  const auto load = [&](int tile) {
    if (tile < n_tiles) {
      uint8_t* const stage = shared_memory + tile % kGemmStages * kStageBytes;
      for (int i = t; i < kGemmRows * 4; i += kGemmThreads) {
        const int row = i / 4, piece = i % 4;
        copy_async16(stage + swizzled(row, piece),
                     a.xq.q + static_cast<size_t>(row_of(first_row + row)) * a.xq.padded + tile * kTileDepth +
                         piece * 16);
      }
      for (int i = t; i < kGemmPanels * kTilePieces; i += kGemmThreads) {
        const size_t from = static_cast<size_t>(panel_of(first_panel + i / kTilePieces)) * a.w.n_tiles + tile;
        copy_async16(
            stage + kGemmRows * kTileDepth + i * 16,
            static_cast<const uint8_t*>(a.w.values) + from * Traits::kTileBytes + i % kTilePieces * 16);
      }
    }
    copy_async_commit();
  };

  // The warp's rows and panels; the rows and outputs of a lane's sums.
  const int warp_row = warp % 2 * 32, warp_panel = warp / 2 * 2;
  const float* d_rows[2][2];
  EH2O_UNROLL
  for (int i = 0; i < 2; ++i) {
    EH2O_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first_row + warp_row + i * 16 + h * 8 + lane / 4);
      d_rows[i][h] = a.xq.d + static_cast<size_t>(row) * (a.xq.padded / 32);
    }
  }
  GemmSums acc = {};
  for (int stage = 0; stage < kGemmStages - 1; ++stage) load(stage);
  for (int tile = 0; tile < n_tiles; ++tile) {
    copy_async_wait<kGemmStages - 2>();
    sync_block();  // this tile is there for all, and the one before it read by all
    load(tile + kGemmStages - 1);
    const uint8_t* const stage = shared_memory + tile % kGemmStages * kStageBytes;
    const uint8_t* const tiles = stage + kGemmRows * kTileDepth;
    const uint16_t* scales[4];
    EH2O_UNROLL
    for (int j = 0; j < 4; ++j) {
      const size_t from =
          static_cast<size_t>(panel_of(first_panel + warp_panel + j / 2)) * a.w.n_tiles + tile;
      scales[j] = a.w.scales + (from * kPanelRows + j % 2 * 8 + lane % 4 * 2) * Traits::kParts;
    }
    EH2O_NO_UNROLL
    for (int b = 0; b < 2; ++b) {
      uint32_t rows[2][4], low[4], high[4];
      float d[2][2];
      EH2O_UNROLL
      for (int i = 0; i < 2; ++i) {
        load_matrix4(rows[i], stage + swizzled(warp_row + i * 16 + lane % 16, 2 * b + lane / 16));
        EH2O_UNROLL
        for (int h = 0; h < 2; ++h) d[i][h] = d_rows[i][h][2 * tile + b];
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
        add_block<kFormat>(acc, rows, d, low, high, scales, b);
      } else {
        const uint32_t zeros[4] = {};
        add_block<kFormat>(acc, rows, d, low, zeros, scales, 2 * b);
        add_block<kFormat>(acc, rows, d, zeros, high, scales, 2 * b + 1);
      }
    }
  }
  EH2O_UNROLL
  for (int i = 0; i < 2; ++i) {
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

#define EH2O_GEMM(name, format) \
  EH2O_KERNEL(name, MultiplyArguments, kGemmThreads) { gemm_tiles<WeightFormat::format>(a); }
EH2O_GEMM(gemm_q4, kQ4)
EH2O_GEMM(gemm_q4_min, kQ4Min)
EH2O_GEMM(gemm_q4_small, kQ4Small)
EH2O_GEMM(gemm_q4_small_min, kQ4SmallMin)
EH2O_GEMM(gemm_q8, kQ8)
EH2O_GEMM(gemm_q8_min, kQ8Min)
EH2O_GEMM(gemm_q8_small, kQ8Small)
#undef EH2O_GEMM

}  // namespace edgeh2o::cuda
