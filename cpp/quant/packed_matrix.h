// Weight matrices in the layout of the kernels (quant/packed_format.h), packed from GGUF tensor data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/half.h"
#include "quant/packed_format.h"

namespace edgeh2o {

// GGUF tensor types map one to one to packed formats; the names are those of the GGUF specification. Those
// that are not of files hold others (quant/widened_types.h).
struct FormatInfo {
  const char* type_name;
  PackedFormat format;
  bool is_quantised;
  size_t block_values;  // weights per GGUF block; a row holds whole blocks
  size_t block_bytes;
  bool is_of_files = true;
};
const std::vector<FormatInfo>& supported_formats();
const FormatInfo& find_format(const std::string& type_name);  // throws std::invalid_argument
const FormatInfo& format_info(PackedFormat format);

// Throws std::invalid_argument unless n_bytes hold rows x cols weights of a type, in whole blocks, and
// row_order [rows], if it is not null, names rows.
void check_tensor_data(const FormatInfo& info, size_t n_bytes, size_t rows, size_t cols,
                       const int32_t* row_order);

// The weights of one row of GGUF blocks as f32. buffer: as many bytes as the row has as f32, aligned.
void dequantize_blocks(const FormatInfo& info, const uint8_t* row, size_t cols, uint8_t* buffer, float* out);

struct LowRankUpdate;
using LowRankUpdates = std::vector<LowRankUpdate>;  // of a matrix, by ascending adapters

class PackedMatrix {
 public:
  PackedMatrix() = default;

  // Packs `rows` rows of `cols` weights each, in parallel over panels. data: n_bytes of GGUF tensor data, row
  // after row. Row i of the result is source row row_order[i] (row i where row_order is null). The weights
  // lie in memory of `pool`, which must outlive this, or in a block of their own where it is null. Throws
  // std::invalid_argument where sizes do not fit.
  PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, const uint8_t* data, size_t n_bytes,
               size_t rows, size_t cols, const int32_t* row_order, BlockPool* pool = nullptr);

  // One that was packed before, by these arguments and in kPackedLayoutVersion: its n_bytes() at `panels`,
  // which must outlive this.
  PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, size_t rows, size_t cols,
               const uint8_t* panels);
  // Memory for such a matrix, whose rows pack_rows fills.
  PackedMatrix(const FormatInfo& info, size_t panel_cols, bool is_signed, size_t rows, size_t cols,
               BlockPool* pool);
  // Packs n_rows of the rows, from row `first`, a multiple of the panel's columns, on. data: theirs alone, or
  // those of the whole matrix where there is a row_order, which is then the part's own.
  void pack_rows(const FormatInfo& info, const uint8_t* data, size_t first, size_t n_rows,
                 const int32_t* row_order = nullptr);
  uint8_t* unfilled_panels() { return packed_; }  // of the same: n_bytes() that were packed before may go here

  // The first n rows, whole panels or all of them, in the memory of this, which must outlive them; without
  // updates.
  PackedMatrix first_rows(size_t n) const;

  PackedFormat format() const { return format_; }
  bool is_quantised() const { return is_quantised_; }
  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  size_t n_bytes() const { return panel_bytes_ * n_panels(); }
  size_t n_panels() const { return panel_cols_ ? ceil_div(rows_, panel_cols_) : 0; }
  size_t panel_bytes() const { return panel_bytes_; }  // from one panel to the next
  const uint8_t* panel(size_t i) const { return panels_ + i * panel_bytes_; }
  // Start of the panel's data for depth k: a multiple of 256 for quantised formats.
  const uint8_t* panel_at(size_t i, size_t k) const;
  explicit operator bool() const { return rows_ != 0; }

  // What may be added to products with this, or null.
  const LowRankUpdates* updates() const { return updates_; }
  void set_updates(const LowRankUpdates* updates) { updates_ = updates; }  // they outlive this

  // Writes the cols() weights of one row as f32: embedding look-up.
  void dequantize_row(float* out, size_t row) const { dequantize_range(out, row, 0, cols_); }
  // The same of `count` weights from column `first` on: multiples of kRangeStep for quantised formats, but
  // for the end of a row.
  static constexpr size_t kRangeStep = 256;
  void dequantize_range(float* out, size_t row, size_t first, size_t count) const;

 private:
  PackedFormat format_ = PackedFormat::kF32;
  bool is_quantised_ = false;
  bool is_signed_ = false;
  size_t rows_ = 0, cols_ = 0, panel_cols_ = 0, panel_bytes_ = 0;
  AlignedBuffer buffer_;  // empty where the panels lie in a pool
  const uint8_t* panels_ = nullptr;
  uint8_t* packed_ = nullptr;  // the same, where they are packed here
  const LowRankUpdates* updates_ = nullptr;
};

// A matrix W with one acts as W + s B A (LoRA: Hu et al. 2021, section 4.1, alpha / r in B), both in floats,
// where s is what the adapter, of those of the model, counts in a row.
struct LowRankUpdate {
  size_t adapter;
  PackedMatrix a;  // [rank][cols]
  PackedMatrix b;  // [rows][rank]
};

// bfloat16 to single precision.
float f32_from_bf16(uint16_t bits);

}  // namespace edgeh2o
