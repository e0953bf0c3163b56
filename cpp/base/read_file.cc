#include "base/read_file.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/arena.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;  // that a thread reads at a time

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

int read_file(int descriptor, uint8_t* out, uint64_t offset, size_t n_bytes) {
  std::atomic<int> error{0};
  parallel_for(ceil_div(n_bytes, kPieceBytes), [&](size_t piece, size_t) {
    const size_t begin = piece * kPieceBytes;
    const int result =
        read_piece(descriptor, out + begin, offset + begin, std::min(kPieceBytes, n_bytes - begin));
    if (result != 0) error.store(result, std::memory_order_relaxed);
  });
  return error;
}

}  // namespace edgeh2o
