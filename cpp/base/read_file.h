// Bytes of an open file, read by all threads: one alone does not keep the queue of a disk full.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

// Reads n_bytes from `offset` on. Returns 0, the number of an error, or -1 where the file ends before.
int read_file(int descriptor, uint8_t* out, uint64_t offset, size_t n_bytes);

}  // namespace edgeh2o
