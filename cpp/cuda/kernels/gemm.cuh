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

// Scale `part` of an output, of two that are loaded together.
EH2O_DEVICE float tile_scale(const uint16_t* scales, int part) {
  return half_of(*reinterpret_cast<const uint32_t*>(scales + part / 2 * 2), part % 2);
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
      scale[e] = tile_scale(scales[j] + e * Traits::kParts, part);
      offset[e] = -kMagic * scale[e];
      if constexpr (Traits::kHasMin)
        min[e] = tile_scale(scales[j] + e * Traits::kParts, Traits::kBlocks + part);
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
  // What a thread copies of every tile, as offsets into what is there; what is beyond is not stored.
  constexpr int kRowCopies = kRows / 32, kTileCopies = kGemmPanels * kTilePieces / kGemmThreads;
  const auto row_of = [&](int row) { return static_cast<uint32_t>(row < n_rows ? row : n_rows - 1); };
  const auto panel_of = [&](int panel) {
    return static_cast<uint32_t>(panel < n_panels ? panel : n_panels - 1) * a.w.n_tiles;
  };
  uint32_t row_at[kRowCopies], tile_at[kTileCopies];
  EH2O_UNROLL
  for (int k = 0; k < kRowCopies; ++k) {
    row_at[k] = row_of(first_row + t / 4 + 32 * k) * a.xq.padded + static_cast<uint32_t>(t % 4 * 16);
  }
  EH2O_UNROLL
  for (int k = 0; k < kTileCopies; ++k) {
    const int i = t + k * kGemmThreads;
    tile_at[k] = panel_of(first_panel + i / kTilePieces) * Traits::kTileBytes +
                 static_cast<uint32_t>(i % kTilePieces * 16);
  }
  const uint32_t row_scale_at = row_of(first_row + t) * (a.xq.padded / 32);
  const uint32_t scale_at =
      panel_of(first_panel + t / kScalePieces) * (kPanelRows * Traits::kParts) + t % kScalePieces * 8;
  const int row_to = swizzled(t / 4, t % 4);  // the pattern repeats after 8 rows

  const auto load = [&](int tile) {
    if (tile < n_tiles) {
      uint8_t* const stage = shared_memory + tile % kGemmStages * Stage::kBytes;
      EH2O_UNROLL
      for (int k = 0; k < kRowCopies; ++k) {
        copy_async16(stage + row_to + k * 32 * kTileDepth, a.xq.q + row_at[k] + tile * kTileDepth);
      }
      EH2O_UNROLL
      for (int k = 0; k < kTileCopies; ++k) {
        copy_async16(stage + Stage::kTiles + (t + k * kGemmThreads) * 16,
                     static_cast<const uint8_t*>(a.w.values) + tile_at[k] + tile * Traits::kTileBytes);
      }
      if (t < kRows) copy_async8(stage + Stage::kRowScales + t * 8, a.xq.d + row_scale_at + 2 * tile);
      if (t < kGemmPanels * kScalePieces) {
        copy_async16(stage + Stage::kScales + t * 16,
                     a.w.scales + scale_at + tile * (kPanelRows * Traits::kParts));
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
    // Of both blocks of 32, since a lane's words lie side by side: read one by one, they meet in banks.
    uint32_t words[4][2 * Traits::kBits / 4];
    EH2O_UNROLL
    for (int panel = 0; panel < 2; ++panel) {
      const uint8_t* const from = tiles + (warp_panel + panel) * Traits::kTileBytes + 16 * lane;
      EH2O_UNROLL
      for (int half = 0; half < Traits::kBits / 4; ++half) {
        const Words4 w = *reinterpret_cast<const Words4*>(from + 512 * half);
        if constexpr (Traits::kBits == 4) {
          words[2 * panel][0] = w.x, words[2 * panel][1] = w.y;
          words[2 * panel + 1][0] = w.z, words[2 * panel + 1][1] = w.w;
        } else {
          words[2 * panel + half][0] = w.x, words[2 * panel + half][1] = w.y;
          words[2 * panel + half][2] = w.z, words[2 * panel + half][3] = w.w;
        }
      }
    }
    EH2O_UNROLL
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
        if constexpr (Traits::kBits == 4) {
          low[j] = words[j][b] & 0x0f0f0f0fu;
          high[j] = words[j][b] >> 4 & 0x0f0f0f0fu;
          if (!Traits::kHasMin) low[j] = less_eight(low[j]), high[j] = less_eight(high[j]);
        } else {
          low[j] = words[j][2 * b], high[j] = words[j][2 * b + 1];
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

#define EH2O_GEMM(format, name, bits, block, has_min)                                 \
  EH2O_KERNEL_OF(gemm_##name, MultiplyArguments, kGemmThreads, block == 16 ? 2 : 3) { \
    gemm_tiles<WeightFormat::format, kGemmTile>(a);                                   \
  }
EH2O_TILED_FORMATS(EH2O_GEMM)
#undef EH2O_GEMM

#define EH2O_TALL_GEMM(name, format)                                     \
  EH2O_KERNEL_OF(gemm_tall_##name, MultiplyArguments, kGemmThreads, 2) { \
    gemm_tiles<WeightFormat::format, kGemmTallRows>(a);                  \
  }
EH2O_TALL_GEMM(q4, kQ4)
EH2O_TALL_GEMM(q4_min, kQ4Min)
EH2O_TALL_GEMM(q8, kQ8)
EH2O_TALL_GEMM(q8_min, kQ8Min)
#undef EH2O_TALL_GEMM

}  // namespace edgeh2o::cuda
