#include "quant/packed_matrix.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"
#include "quant/record_codec.h"

namespace edgeh2o {

const std::vector<FormatInfo>& supported_formats() {
  static const std::vector<FormatInfo> formats = {
      {"F32", PackedFormat::kF32, false, 1, 4},
      {"F16", PackedFormat::kF16, false, 1, 2},
      {"BF16", PackedFormat::kBF16, false, 1, 2},
      {"Q4_0", PackedFormat::kQ4_0, true, 32, sizeof(BlockQ4_0)},
      {"Q4_1", PackedFormat::kQ4_1, true, 32, sizeof(BlockQ4_1)},
      {"Q4_K", PackedFormat::kQ4_K, true, 256, sizeof(BlockQ4_K)},
      {"Q5_0", PackedFormat::kQ5_0, true, 32, sizeof(BlockQ5_0)},
      {"Q5_1", PackedFormat::kQ5_1, true, 32, sizeof(BlockQ5_1)},
      {"Q5_K", PackedFormat::kQ5_K, true, 256, sizeof(BlockQ5_K)},
      {"Q6_K", PackedFormat::kQ6_K, true, 256, sizeof(BlockQ6_K)},
      {"Q8_0", PackedFormat::kQ8_0, true, 32, sizeof(BlockQ8_0)},
      {"Q2_K", PackedFormat::kQ2_K, true, 256, sizeof(BlockQ2_K)},
      {"Q3_K", PackedFormat::kQ3_K, true, 256, sizeof(BlockQ3_K)},
      {"IQ4_NL", PackedFormat::kIQ4_NL, true, 32, sizeof(BlockIQ4_NL)},
      {"IQ4_XS", PackedFormat::kIQ4_XS, true, 256, sizeof(BlockIQ4_XS)},
      {"MXFP4", PackedFormat::kMXFP4, true, 32, sizeof(BlockMXFP4)},
      {"HELD_IQ2", PackedFormat::kHeldIQ2, true, 256, sizeof(BlockHeldIQ2), false},
      {"HELD_IQ3_S", PackedFormat::kHeldIQ3_S, true, 256, sizeof(BlockHeldIQ3_S), false},
      {"HELD_IQ3_XXS", PackedFormat::kHeldIQ3_XXS, true, 256, sizeof(BlockHeldIQ3_XXS), false},
      {"HELD_IQ1_S", PackedFormat::kHeldIQ1_S, true, 256, sizeof(BlockHeldIQ1_S), false},
      {"HELD_IQ1_M", PackedFormat::kHeldIQ1_M, true, 256, sizeof(BlockHeldIQ1_M), false},
  };
  return formats;
}

const FormatInfo& find_format(const std::string& type_name) {
  std::string names;
  for (const FormatInfo& info : supported_formats()) {
    if (type_name == info.type_name) return info;
    if (info.is_of_files) names += (names.empty() ? "" : ", ") + std::string(info.type_name);
  }
  throw_invalid("tensor type ", type_name, " is not supported; supported: ", names);
}

const FormatInfo& format_info(PackedFormat format) {
  return supported_formats()[static_cast<size_t>(format)];
}

float f32_from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

namespace {

template <typename T>
void put(uint8_t* p, size_t index, T value) {
  std::memcpy(p + index * sizeof(T), &value, sizeof(T));
}
template <typename T>
T get(const uint8_t* p, size_t index) {
  T value;
  std::memcpy(&value, p + index * sizeof(T), sizeof(T));
  return value;
}

// Byte offset of a record's start inside a panel of nr columns, past a two-level header that stands before
// it.
template <PackedFormat kFormat>
size_t record_offset(size_t record, size_t nr) {
  using Sizes = PackedSizes<kFormat>;
  const size_t n_headers = Sizes::kHeaderPerColumn ? record / kSuperRecords + 1 : 0;
  return (n_headers * Sizes::kHeaderPerColumn + record * Sizes::kRecordPerColumn) * nr;
}

// A plane of kBits bits, from bit kFrom of the quants on: see quant/packed_format.h. Four quants at a time, a
// byte each.
template <int kFrom, int kBits>
void put_plane(uint8_t* plane, const uint8_t* quants, size_t column, size_t nr) {
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
  for (size_t vector = 0; vector < kBits; ++vector) {
    uint32_t bits = 0;
    for (size_t step = vector; step < 8; step += kBits) {
      bits |= (get<uint32_t>(quants, step) >> kFrom & kMask) << (step / kBits * kBits);
    }
    put(plane, vector * nr + column, bits);
  }
}
template <int kFrom, int kBits>
void get_plane(uint8_t* quants, const uint8_t* plane, size_t column, size_t nr) {
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);
  for (size_t step = 0; step < 8; ++step) {
    const auto bits = get<uint32_t>(plane, step % kBits * nr + column) >> (step / kBits * kBits) & kMask;
    put(quants, step, get<uint32_t>(quants, step) | bits << kFrom);
  }
}

template <PackedFormat kFormat>
void put_quants(uint8_t* out, const uint8_t* quants, size_t column, size_t nr, bool is_signed) {
  using Traits = PackedTraits<kFormat>;
  if constexpr (Traits::kLowBits == 8) {
    const uint32_t sign = is_signed ? 0x80808080 : 0;  // an offset of 128 is the top bit
    for (size_t j = 0; j < 8; ++j) put(out, j * nr + column, get<uint32_t>(quants, j) ^ sign);
  } else {
    put_plane<0, Traits::kLowBits>(out, quants, column, nr);
    if constexpr (Traits::kHighBits > 0) {
      put_plane<Traits::kLowBits, Traits::kHighBits>(out + PackedSizes<kFormat>::kLowPerColumn * nr, quants,
                                                     column, nr);
    }
  }
}

// Unsigned, with the offset.
template <PackedFormat kFormat>
void get_quants(uint8_t* quants, const uint8_t* in, size_t column, size_t nr, bool is_signed) {
  using Traits = PackedTraits<kFormat>;
  std::memset(quants, 0, kBlock);
  if constexpr (Traits::kLowBits == 8) {
    const uint32_t sign = is_signed ? 0x80808080 : 0;
    for (size_t j = 0; j < 8; ++j) put(quants, j, get<uint32_t>(in, j * nr + column) ^ sign);
  } else {
    get_plane<0, Traits::kLowBits>(quants, in, column, nr);
    if constexpr (Traits::kHighBits > 0) {
      get_plane<Traits::kLowBits, Traits::kHighBits>(quants, in + PackedSizes<kFormat>::kLowPerColumn * nr,
                                                     column, nr);
    }
  }
}

// Packs one row into column `column` of a panel.
template <PackedFormat kFormat>
void pack_column(uint8_t* panel, const uint8_t* row, size_t column, size_t nr, size_t n_records,
                 bool is_signed) {
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock;
  for (size_t record = 0; record < n_records; ++record) {
    const Record r = read_record<kFormat>(row, record);
    uint8_t* out = panel + record_offset<kFormat>(record, nr);
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        uint8_t* header = out - Sizes::kHeaderPerColumn * nr;
        put<uint16_t>(header, column, r.d);
        if (Traits::kHasMin && !Traits::kMinOfScale) put<uint16_t>(header, nr + column, r.m);
      }
      for (size_t sub = 0; sub < kSubBlocks; ++sub) {
        uint8_t* fine = out + sub * nr + column;
        if constexpr (Traits::kNibbleScales) {
          *fine = static_cast<uint8_t>(r.fine[sub] | r.fine_min[sub] << 4);
        } else {
          *fine = r.fine[sub];
          if (Traits::kHasMin) fine[kSubBlocks * nr] = r.fine_min[sub];
        }
      }
    } else {
      put<uint16_t>(out, column, r.d);
      if (Traits::kHasMin) put<uint16_t>(out, nr + column, r.m);
    }
    uint8_t* quants = out + Sizes::kScalesPerColumn * nr;
    if (const uint8_t* nibbles = packed_nibbles<kFormat>(row, record)) {  // saves half of the time
      for (size_t j = 0; j < 4; ++j) put(quants, j * nr + column, get<uint32_t>(nibbles, j));
    } else {
      put_quants<kFormat>(quants, r.quants, column, nr, is_signed);
    }
  }
}

