// Operands of the attention kernels as each precision lays them out, and the double precision attention that
// the results are compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa/kernel_table.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/matrices.h"

namespace edgeh2o::selftest {

inline constexpr CacheType kCacheTypes[] = {CacheType::kF16, CacheType::kF32, CacheType::kQ8_0};

inline bool can_store(CacheType type, size_t head_dim) {
  return type != CacheType::kQ8_0 || head_dim % 32 == 0;
}

constexpr double kExpFloor = 1e-26;  // weights below 2^-87 count as 2^-87
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of cached keys or values, as bytes of the cache and as plain numbers.
struct CachedRows {
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // [n_rows][head_dim]
  double largest_scale = 0;   // of q8_0

  CachedRows(CacheType type, size_t n_rows, size_t head_dim, Random& random) {
    double d = 0;
    for (size_t i = 0; i < n_rows * head_dim; ++i) {
      if (type == CacheType::kQ8_0) {
        if (i % 32 == 0) {
          const auto scale = static_cast<uint16_t>(random.integer(0, 0x2500));  // below 2.5 / 127
          d = f64_from_f16(scale);
          largest_scale = std::fmax(largest_scale, d);
          append(bytes, scale);
        }
        const int q = random.integer(-128, 127);
        append(bytes, static_cast<int8_t>(q));
        values.push_back(static_cast<float>(d * q));
        continue;
      }
      const auto half =
          static_cast<uint16_t>(random.integer(0, 1) << 15 | random.integer(0, 0x40ff));  // below 2.5
      const auto value = static_cast<float>(f64_from_f16(half));
      values.push_back(value);
      if (type == CacheType::kF16) {
        append(bytes, half);
      } else {
        append(bytes, value);
      }
    }
  }
};

// The kernels of one precision, and how their operands lie in words.
template <AttentionPrecision kPrecision>
struct Operands {
  static constexpr bool kIsBf16 = kPrecision == AttentionPrecision::kBf16;
  static constexpr bool kIsF16 = kPrecision == AttentionPrecision::kF16;
  static constexpr size_t kPerWord = kIsBf16 || kIsF16 ? 2 : 1;
  // A weight is off by kRounding of itself, and by kFloor.
  static constexpr double kRounding = kIsBf16 ? 0x1p-8 : kIsF16 ? 0x1p-11 : 0;
  static constexpr double kFloor = kIsF16 ? 0x1p-25 : kExpFloor;

  static const AttentionKernels& kernels(const KernelTable& table) {
    return table.attention[static_cast<size_t>(kPrecision)];
  }
  static bool are_in(const KernelTable& table) { return kernels(table).values_per_word > 0; }

