// Attention kernels of prompts: rows of the cache, packed operands, tiles, softmax.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/selftest/attention_operands.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {
namespace {

// Calls run(type, n_keys, head_dim, positions, random); positions is empty for rows in order.
template <typename Run>
void for_each_gather(const KernelTable& table, const Run& run) {
  Random random(20);
  const size_t nr = table.layout.panel_cols;
  for (const CacheType type : kCacheTypes) {
    for (const size_t n_keys : {size_t{1}, nr - 1, 2 * nr + 1}) {
      for (const size_t head_dim : {3, 8, 20, 64, 96}) {
        if (!can_store(type, head_dim)) continue;
        std::vector<int32_t> positions(n_keys);
        for (int32_t& position : positions) position = random.integer(0, static_cast<int>(n_keys) - 1);
        run(type, n_keys, head_dim, std::vector<int32_t>{}, random);
        run(type, n_keys, head_dim, positions, random);
      }
    }
  }
}

void check_store_kv_row(const KernelTable& table, Check& check) {
  Random random(25);
  const auto store = [&](CacheType type, const std::vector<float>& x) {
    std::vector<uint8_t> out(kv_row_bytes(type, x.size()) + kGuard, 0xa5);
    table.store_kv_row_f32(type, out.data(), x.data(), x.size());
    for (size_t i = out.size() - kGuard; i < out.size(); ++i) check.equal(out[i], 0xa5);
    return out;
  };
  for (int round = 0; round < 200; ++round) {
    for (const size_t n : {1, 3, 8, 20, 33, 64, 96}) {
      std::vector<float> x(n);
      for (float& value : x) {
        const uint32_t bits = random.next();
        std::memcpy(&value, &bits, sizeof(value));
        if (round % 2) value = std::ldexp(random.uniform(-2, 2), random.integer(-28, 16));
      }
      const std::vector<uint8_t> copy = store(CacheType::kF32, x);
      check.equal(std::memcmp(copy.data(), x.data(), n * sizeof(float)), 0);
      const std::vector<uint8_t> halves = store(CacheType::kF16, x);
      for (size_t i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, halves.data() + 2 * i, sizeof(half));
        check.equal(f64_from_f16(half), round_to_f16(x[i]));
        if (!std::isnan(x[i])) check.equal(half >> 15, std::signbit(x[i]));
      }
    }
    for (const size_t n : {32, 96}) {
      const float unit = std::ldexp(1.0f, random.integer(-40, 22));
      std::vector<float> x = random.uniform_vector(n, -unit, unit);
      if (round % 8 == 1) std::fill_n(x.begin(), 32, 0.0f);
      if (round % 8 == 2) x[random.next() % 32] = std::numeric_limits<float>::quiet_NaN();
      if (round % 8 == 3) x[random.next() % 32] = kInfinity;
      if (round % 8 == 4) x[random.next() % 32] = -8.4e6f;  // its scale is beyond f16
      const std::vector<uint8_t> blocks = store(CacheType::kQ8_0, x);
      for (size_t i = 0; i < n; i += 32) {
        double largest = 0;
        for (size_t j = i; j < i + 32; ++j) {
          largest = std::isfinite(x[j]) ? std::max(largest, std::fabs(double{x[j]})) : double{kInfinity};
        }
        uint16_t half;
        std::memcpy(&half, blocks.data() + i / 32 * 34, sizeof(half));
        const double d = f64_from_f16(half), want_d = round_to_f16(static_cast<float>(largest) / 127.0f);
        if (!std::isfinite(want_d)) {
          for (size_t j = 0; j < 32; ++j) {
            const auto q = static_cast<int8_t>(blocks[i / 32 * 34 + 2 + j]);
            check.equal(std::isnan(d * q), true);
          }
          continue;
        }
        check.equal(d, want_d);
        // Half a step; where d is denormal, its own error up to 127 times.
        const double tolerance = d / 2 * (1 + 256 * kEps) + 127 * 0x1p-25;
        for (size_t j = 0; j < 32; ++j) {
          const auto q = static_cast<int8_t>(blocks[i / 32 * 34 + 2 + j]);
          check.near(d * q, x[i + j], d < 0x1p-14 ? tolerance : d / 2 * (1 + 256 * kEps));
        }
      }
    }
  }
}

