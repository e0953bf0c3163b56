// Quantised and float matrix kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/matrices.h"

namespace edgeh2o::selftest {
namespace {

uint32_t bits_at(const uint8_t* words, size_t i) {
  uint32_t bits;
  std::memcpy(&bits, words + i * sizeof(bits), sizeof(bits));
  return bits;
}

float float_at(const uint8_t* words, size_t i) {
  float value;
  std::memcpy(&value, words + i * sizeof(value), sizeof(value));
  return value;
}

void check_quantize(const KernelTable& table, Check& check) {
  Random random(1);
  for (const size_t tile_rows : {size_t{1}, table.layout.vector_rows, table.layout.tile_rows}) {
    for (const size_t n_rows : {size_t{1}, tile_rows}) {
      const size_t depth = 3 * kBlock, stride = depth + 5;
      for (int pattern = 0; pattern < 5; ++pattern) {
        std::vector<float> x(n_rows * stride);
        for (float& value : x) {
          if (pattern == 0) value = random.uniform(-3, 3);
          if (pattern == 1) value = static_cast<float>(random.integer(-126, 125)) + 0.5f;
          if (pattern == 2) value = random.integer(0, 1) ? 1e30f : -1e30f;
          if (pattern == 3) value = random.integer(0, 9) ? 0.0f : random.uniform(-1e-3f, 1e-3f);
          if (pattern == 4) value = random.uniform(-1e-38f, 1e-38f);  // 127 / max|x| is infinite
        }
        // Any 32 neighbours get a maximum of 127, hence the scale 1, which makes pattern 1 a row of ties.
        for (size_t i = 0; pattern == 1 && i < x.size(); i += kBlock) x[i] = 127;
        const std::vector<uint8_t> want =
            quantize_reference(x.data(), stride, n_rows, tile_rows, depth, table.layout);
        std::vector<uint8_t> got(want.size() + kGuard, 0xa5);
        table.quantize_q8p_f32(got.data(), x.data(), stride, n_rows, tile_rows, depth, kBlock);
        for (size_t i = 0; i < got.size(); ++i) check.equal(got[i], i < want.size() ? want[i] : 0xa5);
      }
    }
  }
}

// The scale that 256 values share: of their largest, or what leaves the magnitudes of 16 neighbours, before
// they are rounded, below kMostOf16 - 8.
double wide_scale(const float* x) {
  double top = 0;
  for (size_t i = 0; i < kSuperBlock; i += 16) {
    double sum = 0;
    for (size_t j = i; j < i + 16; ++j) {
      top = std::fmax(top, std::fabs(x[j]));
      sum += std::fabs(double{x[j]});
    }
    top = std::fmax(top, sum * 127 / (kMostOf16 - 8));
  }
  return top < 127 / static_cast<double>(std::numeric_limits<float>::max()) ? 0 : top / 127;
}

void check_wide_rows(const KernelTable& table, Check& check, const std::vector<float>& x, size_t n_rows,
                     size_t tile_rows, size_t depth) {
  const size_t stride = x.size() / n_rows, n_records = depth / kBlock;
  const size_t record_bytes = kActivationRecordPerRow * tile_rows;
  std::vector<uint8_t> got(n_records * record_bytes + kGuard, 0xa5);
  table.quantize_q8p_f32(got.data(), x.data(), stride, n_rows, tile_rows, depth, kSuperBlock);
  std::vector<float> scales;
  std::vector<int8_t> quants;
  for (size_t row = 0; row < n_rows; ++row) {
    const float* values = x.data() + row * stride;
    for (size_t record = 0; record < n_records; ++record) {
      const uint8_t* bytes = got.data() + record * record_bytes;
      const double want = wide_scale(values + record / kSuperRecords * kSuperBlock);
      scales.push_back(float_at(bytes, row));
      check.near(scales.back(), want, 16 * kEps * want);
      int magnitudes[2] = {0, 0};
      for (size_t k = 0; k < kBlock; ++k) {
        const uint8_t* four = bytes + kActivationHeaderPerRow * tile_rows + (k / 4 * tile_rows + row) * 4;
        quants.push_back(static_cast<int8_t>(four[k % 4]));
        magnitudes[k / 16] += std::abs(quants.back());
        const float value = want == 0 ? 0.0f : values[record * kBlock + k];
        check.near(quants.back() * scales.back(), value, 0.5001 * want);
      }
      for (const int sum : magnitudes) check.equal(sum <= kMostOf16, true);
    }
  }
  const Activations packed(n_rows, n_records, std::move(scales), std::move(quants));
  const std::vector<uint8_t> want = packed.pack(tile_rows, table.layout);
  for (size_t i = 0; i < got.size(); ++i) check.equal(got[i], i < want.size() ? want[i] : 0xa5);
}

// One scale for 256 values, of which 16 neighbours may all be large.
void check_quantize_wide(const KernelTable& table, Check& check) {
  Random random(11);
  for (const size_t tile_rows : {size_t{1}, table.layout.vector_rows, table.layout.tile_rows}) {
    for (const size_t n_rows : {size_t{1}, tile_rows}) {
      const size_t depth = 2 * kSuperBlock, stride = depth + 5;
      for (int pattern = 0; pattern < 5; ++pattern) {
        std::vector<float> x(n_rows * stride);
        for (size_t i = 0; i < x.size(); ++i) {
          if (pattern == 0) x[i] = random.uniform(-3, 3);
          if (pattern == 1) x[i] = i % 2 ? 96.0f : -96.0f;
          if (pattern == 2) x[i] = random.uniform(-1, 1) * (i % stride % kSuperBlock < 16 ? 1e30f : 1e28f);
          if (pattern == 3) x[i] = random.uniform(-1e-38f, 1e-38f);
          if (pattern == 4) x[i] = i % 100 ? random.uniform(-1e-2f, 1e-2f) : 5.0f;
        }
        check_wide_rows(table, check, x, n_rows, tile_rows, depth);
      }
    }
  }
}

// Bytes that kernels fetch ahead, behind the end of what there is too.
constexpr size_t kAhead = 4096;

std::vector<uint8_t> unpack(const KernelTable& table, const WeightPanel& w, size_t guard) {
  std::vector<uint8_t> unpacked(w.unpacked_bytes() + guard, 0xa5);
  table.unpack_q_qp(w.format.format, unpacked.data(), w.packed.data(), w.n_records, guard == 0 ? 0 : kAhead);
  return unpacked;
}

// A column of a record whose scales are integers or have gone into the quants, which are then u8[8][nr][4].
void check_integers(const KernelTable& table, Check& check, const WeightPanel& w, const uint8_t* bytes,
                    size_t record, size_t col) {
  const QuantFormat& format = w.format;
  if (record % kSuperRecords == 0) {
    const uint8_t* header = bytes - w.n_cols * w.shape.header;
    check.equal(float_at(header, col), w.coarse_scale(col, record));
    if (format.has_min) check.equal(float_at(header, w.n_cols + col), w.coarse_min(col, record) / 32);
  }
  if (format.has_min) {
    const int want = w.fine_min(col, record, 0) | w.fine_min(col, record, format.sub_blocks - 1) << 16;
    check.equal(bits_at(bytes + w.n_cols * w.shape.pairs_from, col), static_cast<uint32_t>(want));
  }
  for (size_t sub = 0; w.kind == Unpacked::kWords && sub < format.sub_blocks; ++sub) {
    const uint32_t fine = static_cast<uint16_t>(w.fine_scale(col, record, sub));
    check.equal(bits_at(bytes, sub * w.n_cols + col), table.layout.has_pairs ? fine << 16 | fine : fine);
  }
  for (size_t k = 0; w.kind == Unpacked::kBytes && k < kBlock; ++k) {
    const int product =
        w.fine_scale(col, record, k * format.sub_blocks / kBlock) * w.quant(col, record * kBlock + k);
    const uint8_t* quants = bytes + w.n_cols * w.shape.quants_from;
    check.equal(int{quants[(k / 4 * w.n_cols + col) * 4 + k % 4]},
                product + (format.has_min ? 0 : kByteOffset));
  }
}

// Scales, mins and the number of bytes; the order of the quants is that of the table's own matrix kernel.
void check_unpack(const KernelTable& table, Check& check) {
  for (const QuantFormat& format : kQuantFormats) {
    const WeightPanel w(format, table.layout, 9, Values::kRandom, Scales::kAny, 2);
    const std::vector<uint8_t> unpacked = unpack(table, w, kGuard);
    for (size_t record = 0; record < w.n_records; ++record) {
      const uint8_t* bytes = unpacked.data() + w.unpacked_record(record);
      for (size_t col = 0; col < w.n_cols; ++col) {
        const bool has_floats = w.kind == Unpacked::kFloats || w.kind == Unpacked::kNibbles;
        if (!has_floats) check_integers(table, check, w, bytes, record, col);
        for (size_t k = 0; w.kind == Unpacked::kNibbles && k < kBlock; ++k) {
          const uint8_t* low = bytes + w.n_cols * (w.shape.quants_from + k / 4 * 4) + col * 4 + k % 4;
          check.equal(low[0] + 16 * low[w.n_cols * kBlock], w.quant(col, record * kBlock + k) + 128);
        }
        for (size_t sub = 0; has_floats && sub < format.sub_blocks; ++sub) {
          check.equal(float_at(bytes, sub * w.n_cols + col), w.scale(col, record, sub));
          if (!format.has_min) continue;
          check.equal(float_at(bytes, (format.sub_blocks + sub) * w.n_cols + col), w.min(col, record, sub));
        }
      }
    }
    for (size_t i = w.unpacked_bytes(); i < unpacked.size(); ++i) check.equal(unpacked[i], 0xa5);
  }
}

// Calls run(weights, activations, exact) for all formats, extreme values and several depths.
template <typename Run>
void for_each_product(const KernelTable& table, size_t max_rows, const Run& run) {
  for (const QuantFormat& format : kQuantFormats) {
    for (const Values values : {Values::kRandom, Values::kLowest, Values::kHighest, Values::kAlternating}) {
      for (const Scales scales : {Scales::kAny, Scales::kInteger}) {
        for (const size_t n_records : {1, 9}) {
          const WeightPanel w(format, table.layout, n_records, values, scales, 3 * n_records);
          for (const Values x_values : {values, Values::kLowest}) {
            run(w, Activations(max_rows, n_records, x_values, scales, 5 * n_records, w.scale_block),
                scales == Scales::kInteger);
          }
        }
      }
    }
  }
}

void check_gemm_q8(const KernelTable& table, Check& check) {
  const size_t mr = table.layout.tile_rows, nr = table.layout.panel_cols;
  const struct {
    size_t n_rows, n_cols;
    bool accumulate;
  } shapes[] = {{2 * mr + 1, nr, true}, {mr, nr - 1, true}, {mr - 1, 1, false}, {1, nr / 2 + 1, false}};
  for_each_product(table, 2 * mr + 1, [&](const WeightPanel& w, const Activations& x, bool exact) {
    const std::vector<uint8_t> unpacked = unpack(table, w, 0), packed_x = x.pack(mr, table.layout);
    for (const auto& shape : shapes) {
      const size_t stride = nr + 3;
      std::vector<float> c((shape.n_rows + 1) * stride, kUntouched);
      table.gemm_f32_q8_qp(w.format.format, c.data(), stride, packed_x.data(), x.tile_bytes(mr),
                           unpacked.data(), w.n_records, shape.n_rows, shape.n_cols, shape.accumulate);
      for (size_t row = 0; row <= shape.n_rows; ++row) {
        for (size_t col = 0; col < stride; ++col) {
          const float got = c[row * stride + col];
          if (row == shape.n_rows || col >= shape.n_cols) {
            check.equal(got, kUntouched);
          } else {
            const Product want = multiply(w, x, row, col);
            const double before = shape.accumulate ? kUntouched : 0;
            // Each of up to four terms of a record rounds a sum that starts there.
            const double rounding = before * kEps * static_cast<double>(4 * w.n_records);
            check.near(got, want.value + before, exact ? 0 : want.tolerance + rounding);
          }
        }
      }
    }
  });
}

// The rows of all tiles that matrix-vector kernels have.
std::vector<size_t> vector_tiles(const PackLayout& layout) {
  std::vector<size_t> tiles;
  for (size_t n = 1; n <= layout.vector_rows; ++n) {
    if (vector_tile_rows(n) == n) tiles.push_back(n);
  }
  return tiles;
}

void check_gemv_q8(const KernelTable& table, Check& check) {
  const size_t nr = table.layout.panel_cols, stride = nr + 3;
  for (const size_t tile_rows : vector_tiles(table.layout)) {
    for_each_product(table, tile_rows, [&](const WeightPanel& w, const Activations& x, bool exact) {
      const std::vector<uint8_t> packed_x = x.pack(tile_rows, table.layout);
      for (const size_t n_cols : {nr, nr - 1, nr / 2 + 1, size_t{1}}) {
        const size_t n_rows = n_cols == 1 ? 1 : tile_rows;
        const bool accumulate = n_cols % 2 == 1;
        std::vector<float> y((n_rows + 1) * stride, kUntouched);
        table.gemv_f32_q8_qp(w.format.format, y.data(), stride, packed_x.data(), tile_rows, w.packed.data(),
                             w.n_records, n_rows, n_cols, accumulate, accumulate ? kAhead : 0);
        for (size_t i = 0; i < y.size(); ++i) {
          const size_t row = i / stride, col = i % stride;
          if (row == n_rows || col >= n_cols) {
            check.equal(y[i], kUntouched);
            continue;
          }
          const Product want = multiply(w, x, row, col);
          const double before = accumulate ? kUntouched : 0;
          const double rounding = before * kEps * static_cast<double>(4 * w.n_records);
          check.near(y[i], want.value + before, exact ? 0 : want.tolerance + rounding);
        }
      }
    });
  }
}

// A row's result is the same bits in both kernels, alone or with others, in one go or in parts of its depth.
void check_rows_alike(const KernelTable& table, Check& check) {
  const size_t nr = table.layout.panel_cols, mr = table.layout.tile_rows, n_records = 2 * kSuperRecords;
  for (const QuantFormat& format : kQuantFormats) {
    const WeightPanel w(format, table.layout, n_records, Values::kRandom, Scales::kAny, 4);
    const Activations x(1, n_records, Values::kRandom, Scales::kAny, 5, w.scale_block);
    std::vector<float> want(nr, kUntouched), got(nr);
    table.gemv_f32_q8_qp(format.format, want.data(), nr, x.pack(1, table.layout).data(), 1, w.packed.data(),
                         n_records, 1, nr, true, 0);
    const auto compare = [&] {
      for (size_t col = 0; col < nr; ++col) check.equal(got[col], want[col]);
      got.assign(nr, kUntouched);
    };
    got.assign(nr, kUntouched);
    for (const size_t tile_rows : vector_tiles(table.layout)) {
      table.gemv_f32_q8_qp(format.format, got.data(), nr, x.pack(tile_rows, table.layout).data(), tile_rows,
                           w.packed.data(), n_records, 1, nr, true, kAhead);
      compare();
    }
    const std::vector<uint8_t> unpacked = unpack(table, w, 0), packed_x = x.pack(mr, table.layout);
    const size_t x_half = x.tile_bytes(mr) / 2, w_half = unpacked.size() / 2;
    for (const size_t half : {0, 1}) {
      table.gemm_f32_q8_qp(format.format, got.data(), nr, packed_x.data() + half * x_half, x_half,
                           unpacked.data() + half * w_half, n_records / 2, 1, nr, true);
    }
    compare();
  }
}

const PackedFormat kFloatFormats[] = {PackedFormat::kF32, PackedFormat::kF16, PackedFormat::kBF16};

void check_unpack_f32(const KernelTable& table, Check& check) {
  for (const PackedFormat format : kFloatFormats) {
    const FloatPanel w(format, table.layout.panel_cols, 5, 5);
    std::vector<float> out(w.values.size() + kGuard, kUntouched);
    table.unpack_f32_fp(format, out.data(), w.bytes.data(), 5);
    for (size_t i = 0; i < w.values.size(); ++i) check.equal(out[i], w.values[i]);
    check.untouched(out, w.values.size());
  }
}

void check_gemm_f32(const KernelTable& table, Check& check) {
  Random random(7);
  const size_t nr = table.layout.panel_cols;
  for (const size_t n_rows : {1, 2, 3, 5, 8, 12, 13, 25}) {
    for (const size_t depth : {1, 2, 3, 4, 5, 8, 11, 33}) {
      const size_t a_stride = depth + 2, b_stride = nr + 4, c_stride = nr + 3;
      const std::vector<float> a = random.uniform_vector(n_rows * a_stride, -2, 2);
      const std::vector<float> b = random.uniform_vector(depth * b_stride, -2, 2);
      const size_t n_cols = depth % 2 ? nr : 1 + (n_rows + depth) % nr;
      for (const bool accumulate : {false, true}) {
        std::vector<float> c((n_rows + 1) * c_stride, kUntouched);
        table.gemm_f32_f32_f32p(c.data(), c_stride, a.data(), a_stride, b.data(), b_stride, n_rows, n_cols,
                                depth, accumulate);
        for (size_t i = 0; i < c.size(); ++i) {
          const size_t row = i / c_stride, col = i % c_stride;
          if (row == n_rows || col >= n_cols) {
            check.equal(c[i], kUntouched);
            continue;
          }
          double want = accumulate ? kUntouched : 0, norm = want;
          for (size_t k = 0; k < depth; ++k) {
            const double term = double{a[row * a_stride + k]} * b[k * b_stride + col];
            want += term;
            norm += std::fabs(term);
          }
          check.near(c[i], want, static_cast<double>(depth + 2) * kEps * norm);
        }
      }
    }
  }
}

void check_gemv_f32(const KernelTable& table, Check& check) {
  Random random(8);
  const size_t nr = table.layout.panel_cols;
  for (const PackedFormat format : kFloatFormats) {
    for (size_t n_rows = 1; n_rows <= table.layout.float_vector_rows; ++n_rows) {
      for (const size_t n_cols : {size_t{1}, nr - 1, nr, 3 * nr, 3 * nr + 1, 7 * nr + 2}) {
        const size_t depth = n_cols % 2 ? 1 : 33, x_stride = depth + 2, y_stride = n_cols + 3;
        const size_t n_panels = (n_cols + nr - 1) / nr;
        std::vector<uint8_t> bytes;
        std::vector<FloatPanel> panels;
        for (size_t p = 0; p < n_panels; ++p) {
          panels.emplace_back(format, nr, depth, p);
          bytes.insert(bytes.end(), panels[p].bytes.begin(), panels[p].bytes.end());
        }
        const std::vector<float> x = random.uniform_vector(n_rows * x_stride, -2, 2);
        const bool accumulate = n_panels % 2 == 0;
        std::vector<float> y((n_rows + 1) * y_stride, kUntouched), alone(nr);
        table.gemv_f32_f32_fp(format, y.data(), y_stride, x.data(), x_stride, bytes.data(),
                              bytes.size() / n_panels, depth, n_rows, n_cols, accumulate,
                              accumulate ? kAhead : 0);
        for (size_t i = 0; i < y.size(); ++i) {
          const size_t row = i / y_stride, col = i % y_stride;
          if (row == n_rows || col >= n_cols) {
            check.equal(y[i], kUntouched);
            continue;
          }
          const std::vector<float>& values = panels[col / nr].values;
          double want = accumulate ? kUntouched : 0, norm = want;
          for (size_t k = 0; k < depth; ++k) {
            const double term = double{x[row * x_stride + k]} * values[k * nr + col % nr];
            want += term;
            norm += std::fabs(term);
          }
          check.near(y[i], want, static_cast<double>(depth + 2) * kEps * norm);
          if (col % nr == 0) {  // the same bits as in a matrix product of this row alone
            const size_t width = std::min(nr, n_cols - col);
            alone.assign(nr, kUntouched);
            table.gemm_f32_f32_f32p(alone.data(), nr, x.data() + row * x_stride, x_stride, values.data(), nr,
                                    1, width, depth, accumulate);
            for (size_t c = 0; c < width; ++c) check.equal(y[i + c], alone[c]);
          }
        }
      }
    }
  }
}

}  // namespace

const std::vector<KernelCheck>& matrix_checks() {
  static const std::vector<KernelCheck> checks = {
      {"quantize_q8p_f32", check_quantize}, {"quantize_q8p_f32 wide", check_quantize_wide},
      {"unpack_q_qp", check_unpack},        {"gemm_f32_q8_qp", check_gemm_q8},
      {"gemv_f32_q8_qp", check_gemv_q8},    {"rows alike", check_rows_alike},
      {"unpack_f32_fp", check_unpack_f32},  {"gemm_f32_f32_f32p", check_gemm_f32},
      {"gemv_f32_f32_fp", check_gemv_f32},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