template <PackedFormat kFormat>
void unpack_column(float* weights, const uint8_t* panel, size_t column, size_t nr, size_t n_records,
                   bool is_signed) {
  using Traits = PackedTraits<kFormat>;
  using Sizes = PackedSizes<kFormat>;
  constexpr size_t kSubBlocks = kBlock / Traits::kSubBlock;
  constexpr int kOffset =
      Traits::kOffsetLog2 >= 0 ? 1 << (Traits::kOffsetLog2 < 0 ? 0 : Traits::kOffsetLog2) : 0;
  float d = 0.0f, m = 0.0f;
  for (size_t record = 0; record < n_records; ++record, weights += kBlock) {
    const uint8_t* in = panel + record_offset<kFormat>(record, nr);
    float scale[2], min[2] = {0.0f, 0.0f};
    if constexpr (Traits::kTwoLevel) {
      if (record % kSuperRecords == 0) {
        const uint8_t* header = in - Sizes::kHeaderPerColumn * nr;
        d = f32_from_f16(get<uint16_t>(header, column)) * Traits::kUnit;
        if (Traits::kHasMin && !Traits::kMinOfScale) m = -f32_from_f16(get<uint16_t>(header, nr + column));
      }
      for (size_t sub = 0; sub < kSubBlocks; ++sub) {
        const uint8_t* fine = in + sub * nr + column;
        if constexpr (Traits::kNibbleScales) {
          scale[sub] = d * static_cast<float>(*fine & 0xf);
          min[sub] = (Traits::kMinOfScale ? -0.125f * scale[sub] : m) * static_cast<float>(*fine >> 4);
        } else {
          scale[sub] = d * static_cast<float>(Traits::kHasMin ? *fine : static_cast<int8_t>(*fine));
          if (Traits::kHasMin) min[sub] = m * static_cast<float>(fine[kSubBlocks * nr]);
        }
      }
    } else {
      const auto bits = get<uint16_t>(in, column);
      scale[0] = Traits::kBf16Scale ? f32_from_bf16(bits) : f32_from_f16(bits);
      if (Traits::kHasMin) min[0] = f32_from_f16(get<uint16_t>(in, nr + column));
    }
    uint8_t quants[kBlock];
    get_quants<kFormat>(quants, in + Sizes::kScalesPerColumn * nr, column, nr, is_signed);
    for (size_t k = 0; k < kBlock; ++k) {
      const int q = Traits::kCodebook == Codebook::kNone ? quants[k] - kOffset
                                                         : codebook_value(Traits::kCodebook, quants[k]);
      const size_t sub = k / Traits::kSubBlock;
      weights[k] = scale[sub] * static_cast<float>(q) + min[sub];
    }
  }
}

