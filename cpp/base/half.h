// IEEE half precision, in integers: rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace edgeh2o {

inline float f32_from_f16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
  float value;
  uint32_t bits;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t f16_from_f32(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65,520 and more
  if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded fraction in the lowest bits
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &magnitude, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  const uint32_t odd = bits >> 13 & 1;
  return static_cast<uint16_t>(sign | (bits - 0x38000000u + 0xfffu + odd) >> 13);
}

}  // namespace edgeh2o
