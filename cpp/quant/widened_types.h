// Types of GGUF files without a packed format of their own: their blocks become those of a larger type, of
// files or of memory alone, that holds the same weights exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "quant/packed_matrix.h"

namespace edgeh2o {

struct WidenedType {
  const char *type_name, *held_name;  // in the file, and in memory
  size_t block_values, block_bytes, held_bytes;
  void (*widen)(const uint8_t* block, uint8_t* held);
};
const std::vector<WidenedType>& widened_types();

// The data of a tensor in a type that has a packed format: as it is, or widened.
class HeldTensor {
 public:
  // Widens in parallel, into memory of its own. `data` must outlive this. Throws std::invalid_argument for an
  // unknown type and for data that are not whole blocks.
  HeldTensor(const std::string& type_name, const uint8_t* data, size_t n_bytes);

  const FormatInfo& info() const { return *info_; }
  const uint8_t* data() const { return data_; }
  size_t n_bytes() const { return n_bytes_; }
  size_t n_blocks() const { return n_bytes_ / info_->block_bytes; }
  size_t n_file_blocks() const { return n_file_blocks_; }

 private:
  const FormatInfo* info_;
  std::vector<uint8_t> widened_;
  const uint8_t* data_;
  size_t n_bytes_, n_file_blocks_;
};

// A matrix [cols][rows] of a tensor [rows][cols], in floats: as f16, which holds quantised weights to their
// rounding, or as f32 what is of its range. Throws std::invalid_argument for data of another size.
class TransposedTensor {
 public:
  TransposedTensor(const HeldTensor& held, size_t rows, size_t cols);

  const FormatInfo& info() const { return *info_; }
  const uint8_t* data() const { return data_.data(); }
  size_t n_bytes() const { return data_.size(); }

 private:
  const FormatInfo* info_;
  std::vector<uint8_t> data_;
};

// The packed format's type that holds tensors of a type: itself, where it has one.
const FormatInfo& find_held_format(const std::string& type_name);

// PackedMatrix of a tensor of any type, in a block of its own. Throws std::invalid_argument as HeldTensor and
// PackedMatrix do.
PackedMatrix pack_tensor(const std::string& type_name, const uint8_t* data, size_t n_bytes, size_t rows,
                         size_t cols, size_t panel_cols, bool is_signed);

}  // namespace edgeh2o
