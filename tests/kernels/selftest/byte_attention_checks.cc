// Attention in 8 bits, against the operands before they are rounded, within the bounds of
// cpp/kernels/attention_integers-inl.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/selftest/attention_operands.h"
#include "tests/kernels/selftest/byte_operands.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {
namespace {

constexpr double kFloatSlack = 1 + 1e-5;  // of units, which are computed in f32
constexpr double kLevelError = (0.5 + 255 * 8e-5 + 1e-3) / 255;

struct Shape {
  size_t n_rows, group_size, head_dim, n_keys;
  ptrdiff_t n_visible, n_hidden;
  bool has_biases;
  float q_range, soft_cap;
  ptrdiff_t distance = 0;  // 0: without slopes
};
constexpr float kSlopes[] = {0.25f, 0.375f, 0.0625f};
constexpr Shape kShapes[] = {
    {1, 1, 8, 1, 1, kNoneHidden, false, 1, 0},           {5, 1, 24, 5, 1, kNoneHidden, false, 1, 0},
    {14, 3, 8, 40, 1000, kNoneHidden, true, 1, 0},       {27, 3, 64, 9, 1, kNoneHidden, false, 2, 0},
    {30, 2, 24, 150, 140, kNoneHidden, false, 1, 5},     {26, 1, 8, 30, -7, kNoneHidden, true, 1, 0},
    {60, 3, 72, 300, 190, kNoneHidden, false, 1, 0},     {40, 1, 16, 300, 200, 60, false, 1, 0},
    {29, 3, 16, 200, 1000, kNoneHidden, true, 1, 0, 90},
};

// A piece with its tile, packed.
struct ByteCase {
  AttentionTile tile;
  AttentionPiece piece;
  std::vector<float> q, k, v, biases;
  std::vector<float> packed_q, packed_k, packed_v, weights, o, m, l;

  ByteCase(const KernelTable& table, const Shape& shape, Random& random)
      : q(random.uniform_vector(shape.n_rows * shape.head_dim, -shape.q_range, shape.q_range)),
        k(random.uniform_vector(shape.n_keys * shape.head_dim, -1, 1)),
        v(random.uniform_vector(shape.n_keys * shape.head_dim, -2, 2)),
        biases(random.uniform_vector(shape.n_keys, -2, 2)) {
    const size_t dim = shape.head_dim, padded = round_up(shape.n_rows, table.layout.float_rows);
    for (size_t i = 0; i < k.size(); i += dim) k[i] += 140;  // what the mean takes away
    piece.n_keys = shape.n_keys;
    piece.n_visible = shape.n_visible;
    piece.n_hidden = shape.n_hidden;
    piece.biases = shape.has_biases ? biases.data() : nullptr;
    tile.n_rows = shape.n_rows;
    tile.group_size = shape.group_size;
    tile.key_dim = tile.value_dim = dim;
    tile.soft_cap = shape.soft_cap;
    piece.distance = shape.distance;
    if (shape.distance != 0) tile.slopes = kSlopes;
    tile.o_stride = round_up(dim, table.layout.panel_cols);
    tile.weight_stride = IntegerLayout{4}.weight_words(shape.n_keys) + 3;
    packed_q.resize(padded * IntegerLayout{4}.query_words(dim));
    packed_k.resize(round_up(shape.n_keys, kLevelKeys) * IntegerLayout{4}.key_words(dim));
    packed_v.resize(round_up(shape.n_keys, kLevelKeys) * IntegerLayout{4}.value_words(tile.o_stride));
    weights.resize(padded * tile.weight_stride, kUntouched);
    o.resize(padded * tile.o_stride, kUntouched);
    m.resize(shape.n_rows, kUntouched);
    l.resize(shape.n_rows, kUntouched);
    pack(table);
  }
  void pack(const KernelTable& table) {
    const AttentionKernels& kernels = byte_kernels(table);
    kernels.pack_queries(packed_q.data(), q.data(), tile.key_dim, 1.0f, tile.n_rows, 1, tile.key_dim);
    kernels.pack_keys(CacheType::kF32, packed_k.data(), k.data(), nullptr, piece.n_keys, tile.key_dim);
    kernels.pack_values(CacheType::kF32, packed_v.data(), 0, v.data(), nullptr, piece.n_keys, tile.value_dim);
    tile.q = packed_q.data();
    tile.weights = weights.data();
    tile.o = o.data();
    tile.m = m.data();
    tile.l = l.data();
    piece.k = packed_k.data();
    piece.v = packed_v.data();
  }

