// Random matrices for kernel_selftest: written in the packed layouts of quant/packed_format.h from that
// comment alone, next to the plain values from which products are computed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "isa/kernel_table.h"
#include "quant/packed_format.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {

struct UnpackedShape {  // bytes per column
  size_t header, pairs_from, quants_from, record;
};

struct QuantFormat {
  PackedFormat format;
  int low_bits, high_bits, offset;  // of the two planes that are stored
  Codebook codebook;
  bool has_min, two_level, nibble_scales, bf16_scale, fits_bytes;
  size_t sub_blocks;
  UnpackedShape unpacked[4];  // by Unpacked
  float unit;                 // of the codebook
  bool min_of_scale;
};

template <PackedFormat kFormat, Unpacked kKind>
constexpr UnpackedShape shape_of() {
  using Sizes = UnpackedSizes<kFormat, kKind>;
  return {Sizes::kHeaderPerColumn, Sizes::kScalesPerColumn, Sizes::kQuantsFrom, Sizes::kRecordPerColumn};
}

template <PackedFormat kFormat>
constexpr QuantFormat describe() {
  using Traits = PackedTraits<kFormat>;
  return {kFormat,
          Traits::kLowBits,
          Traits::kHighBits,
          Traits::kOffsetLog2 < 0 ? 0 : 1 << Traits::kOffsetLog2,
          Traits::kCodebook,
          Traits::kHasMin,
          Traits::kTwoLevel,
          Traits::kNibbleScales,
          Traits::kBf16Scale,
          kFitsBytes<kFormat>,
          kBlock / Traits::kSubBlock,
          {shape_of<kFormat, Unpacked::kFloats>(), shape_of<kFormat, Unpacked::kWords>(),
           shape_of<kFormat, Unpacked::kBytes>(), shape_of<kFormat, Unpacked::kNibbles>()},
          Traits::kUnit,
          Traits::kMinOfScale};
}

#define EH2O_DESCRIBE(name) describe<PackedFormat::name>(),
constexpr QuantFormat kQuantFormats[] = {EH2O_QUANTISED_FORMATS(EH2O_DESCRIBE)};
#undef EH2O_DESCRIBE

enum class Values { kRandom, kLowest, kHighest, kAlternating };
enum class Scales { kAny, kInteger };  // kInteger: small integers, so that every sum is exact in f32

inline int pick(Values values, int low, int high, size_t index, Random& random) {
  if (values == Values::kRandom) return random.integer(low, high);
  if (values == Values::kAlternating) return index % 3 ? low : high;
  return values == Values::kLowest ? low : high;
}

template <typename T>
void append(std::vector<uint8_t>& bytes, T value) {
  bytes.resize(bytes.size() + sizeof(T));
  std::memcpy(bytes.data() + bytes.size() - sizeof(T), &value, sizeof(T));
}

// One packed panel of weights and its plain values.
struct WeightPanel {
  QuantFormat format;
  size_t n_cols, n_records, scale_block;
  Unpacked kind;
  UnpackedShape shape;
  std::vector<uint8_t> packed;

  WeightPanel(const QuantFormat& quant_format, const PackLayout& layout, size_t records, Values values,
              Scales scales, size_t seed)
      : format(quant_format),
        n_cols(layout.panel_cols),
        n_records(records),
        scale_block(layout.scale_block(quant_format.format)),
        kind(layout.unpacked(quant_format.format)),
        shape(quant_format.unpacked[static_cast<int>(kind)]),
        columns_(n_cols * n_records) {
    Random random(seed);
    for (size_t record = 0; record < n_records; ++record) {
      for (size_t col = 0; col < n_cols; ++col) {
        Column& column = at(col, record);
        const bool keeps_header = format.two_level && record % kSuperRecords != 0;
        column.d = keeps_header        ? at(col, record - 1).d
                   : format.bf16_scale ? random_bf16(scales, random)
                                       : random_f16(scales, random);
        column.m = keeps_header ? at(col, record - 1).m : random_f16(scales, random);
        const int largest = scales == Scales::kInteger ? 3
                            : format.nibble_scales     ? 15
                            : format.fits_bytes        ? 31
                            : format.has_min           ? 255
                                                       : 127;
        const int lowest = format.has_min ? 0 : largest == 31 ? -32 : -largest;
        for (int& fine : column.fine) fine = random.integer(lowest, largest);
        for (int& fine : column.fine_min) fine = random.integer(0, largest);
        const int high = (1 << (format.low_bits + format.high_bits)) - 1;
        for (size_t k = 0; k < kBlock; ++k) column.quants[k] = pick(values, 0, high, k + col, random);
      }
    }
    for (size_t record = 0; record < n_records; ++record)
      pack_record(record, layout.is_signed(format.format));
  }