size_t quantised_panel_bytes(PackedFormat format, size_t nr, size_t n_records) {
  switch (format) {
#define EH2O_CASE(name)                                           \
  case PackedFormat::name:                                        \
    return record_offset<PackedFormat::name>(n_records - 1, nr) + \
           PackedSizes<PackedFormat::name>::kRecordPerColumn * nr;
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return 0;
  }
}

void pack_quantised_column(PackedFormat format, uint8_t* panel, const uint8_t* row, size_t column, size_t nr,
                           size_t n_records, bool is_signed) {
  switch (format) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return pack_column<PackedFormat::name>(panel, row, column, nr, n_records, is_signed);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return;
  }
}

template <typename T>
void pack_float_column(uint8_t* panel, const uint8_t* row, size_t column, size_t nr, size_t depth) {
  for (size_t k = 0; k < depth; ++k) put(panel, k * nr + column, get<T>(row, k));
}

}  // namespace

void check_tensor_data(const FormatInfo& info, size_t n_bytes, size_t rows, size_t cols,
                       const int32_t* row_order) {
  EH2O_CHECK(rows > 0 && cols > 0, "a matrix of ", rows, " x ", cols, " has no weights");
  EH2O_CHECK(cols % info.block_values == 0, "rows of ", cols, " weights are not whole ", info.type_name,
             " blocks of ", info.block_values);
  const size_t row_bytes = cols / info.block_values * info.block_bytes;
  EH2O_CHECK(n_bytes / row_bytes == rows && n_bytes % row_bytes == 0, rows, " x ", cols, " weights of type ",
             info.type_name, " take ", rows * row_bytes, " bytes, got ", n_bytes);
  for (size_t i = 0; row_order && i < rows; ++i) {
    EH2O_CHECK(row_order[i] >= 0 && static_cast<size_t>(row_order[i]) < rows, "row_order[", i,
               "] = ", row_order[i], " is outside the ", rows, " rows");
  }
}

PackedMatrix::PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, size_t rows,
                           size_t cols, const uint8_t* panels)
    : format_(info.format),
      is_quantised_(info.is_quantised),
      is_signed_(is_signed),
      rows_(rows),
      cols_(cols),
      panel_cols_(panel_cols),
      panels_(panels) {
  EH2O_CHECK(rows > 0 && cols > 0, "a matrix of ", rows, " x ", cols, " has no weights");
  EH2O_CHECK(cols % info.block_values == 0, "rows of ", cols, " weights are not whole ", info.type_name,
             " blocks of ", info.block_values);
  panel_bytes_ = round_up(is_quantised_ ? quantised_panel_bytes(format_, panel_cols, cols / kBlock)
                                        : cols * panel_cols * info.block_bytes,
                          kAlignment);
}

