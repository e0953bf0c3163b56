#include "sparse/eviction.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace edgeh2o {

void drop_lowest(const EvictionInput& input, int32_t* dropped) {
  const size_t n = input.scores.size, n_kept = n - input.n_dropped;
  EH2O_DASSERT(input.n_dropped < n);
  const size_t window = std::min(kEvictionWindow, n_kept / 2),
               first = std::min(kEvictionSinks, n_kept - window);
  // Scores are sums of weights, never negative: their bits order as they do, and NaN keeps the order total.
  size_t n_candidates = 0;
  for (size_t position = first; position < n - window; ++position) {
    uint32_t bits;
    std::memcpy(&bits, &input.scores[position], sizeof(bits));
    input.ranks[n_candidates++] = uint64_t{bits} << 32 | ~static_cast<uint32_t>(position);
  }
  uint64_t* const end = input.ranks + input.n_dropped;
  if (input.n_dropped < n_candidates) std::nth_element(input.ranks, end, input.ranks + n_candidates);
  std::transform(input.ranks, end, dropped,
                 [](uint64_t rank) { return static_cast<int32_t>(~static_cast<uint32_t>(rank)); });
  std::sort(dropped, dropped + input.n_dropped);
}

}  // namespace edgeh2o