  // Where a record begins in the unpacked panel, after a header in front of it.
  size_t unpacked_record(size_t record) const {
    return n_cols * (record * shape.record + (record / kSuperRecords + 1) * shape.header);
  }
  size_t unpacked_bytes() const { return unpacked_record(n_records - 1) + n_cols * shape.record; }
  int quant(size_t col, size_t k) const {
    const int stored = at(col, k / kBlock).quants[k % kBlock];
    return format.codebook == Codebook::kNone ? stored - format.offset
                                              : codebook_value(format.codebook, static_cast<size_t>(stored));
  }
  float coarse_scale(size_t col, size_t record) const {
    const Column& column = at(col, record);
    const double value = format.bf16_scale ? f64_from_bf16(column.d) : f64_from_f16(column.d);
    return static_cast<float>(value) * format.unit;
  }
  float coarse_min(size_t col, size_t record) const {
    return format.min_of_scale ? 0.125f * coarse_scale(col, record)
                               : static_cast<float>(f64_from_f16(at(col, record).m));
  }
  int fine_scale(size_t col, size_t record, size_t sub) const { return at(col, record).fine[sub]; }
  int fine_min(size_t col, size_t record, size_t sub) const {
    const Column& column = at(col, record);
    return column.fine_min[sub] * (format.min_of_scale ? column.fine[sub] : 1);
  }
  float scale(size_t col, size_t record, size_t sub) const {
    const float d = coarse_scale(col, record);
    return format.two_level ? d * static_cast<float>(fine_scale(col, record, sub)) : d;
  }
  float min(size_t col, size_t record, size_t sub) const {
    const float m = coarse_min(col, record);
    return format.two_level ? -m * static_cast<float>(fine_min(col, record, sub)) : m;
  }

 private:
  struct Column {  // one record of one column
    uint16_t d, m;
    int fine[2], fine_min[2];
    int quants[kBlock];  // offset not removed
  };
  std::vector<Column> columns_;

  Column& at(size_t col, size_t record) { return columns_[record * n_cols + col]; }
  const Column& at(size_t col, size_t record) const { return columns_[record * n_cols + col]; }

  static uint16_t random_f16(Scales scales, Random& random) {
    if (scales == Scales::kInteger) return random.integer(0, 1) ? 0x3c00 : 0xbc00;   // 1 or -1
    const int exponent = random.integer(0, 16), fraction = random.integer(0, 1023);  // denormal where 0
    return static_cast<uint16_t>(random.integer(0, 1) << 15 | exponent << 10 | fraction);
  }

  static uint16_t random_bf16(Scales scales, Random& random) {
    if (scales == Scales::kInteger) return random.integer(0, 1) ? 0x3f80 : 0xbf80;
    return static_cast<uint16_t>(random.integer(120, 130) << 7);
  }

  void pack_record(size_t record, bool is_signed) {
    const auto each = [&](const auto& bytes_of) {
      for (size_t col = 0; col < n_cols; ++col) bytes_of(at(col, record));
    };
    if (!format.two_level || record % kSuperRecords == 0) {
      each([&](const Column& column) { append(packed, column.d); });
      if (format.has_min && !format.min_of_scale) {
        each([&](const Column& column) { append(packed, column.m); });
      }
    }
    for (size_t sub = 0; format.two_level && sub < format.sub_blocks; ++sub) {
      each([&](const Column& column) {
        const int high = format.nibble_scales ? column.fine_min[sub] << 4 : 0;
        append(packed, static_cast<uint8_t>(column.fine[sub] | high));
      });
    }
    const bool has_mins = format.two_level && format.has_min && !format.nibble_scales;
    for (size_t sub = 0; has_mins && sub < format.sub_blocks; ++sub) {
      each([&](const Column& column) { append(packed, static_cast<uint8_t>(column.fine_min[sub])); });
    }
    pack_plane(record, 0, format.low_bits, is_signed ? format.offset : 0);
    if (format.high_bits > 0) pack_plane(record, format.low_bits, format.high_bits, 0);
  }