PackedMatrix::PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, size_t rows,
                           size_t cols, BlockPool* pool)
    : PackedMatrix(info, panel_cols, is_signed, rows, cols, static_cast<const uint8_t*>(nullptr)) {
  if (!pool) buffer_ = AlignedBuffer(n_bytes());
  panels_ = packed_ = pool ? pool->take(n_bytes()) : buffer_.data();
}

PackedMatrix::PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, const uint8_t* data,
                           size_t n_bytes, size_t rows, size_t cols, const int32_t* row_order,
                           BlockPool* pool)
    : PackedMatrix((check_tensor_data(info, n_bytes, rows, cols, row_order), info), panel_cols, is_signed,
                   rows, cols, pool) {
  pack_rows(info, data, 0, rows, row_order);
}

// One row is one panel of one column: blocks are read as everywhere else.
void dequantize_blocks(const FormatInfo& info, const uint8_t* row, size_t cols, uint8_t* buffer, float* out) {
  if (info.is_quantised) {
    pack_quantised_column(info.format, buffer, row, 0, 1, cols / kBlock, false);
  } else {
    std::memcpy(buffer, row, cols * info.block_bytes);
  }
  PackedMatrix(info, 1, false, 1, cols, static_cast<const uint8_t*>(buffer)).dequantize_row(out, 0);
}

PackedMatrix PackedMatrix::first_rows(size_t n) const {
  EH2O_CHECK(n > 0 && (n == rows_ || (n < rows_ && n % panel_cols_ == 0)), n, " of ", rows_,
             " rows are no whole panels of ", panel_cols_);
  return {format_info(format_), panel_cols_, is_signed_, n, cols_, panels_};
}

void PackedMatrix::pack_rows(const FormatInfo& info, const uint8_t* data, size_t first, size_t n_rows,
                             const int32_t* row_order) {
  const size_t row_bytes = cols_ / info.block_values * info.block_bytes, n_records = cols_ / kBlock;
  EH2O_DASSERT(packed_ && info.format == format_ && first % panel_cols_ == 0 && first + n_rows <= rows_);
  parallel_for(ceil_div(n_rows, panel_cols_), [&](size_t p, size_t) {
    uint8_t* panel = packed_ + (first / panel_cols_ + p) * panel_bytes_;
    const size_t n_columns = std::min(panel_cols_, n_rows - p * panel_cols_);
    for (size_t column = 0; column < n_columns; ++column) {
      const size_t i = p * panel_cols_ + column;
      const uint8_t* row = data + (row_order ? static_cast<size_t>(row_order[i]) : i) * row_bytes;
      if (is_quantised_) {
        pack_quantised_column(format_, panel, row, column, panel_cols_, n_records, is_signed_);
      } else {
        (info.block_bytes == 4 ? pack_float_column<uint32_t>
                               : pack_float_column<uint16_t>)(panel, row, column, panel_cols_, cols_);
      }
    }
  });
}

const uint8_t* PackedMatrix::panel_at(size_t i, size_t k) const {
  if (k == 0) return panel(i);
  if (!is_quantised_) return panel(i) + k * panel_cols_ * format_info(format_).block_bytes;
  switch (format_) {
#define EH2O_CASE(name)    \
  case PackedFormat::name: \
    return panel(i) +      \
           k / (kBlock * kSuperRecords) * PackedSizes<PackedFormat::name>::kSuperPerColumn * panel_cols_;
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    default:
      return nullptr;
  }
}

void PackedMatrix::dequantize_range(float* out, size_t row, size_t first, size_t count) const {
  const uint8_t* panel_data = panel_at(row / panel_cols_, first);
  const size_t column = row % panel_cols_;
  switch (format_) {
#define EH2O_CASE(name)                                                                            \
  case PackedFormat::name:                                                                         \
    return unpack_column<PackedFormat::name>(out, panel_data, column, panel_cols_, count / kBlock, \
                                             is_signed_);
    EH2O_QUANTISED_FORMATS(EH2O_CASE)
#undef EH2O_CASE
    case PackedFormat::kF32:
      for (size_t k = 0; k < count; ++k) out[k] = get<float>(panel_data, k * panel_cols_ + column);
      return;
    case PackedFormat::kF16:
      for (size_t k = 0; k < count; ++k)
        out[k] = f32_from_f16(get<uint16_t>(panel_data, k * panel_cols_ + column));
      return;
    case PackedFormat::kBF16:
      for (size_t k = 0; k < count; ++k) {
        out[k] = f32_from_bf16(get<uint16_t>(panel_data, k * panel_cols_ + column));
      }
      return;
  }
}

}  // namespace edgeh2o