void check_score_blocks(const KernelTable& table, Check& check) {
  Random random(27);
  constexpr size_t kBlocks = 2, kPages = kBlocks * kKvBlock, kRows = 5;
  for (const size_t width : {2, 40}) {
    std::vector<uint8_t> blocks(kBlocks * width * kKvBlockBytes);
    for (size_t i = 0; i < kBlocks * width; ++i) {
      const std::vector<float> x = random.uniform_vector(kKvBlock, -3, 3);
      table.store_kv_row_f32(CacheType::kQ8_0, blocks.data() + i * kKvBlockBytes, x.data(), kKvBlock);
    }
    const std::vector<float> q = random.uniform_vector(kRows * width, -2, 2);
    const std::vector<int32_t> channels = {0, static_cast<int32_t>(width) - 1};
    for (const bool is_listed : {false, true}) {
      std::vector<float> out(kRows * kPages + kGuard, kUntouched);
      table.score_blocks_f32(out.data(), kPages, q.data(), width, kRows,
                             is_listed ? channels.data() : nullptr, is_listed ? channels.size() : width,
                             blocks.data(), kBlocks, width);
      for (size_t row = 0; row < kRows; ++row) {
        for (size_t page = 0; page < kPages; ++page) {
          double want = 0;
          for (size_t i = 0; i < (is_listed ? channels.size() : width); ++i) {
            const size_t channel = is_listed ? static_cast<size_t>(channels[i]) : i;
            const uint8_t* values = &blocks[(page / kKvBlock * width + channel) * kKvBlockBytes];
            uint16_t half;
            std::memcpy(&half, values, sizeof(half));
            want += double{q[row * width + channel]} * f64_from_f16(half) *
                    static_cast<int8_t>(values[2 + page % kKvBlock]);
          }
          check.near(out[row * kPages + page], want, 1e-3);
        }
      }
      check.untouched(out, kRows * kPages);
    }
  }
}

template <AttentionPrecision kPrecision>
void check_pack_queries(const KernelTable& table, Check& check) {
  using Ops = Operands<kPrecision>;
  if (!Ops::are_in(table)) return;
  Random random(26);
  for (const size_t n : {2, 8, 20, 30, 32, 64, 66, 144, 192}) {
    const size_t n_queries = 3, stride = 2 * n + 6, n_words = 2 * n / Ops::kPerWord;
    const std::vector<float> x = random.uniform_vector(n_queries * stride, -3, 3);
    std::vector<float> out(n_queries * n_words + kGuard, kUntouched);
    Ops::kernels(table).pack_queries(out.data(), x.data(), stride, 0.18f, n_queries, 2, n);
    for (size_t query = 0; query < n_queries; ++query) {
      const float* words = out.data() + query * n_words;
      for (size_t i = 0; i < 2 * n; ++i)
        check.equal(Ops::at(words, i, 1, 0), Ops::rounded(0.18f * x[query * stride + i]));
    }
    check.untouched(out, n_queries * n_words);
  }
}

template <AttentionPrecision kPrecision>
void check_pack_keys(const KernelTable& table, Check& check) {
  using Ops = Operands<kPrecision>;
  if (!Ops::are_in(table)) return;
  const size_t nr = table.layout.panel_cols;
  for_each_gather(table, [&](CacheType type, size_t n_keys, size_t head_dim,
                             const std::vector<int32_t>& positions, Random& random) {
    if (head_dim % Ops::kPerWord != 0) return;
    const CachedRows rows(type, n_keys, head_dim, random);
    const size_t n_columns = round_up(n_keys, nr), n_words = head_dim / Ops::kPerWord;
    std::vector<float> out(n_columns * n_words + kGuard, kUntouched);
    Ops::kernels(table).pack_keys(type, out.data(), rows.bytes.data(),
                                  positions.empty() ? nullptr : positions.data(), n_keys, head_dim);
    for (size_t key = 0; key < n_columns; ++key) {
      const size_t row = positions.empty() || key >= n_keys ? key : static_cast<size_t>(positions[key]);
      const float* panel = out.data() + key / nr * nr * n_words;
      for (size_t dim = 0; dim < head_dim; ++dim) {
        const float want = key < n_keys ? Ops::rounded(rows.values[row * head_dim + dim]) : 0.0f;
        check.equal(Ops::at(panel, dim, nr, key % nr), want);
      }
    }
    check.untouched(out, n_columns * n_words);
  });
}

