#include "quant/k_quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "quant/block_formats.h"
#include "quant/block_writers.h"
#include "quant/packed_format.h"

namespace edgeh2o {
namespace {

// The nearest integer of a value below 2^22 in magnitude: adding 1.5 * 2^23 leaves it in the lowest bits.
int nearest(float value) {
  const float shifted = value + 12582912.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return static_cast<int>(bits & 0x7fffff) - 0x400000;
}

int nearest(float value, int low, int high) { return std::clamp(nearest(value), low, high); }

float f32_from_le16(u16_le bits) { return f32_from_f16(bits); }

struct ScaleMin {
  float scale, min;  // w = scale * q - min, min >= 0
};

// Scale and min of a sub-block whose quants go from 0 to kMax, of least weighted squared error. Large weights
// count more: they meet the same activations, and their errors are larger. Every candidate stretches the
// range of the weights a little otherwise, rounds, and then solves for the two numbers by least squares.
template <int kMax>
ScaleMin fit_scale_min(const float* x, float first_stretch, int n_candidates) {
  float square_sum = 0.0f;
  for (size_t i = 0; i < kBlock; ++i) square_sum += x[i] * x[i];
  const float mean = std::sqrt(square_sum / kBlock);
  float importance[kBlock], total = 0.0f, total_x = 0.0f;
  for (size_t i = 0; i < kBlock; ++i) {
    importance[i] = mean + std::fabs(x[i]);
    total += importance[i];
    total_x += importance[i] * x[i];
  }
  const auto [least, largest] = std::minmax_element(x, x + kBlock);
  const float low = std::min(*least, 0.0f), high = std::max(*largest, low);
  if (high == low) return {0.0f, -low};

  ScaleMin best{(high - low) / kMax, -low};
  float best_error = INFINITY;
  for (int candidate = -1; candidate < n_candidates; ++candidate) {
    const float stretch = candidate < 0 ? 0.0f : first_stretch + 0.1f * static_cast<float>(candidate);
    const float inverse = (kMax + stretch) / (high - low);
    float quants[kBlock], sum_q = 0.0f, sum_qq = 0.0f, sum_qx = 0.0f;
    for (size_t i = 0; i < kBlock; ++i) {
      const auto q = static_cast<float>(nearest(inverse * (x[i] - low), 0, kMax));
      quants[i] = q;
      sum_q += importance[i] * q;
      sum_qq += importance[i] * q * q;
      sum_qx += importance[i] * q * x[i];
    }
    const float determinant = total * sum_qq - sum_q * sum_q;
    if (!(determinant > 0.0f)) continue;
    ScaleMin fit{(total * sum_qx - sum_q * total_x) / determinant,
                 (sum_q * sum_qx - sum_qq * total_x) / determinant};
    if (fit.min < 0.0f) fit = {sum_qx / sum_qq, 0.0f};
    float error = 0.0f;
    for (size_t i = 0; i < kBlock; ++i) {
      const float difference = fit.scale * quants[i] - fit.min - x[i];
      error += importance[i] * difference * difference;
    }
    if (error < best_error) {
      best_error = error;
      best = fit;
    }
  }
  return best;
}

// Six bits each of 8 scales and 8 mins: the inverse of read_scale_min.
void put_scale_min(uint8_t* scales, size_t s, int scale, int min) {
  if (s < 4) {
    scales[s] = static_cast<uint8_t>(scale);
    scales[s + 4] = static_cast<uint8_t>(min);
  } else {
    scales[s + 4] = static_cast<uint8_t>((scale & 15) | (min & 15) << 4);
    scales[s - 4] = static_cast<uint8_t>(scales[s - 4] | scale >> 4 << 6);
    scales[s] = static_cast<uint8_t>(scales[s] | min >> 4 << 6);
  }
}

// d, dmin and scales of a block; the quants of its weights go to q.
template <int kMax, typename Block>
void quantize_two_level(const float* x, float first_stretch, int n_candidates, Block& block, int* q) {
  ScaleMin fits[kSuperRecords];
  float largest_scale = 0.0f, largest_min = 0.0f;
  for (size_t s = 0; s < kSuperRecords; ++s) {
    fits[s] = fit_scale_min<kMax>(x + s * kBlock, first_stretch, n_candidates);
    largest_scale = std::max(largest_scale, fits[s].scale);
    largest_min = std::max(largest_min, fits[s].min);
  }
  block.d = le16_from_f32(largest_scale / 63.0f);
  block.dmin = le16_from_f32(largest_min / 63.0f);
  const float per_scale = largest_scale > 0.0f ? 63.0f / largest_scale : 0.0f;
  const float per_min = largest_min > 0.0f ? 63.0f / largest_min : 0.0f;
  const float d = f32_from_le16(block.d), dmin = f32_from_le16(block.dmin);
  std::memset(block.scales, 0, sizeof(block.scales));
  for (size_t s = 0; s < kSuperRecords; ++s) {
    const int scale = nearest(per_scale * fits[s].scale, 0, 63), min = nearest(per_min * fits[s].min, 0, 63);
    put_scale_min(block.scales, s, scale, min);
    const float step = d * static_cast<float>(scale), offset = dmin * static_cast<float>(min);
    for (size_t i = s * kBlock; i < (s + 1) * kBlock; ++i) {
      q[i] = step > 0.0f ? nearest((x[i] + offset) / step, 0, kMax) : 0;
    }
  }
}

// Low nibbles: sub-blocks 2 j and 2 j + 1 share 32 bytes.
void put_k_nibbles(uint8_t* qs, const int* q) {
  for (size_t pair = 0; pair < kSuperRecords / 2; ++pair, q += 2 * kBlock) {
    for (size_t i = 0; i < kBlock; ++i) {
      qs[pair * kBlock + i] = static_cast<uint8_t>((q[i] & 15) | (q[i + kBlock] & 15) << 4);
    }
  }
}

// The scale of 16 weights whose quants go from -32 to 31, of least squared error weighted by x^2.
float fit_scale(const float* x) {
  constexpr int kCount = 16;
  float largest = 0.0f;
  for (int i = 0; i < kCount; ++i) {
    if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
  }
  if (std::fabs(largest) < 1e-15f) return 0.0f;
  float best = largest / -32.0f, best_gain = 0.0f;
  for (int candidate = -9; candidate <= 9; ++candidate) {
    const float inverse = -(32.0f + 0.1f * static_cast<float>(candidate)) / largest;
    float sum_qx = 0.0f, sum_qq = 0.0f;
    for (int i = 0; i < kCount; ++i) {
      const auto q = static_cast<float>(nearest(inverse * x[i], -32, 31));
      const float importance = x[i] * x[i];
      sum_qx += importance * q * x[i];
      sum_qq += importance * q * q;
    }
    // The error is a constant less this.
    if (sum_qq > 0.0f && sum_qx * sum_qx > best_gain * sum_qq) {
      best_gain = sum_qx * sum_qx / sum_qq;
      best = sum_qx / sum_qq;
    }
  }
  return best;
}

}  // namespace

void quantize_q4_k(const float* weights, size_t n, uint8_t* out) {
  auto* blocks = reinterpret_cast<BlockQ4_K*>(out);
  int q[kSuperBlock];
  for (size_t b = 0; b < n / kSuperBlock; ++b) {
    quantize_two_level<15>(weights + b * kSuperBlock, -1.0f, 21, blocks[b], q);
    put_k_nibbles(blocks[b].qs, q);
  }
}

void quantize_q5_k(const float* weights, size_t n, uint8_t* out) {
  auto* blocks = reinterpret_cast<BlockQ5_K*>(out);
  int q[kSuperBlock];
  for (size_t b = 0; b < n / kSuperBlock; ++b) {
    quantize_two_level<31>(weights + b * kSuperBlock, -0.5f, 16, blocks[b], q);
    put_k_nibbles(blocks[b].qs, q);
    std::memset(blocks[b].qh, 0, sizeof(blocks[b].qh));
    for (size_t i = 0; i < kSuperBlock; ++i) {
      blocks[b].qh[i % kBlock] = static_cast<uint8_t>(blocks[b].qh[i % kBlock] | q[i] >> 4 << i / kBlock);
    }
  }
}

void quantize_q6_k(const float* weights, size_t n, uint8_t* out) {
  constexpr size_t kSub = 16, kSubs = kSuperBlock / kSub;
  auto* blocks = reinterpret_cast<BlockQ6_K*>(out);
  for (size_t b = 0; b < n / kSuperBlock; ++b, weights += kSuperBlock) {
    BlockQ6_K& block = blocks[b];
    std::memset(&block, 0, sizeof(block));
    float scales[kSubs], largest = 0.0f;
    for (size_t s = 0; s < kSubs; ++s) {
      scales[s] = fit_scale(weights + s * kSub);
      if (std::fabs(scales[s]) > std::fabs(largest)) largest = scales[s];
    }
    if (largest == 0.0f) continue;
    block.d = le16_from_f32(largest / -128.0f);
    const float d = f32_from_le16(block.d);
    for (size_t s = 0; s < kSubs; ++s) {
      block.scales[s] = static_cast<int8_t>(nearest(-128.0f / largest * scales[s], -128, 127));
    }
    for (size_t i = 0; i < kSuperBlock; ++i) {
      const float step = d * static_cast<float>(block.scales[i / kSub]);
      const int q = (step != 0.0f ? nearest(weights[i] / step, -32, 31) : 0) + 32;
      put_q6(block, i, q);
    }
  }
}

}  // namespace edgeh2o
