// Attention kernels of a few queries on rows where they lie, as decode reads them.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/selftest/attention_operands.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/matrices.h"

namespace edgeh2o::selftest {
namespace {

// attention_blocks-inl.h rounds queries and weights to units of the largest.
constexpr double kIntegerUnit = 0.5 / 32639 * (1 + 0x1p-7);

// Calls f(k_type, v_type, head_dim) for all that can be stored.
template <typename F>
void for_each_cache(const F& f) {
  for (const CacheType k_type : kCacheTypes) {
    for (const CacheType v_type : kCacheTypes) {
      for (const size_t head_dim : {5, 20, 64, 96}) {
        if (can_store(k_type, head_dim) && can_store(v_type, head_dim)) f(k_type, v_type, head_dim);
      }
    }
  }
}

void check_attention_rows(const KernelTable& table, Check& check) {
  Random random(24);
  for_each_cache([&](CacheType k_type, CacheType v_type, size_t head_dim) {
    for (const size_t n_rows : {1, 2, 3, 4, 9}) {
      for (const size_t n_keys : {1, 2, 3, 7, 33, 270}) {
        if (n_keys == 270 && n_rows != 3) continue;
        const CachedRows k(k_type, n_keys, head_dim, random), v(v_type, n_keys, head_dim, random);
        const size_t group_size = n_rows == 9 ? 3 : n_rows;
        TestTile<AttentionPrecision::kF32> test(table, n_rows, group_size, head_dim, n_keys, 1, random);
        if (k_type == CacheType::kQ8_0) test.query_error = kIntegerUnit;  // queries are within +-1
        if (v_type == CacheType::kQ8_0) test.key_error = kIntegerUnit * 128 * v.largest_scale;
        const std::vector<float> biases = random.uniform_vector(n_keys, 0, 4),
                                 slopes = random.uniform_vector(group_size, 0, 0.7f);
        const float* const none = nullptr;
        const ptrdiff_t distance = random.integer(static_cast<int>(n_keys) - 1, 400);
        using Added = std::pair<const float*, const float*>;
        for (const auto& [bias, slope] : {Added{none, none}, {biases.data(), none}, {none, slopes.data()}}) {
          test.tile.slopes = slope;
          table.attention_rows_f32(k_type, v_type, test.tile, k.bytes.data(), v.bytes.data(), nullptr, n_keys,
                                   bias, distance, 0);
          for (size_t row = 0; row < n_rows; ++row)
            test.check_row(check, row, n_keys, k.values, v.values, bias, distance);
        }
      }
    }
  });
}

// Listed rows, every four of which are neighbours, give what copies of them do, bit by bit.
void check_attention_rows_in_place(const KernelTable& table, Check& check) {
  Random random(25);
  for_each_cache([&](CacheType k_type, CacheType v_type, size_t head_dim) {
    for (const size_t n_rows : {1, 3, 5, 7}) {
      for (const size_t n_keys : {4, 16, 36, 268}) {
        const size_t n_cached = 2 * n_keys + 7;
        const CachedRows k(k_type, n_cached, head_dim, random), v(v_type, n_cached, head_dim, random);
        std::vector<int32_t> positions;
        std::vector<uint8_t> k_copy, v_copy;
        for (size_t next = 1; positions.size() < n_keys; next += 4 + positions.size() % 3 * 2) {
          for (size_t i = 0; i < 4; ++i) {
            const size_t row = next + i;
            positions.push_back(static_cast<int32_t>(row));
            const auto append = [row](std::vector<uint8_t>& out, const CachedRows& rows, size_t row_bytes) {
              out.insert(out.end(), rows.bytes.data() + row * row_bytes,
                         rows.bytes.data() + (row + 1) * row_bytes);
            };
            append(k_copy, k, kv_row_bytes(k_type, head_dim));
            append(v_copy, v, kv_row_bytes(v_type, head_dim));
          }
        }
        TestTile<AttentionPrecision::kF32> test(table, n_rows, n_rows, head_dim, n_keys, 1, random);
        const auto attend = [&](const void* keys, const void* values, const int32_t* at) {
          table.attention_rows_f32(k_type, v_type, test.tile, keys, values, at, n_keys, nullptr, 0, 0);
          std::vector<float> result(test.tile.o, test.tile.o + n_rows * test.tile.o_stride);
          result.insert(result.end(), test.tile.l, test.tile.l + n_rows);
          return result;
        };
        const std::vector<float> copied = attend(k_copy.data(), v_copy.data(), nullptr),
                                 in_place = attend(k.bytes.data(), v.bytes.data(), positions.data());
        for (size_t i = 0; i < copied.size(); ++i) check.equal(in_place[i], copied[i]);
      }
    }
  });
}

// A row's result does not depend on the rows that go with it.
void check_attention_rows_alone(const KernelTable& table, Check& check) {
  Random random(30);
  constexpr size_t kKeys = 70;  // two blocks of columns, and keys that fill neither one nor a group of four
  for_each_cache([&](CacheType k_type, CacheType v_type, size_t head_dim) {
    for (const size_t n_rows : {5, 6, 21}) {
      const CachedRows k(k_type, kKeys, head_dim, random), v(v_type, kKeys, head_dim, random);
      const size_t group_size = n_rows == 21 ? 7 : n_rows;
      TestTile<AttentionPrecision::kF32> test(table, n_rows, group_size, head_dim, kKeys, 1, random);
      const std::vector<float> slopes = random.uniform_vector(group_size, 0, 0.7f);
      if (n_rows != 5) test.tile.slopes = slopes.data();
      const auto attend = [&](AttentionTile tile, size_t query) {
        table.attention_rows_f32(k_type, v_type, tile, k.bytes.data(), v.bytes.data(), nullptr, kKeys,
                                 nullptr, static_cast<ptrdiff_t>(kKeys + query), 0);
        std::vector<float> result;
        for (size_t row = 0; row < tile.n_rows; ++row) {
          const float* o = tile.o + row * tile.o_stride;
          result.insert(result.end(), o, o + head_dim);
          result.insert(result.end(), {tile.m[row], tile.l[row]});
        }
        return result;
      };
      const std::vector<float> together = attend(test.tile, 0);
      for (size_t row = 0; row < n_rows; ++row) {
        AttentionTile tile = test.tile;
        tile.n_rows = tile.group_size = 1;
        tile.q += row * head_dim;
        if (tile.slopes) tile.slopes += row % group_size;
        const std::vector<float> alone = attend(tile, row / group_size);
        for (size_t i = 0; i < alone.size(); ++i) check.equal(together[row * alone.size() + i], alone[i]);
      }
    }
  });
}

// What is not finite in a cached row reaches the output.
void check_attention_rows_not_finite(const KernelTable& table, Check& check) {
  Random random(28);
  constexpr size_t kKeys = 40, kDim = 64;
  for (const uint16_t scale : {uint16_t{0x7c00}, uint16_t{0x7e00}}) {
    for (const bool is_key : {false, true}) {
      CachedRows k(CacheType::kQ8_0, kKeys, kDim, random), v(CacheType::kQ8_0, kKeys, kDim, random);
      uint8_t* block = (is_key ? k : v).bytes.data() + 21 * 68 + 34;  // the second one of row 21
      std::memcpy(block, &scale, sizeof(scale));
      block[2] = 0;
      TestTile<AttentionPrecision::kF32> test(table, 2, 2, kDim, kKeys, 1, random);
      table.attention_rows_f32(CacheType::kQ8_0, CacheType::kQ8_0, test.tile, k.bytes.data(), v.bytes.data(),
                               nullptr, kKeys, nullptr, 0, 0);
      for (size_t row = 0; row < 2; ++row) {
        // Of a key, at least the sum of weights, by which outputs are divided.
        const float value = is_key ? test.l[row] : test.o[row * test.tile.o_stride + 40];
        check.equal(std::isfinite(value), false);
      }
    }
  }
}

}  // namespace

const std::vector<KernelCheck>& attention_row_checks() {
  static const std::vector<KernelCheck> checks = {
      {"attention_rows_f32", check_attention_rows},
      {"attention_rows_f32.in_place", check_attention_rows_in_place},
      {"attention_rows_f32.alone", check_attention_rows_alone},
      {"attention_rows_f32.not_finite", check_attention_rows_not_finite},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
