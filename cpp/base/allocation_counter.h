// Counts calls of operator new and of AlignedBuffer in debug builds, so that tests can show that the prefill
// and decode loops allocate nothing.
#pragma once

#include <cstdint>

namespace edgeh2o {

#ifdef EH2O_DEBUG
inline constexpr bool kCountsAllocations = true;
#else
inline constexpr bool kCountsAllocations = false;
#endif

uint64_t allocation_count();  // 0 in release builds
void count_allocation();

}  // namespace edgeh2o
