// Operands of the attention kernels in 8 bits, as cpp/kernels/attention_integers-inl.h mixes and offsets
// them.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/kernels/selftest/attention_operands.h"

namespace edgeh2o::selftest {

inline const AttentionKernels& byte_kernels(const KernelTable& table) {
  return table.attention[static_cast<size_t>(AttentionPrecision::kInt8)];
}
inline bool has_byte_kernels(const KernelTable& table) { return byte_kernels(table).values_per_word > 0; }

inline int byte_at(const float* words, size_t i, int offset) {
  const uint8_t byte = reinterpret_cast<const uint8_t*>(words)[i];
  return offset == 0 ? static_cast<int8_t>(byte) : byte - offset;
}
inline int32_t bits_of(float word) {
  int32_t bits;
  std::memcpy(&bits, &word, sizeof(bits));
  return bits;
}

// The n numbers at x as they are rounded: blocks of the largest power of two that divides n, times a Hadamard
// matrix.
inline std::vector<double> mixed(const std::vector<double>& x) {
  const size_t size = x.size() & (~x.size() + 1);
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < size; ++j) {
      const bool is_negative = __builtin_popcountll(i % size & j) % 2 != 0;
      out[i] += (is_negative ? -1 : 1) * x[i / size * size + j];
    }
  }
  return out;
}
// Of queries, so that products with mixed keys are those of before.
inline std::vector<double> mixed_query(const float* x, double factor, size_t n) {
  std::vector<double> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = factor * double{x[i]};
  out = mixed(out);
  for (double& v : out) v /= static_cast<double>(n & (~n + 1));
  return out;
}
inline double norm_of(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += std::fabs(v);
  return sum;
}
inline double largest_of(const std::vector<double>& x) {
  double largest = 0;
  for (const double v : x) largest = std::fmax(largest, std::fabs(v));
  return largest;
}

// What the kernels add to the bytes of keys and of values: as the packing of a known query, and of no value,
// shows.
struct Offsets {
  explicit Offsets(const KernelTable& table) {
    const std::vector<float> ones(64, 1.0f);
    const std::vector<float> first{1, 0, 0, 0, 0, 0, 0, 0};  // times a Hadamard matrix: ones
    std::vector<float> q(IntegerLayout{4}.query_words(8)),
        v(kLevelKeys * IntegerLayout{4}.value_words(table.layout.panel_cols));
    byte_kernels(table).pack_queries(q.data(), first.data(), 8, 1.0f, 1, 1, 8);
    key = -bits_of(q[3]) / (8 * 127);
    byte_kernels(table).pack_values(CacheType::kF32, v.data(), 0, ones.data(), nullptr, 1, 8);
    value = reinterpret_cast<const uint8_t*>(v.data())[1];
  }
  int key, value;
};

}  // namespace edgeh2o::selftest