  // A value as it is multiplied: to nearest even.
  static float rounded(float value) {
    if (kIsF16) return static_cast<float>(round_to_f16(value));
    if (!kIsBf16) return value;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static void round_all(std::vector<float>& values) {
    for (float& value : values) value = rounded(value);
  }
  // Value `depth` of column `col` of panels of n_cols columns.
  static float at(const float* words, size_t depth, size_t n_cols, size_t col) {
    if (kIsF16) {
      uint16_t half;
      std::memcpy(&half, reinterpret_cast<const char*>(words) + 2 * (depth * n_cols + col), sizeof(half));
      return static_cast<float>(f64_from_f16(half));
    }
    const float word = words[depth / kPerWord * n_cols + col];
    if (!kIsBf16) return word;
    uint32_t bits;
    std::memcpy(&bits, &word, sizeof(bits));
    bits = depth % 2 ? bits & 0xffff0000 : bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

// Running error bound of sums of 32 terms in f16 (Higham 2002, section 3.3): every addition rounds its
// partial sum.
template <AttentionPrecision kPrecision>
class ShortSumError {
 public:
  void add(double term) {
    if (kPrecision != AttentionPrecision::kF16) return;
    if (n_terms_++ % 32 == 0) sum_ = 0;
    sum_ += term;
    bound_ += std::fabs(sum_) * 0x1p-11 * (1 + 0x1p-6) + 0x1p-25;
  }
  double bound() const { return bound_; }

 private:
  size_t n_terms_ = 0;
  double sum_ = 0, bound_ = 0;
};

// A tile with room for n_keys, and the double precision attention of its rows.
template <AttentionPrecision kPrecision>
struct TestTile {
  using Ops = Operands<kPrecision>;
  AttentionTile tile;
  std::vector<float> q, packed_q, weights, o, m, l;
  std::vector<double> logits;  // of one row
  // Of products with integers: most that a query value is off, and that each key adds to the error of an
  // output.
  double query_error = 0, key_error = 0;

  TestTile(const KernelTable& table, size_t n_rows, size_t group_size, size_t head_dim, size_t n_keys,
           float q_range, Random& random) {
    const PackLayout& layout = table.layout;
    const size_t padded = round_up(n_rows, layout.float_rows);
    tile.n_rows = n_rows;
    tile.group_size = group_size;
    tile.key_dim = tile.value_dim = head_dim;
    tile.weight_stride = round_up(n_keys, layout.panel_cols) + 4;
    tile.o_stride = round_up(head_dim, layout.panel_cols);
    q = random.uniform_vector(n_rows * head_dim, -q_range, q_range);
    Ops::round_all(q);
    packed_q.resize(padded * head_dim / Ops::kPerWord);
    Ops::kernels(table).pack_queries(packed_q.data(), q.data(), head_dim, 1.0f, n_rows, 1, head_dim);
    weights.resize(padded * tile.weight_stride, kUntouched);
    o.resize(padded * tile.o_stride, kUntouched);
    m.resize(n_rows, kUntouched);
    l.resize(n_rows, kUntouched);
    tile.q = packed_q.data();
    tile.weights = weights.data();
    tile.o = o.data();
    tile.m = m.data();
    tile.l = l.data();
  }

  double weight_of(size_t row, size_t key) const {
    return Ops::at(weights.data() + row * tile.weight_stride, key, 1, 0);
  }

  // Compares the weights, m, l and o of one row that sees the first n_keys of k and v. Weights are rounded
  // before they meet the values. distance: of the piece, as AttentionPiece has it.
  void check_row(Check& check, size_t row, size_t n_keys, const std::vector<float>& k,
                 const std::vector<float>& v, const float* biases, ptrdiff_t distance = 0) {
    const size_t head_dim = tile.key_dim;
    logits.assign(n_keys, 0);
    double largest_norm = 0, largest_short = 0, maximum = -kInfinity;
    for (size_t key = 0; key < n_keys; ++key) {
      double norm = 0, rounding = 0;
      ShortSumError<kPrecision> short_error;
      for (size_t dim = 0; dim < head_dim; ++dim) {
        const double term = double{q[row * head_dim + dim]} * k[key * head_dim + dim];
        logits[key] += term;
        norm += std::fabs(term);
        short_error.add(term);
        rounding += query_error * std::fabs(k[key * head_dim + dim]);
      }
      if (biases) logits[key] += double{biases[key]} * kLog2E;
      if (tile.slopes) {
        const size_t query = row / tile.group_size;
        logits[key] -= double{tile.slopes[row % tile.group_size]} *
                       std::fabs(static_cast<double>(distance + static_cast<ptrdiff_t>(query)) -
                                 static_cast<double>(key));
      }
      largest_norm = std::fmax(largest_norm, norm + std::fabs(logits[key]));
      largest_short = std::fmax(largest_short, short_error.bound() + rounding);
      maximum = std::fmax(maximum, logits[key]);
    }
    const double logit_error = static_cast<double>(head_dim + 2) * kEps * largest_norm + largest_short;
    const double weight_error = std::exp2(2 * logit_error) - 1 + 4 * kEps;  // relative
    check.near(m[row], maximum, logit_error);
    double sum = 0;
    std::vector<double> out(head_dim), norm(head_dim);
    std::vector<ShortSumError<kPrecision>> short_errors(head_dim);
    for (size_t key = 0; key < n_keys; ++key) {
      const double weight = std::exp2(logits[key] - maximum);
      check.near(weight_of(row, key), weight, weight * (weight_error + Ops::kRounding) + Ops::kFloor);
      sum += weight;
      for (size_t dim = 0; dim < head_dim; ++dim) {
        out[dim] += weight * v[key * head_dim + dim];
        norm[dim] += weight * std::fabs(v[key * head_dim + dim]);
        short_errors[dim].add(weight * v[key * head_dim + dim]);
      }
    }
    const double sum_error = weight_error + static_cast<double>(n_keys) * kEps;
    check.near(l[row], sum, sum * sum_error + kExpFloor * static_cast<double>(n_keys));
    for (size_t dim = 0; dim < head_dim; ++dim) {
      check.near(o[row * tile.o_stride + dim], out[dim],
                 norm[dim] * (sum_error + Ops::kRounding) + short_errors[dim].bound() * (1 + weight_error) +
                     key_error * static_cast<double>(n_keys) + 3 * Ops::kFloor * static_cast<double>(n_keys));
    }
  }
};

}  // namespace edgeh2o::selftest