template <AttentionPrecision kPrecision>
void check_pack_values(const KernelTable& table, Check& check) {
  using Ops = Operands<kPrecision>;
  if (!Ops::are_in(table)) return;
  const size_t nr = table.layout.panel_cols;
  for_each_gather(table, [&](CacheType type, size_t n_keys, size_t head_dim,
                             const std::vector<int32_t>& positions, Random& random) {
    const CachedRows rows(type, n_keys, head_dim, random);
    const size_t n_words = round_up(n_keys, Ops::kPerWord) / Ops::kPerWord;  // of a column
    const size_t n_padded = Ops::kIsBf16 ? n_words * Ops::kPerWord : n_keys;
    const size_t stride = (n_words + 1) * nr, n_panels = round_up(head_dim, nr) / nr;
    std::vector<float> out(n_panels * stride, kUntouched);
    Ops::kernels(table).pack_values(type, out.data(), stride, rows.bytes.data(),
                                    positions.empty() ? nullptr : positions.data(), n_keys, head_dim);
    for (size_t panel = 0; panel < n_panels; ++panel) {
      const float* words = out.data() + panel * stride;
      for (size_t col = 0; col < nr; ++col) {
        const size_t dim = panel * nr + col;
        check.equal(words[n_words * nr + col], kUntouched);
        for (size_t key = 0; key < n_padded && dim < head_dim; ++key) {
          const size_t row = positions.empty() || key >= n_keys ? key : static_cast<size_t>(positions[key]);
          const float want = key < n_keys ? Ops::rounded(rows.values[row * head_dim + dim]) : 0.0f;
          check.equal(Ops::at(words, key, nr, col), want);
        }
      }
    }
  });
}

// Calls run(tile, piece, k, v, random) for causal, partly hidden and fully visible pieces.
template <AttentionPrecision kPrecision, typename Run>
void for_each_tile(const KernelTable& table, const Run& run) {
  struct Shape {
    size_t n_rows, group_size, head_dim, n_keys;
    ptrdiff_t n_visible;
    bool has_biases;
    float q_range;
    ptrdiff_t distance;  // 0: without slopes
  };
  static constexpr float kSlopes[] = {0.25f, 0.375f, 0.0625f};
  const Shape shapes[] = {
      {1, 1, 8, 1, 1, false, 1, 0},       {5, 1, 20, 5, 1, false, 1, 0},
      {14, 3, 8, 40, 1000, true, 1, 0},   {27, 3, 64, 9, 1, false, 20, 0},
      {30, 2, 20, 150, 140, false, 1, 0}, {26, 1, 8, 30, -7, true, 1, 0},
      {29, 3, 20, 70, 1000, true, 1, 31}, {11, 1, 8, 50, 45, false, 1, -20},
  };
  Random random(21);
  for (const Shape& shape : shapes) {
    using Ops = Operands<kPrecision>;
    CachedRows k(CacheType::kF32, shape.n_keys, shape.head_dim, random);
    CachedRows v(CacheType::kF32, shape.n_keys, shape.head_dim, random);
    const size_t nr = table.layout.panel_cols,
                 n_words = round_up(shape.n_keys + 1, Ops::kPerWord) / Ops::kPerWord;
    std::vector<float> k_panels(round_up(shape.n_keys, nr) * shape.head_dim / Ops::kPerWord);
    std::vector<float> v_panels(round_up(shape.head_dim, nr) * n_words);
    std::vector<float> biases = random.uniform_vector(round_up(shape.n_keys, nr), -2, 2);
    AttentionPiece piece;
    piece.k = k_panels.data();
    piece.v = v_panels.data();
    piece.v_panel_stride = n_words * nr;
    piece.n_keys = shape.n_keys;
    piece.n_visible = shape.n_visible;
    piece.biases = shape.has_biases ? biases.data() : nullptr;
    const AttentionKernels& kernels = Ops::kernels(table);
    kernels.pack_keys(CacheType::kF32, k_panels.data(), k.bytes.data(), nullptr, shape.n_keys,
                      shape.head_dim);
    kernels.pack_values(CacheType::kF32, v_panels.data(), piece.v_panel_stride, v.bytes.data(), nullptr,
                        shape.n_keys, shape.head_dim);
    Ops::round_all(k.values);
    Ops::round_all(v.values);
    TestTile<kPrecision> test(table, shape.n_rows, shape.group_size, shape.head_dim, shape.n_keys,
                              shape.q_range, random);
    piece.distance = shape.distance;
    if (shape.distance != 0) test.tile.slopes = kSlopes;
    run(test, piece, k.values, v.values, random);
  }
}

