// How fast threads read memory: what products of one row are bound by (bench/memory_bound.py).
#pragma once

#include <cstddef>
#include <vector>

#include "isa/kernel_table.h"

namespace edgeh2o {

// Reads n_bytes (rounded up to whole pieces of 1 MiB) with num_threads() threads, in pages like those of the
// weights. Returns the seconds of each of n_rounds. Throws std::bad_alloc.
std::vector<double> measure_reading(const KernelTable& table, size_t n_bytes, int n_rounds);

}  // namespace edgeh2o