  bool sees(size_t row, size_t key) const {
    const auto query = static_cast<ptrdiff_t>(row / tile.group_size);
    return static_cast<ptrdiff_t>(key) < piece.n_visible + query &&
           static_cast<ptrdiff_t>(key) >= piece.n_hidden + query;
  }
  double weight_of(size_t row, size_t key) const {
    const float* words = weights.data() + row * tile.weight_stride;
    const size_t n_blocks = round_up(piece.n_keys, kLevelKeys) / kLevelKeys;
    return reinterpret_cast<const uint8_t*>(words)[key] *
           double{words[n_blocks * kLevelKeys / 4 + key / kLevelKeys]};
  }
  // Of the rounded differences of keys from the mean of their block, and of values: see the kernel.
  double mean_of(size_t key, size_t dim) const {
    return packed_k[key / kLevelKeys * kLevelKeys * IntegerLayout{4}.key_words(tile.key_dim) +
                    kLevelKeys * tile.key_dim / 4 + kLevelKeys + dim];
  }
  std::vector<double> mixed_key(size_t key) const {
    std::vector<double> out(tile.key_dim);
    for (size_t d = 0; d < out.size(); ++d) out[d] = k[key * tile.key_dim + d] - mean_of(key, d);
    return mixed(out);
  }
  double value_unit(size_t key, size_t dim) const {
    double largest = 0;
    const size_t begin = key / kLevelKeys * kLevelKeys, end = std::min(begin + kLevelKeys, piece.n_keys);
    for (size_t i = begin; i < end; ++i) largest = std::fmax(largest, std::fabs(v[i * tile.value_dim + dim]));
    return largest / 127 * kFloatSlack;
  }
};

// Of a key's rounded differences from the mean of its block.
struct KeyRounding {
  double unit, norm;
};

// Weights, m, l and o of a row.
void check_row(Check& check, const ByteCase& c, size_t row, const std::vector<KeyRounding>& keys) {
  const size_t dim = c.tile.key_dim, n_keys = c.piece.n_keys;
  const float* q = c.q.data() + row * dim;
  const std::vector<double> rounded = mixed_query(q, 1, dim);
  const double query_unit = largest_of(rounded) / 127 * kFloatSlack, query_norm = norm_of(rounded);
  double maximum = -kInfinity, largest_error = 0;
  std::vector<double> logits(n_keys), errors(n_keys), tops(n_keys / kLevelKeys + 1, -kInfinity);
  for (size_t key = 0; key < n_keys; ++key) {
    if (!c.sees(row, key)) continue;
    double norm = 0;
    for (size_t d = 0; d < dim; ++d) {
      const double x = c.k[key * dim + d];
      logits[key] += q[d] * x;
      norm += std::fabs(q[d] * x) + std::fabs(q[d] * c.mean_of(key, d));
    }
    const double rounded_norm = keys[key].norm + static_cast<double>(dim) * keys[key].unit / 2;
    const float cap = c.tile.soft_cap;
    if (cap > 0) logits[key] = cap * std::tanh(logits[key] / cap);
    if (c.piece.biases) logits[key] += double{c.piece.biases[key]} * kLog2E;
    if (c.tile.slopes) {
      const ptrdiff_t query = c.piece.distance + static_cast<ptrdiff_t>(row / c.tile.group_size);
      logits[key] -= double{c.tile.slopes[row % c.tile.group_size]} *
                     std::fabs(static_cast<double>(query) - static_cast<double>(key));
      norm += std::fabs(logits[key]);
    }
    errors[key] = query_unit / 2 * rounded_norm + keys[key].unit / 2 * query_norm +
                  static_cast<double>(dim + 8) * kEps * (norm + 1) + 8 * kEps * cap;
    largest_error = std::fmax(largest_error, errors[key]);
    maximum = std::fmax(maximum, logits[key]);
    tops[key / kLevelKeys] = std::fmax(tops[key / kLevelKeys], logits[key] + errors[key]);
  }
  if (maximum == -kInfinity) {
    check.equal(c.m[row], -kInfinity);
    check.equal(c.l[row], 0);
    for (size_t d = 0; d < dim; ++d) check.equal(c.o[row * c.tile.o_stride + d], 0);
    return;
  }
  check.near(c.m[row], maximum, largest_error);
  double sum = 0, sum_error = 0;
  std::vector<double> out(dim), out_errors(dim);
  for (size_t key = 0; key < n_keys; ++key) {
    if (!c.sees(row, key)) continue;
    const double weight = std::exp2(logits[key] - c.m[row]);
    const double error = weight * (std::exp2(errors[key]) - 1) +
                         std::exp2(tops[key / kLevelKeys] - c.m[row]) * (kLevelError + 64 * kEps);
    check.near(c.weight_of(row, key), weight, error);
    sum += weight;
    sum_error += error;
    for (size_t d = 0; d < dim; ++d) {
      const double x = c.v[key * dim + d];
      out[d] += weight * x;
      out_errors[d] += error * std::fabs(x) + (weight + error) * c.value_unit(key, d) / 2;
    }
  }
  check.near(c.l[row], sum, sum_error);
  for (size_t d = 0; d < dim; ++d) check.near(c.o[row * c.tile.o_stride + d], out[d], out_errors[d]);
}

template <typename Run>
void for_each_case(const KernelTable& table, const Run& run) {
  if (!has_byte_kernels(table)) return;
  Random random(32);
  for (const Shape& shape : kShapes) {
    ByteCase c(table, shape, random);
    byte_kernels(table).attention_tile(c.tile, c.piece);
    run(c, random);
  }
}

void check_attention_tile(const KernelTable& table, Check& check) {
  for_each_case(table, [&](const ByteCase& c, Random&) {
    std::vector<KeyRounding> keys(c.piece.n_keys);
    for (size_t key = 0; key < keys.size(); ++key) {
      const std::vector<double> x = c.mixed_key(key);
      keys[key] = {largest_of(x) / 127 * kFloatSlack, norm_of(x)};
    }
    for (size_t row = 0; row < c.tile.n_rows; ++row) check_row(check, c, row, keys);
  });
}

void check_column_sums(const KernelTable& table, Check& check) {
  for_each_case(table, [&](const ByteCase& c, Random& random) {
    if (c.piece.n_hidden != kNoneHidden) return;
    const std::vector<float> row_weights = random.uniform_vector(c.tile.n_rows, 0, 1);
    const size_t padded = round_up(c.piece.n_keys, kLevelKeys);
    std::vector<float> sums(padded + kGuard, kUntouched);
    byte_kernels(table).column_sums(sums.data(), c.tile, c.piece, row_weights.data());
    for (size_t key = 0; key < c.piece.n_keys; ++key) {
      double want = kUntouched;
      for (size_t row = 0; row < c.tile.n_rows; ++row)
        if (c.sees(row, key)) want += double{row_weights[row]} * c.weight_of(row, key);
      check.near(sums[key], want, static_cast<double>(c.tile.n_rows + 4) * kEps * want);
    }
    check.untouched(sums, padded);
  });
}

// What is not finite reaches the rows that see it, and no row of an earlier block.
void check_not_finite(const KernelTable& table, Check& check) {
  if (!has_byte_kernels(table)) return;
  constexpr size_t kRows = 200, kDim = 16, kAt = 70;
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const int which : {0, 1, 2}) {
      Random random(33);
      ByteCase c(table, {kRows, 1, kDim, kRows, 1, kNoneHidden, false, 1, 0}, random);
      (which == 0 ? c.q : which == 1 ? c.k : c.v)[kAt * kDim + 3] = value;
      c.pack(table);
      byte_kernels(table).attention_tile(c.tile, c.piece);
      for (size_t row = 0; row < kRows; ++row) {
        const bool is_finite = std::isfinite(c.l[row]) && std::isfinite(c.o[row * c.tile.o_stride + 3]);
        if (which == 0) check.equal(is_finite, row != kAt);
        if (which > 0 && row >= kAt) check.equal(is_finite, false);
        if (which > 0 && row + table.layout.float_rows < kLevelKeys) check.equal(is_finite, true);
      }
    }
  }
}

}  // namespace

const std::vector<KernelCheck>& byte_attention_checks() {
  static const std::vector<KernelCheck> checks = {
      {"attention_int8.attention_tile", check_attention_tile},
      {"attention_int8.column_sums", check_column_sums},
      {"attention_int8.not_finite", check_not_finite},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
