#include "ops/read_bandwidth.h"

#include <chrono>
#include <cstring>

#include "base/arena.h"
#include "base/cpu_features.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {
constexpr size_t kPieceBytes = size_t{1} << 20;
}

std::vector<double> measure_reading(const KernelTable& table, size_t n_bytes, int n_rounds) {
  using Clock = std::chrono::steady_clock;
  const size_t n_pieces = ceil_div(n_bytes, kPieceBytes);
  const AlignedBuffer buffer(n_pieces * kPieceBytes);
  // Written, since pages that nobody wrote are all the same page of zeros.
  std::memset(buffer.data(), 1, buffer.size());
  std::vector<float> sums(n_pieces);
  std::vector<double> seconds;
  for (int round = 0; round < n_rounds; ++round) {
    const auto start = Clock::now();
    parallel_for(n_pieces, [&](size_t piece, size_t) {
      const uint8_t* begin = buffer.data() + piece * kPieceBytes;
      sums[piece] = table.peak_read(reinterpret_cast<const float*>(begin), kPieceBytes, weights_ahead());
    });
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

}  // namespace edgeh2o
