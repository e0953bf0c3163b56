// Matrix times vector, row by row of x: what a generated token needs. Memory bounds it, so that a weight is
// read once, 16 bytes per lane and in the order of memory.
#pragma once

#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

inline constexpr int kMultiplyThreads = 128, kMultiplyWarps = kMultiplyThreads / kWarpSize;
inline constexpr int kTilesWarps = kTilesThreads / kWarpSize;

// The arguments of the block's head.
template <WeightFormat kFormat>
EH2O_DEVICE MultiplyArguments of_head(MultiplyArguments a) {
  if (!a.heads) return a;
  const uint32_t head = static_cast<uint32_t>(block_z());
  a.w = a.heads[head];
  a.out += static_cast<size_t>(head) * a.out_step;
  if constexpr (WeightTraits<kFormat>::kBits == 0) {
    a.x += static_cast<size_t>(head) * a.x_step;
  } else {
    a.xq.q += static_cast<size_t>(head) * a.x_step;
    a.xq.d += static_cast<size_t>(head) * (a.x_step / 32);
  }
  return a;
}

EH2O_DEVICE float half_at(const uint16_t* p, int i) { return f32_from_f16(p[i]); }

// The scales of an output over a tile, loaded at once.
template <int kParts>
struct TileScales {
  EH2O_DEVICE explicit TileScales(const uint16_t* p) {
    if constexpr (kParts == 2) {
      words[0] = load_constant4(p);
    } else if constexpr (kParts == 4) {
      const Words2 w = load_constant8(p);
      words[0] = w.x, words[1] = w.y;
    } else {
      const Words4 w = load_constant16(p);
      words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
    }
  }
  EH2O_DEVICE float operator[](int i) const { return half_of(words[i / 2], i % 2); }
  uint32_t words[kParts / 2];
};

// What one lane adds for one output and 32 of depth: low and high words of weights and activations.
template <WeightFormat kFormat>
EH2O_DEVICE float block_product(uint32_t low, uint32_t high, uint32_t x_low, uint32_t x_high, float d,
                                const TileScales<WeightTraits<kFormat>::kParts>& scales, int block32,
                                float acc) {
  using Traits = WeightTraits<kFormat>;
  constexpr uint32_t kOnes = 0x01010101u;
  const auto term = [&](int dot, int sum, int part) {
    if constexpr (Traits::kHasMin) {
      acc = multiply_add(d * scales[Traits::kBlocks + part], static_cast<float>(sum), acc);
    } else if constexpr (Traits::kBits == 4) {
      dot -= 8 * sum;
    }
    acc = multiply_add(d * scales[part], static_cast<float>(dot), acc);
  };
  constexpr bool kNeedsSum = Traits::kHasMin || Traits::kBits == 4;
  if constexpr (Traits::kBlock == 32) {
    const int sum = kNeedsSum ? dot4(x_low, kOnes, dot4(x_high, kOnes, 0)) : 0;
    term(dot4(low, x_low, dot4(high, x_high, 0)), sum, block32);
  } else {
    term(dot4(low, x_low, 0), kNeedsSum ? dot4(x_low, kOnes, 0) : 0, 2 * block32);
    term(dot4(high, x_high, 0), kNeedsSum ? dot4(x_high, kOnes, 0) : 0, 2 * block32 + 1);
  }
  return acc;
}

// The block's panel of the matrix that it belongs to, which takes the place of w.
EH2O_DEVICE uint32_t choose_matrix(MultiplyArguments& a) {
  const uint32_t block = static_cast<uint32_t>(block_x());
  uint32_t first = 0;
  EH2O_UNROLL
  for (uint32_t i = 0; i < kMostMatrices - 1; ++i) {
    if (i >= a.n_further || block < a.further[i].first_panel) continue;
    a.w = a.further[i].w;
    a.bias = a.further[i].bias;
    a.out = a.further[i].out;
    first = a.further[i].first_panel;
  }
  return block - first;
}

