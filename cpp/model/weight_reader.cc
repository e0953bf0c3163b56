#include "model/weight_reader.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Bytes that one thread reads at a time.
constexpr size_t kPieceBytes = size_t{1} << 20;
// Of a tensor that are held at a time, where it can be packed in parts: fresh memory is cleared by the
// kernel, which takes longer than to pack what it is for.
constexpr size_t kPartBytes = 8 * kPieceBytes;

// The number of the error, 0 for none and -1 where the file ends before.
int read_piece(int descriptor, uint8_t* out, uint64_t offset, size_t n_bytes) {
  while (n_bytes > 0) {
    const ssize_t n_read = pread(descriptor, out, n_bytes, static_cast<off_t>(offset));
    if (n_read < 0 && errno == EINTR) continue;
    if (n_read < 0) return errno;
    if (n_read == 0) return -1;
    out += n_read;
    offset += static_cast<uint64_t>(n_read);
    n_bytes -= static_cast<size_t>(n_read);
  }
  return 0;
}

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
  std::atomic<int> error{0};
  parallel_for(ceil_div(n_bytes, kPieceBytes), [&](size_t piece, size_t) {
    const size_t begin = piece * kPieceBytes;
    const int result =
        read_piece(descriptor_, out + begin, offset + begin, std::min(kPieceBytes, n_bytes - begin));
    if (result != 0) error.store(result, std::memory_order_relaxed);
  });
  if (error == 0) return ReadStatus::kDone;
  if (error < 0) return ReadStatus::kFileTooShort;
  error_number_ = error;
  return ReadStatus::kReadError;
}

}  // namespace edgeh2o