  // [n_bits][columns][4] bytes: step s (4 values of depth) at the bits from n_bits (s / n_bits) on of the
  // vector s % n_bits.
  void pack_plane(size_t record, int from, int n_bits, int offset) {
    for (int vector = 0; vector < n_bits; ++vector) {
      for (size_t col = 0; col < n_cols; ++col) {
        for (int i = 0; i < 4; ++i) {
          int byte = 0;
          for (int step = vector; step < 8; step += n_bits) {
            const int q = at(col, record).quants[4 * step + i] - offset;
            byte |= (q >> from & ((1 << n_bits) - 1)) << (step / n_bits * n_bits);
          }
          append(packed, static_cast<uint8_t>(byte));
        }
      }
    }
  }
};

// Rows of 8-bit activations.
struct Activations {
  size_t n_rows, n_records;

  // scale_block values share a scale. Of 256 that do, 16 neighbours do not add up to more than kMostOf16: all
  // are small, or, where there is more than a super-block, every other is 0.
  Activations(size_t rows, size_t records, Values values, Scales scales, size_t seed, size_t scale_block)
      : n_rows(rows), n_records(records), d_(rows * records), quants_(rows * records * kBlock) {
    Random random(seed);
    const bool is_wide = scale_block == kSuperBlock, is_sparse = is_wide && records > kSuperRecords;
    const int largest = is_wide && !is_sparse ? kMostOf16 / 16 : 127;
    for (size_t i = 0; i < d_.size(); ++i) {
      const bool is_shared = is_wide && i % records % kSuperRecords != 0;
      d_[i] = is_shared ? d_[i - 1] : scales == Scales::kInteger ? 1.0f : random.uniform(0.001f, 0.1f);
    }
    for (size_t i = 0; i < quants_.size(); ++i) {
      const bool is_zero = is_sparse && (i % 2 != 0) != (i / 16 % 2 != 0);
      quants_[i] = is_zero ? 0 : static_cast<int8_t>(pick(values, -largest, largest, i, random));
    }
  }
  // Takes already quantised values: d [n_rows][n_records], quants [n_rows][n_records][kBlock].
  Activations(size_t rows, size_t records, std::vector<float> d, std::vector<int8_t> quants)
      : n_rows(rows), n_records(records), d_(std::move(d)), quants_(std::move(quants)) {}

  int quant(size_t row, size_t k) const { return quants_[row * n_records * kBlock + k]; }
  float d(size_t row, size_t record) const { return d_[row * n_records + record]; }
  int sum(size_t row, size_t record, size_t n = kBlock) const {
    int total = 0;
    for (size_t k = 0; k < n; ++k) total += quant(row, record * kBlock + k);
    return total;
  }
  float scaled_sum(size_t row, size_t record) const {
    return d(row, record) * static_cast<float>(sum(row, record));
  }
  float scaled_sum(size_t row, size_t record, size_t begin, size_t n) const {
    const int total = sum(row, record, begin + n) - sum(row, record, begin);
    return d(row, record) * static_cast<float>(total);
  }

  size_t tile_bytes(size_t tile_rows) const { return n_records * tile_rows * kActivationRecordPerRow; }
  std::vector<uint8_t> pack(size_t tile_rows, const PackLayout& layout) const {
    std::vector<uint8_t> bytes;
    for (size_t first = 0; first < n_rows; first += tile_rows) {
      for (size_t record = 0; record < n_records; ++record) {
        const auto each = [&](const auto& value) {  // rows beyond the last one are zero
          for (size_t row = first; row < first + tile_rows; ++row) {
            append(bytes, row < n_rows ? value(row) : decltype(value(row)){});
          }
        };
        each([&](size_t row) { return d(row, record); });
        each([&](size_t row) { return scaled_sum(row, record); });
        struct Start {
          int factor;
          size_t begin, end;
        };
        for (const Start& start :
             {Start{8, 0, kBlock}, {128, 0, kBlock}, {32, 0, kBlock / 2}, {32, kBlock / 2, kBlock}}) {
          for (size_t row = first; row < first + tile_rows; ++row) {
            const int total = row < n_rows ? sum(row, record, start.end) - sum(row, record, start.begin) : 0;
            if (layout.has_pairs && start.factor != 8) {
              const int factor = start.factor == 128 ? 16 : start.factor;
              for (const size_t pair : {0, 1}) {
                const int part = row < n_rows ? sum_of_pairs(row, record, start.begin, start.end, pair) : 0;
                append(bytes, static_cast<int16_t>(-factor * part));
              }
            } else {
              append(bytes, layout.dot_bias - start.factor * total);
            }
          }
        }
        for (size_t k = record * kBlock; k < (record + 1) * kBlock; k += 4) {
          each([&](size_t row) {
            uint32_t four = 0;
            for (size_t i = 0; i < 4; ++i) four |= (quant(row, k + i) & 255u) << (8 * i);
            return four;
          });
        }
      }
    }
    return bytes;
  }

