// Weights of one GGUF type as those of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "quant/packed_matrix.h"

namespace edgeh2o {

// Names of the types that weights can be written in.
std::vector<std::string> written_types();

// Writes rows x cols weights, which `in` holds as `from`, to `out` as `to`, in parallel over rows. Returns
// the first row with a weight that is NaN, infinite or beyond what `to` can hold; `out` is then of no use.
// Throws std::invalid_argument where sizes do not fit, or `to` cannot be written.
std::optional<size_t> convert_rows(const FormatInfo& from, const FormatInfo& to, const uint8_t* in,
                                   size_t in_bytes, uint8_t* out, size_t out_bytes, size_t rows, size_t cols);

}  // namespace edgeh2o