// A block per panel: its warps share the depth and are added in order.
template <WeightFormat kFormat>
EH2O_DEVICE void multiply_tiles(MultiplyArguments a) {
  using Traits = WeightTraits<kFormat>;
  EH2O_SHARED_MEMORY;
  float* const sums = reinterpret_cast<float*>(shared_memory);  // [warps][16]
  const uint32_t panel = choose_matrix(a), row = static_cast<uint32_t>(block_y());
  const uint32_t t = static_cast<uint32_t>(thread_index()), lane = t % kWarpSize, warp = t / kWarpSize;
  const uint32_t output = lane / 4, column = lane % 4;
  const size_t first_tile = static_cast<size_t>(panel) * a.w.n_tiles;
  const uint8_t* tiles = static_cast<const uint8_t*>(a.w.values) + first_tile * Traits::kTileBytes;
  const uint16_t* scales = a.w.scales + first_tile * kPanelRows * Traits::kParts;
  const int8_t* x = a.xq.q + static_cast<size_t>(row) * a.xq.padded;
  const float* d = a.xq.d + static_cast<size_t>(row) * (a.xq.padded / 32);
  float acc[2] = {};
  EH2O_UNROLL_4
  for (uint32_t tile = warp; tile < a.w.n_tiles; tile += kTilesWarps) {
    const int8_t* xs = x + tile * kTileDepth + 4 * column;
    uint32_t x_low[2], x_high[2];
    const Words2 both_d = load_constant8(d + 2 * tile);
    const float d_of[2] = {float_of_bits(both_d.x), float_of_bits(both_d.y)};
    EH2O_UNROLL
    for (int b = 0; b < 2; ++b) {
      x_low[b] = load_constant4(xs + 32 * b);
      x_high[b] = load_constant4(xs + 32 * b + 16);
    }
    const uint8_t* words = tiles + static_cast<size_t>(tile) * Traits::kTileBytes + 16 * lane;
    EH2O_UNROLL
    for (int half = 0; half < 2; ++half) {
      const TileScales<Traits::kParts> part(
          scales + (static_cast<size_t>(tile) * kPanelRows + 8 * half + output) * Traits::kParts);
      uint32_t low[2], high[2];
      if constexpr (Traits::kBits == 4) {
        const Words4 w = load_constant16(words);
        const uint32_t both[2] = {half ? w.z : w.x, half ? w.w : w.y};
        for (int b = 0; b < 2; ++b) {
          low[b] = both[b] & 0x0f0f0f0fu;
          high[b] = both[b] >> 4 & 0x0f0f0f0fu;
        }
      } else {
        const Words4 w = load_constant16(words + 512 * half);
        low[0] = w.x, high[0] = w.y, low[1] = w.z, high[1] = w.w;
      }
      for (int b = 0; b < 2; ++b) {
        acc[half] = block_product<kFormat>(low[b], high[b], x_low[b], x_high[b], d_of[b], part, b, acc[half]);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    acc[half] = reduce_add<4>(acc[half]);
    if (column == 0) sums[warp * kPanelRows + 8 * half + output] = acc[half];
  }
  sync_block();
  const uint32_t i = panel * kPanelRows + t;
  if (t >= kPanelRows || i >= a.w.n_out) return;
  float sum = 0.0f;
  for (uint32_t w = 0; w < kTilesWarps; ++w) sum += sums[w * kPanelRows + t];
  sum *= a.w.row_factors[i];
  if (a.bias) sum += a.bias[i];
  float* out = a.out + static_cast<size_t>(row) * a.out_stride + i;
  *out = a.accumulates ? *out + sum : sum;
}

template <WeightFormat kFormat>
EH2O_DEVICE float float_weight(const void* values, size_t i) {
  if constexpr (kFormat == WeightFormat::kF32) {
    return static_cast<const float*>(values)[i];
  } else if constexpr (kFormat == WeightFormat::kF16) {
    return f32_from_f16(static_cast<const uint16_t*>(values)[i]);
  } else {
    return float_of_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(values)[i]) << 16);
  }
}

// A warp per output.
template <WeightFormat kFormat>
EH2O_DEVICE void multiply_floats(const MultiplyArguments& a) {
  const uint32_t t = static_cast<uint32_t>(thread_index()), lane = t % kWarpSize;
  const uint32_t i = static_cast<uint32_t>(block_x()) * kMultiplyWarps + t / kWarpSize;
  const uint32_t row = static_cast<uint32_t>(block_y());
  if (i >= a.w.n_out) return;
  const float* x = a.x + static_cast<size_t>(row) * a.x_stride;
  const size_t first = static_cast<size_t>(i) * a.w.depth;
  float sum = 0.0f;
  for (uint32_t k = lane; k < a.w.depth; k += kWarpSize) {
    sum = multiply_add(float_weight<kFormat>(a.w.values, first + k), x[k], sum);
  }
  sum = reduce_add<kWarpSize>(sum);
  if (lane != 0) return;
  if (a.bias) sum += a.bias[i];
  float* out = a.out + static_cast<size_t>(row) * a.out_stride + i;
  *out = a.accumulates ? *out + sum : sum;
}

// Registers for loads of several rounds matter more than blocks.
#define EH2O_MULTIPLY(name, format, how)                                                                \
  EH2O_KERNEL_OF(name, MultiplyArguments,                                                               \
                 WeightTraits<WeightFormat::format>::kBits > 0 ? kTilesThreads : kMultiplyThreads, 3) { \
    how<WeightFormat::format>(of_head<WeightFormat::format>(a));                                        \
  }
