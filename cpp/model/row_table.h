// A table of rows that stays in its file: it may be larger than memory, and a token needs a few rows of it.
// They are read, not mapped: a model file that is overwritten while it is in use costs an answer, where a
// mapped one that becomes shorter would end the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/mat_view.h"
#include "quant/packed_matrix.h"

namespace edgeh2o {

// The file cannot be read any more.
class RowTableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RowTable {
 public:
  RowTable() = default;
  // rows x cols weights from `offset` on in the file of the descriptor, which may be closed afterwards.
  // Throws std::invalid_argument for a type that has no packed format of its own and rows that are no whole
  // blocks, std::system_error.
  RowTable(int descriptor, const std::string& type_name, uint64_t offset, size_t rows, size_t cols);
  ~RowTable();
  RowTable(RowTable&& other) noexcept { *this = std::move(other); }
  RowTable& operator=(RowTable&& other) noexcept;

  explicit operator bool() const { return descriptor_ >= 0; }
  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }

  // out [n][cols] = rows indices[i] < rows(), in parallel. scratch: num_threads() x scratch_bytes. Throws
  // RowTableError, also where the file has become shorter.
  void read(Span<const int64_t> indices, MatView<float> out, uint8_t* scratch) const;
  static size_t scratch_bytes(size_t cols);

 private:
  int descriptor_ = -1;
  const FormatInfo* info_ = nullptr;
  uint64_t offset_ = 0;
  size_t rows_ = 0, cols_ = 0, row_bytes_ = 0;
};

}  // namespace edgeh2o
