#include "quant/block_quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"
#include "quant/block_formats.h"
#include "quant/block_writers.h"
#include "quant/k_quantizer.h"

namespace edgeh2o {
namespace {

void write_f32(const float* weights, size_t n, uint8_t* out) { std::memcpy(out, weights, 4 * n); }

void write_f16(const float* weights, size_t n, uint8_t* out) {
  auto* halves = reinterpret_cast<u16_le*>(out);
  for (size_t i = 0; i < n; ++i) halves[i] = le16_from_f32(weights[i]);
}

void write_bf16(const float* weights, size_t n, uint8_t* out) {
  auto* halves = reinterpret_cast<u16_le*>(out);
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, weights + i, 4);
    halves[i] = le16(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));  // nearest even
  }
}

// The weight of largest magnitude, with its sign, the first of several.
float find_largest(const float* x) {
  float largest = 0.0f;
  for (size_t i = 0; i < kBlock; ++i) {
    if (std::fabs(largest) < std::fabs(x[i])) largest = x[i];
  }
  return largest;
}

// Zero for a scale so small that its inverse is infinite: half precision rounds it to zero.
float inverse(float d) {
  const float scale = 1.0f / d;
  return std::isfinite(scale) ? scale : 0.0f;
}

void put_nibbles(uint8_t* qs, const int* q) {
  for (int i = 0; i < 16; ++i) qs[i] = static_cast<uint8_t>((q[i] & 15) | (q[i + 16] & 15) << 4);
}

void put_fifth_bits(uint8_t* qh, const int* q) {
  for (int byte = 0; byte < 4; ++byte) {
    int bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (q[8 * byte + i] >> 4 & 1) << i;
    qh[byte] = static_cast<uint8_t>(bits);
  }
}

// w = d * (q - kHalf): the largest magnitude takes the end that reaches farther, q = 0.
template <int kHalf, typename Block>
void quantize_symmetric(const float* weights, size_t n, uint8_t* out) {
  auto* blocks = reinterpret_cast<Block*>(out);
  for (size_t b = 0; b < n / kBlock; ++b, weights += kBlock) {
    const float d = find_largest(weights) / -kHalf, scale = inverse(d);
    int q[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
      q[i] = std::min(2 * kHalf - 1, static_cast<int>(weights[i] * scale + (kHalf + 0.5f)));
    }
    blocks[b].d = le16_from_f32(d);
    if constexpr (kHalf == 16) put_fifth_bits(blocks[b].qh, q);
    put_nibbles(blocks[b].qs, q);
  }
}

// w = d * q + m, with the least and the largest weight on the ends.
template <int kMax, typename Block>
void quantize_with_min(const float* weights, size_t n, uint8_t* out) {
  auto* blocks = reinterpret_cast<Block*>(out);
  for (size_t b = 0; b < n / kBlock; ++b, weights += kBlock) {
    const auto [low, high] = std::minmax_element(weights, weights + kBlock);
    const float m = *low, d = (*high - m) / kMax, scale = inverse(d);
    int q[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
      const float level = (weights[i] - m) * scale + 0.5f;
      q[i] = level < kMax ? static_cast<int>(level) : kMax;  // not a number where the range overflowed
    }
    blocks[b].d = le16_from_f32(d);
    blocks[b].m = le16_from_f32(m);
    if constexpr (kMax == 31) put_fifth_bits(blocks[b].qh, q);
    put_nibbles(blocks[b].qs, q);
  }
}

void quantize_q8_0(const float* weights, size_t n, uint8_t* out) {
  auto* blocks = reinterpret_cast<BlockQ8_0*>(out);
  for (size_t b = 0; b < n / kBlock; ++b, weights += kBlock) {
    const float d = std::fabs(find_largest(weights)) / 127.0f, scale = inverse(d);
    blocks[b].d = le16_from_f32(d);
    for (size_t i = 0; i < kBlock; ++i) {
      const float value = weights[i] * scale;  // to the nearest integer, halves away from zero
      const int whole = static_cast<int>(value);
      const float rest = value - static_cast<float>(whole);
      blocks[b].qs[i] = static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
  }
}

}  // namespace

RowQuantizer find_row_quantizer(PackedFormat format) {
  switch (format) {
    case PackedFormat::kF32:
      return write_f32;
    case PackedFormat::kF16:
      return write_f16;
    case PackedFormat::kBF16:
      return write_bf16;
    case PackedFormat::kQ4_0:
      return quantize_symmetric<8, BlockQ4_0>;
    case PackedFormat::kQ5_0:
      return quantize_symmetric<16, BlockQ5_0>;
    case PackedFormat::kQ4_1:
      return quantize_with_min<15, BlockQ4_1>;
    case PackedFormat::kQ5_1:
      return quantize_with_min<31, BlockQ5_1>;
    case PackedFormat::kQ8_0:
      return quantize_q8_0;
    case PackedFormat::kQ4_K:
      return quantize_q4_k;
    case PackedFormat::kQ5_K:
      return quantize_q5_k;
    case PackedFormat::kQ6_K:
      return quantize_q6_k;
    default:
      return nullptr;
  }
}

}  // namespace edgeh2o
