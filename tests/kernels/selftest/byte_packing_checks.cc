// What packs queries, keys and values for attention in 8 bits, against the numbers before they are rounded.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tests/kernels/selftest/attention_operands.h"
#include "tests/kernels/selftest/byte_operands.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {
namespace {

void check_pack_queries(const KernelTable& table, Check& check) {
  if (!has_byte_kernels(table)) return;
  const Offsets offsets(table);
  check.equal(offsets.key == 0 || offsets.key == 128, true);
  Random random(30);
  for (const size_t dim : {8, 24, 64, 72, 96, 128, 136, 256}) {
    const size_t n_queries = 7, group = 3, n_rows = n_queries * group,
                 n_words = IntegerLayout{4}.query_words(dim);
    const size_t stride = group * dim + 5;
    const std::vector<float> queries = random.uniform_vector(n_queries * stride, -3, 3);
    std::vector<float> out(n_rows * n_words + kGuard, kUntouched);
    byte_kernels(table).pack_queries(out.data(), queries.data(), stride, 0.18f, n_queries, group, dim);
    for (size_t row = 0; row < n_rows; ++row) {
      const float* words = out.data() + row * n_words;
      const float* x = queries.data() + row / group * stride + row % group * dim;
      const std::vector<double> q = mixed_query(x, double{0.18f}, dim);
      const double largest = largest_of(q);
      int sum = 0;
      for (size_t i = 0; i < dim; ++i) {
        const int byte = byte_at(words, i, 0);
        check.equal(words[dim / 4 + 2 + i], 0.18f * x[i]);
        check.near(byte * double{words[dim / 4]}, q[i], words[dim / 4] / 2 * (1 + 1e-4));
        sum += byte;
      }
      check.near(words[dim / 4], largest / 127, 8 * largest * kEps);
      check.equal(bits_of(words[dim / 4 + 1]), -offsets.key * sum);
    }
    check.untouched(out, n_rows * n_words);
  }
}

// Calls run(rows, n_keys, head_dim, positions) where positions is null or names the rows.
template <typename Run>
void for_each_gather(const Run& run) {
  Random random(31);
  for (const CacheType type : {CacheType::kF16, CacheType::kF32, CacheType::kQ8_0}) {
    for (const size_t n_keys : {1, 63, 64, 65, 130}) {
      for (const size_t dim : {8, 24, 64, 96}) {
        if (type == CacheType::kQ8_0 && dim % 32 != 0) continue;
        const CachedRows rows(type, n_keys, dim, random);
        std::vector<int32_t> positions(n_keys);
        for (int32_t& position : positions) position = random.integer(0, static_cast<int>(n_keys) - 1);
        for (const int32_t* named : {static_cast<const int32_t*>(nullptr), std::as_const(positions).data()})
          run(type, rows, n_keys, dim, named);
      }
    }
  }
}

void check_pack_keys(const KernelTable& table, Check& check) {
  if (!has_byte_kernels(table)) return;
  const int offset = Offsets(table).key;
  const size_t nr = table.layout.panel_cols;
  for_each_gather(
      [&](CacheType type, const CachedRows& rows, size_t n_keys, size_t dim, const int32_t* named) {
        const size_t n_words = round_up(n_keys, kLevelKeys) * IntegerLayout{4}.key_words(dim);
        std::vector<float> out(n_words + kGuard, kUntouched);
        byte_kernels(table).pack_keys(type, out.data(), rows.bytes.data(), named, n_keys, dim);
        check.untouched(out, n_words);
        for (size_t first = 0; first < n_keys; first += kLevelKeys) {
          const float* block = out.data() + first * IntegerLayout{4}.key_words(dim);
          const float *units = block + kLevelKeys * dim / 4, *mean = units + kLevelKeys;
          const size_t n = std::min(kLevelKeys, n_keys - first);
          const auto value = [&](size_t i, size_t d) {
            return double{rows.values[(named ? static_cast<size_t>(named[first + i]) : first + i) * dim + d]};
          };
          for (size_t d = 0; d < dim; ++d) {
            double sum = 0;
            for (size_t i = 0; i < n; ++i) sum += value(i, d);
            check.near(mean[d], sum / static_cast<double>(n), 2.5 * kEps * static_cast<double>(n));
          }
          for (size_t i = 0; i < kLevelKeys; ++i) {
            std::vector<double> differences(dim);
            for (size_t d = 0; i < n && d < dim; ++d) differences[d] = value(i, d) - mean[d];
            differences = mixed(differences);
            const double float_error = 8 * kEps * static_cast<double>(dim);
            for (size_t d = 0; i < n && d < dim; ++d) {
              const size_t at = (i / nr * nr * dim / 4 + d / 4 * nr + i % nr) * 4 + d % 4;
              check.near(byte_at(block, at, offset) * double{units[i]}, differences[d],
                         units[i] / 2 * 1.0001 + float_error);
            }
            check.near(units[i], largest_of(differences) / 127, float_error);
          }
        }
      });
}

void check_pack_values(const KernelTable& table, Check& check) {
  if (!has_byte_kernels(table)) return;
  const int offset = Offsets(table).value;
  check.equal(offset == 0 || offset == 128, true);
  const size_t nr = table.layout.panel_cols;
  for_each_gather([&](CacheType type, const CachedRows& rows, size_t n_keys, size_t dim,
                      const int32_t* named) {
    const size_t o_stride = round_up(dim, nr);
    const size_t n_words = round_up(n_keys, kLevelKeys) * IntegerLayout{4}.value_words(o_stride);
    std::vector<float> out(n_words + kGuard, kUntouched);
    byte_kernels(table).pack_values(type, out.data(), 0, rows.bytes.data(), named, n_keys, dim);
    check.untouched(out, n_words);
    for (size_t first = 0; first < n_keys; first += kLevelKeys) {
      const float* block = out.data() + first * IntegerLayout{4}.value_words(o_stride);
      const float* units = block + kLevelKeys * o_stride / 4;
      for (size_t d = 0; d < dim; ++d) {
        double largest = 0;
        for (size_t i = 0; i < kLevelKeys; ++i) {
          const size_t key = first + i, row = named && key < n_keys ? static_cast<size_t>(named[key]) : key;
          const double value = key < n_keys ? rows.values[row * dim + d] : 0;
          const size_t at = (d / nr * nr * kLevelKeys / 4 + i / 4 * nr + d % nr) * 4 + i % 4;
          largest = std::fmax(largest, std::fabs(value));
          check.near(byte_at(block, at, offset) * double{units[d]}, value, units[d] / 2 * 1.0001 + kEps);
        }
        check.near(units[d], largest / 127, 2 * kEps);
      }
    }
  });
}

}  // namespace

const std::vector<KernelCheck>& byte_packing_checks() {
  static const std::vector<KernelCheck> checks = {
      {"attention_int8.pack_queries", check_pack_queries},
      {"attention_int8.pack_keys", check_pack_keys},
      {"attention_int8.pack_values", check_pack_values},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
