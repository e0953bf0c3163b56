#include "model/weight_reader.h"

#include <algorithm>

#include "base/parallel.h"
#include "base/read_file.h"

namespace edgeh2o {
namespace {

// Of a tensor that are held at a time, where it can be packed in parts: fresh memory is cleared by the
// kernel, which takes longer than to pack what it is for.
constexpr size_t kPartBytes = size_t{8} << 20;

}  // namespace

ReadStatus WeightReader::run() {
  const auto rows_at_once = [&](const TensorSource& source) {
    return sink_.rows_at_once ? sink_.rows_at_once(source, kPartBytes) : source.rows;
  };
  size_t largest = 0;
  for (const TensorSource& source : sources_) {
    const size_t n_rows = rows_at_once(source);
    largest =
        std::max(largest, n_rows < source.rows ? source.n_bytes / source.rows * n_rows : source.n_bytes);
  }
  const AlignedBuffer buffer(largest);
  for (const TensorSource& source : sources_) {
    const size_t n_rows = rows_at_once(source);
    for (size_t first = 0; first < source.rows; first += n_rows) {
      if (is_cancelled_.load(std::memory_order_relaxed)) return ReadStatus::kCancelled;
      const bool spares_thread = spares_thread_.load(std::memory_order_relaxed);
      const ThreadScope scope(std::max(1, num_threads() - spares_thread));
      const bool is_whole = n_rows >= source.rows;
      const size_t count = std::min(n_rows, source.rows - first), row_bytes = source.n_bytes / source.rows;
      const size_t n_bytes = is_whole ? source.n_bytes : count * row_bytes;
      const ReadStatus status = read(buffer.data(), source.offset + first * row_bytes, n_bytes);
      if (status != ReadStatus::kDone) return status;
      if (is_whole) {
        sink_.set_tensor(source, buffer.data());
      } else {
        sink_.set_rows(source, buffer.data(), n_bytes, first, count);
      }
      n_bytes_done_.fetch_add(n_bytes, std::memory_order_relaxed);
    }
  }
  return ReadStatus::kDone;
}

ReadStatus WeightReader::read(uint8_t* out, uint64_t offset, size_t n_bytes) {
  const int error = read_file(descriptor_, out, offset, n_bytes);
  if (error == 0) return ReadStatus::kDone;
  if (error < 0) return ReadStatus::kFileTooShort;
  error_number_ = error;
  return ReadStatus::kReadError;
}

}  // namespace edgeh2o
