// Rounds rows of floats to the blocks of GGUF files, as quant/block_formats.h has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/packed_format.h"

namespace edgeh2o {

// Writes n weights, whole blocks, that are finite. Blocks of one scale are those of ggml's reference, bit by
// bit; the scales (and mins) of K-quants come from a search of our own for the least squared error.
using RowQuantizer = void (*)(const float* weights, size_t n, uint8_t* out);

// Null for a format that is only read.
RowQuantizer find_row_quantizer(PackedFormat format);

}  // namespace edgeh2o