 private:
  std::vector<float> d_;
  std::vector<int8_t> quants_;

  // Of every 4 quants the first two, or the last two.
  int sum_of_pairs(size_t row, size_t record, size_t begin, size_t end, size_t pair) const {
    int total = 0;
    for (size_t k = begin; k < end; ++k) total += k / 2 % 2 == pair ? quant(row, record * kBlock + k) : 0;
    return total;
  }
};

// d = max|x| / 127 and q = rint(x / d); a block whose 127 / max|x| is not finite counts as zero.
inline std::vector<uint8_t> quantize_reference(const float* x, size_t stride, size_t n_rows, size_t tile_rows,
                                               size_t depth, const PackLayout& layout) {
  std::vector<float> d;
  std::vector<int8_t> quants;
  for (size_t row = 0; row < n_rows; ++row) {
    for (size_t k = 0; k < depth; k += kBlock) {
      const float* block = x + row * stride + k;
      float largest = 0;
      for (size_t i = 0; i < kBlock; ++i) largest = std::fmax(largest, std::fabs(block[i]));
      const bool is_zero = !std::isfinite(127.0f / largest);
      d.push_back(is_zero ? 0.0f : largest / 127.0f);
      for (size_t i = 0; i < kBlock; ++i) {
        const float scaled = is_zero ? 0.0f : block[i] * (127.0f / largest);
        quants.push_back(static_cast<int8_t>(std::nearbyint(scaled)));
      }
    }
  }
  return Activations(n_rows, depth / kBlock, std::move(d), std::move(quants)).pack(tile_rows, layout);
}

struct Product {
  double value, tolerance;
};

inline Product multiply(const WeightPanel& w, const Activations& x, size_t row, size_t col) {
  double value = 0, norm = 0;
  const size_t sub_size = kBlock / w.format.sub_blocks;
  for (size_t record = 0; record < w.n_records; ++record) {
    for (size_t sub = 0; sub < w.format.sub_blocks; ++sub) {
      int dot = 0;
      for (size_t i = 0; i < sub_size; ++i) {
        const size_t k = record * kBlock + sub * sub_size + i;
        dot += w.quant(col, k) * x.quant(row, k);
      }
      const double term = double{x.d(row, record)} * w.scale(col, record, sub) * dot;
      value += term;
      norm += std::fabs(term);
      if (!w.format.has_min) continue;
      const double x_sum = x.scaled_sum(row, record, sub * sub_size, sub_size);
      value += x_sum * w.min(col, record, sub);
      norm += std::fabs(x_sum * w.min(col, record, sub));
    }
  }
  const size_t n_terms = w.n_records * w.format.sub_blocks * (w.format.has_min ? 2 : 1);
  return {value, static_cast<double>(n_terms + 3) * kEps * norm};
}

// One panel [depth][n_cols] of float weights.
struct FloatPanel {
  std::vector<uint8_t> bytes;
  std::vector<float> values;

  FloatPanel(PackedFormat format, size_t n_cols, size_t depth, size_t seed) {
    Random random(seed);
    for (size_t i = 0; i < depth * n_cols; ++i) {
      float value = random.uniform(-2, 2);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      if (format == PackedFormat::kF32) {
        append(bytes, value);
        values.push_back(value);
      } else if (format == PackedFormat::kF16) {
        const auto half = static_cast<uint16_t>((bits & 0x8000) | random.integer(0, 0x43ff));  // below 4
        append(bytes, half);
        values.push_back(static_cast<float>(f64_from_f16(half)));
      } else {
        append(bytes, static_cast<uint16_t>(bits >> 16));
        bits &= 0xffff0000;
        std::memcpy(&value, &bits, sizeof(value));
        values.push_back(value);
      }
    }
  }
};

}  // namespace edgeh2o::selftest
