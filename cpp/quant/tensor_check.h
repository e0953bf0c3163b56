// Search for weights that are not finite, in the data of a GGUF tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "quant/packed_matrix.h"

namespace edgeh2o {

// Index of the first block (for float types: value) with a scale or value that is NaN or infinite. data:
// n_bytes of whole blocks; throws std::invalid_argument for anything else.
std::optional<size_t> find_bad_block(const FormatInfo& info, const uint8_t* data, size_t n_bytes);

}  // namespace edgeh2o