EH2O_MULTIPLY(multiply_f32, kF32, multiply_floats)
EH2O_MULTIPLY(multiply_f16, kF16, multiply_floats)
EH2O_MULTIPLY(multiply_bf16, kBF16, multiply_floats)
EH2O_MULTIPLY(multiply_q4, kQ4, multiply_tiles)
EH2O_MULTIPLY(multiply_q4_min, kQ4Min, multiply_tiles)
EH2O_MULTIPLY(multiply_q4_small, kQ4Small, multiply_tiles)
EH2O_MULTIPLY(multiply_q4_small_min, kQ4SmallMin, multiply_tiles)
EH2O_MULTIPLY(multiply_q8, kQ8, multiply_tiles)
EH2O_MULTIPLY(multiply_q8_min, kQ8Min, multiply_tiles)
EH2O_MULTIPLY(multiply_q8_small, kQ8Small, multiply_tiles)
#undef EH2O_MULTIPLY

// Weight `k` of a row of tiles.
template <WeightFormat kFormat>
EH2O_DEVICE float tiled_weight(const DeviceMatrix& w, uint32_t row, uint32_t k) {
  using Traits = WeightTraits<kFormat>;
  const uint32_t panel = row / kPanelRows, output = row % kPanelRows, half = output / 8;
  const uint32_t b = k % kTileDepth / 32, is_high = k % 32 / 16, column = k % 16 / 4, byte = k % 4;
  const uint32_t lane = output % 8 * 4 + column;
  const size_t tile = static_cast<size_t>(panel) * w.n_tiles + k / kTileDepth;
  const uint8_t* bytes = static_cast<const uint8_t*>(w.values) + tile * Traits::kTileBytes;
  const uint16_t* parts = w.scales + (tile * kPanelRows + output) * Traits::kParts;
  const uint32_t part = k % kTileDepth / Traits::kBlock;
  int q;
  if constexpr (Traits::kBits == 4) {
    q = bytes[lane * 16 + half * 8 + b * 4 + byte] >> (4 * is_high) & 15;
    if (!Traits::kHasMin) q -= 8;
  } else {
    q = static_cast<int8_t>(bytes[half * 512 + lane * 16 + b * 8 + is_high * 4 + byte]);
  }
  float value = half_at(parts, static_cast<int>(part)) * static_cast<float>(q);
  if constexpr (Traits::kHasMin) value += half_at(parts, Traits::kBlocks + static_cast<int>(part));
  return value * w.row_factors[row];
}

EH2O_DEVICE float weight_at(const DeviceMatrix& w, uint32_t row, uint32_t k) {
  const size_t i = static_cast<size_t>(row) * w.depth + k;
  switch (w.format) {
    case WeightFormat::kF32:
      return float_weight<WeightFormat::kF32>(w.values, i);
    case WeightFormat::kF16:
      return float_weight<WeightFormat::kF16>(w.values, i);
    case WeightFormat::kBF16:
      return float_weight<WeightFormat::kBF16>(w.values, i);
    case WeightFormat::kQ4:
      return tiled_weight<WeightFormat::kQ4>(w, row, k);
    case WeightFormat::kQ4Min:
      return tiled_weight<WeightFormat::kQ4Min>(w, row, k);
    case WeightFormat::kQ4Small:
      return tiled_weight<WeightFormat::kQ4Small>(w, row, k);
    case WeightFormat::kQ4SmallMin:
      return tiled_weight<WeightFormat::kQ4SmallMin>(w, row, k);
    case WeightFormat::kQ8:
      return tiled_weight<WeightFormat::kQ8>(w, row, k);
    case WeightFormat::kQ8Min:
      return tiled_weight<WeightFormat::kQ8Min>(w, row, k);
    case WeightFormat::kQ8Small:
      return tiled_weight<WeightFormat::kQ8Small>(w, row, k);
  }
  return 0.0f;
}

EH2O_KERNEL(embed_rows, EmbedArguments, kMultiplyThreads) {
  const uint32_t row = static_cast<uint32_t>(block_x());
  const uint32_t token = static_cast<uint32_t>(a.tokens[row]);
  const DeviceMatrix w = a.parts[token / a.part_rows];
  const uint32_t begin = static_cast<uint32_t>(block_y()) * kEmbedColumns;
  const uint32_t end = a.n_columns - begin < kEmbedColumns ? a.n_columns : begin + kEmbedColumns;
  for (uint32_t k = begin + static_cast<uint32_t>(thread_index()); k < end; k += kMultiplyThreads) {
    a.out[static_cast<size_t>(row) * a.n_columns + k] =
        weight_at(w, token % a.part_rows, a.first + k) * a.scale;
  }
}

}  // namespace edgeh2o::cuda
