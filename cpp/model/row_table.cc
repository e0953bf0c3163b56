#include "model/row_table.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/arena.h"
#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// No type takes more bytes of a row than floats do.
size_t buffer_bytes(size_t cols) { return round_up(cols * sizeof(float), kAlignment); }

// The number of the error, or 0.
int read_all(int descriptor, uint8_t* out, uint64_t offset, size_t n_bytes) {
  while (n_bytes > 0) {
    const ssize_t n_read = pread(descriptor, out, n_bytes, static_cast<off_t>(offset));
    if (n_read < 0 && errno == EINTR) continue;
    if (n_read <= 0) return n_read < 0 ? errno : EIO;
    out += n_read;
    offset += static_cast<uint64_t>(n_read);
    n_bytes -= static_cast<size_t>(n_read);
  }
  return 0;
}

}  // namespace

RowTable::RowTable(int descriptor, const std::string& type_name, uint64_t offset, size_t rows, size_t cols)
    : info_(&find_format(type_name)), offset_(offset), rows_(rows), cols_(cols) {
  EH2O_CHECK(rows > 0 && cols > 0 && cols % info_->block_values == 0, "a table of ", rows, " rows of ", cols,
             " weights has no whole ", type_name, " blocks of ", info_->block_values);
  row_bytes_ = cols / info_->block_values * info_->block_bytes;
  descriptor_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "the table of rows");
}

RowTable::~RowTable() {
  if (descriptor_ >= 0) close(descriptor_);
}

RowTable& RowTable::operator=(RowTable&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(info_, other.info_);
  std::swap(offset_, other.offset_);
  std::swap(rows_, other.rows_);
  std::swap(cols_, other.cols_);
  std::swap(row_bytes_, other.row_bytes_);
  return *this;
}

size_t RowTable::scratch_bytes(size_t cols) { return 2 * buffer_bytes(cols); }

void RowTable::read(Span<const int64_t> indices, MatView<float> out, uint8_t* scratch) const {
  std::atomic<int> error{0};
  parallel_for(indices.size, [&](size_t i, size_t thread) {
    uint8_t *const row = scratch + thread * scratch_bytes(cols_), *const panel = row + buffer_bytes(cols_);
    const uint64_t begin = offset_ + static_cast<uint64_t>(indices[i]) * row_bytes_;
    if (const int number = read_all(descriptor_, row, begin, row_bytes_)) {
      error.store(number, std::memory_order_relaxed);
      return;
    }
    dequantize_blocks(*info_, row, cols_, panel, out.row(i));
  });
  if (error != 0) {
    const char* cause =
        error == EIO ? "an error of the disk, or the file has become shorter" : std::strerror(error);
    throw RowTableError(std::string("the rows of n-grams in the model's file cannot be read any more: ") +
                        cause + "; load the model anew");
  }
}

}  // namespace edgeh2o