size_t keys_of_row(const AttentionTile& tile, const AttentionPiece& piece, size_t row) {
  const ptrdiff_t n = piece.n_visible + static_cast<ptrdiff_t>(row / tile.group_size);
  return n < 0 ? 0 : std::min(static_cast<size_t>(n), piece.n_keys);
}

template <AttentionPrecision kPrecision>
void check_attention_tile(const KernelTable& table, Check& check) {
  if (!Operands<kPrecision>::are_in(table)) return;
  for_each_tile<kPrecision>(table, [&](TestTile<kPrecision>& test, const AttentionPiece& piece,
                                       const std::vector<float>& k, const std::vector<float>& v, Random&) {
    Operands<kPrecision>::kernels(table).attention_tile(test.tile, piece);
    for (size_t row = 0; row < test.tile.n_rows; ++row) {
      const size_t n_keys = keys_of_row(test.tile, piece, row);
      test.check_row(check, row, n_keys, k, v, piece.biases, piece.distance);
      if (n_keys == 0) check.equal(test.m[row], -kInfinity);
    }
  });
}

template <AttentionPrecision kPrecision>
void check_column_sums(const KernelTable& table, Check& check) {
  if (!Operands<kPrecision>::are_in(table)) return;
  const AttentionKernels& kernels = Operands<kPrecision>::kernels(table);
  for_each_tile<kPrecision>(table, [&](TestTile<kPrecision>& test, const AttentionPiece& piece,
                                       const std::vector<float>&, const std::vector<float>&, Random& random) {
    const AttentionTile& tile = test.tile;
    kernels.attention_tile(tile, piece);
    const std::vector<float> row_weights = random.uniform_vector(tile.n_rows, 0, 1);
    const size_t padded_keys = round_up(piece.n_keys, table.layout.panel_cols);
    std::vector<float> sums(padded_keys + kGuard, kUntouched);
    kernels.column_sums(sums.data(), tile, piece, row_weights.data());
    for (size_t key = 0; key < piece.n_keys; ++key) {
      double want = kUntouched;
      for (size_t row = 0; row < tile.n_rows; ++row) {
        if (key >= keys_of_row(tile, piece, row)) continue;
        want += double{row_weights[row]} * test.weight_of(row, key);
      }
      check.near(sums[key], want, static_cast<double>(tile.n_rows + 2) * kEps * want);
    }
    check.untouched(sums, padded_keys);
  });
}

void check_softmax_factors(const KernelTable& table, Check& check) {
  Random random(22);
  for (const size_t n : {1, 4, 7, 16, 33}) {
    std::vector<float> m_part = random.uniform_vector(n, -30, 2), m = random.uniform_vector(n, 2, 30);
    const std::vector<float> l = random.uniform_vector(n, 1, 50);
    m_part[n / 2] = -kInfinity;  // a row that sees no key of the part
    std::vector<float> out(n + kGuard, kUntouched);
    table.softmax_factors_f32(out.data(), m_part.data(), m.data(), l.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double want = std::exp2(double{m_part[i]} - m[i]) / l[i];
      check.near(out[i], want, want * (64 + 4) * kEps + kExpFloor);
    }
    check.untouched(out, n);
  }
}

