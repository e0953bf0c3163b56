// Random numbers for kernel_selftest, the same everywhere, and what half precision makes of a number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace edgeh2o::selftest {

constexpr double kEps = std::numeric_limits<float>::epsilon();

class Random {  // xorshift32 (Marsaglia 2003): the same numbers everywhere
 public:
  explicit Random(size_t seed) : state_(static_cast<uint32_t>(2463534242u + 977 * seed)) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }
  int integer(int low, int high) {
    return low + static_cast<int>(next() % static_cast<uint32_t>(high - low + 1));
  }
  float uniform(float low, float high) {
    return low + (high - low) * (static_cast<float>(next() >> 8) * 0x1p-24f);
  }
  std::vector<float> uniform_vector(size_t n, float low, float high) {
    std::vector<float> values(n);
    for (float& value : values) value = uniform(low, high);
    return values;
  }

 private:
  uint32_t state_;
};

inline double f64_from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) {
    value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  }
  return bits >> 15 ? -value : value;
}

inline double f64_from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// The nearest half precision value; ties to even, overflow to infinity.
inline double round_to_f16(double value) {
  if (std::isnan(value) || value == 0) return value;
  if (std::fabs(value) >= 65520) return std::copysign(std::numeric_limits<double>::infinity(), value);
  const int unit = std::max(std::ilogb(value), -14) - 10;
  return std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
}

}  // namespace edgeh2o::selftest