void check_merge_softmax(const KernelTable& table, Check& check) {
  Random random(23);
  for (const size_t n_rows : {1, 6, 21}) {
    const size_t group_size = n_rows % 3 ? 1 : 3, head_dim = n_rows == 6 ? 8 : 20;
    const size_t n_queries = n_rows / group_size, o_stride = group_size * head_dim + 5;
    std::vector<float> m(n_rows + kGuard, kUntouched), l = m, o(n_queries * o_stride, kUntouched);
    std::vector<float> scratch(2 * n_rows);
    std::vector<double> want_m(n_rows, -kInfinity), want_l(n_rows), want_o(n_rows * head_dim), norm = want_o;
    for (int part = 0; part < 3; ++part) {
      TestTile<AttentionPrecision::kF32> test(table, n_rows, group_size, head_dim, 1, 1, random);
      test.o = random.uniform_vector(test.o.size(), -3, 3);
      test.m = random.uniform_vector(n_rows, -20, 20);
      test.l = random.uniform_vector(n_rows, 1, 9);
      test.tile.o = test.o.data();
      test.tile.m = test.m.data();
      test.tile.l = test.l.data();
      if (part == 1) {  // a row that sees no key of this part
        test.m[n_rows / 2] = -kInfinity;
        test.l[n_rows / 2] = 0;
        std::fill_n(test.o.data() + n_rows / 2 * test.tile.o_stride, head_dim, 0.0f);
      }
      SoftmaxRows state;
      state.m = m.data();
      state.l = l.data();
      state.o = o.data();
      state.o_stride = o_stride;
      table.merge_softmax_f32(state, test.tile, scratch.data(), part == 0);
      for (size_t row = 0; row < n_rows; ++row) {
        const double old_m = want_m[row], new_m = std::fmax(old_m, test.m[row]);
        const double old_factor = std::exp2(old_m - new_m), new_factor = std::exp2(test.m[row] - new_m);
        want_m[row] = new_m;
        want_l[row] = old_factor * want_l[row] + new_factor * test.l[row];
        const double tolerance = 64.0 * kEps * (part + 1);  // powers of differences up to 40
        check.equal(m[row], new_m);
        check.near(l[row], want_l[row], tolerance * want_l[row]);
        for (size_t dim = 0; dim < head_dim; ++dim) {
          const size_t i = row * head_dim + dim;
          const double value = test.o[row * test.tile.o_stride + dim];
          want_o[i] = old_factor * want_o[i] + new_factor * value;  // not yet divided by l
          norm[i] = old_factor * norm[i] + new_factor * std::fabs(value);
          check.near(o[row / group_size * o_stride + row % group_size * head_dim + dim],
                     want_o[i] / want_l[row], tolerance * norm[i] / want_l[row]);
        }
      }
    }
    check.untouched(m, n_rows);
    check.untouched(l, n_rows);
    for (size_t query = 0; query < n_queries; ++query) {
      for (size_t i = group_size * head_dim; i < o_stride; ++i)
        check.equal(o[query * o_stride + i], kUntouched);
    }
  }
}

}  // namespace

const std::vector<KernelCheck>& attention_checks() {
  static const std::vector<KernelCheck> checks = {
      {"store_kv_row_f32", check_store_kv_row},
      {"score_blocks_f32", check_score_blocks},
      {"attention_f32.pack_queries", check_pack_queries<AttentionPrecision::kF32>},
      {"attention_f32.pack_keys", check_pack_keys<AttentionPrecision::kF32>},
      {"attention_f32.pack_values", check_pack_values<AttentionPrecision::kF32>},
      {"attention_f32.attention_tile", check_attention_tile<AttentionPrecision::kF32>},
      {"attention_f32.column_sums", check_column_sums<AttentionPrecision::kF32>},
      {"attention_bf16.pack_queries", check_pack_queries<AttentionPrecision::kBf16>},
      {"attention_bf16.pack_keys", check_pack_keys<AttentionPrecision::kBf16>},
      {"attention_bf16.pack_values", check_pack_values<AttentionPrecision::kBf16>},
      {"attention_bf16.attention_tile", check_attention_tile<AttentionPrecision::kBf16>},
      {"attention_bf16.column_sums", check_column_sums<AttentionPrecision::kBf16>},
      {"attention_f16.pack_queries", check_pack_queries<AttentionPrecision::kF16>},
      {"attention_f16.pack_keys", check_pack_keys<AttentionPrecision::kF16>},
      {"attention_f16.pack_values", check_pack_values<AttentionPrecision::kF16>},
      {"attention_f16.attention_tile", check_attention_tile<AttentionPrecision::kF16>},
      {"attention_f16.column_sums", check_column_sums<AttentionPrecision::kF16>},
      {"softmax_factors_f32", check_softmax_factors},
      {"merge_softmax_f32", check_merge_softmax},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
